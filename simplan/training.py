"""Batch, precision, optimizer and data of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from simplan.base import Count, Natural, Positive, Spec
from simplan.model.base_weights import BaseWeights
from simplan.model.fake_quantization import FakeQuantization
from simplan.model.low_precision import Fp8Recipe
from simplan.model.model import Objective
from simplan.optimizers import UPDATES, OptimizerName, UpdateName
from simplan.unmodeled import OPTIMIZERS as OPTIMIZERS_NOT_MODELED

DataName = Literal["random", "markov", "gratings"]

NUM_SUCCESSORS = 4
"""Tokens that can follow a token and the parity of the token before it, in the data ``markov``."""


def successor_probabilities(vocab_size: int) -> tuple[float, ...]:
    """Probabilities of the tokens that can follow in the data ``markov``, the most probable first (Zipf's law).

    >>> successor_probabilities(2)
    (0.6666666666666666, 0.3333333333333333)
    """
    weights = [1 / rank for rank in range(1, min(NUM_SUCCESSORS, vocab_size) + 1)]
    return tuple(weight / sum(weights) for weight in weights)


def num_gratings(image_size: int) -> int:
    """Number of different gratings of a square image: whole periods along both sides, below the Nyquist frequency."""
    return ((2 * ((image_size - 1) // 2) + 1) ** 2 - 1) // 2


def least_loss(data: DataName, vocab_size: int) -> float | None:
    """Least mean cross-entropy that a model can reach on new samples, in nats; None for data without structure.

    For ``markov`` it is the entropy rate. All contexts have the same probabilities, of different tokens, so the rate is
    the entropy of these probabilities. Classes of ``gratings`` can be told apart without error.
    """
    match data:
        case "random":
            return None
        case "markov":
            return -sum(p * math.log(p) for p in successor_probabilities(vocab_size))
        case "gratings":
            return 0.0


Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


def _modelled(name: Any) -> Any:
    """Tell optimizers that are not modeled from misspelt names."""
    if isinstance(name, str) and name not in UPDATES and any(part in name.lower() for part in OPTIMIZERS_NOT_MODELED):
        known = ", ".join(get_args(OptimizerName))
        raise ValueError(f"is an optimizer that is not modeled yet, for it keeps other states; modeled: {known}")
    return name


def _of_format(value: Any) -> Any:
    """Mapping with a format for a format alone."""
    return {"format": value} if isinstance(value, str) else value


StateType = Literal["fp32", "fp16", "bf16", "fp8"]
"""Type in which a state of the optimizer is stored."""


class OptimizerDtypes(Spec):
    """Types of Adam's states, where they are not those of the framework.

    Megatron Core has them in its precision-aware optimizer (``core/optimizer/optimizer_config.py``), with FP32 weights
    as BF16 weights and 16 bits more (``store_param_remainders``). torchtitan has both states in BF16
    (``components/optimizer.py``, ``fused_opt_states_bf16``).

    Attributes:
        exp_avg, exp_avg_sq: First and second moment.
        main_params: FP32 copy of the weights.
    """

    exp_avg: StateType = Field("fp32", description="type of Adam's mean of gradients")
    exp_avg_sq: StateType = Field("fp32", description="type of Adam's mean of squared gradients")
    main_params: Literal["fp32", "fp16"] = Field(
        "fp32",
        description="type of Megatron's copy of the weights; fp32 is stored as 16 bits next to BF16 weights",
    )


Task = Literal["pretrain", "sft", "lora", "dpo", "kto", "orpo", "simpo", "reward"]
"""Purpose of a run; the last five train on preferences."""
Reference = Literal["adapters_off", "second_model", "precomputed", "none"]
ForwardPassName = Literal["mismatched", "mismatched reference", "reference"]
PREFERENCE_TASKS: tuple[Task, ...] = ("dpo", "kto", "orpo", "simpo", "reward")
REFERENCE_TASKS: tuple[Task, ...] = ("dpo", "kto")
"""Tasks whose loss compares the model with a reference model."""
PAIRED_TASKS: tuple[Task, ...] = ("dpo", "orpo", "simpo", "reward")
_OBJECTIVES: Mapping[str, Objective] = {"orpo": "odds_ratio", "reward": "score"}


class PreferenceSpec(Spec):
    """The reference model of preference training.

    Attributes:
        reference: Origin of the reference's log-probabilities. ``adapters_off``: a second forward of the model without
            its adapters. ``second_model``: a model of its own on every rank. ``precomputed``: a pass over the data
            before training, outside of the step. ``none``: the loss has none. None for ``adapters_off`` with adapters,
            ``second_model`` without, and ``none`` for tasks without a reference.
        reference_sharded: FSDP or ZeRO-3 shards the second model; None for a plan that shards parameters.
        reference_dtype: Type in which the second model is stored; None for that of frozen weights of the framework.
    """

    reference: Reference | None = Field(
        None,
        description="adapters_off, second_model, precomputed or none; default: by task and adapters",
    )
    reference_sharded: bool | None = Field(
        None, description="shard the second model over the ranks that shard parameters; default: as the plan does"
    )
    reference_dtype: Literal["fp32", "fp16", "bf16"] | None = Field(
        None, description="type of the second model's weights; default: that of frozen weights"
    )

    logits: bool = Field(
        False, description="reward models compute logits in forward as well, which nothing uses (LLaMA-Factory)"
    )

    @property
    def reference_bytes(self) -> int | None:
        """Bytes per weight of the second model; None for those of frozen weights."""
        return None if self.reference_dtype is None else 4 if self.reference_dtype == "fp32" else 2


def _of_reference(value: Any) -> Any:
    """Mapping with a reference for a reference alone."""
    return {"reference": value} if isinstance(value, str) else value


class TrainingSpec(Spec):
    """Batch, precision and optimizer of one run.

    Attributes:
        global_batch_size: Sequences per optimizer step, over all devices; pairs of sequences where a task trains on
            pairs (``sequences_per_sample``).
        precision: Format of the linear layers' matmuls. FP16 and BF16 are mixed precision. ``fp8``, ``mxfp8`` and
            ``nvfp4`` are BF16 except for the linear layers of blocks (``simplan.model.low_precision``).
        pure_bf16: Weights, gradients and optimizer states are BF16, without FP32 copies (``model.to(torch.bfloat16)``);
            with precision fp16 all of them are FP16. Else both are mixed precision, with FP32 weights or FP32 copies.
        fp8_recipe: FP8 scaling recipe; None for per-tensor scaling (``tensorwise``), and for other precisions.
        optimizer: Optimizer; ``simplan.training`` has its states, traffic and norms.
        optimizer_dtypes: Types of Adam's states; None for those of the framework.
        fused_optimizer: One kernel reads and writes all tensors of a step; false for torch's ``foreach``, a sequence of
            kernels, which for Adam needs a tensor as large as all parameters of the rank. None for fused where there is
            such a kernel, which is all except LARS and LAMB.
        clip_grad_norm: Norm to which gradients of the full model are scaled if theirs is larger; None for no clipping.
        task: Purpose of the run. ``pretrain`` trains all weights, ``lora`` the adapters of ``ModelSpec.lora_rank``.
            ``sft`` computes the same as ``pretrain``: tokens of prompts and padding are masked in the loss, but their
            logits are computed. ``dpo``, ``orpo``, ``simpo`` and ``reward`` train on pairs of a chosen and a rejected
            sequence, ``kto`` on single ones, all weights or, with ``ModelSpec.lora_rank``, adapters.
        preference: Reference model of ``dpo`` and ``kto``; None for its defaults.
        base_weights: Frozen linear layers below adapters in few bits (QLoRA); None for weights of the usual width.
        fake_quantization: Simulated quantization of linear layers (quantization-aware training); None for none.
        backup_workers: Data-parallel replicas whose gradients a step drops: it goes on when all but these have arrived
            (Chen et al. 2016, arXiv:1604.00981). Dropped sequences do not count in throughput.
        data: Synthetic samples of a run; a prediction does not depend on them. ``random`` has uniform tokens, or noise
            as images, and nothing to learn. ``markov`` has tokens of a Markov chain of order 2, for models that predict
            the next token. ``gratings`` has images of sinusoidal gratings in noise, for models that predict a class.
            ``least_loss`` has the loss that the best model reaches.
    """

    global_batch_size: Count = Field(
        description="sequences (or images, or pairs of task dpo, orpo, simpo and reward) of a step, over all devices"
    )
    precision: Precision = Field(
        "bf16", description="precision of the matmuls of linear layers; all except fp32 and tf32 are mixed precision"
    )
    pure_bf16: bool = Field(
        False,
        description="weights, gradients and optimizer states in bf16 (with precision fp16: fp16) too, no fp32 copies",
    )
    fp8_recipe: Fp8Recipe | None = Field(None, description="for fp8: scaling granularity; default: per tensor")
    optimizer: Annotated[OptimizerName, BeforeValidator(_modelled)] = Field(
        "adamw", description="optimizer, with its states per parameter"
    )
    optimizer_dtypes: OptimizerDtypes | None = Field(
        None, description="types of Adam's states in Megatron's precision-aware optimizer, or BF16 in torchtitan"
    )
    fused_optimizer: bool | None = Field(
        None, description="one kernel for the update; false for torch's foreach; default: where such a kernel exists"
    )
    clip_grad_norm: Positive | None = Field(None, description="maximum norm of the gradients of the model")
    task: Task = Field(
        "pretrain",
        description=(
            "lora trains adapters of model.lora_rank only; sft computes the same as pretrain; dpo, orpo, simpo and "
            "reward train on pairs, kto on single examples, all weights or adapters"
        ),
    )
    preference: Annotated[PreferenceSpec | None, BeforeValidator(_of_reference)] = Field(
        None,
        description=(
            "reference model of dpo and kto: adapters_off, second_model or precomputed, or a mapping of reference, "
            "reference_sharded and reference_dtype"
        ),
    )
    base_weights: Annotated[BaseWeights | None, BeforeValidator(_of_format)] = Field(
        None,
        description=(
            "frozen linear layers below adapters in few bits (QLoRA): a format, or a mapping of format, "
            "double_quantization, block_size, storage, library, keeps_inputs and upcast"
        ),
    )
    fake_quantization: FakeQuantization | None = Field(
        None,
        description=(
            "linear layers round weights and inputs to few bits and back (quantization-aware training): a mapping of "
            "weights, activations and group_size"
        ),
    )
    backup_workers: Natural = Field(
        0, description="replicas of plan.dp_replicate whose gradients, the last to arrive, a step drops"
    )
    data: DataName = Field(
        "random",
        description="samples of a run: markov (tokens) and gratings (images) can be learned; a step takes equally long",
    )

    @property
    def is_of_preferences(self) -> bool:
        """True for a task of preference training."""
        return self.task in PREFERENCE_TASKS

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of one sample of the batch that are trained on: 2 for a pair."""
        return 2 if self.task in PAIRED_TASKS else 1

    @property
    def objective(self) -> Objective:
        """Output and loss of the model's head."""
        if self.task == "reward" and self.preference is not None and self.preference.logits:
            return "score_and_logits"
        return _OBJECTIVES.get(self.task, "tokens")

    def reference(self, *, has_adapters: bool) -> Reference:
        """Origin of the reference's log-probabilities in a step of a model with or without adapters."""
        chosen = None if self.preference is None else self.preference.reference
        if chosen is not None or self.task not in REFERENCE_TASKS:
            return chosen or "none"
        return "adapters_off" if has_adapters else "second_model"

    def passes(self, reference: Reference) -> tuple[ForwardPassName, ...]:
        """Forwards of a microbatch without gradients, in the order of TRL's trainers.

        Those of mismatched completions, for the KL term of KTO, and those of the reference model.
        """
        has_reference = reference in ("adapters_off", "second_model")
        if self.task != "kto":
            return ("reference",) if has_reference else ()
        of_reference: tuple[ForwardPassName, ...] = ("mismatched reference", "reference")
        return ("mismatched", *of_reference[: 2 * has_reference])

    @property
    def update(self) -> UpdateName:
        """The optimizer with the kernels of its step; LARS and LAMB have one variant."""
        name = self.optimizer if self.fused_optimizer is not False else f"{self.optimizer}_foreach"
        return next((update for update in UPDATES if update == name), self.optimizer)


NumTokens = Annotated[float, Field(ge=1, le=1e18)]
"""Tokens of a full training."""
Price = Annotated[float, Field(gt=0, le=1e6)]
"""Price per device and hour, in any currency."""


class TrainingSection(TrainingSpec):
    """The section ``training`` of a scenario file: what a step depends on, and the length of the full training.

    Attributes:
        num_tokens: Tokens of the full training, padding included; None for a prediction of one step only.
    """

    num_tokens: NumTokens | None = Field(
        None,
        description="tokens of the full training, for its days and cost; at most 1e18; a step does not depend on it",
    )

    @property
    def step(self) -> TrainingSpec:
        """Keys that a step depends on."""
        return TrainingSpec(**{name: getattr(self, name) for name in self.model_fields_set - {"num_tokens"}})


class TrainingBudget(Spec):
    """Length and price of a full training; a step does not depend on them.

    Attributes:
        num_tokens: As in ``TrainingSection``.
        num_samples: Sequences or images, in place of tokens.
        num_steps: Optimizer steps, in place of tokens.
        price_per_device_hour: Price of one device for one hour, in any currency; None for no cost.
    """

    num_tokens: NumTokens | None = None
    num_samples: NumTokens | None = None
    num_steps: Count | None = None
    price_per_device_hour: Price | None = None

    @property
    def has_length(self) -> bool:
        """True if the length of the training is known."""
        return (self.num_tokens, self.num_samples, self.num_steps) != (None, None, None)

    def steps(self, samples_per_step: int, seq_len: int) -> int | None:
        """Optimizer steps, the last one included even if it needs fewer samples; None without a length."""
        if self.num_steps is not None:
            return self.num_steps
        if self.num_samples is not None:
            return math.ceil(self.num_samples / samples_per_step)
        return None if self.num_tokens is None else math.ceil(self.num_tokens / (samples_per_step * seq_len))
