"""What the training framework brings: state precision, buckets, buffers and hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from simplan.base import Count, NonNegative, Spec
from simplan.model.implementations.expert_dispatch import ExpertDispatch
from simplan.model.implementations.layer_style import LayerStyle, styled_layers
from simplan.model.layer import LayerSpec
from simplan.model.low_precision import (
    Fp8Recipe,
    Kept,
    LinearFormat,
    LowPrecision,
    QuantizedWeights,
    linear_format,
)
from simplan.plan.plan import ParallelPlan, RecomputeModule
from simplan.software.rates import StackRates
from simplan.training.optimizer import OPTIMIZERS, OptimizerName
from simplan.training.training import TrainingSpec

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["LowPrecisionLinears", "SoftwareOption", "SoftwareSpec", "StateBytes", "TensorOverlap"]


_Wide = Literal["fp32", "tf32", "fp16", "bf16"]
SoftwareOption = Literal[
    "compiled", "expert_dispatch", "expert_overlap", "fp8_dot_product_attention", "fused_experts", "vocab_multiple"
]
"""Fields of a profile that are the user's choice."""
TensorOverlap = Literal["none", "backward", "gathers", "all"]
"""Exchanges of tensor-parallel ranks that run beside matrix products."""


class LowPrecisionLinears(Spec):
    """Linear layers in one low precision, as the framework has them.

    Attributes:
        kept: What they keep of their operands for backward.
        recipes: Of fp8, those that it has.
        weights: How often weights are quantized where they are whole. What FSDP gathers is quantized every time, but
            for weights that are ``stored`` so.
        gathers: Those recipes with which tensor-parallel ranks gather inputs, and gradients of outputs, of the linear
            layers of blocks in 8 bits.
        experts: The grouped products of experts are in it as well.
        frozen: Matrices that adapters stand beside are in it as well, without what gradients of weights would need.
        eager: Casts are torch's own operations one after the other, unless blocks are compiled.
    """

    kept: Kept
    weights: QuantizedWeights = "microbatch"
    recipes: Annotated[tuple[Fp8Recipe, ...], Field(strict=False)] = ()  # files have lists
    gathers: Annotated[tuple[Fp8Recipe, ...], Field(strict=False)] = ()
    experts: bool = False
    frozen: bool = False
    eager: bool = False


class StateBytes(Spec):
    """Bytes per parameter and per element, as the framework keeps them in memory during training.

    Attributes:
        parameter: The weights between steps.
        frozen: Those of them that are not trained.
        gradient: The accumulated gradient; of FSDP, whole until it is reduced.
        master: A separate fp32 copy of the weights, when there is one.
        moment: Each state of the optimizer, Adam's two moments for example.
        activation: Bytes of one activation element that the backward pass keeps.
        residual: The same for the residual stream.
        boundary: Bytes of one element sent between stages.
        gathered: Weights that FSDP has gathered for computing.
        reduced: Gradients while FSDP reduces them.
        product: A gradient of a matrix as its product gives it; 0 where products add to the gradients that are held.
        placeholder: What autograd gets for a gradient that was added where it is held: an empty tensor, of block's
            matrices one for each shape that is kept, of the head's one while its backward runs; 0 for none.
        unaccumulated: Gradients of a microbatch, kept beside the wider ones that they are added to; 0 for none.
        flattened: A flat copy of gradients that the optimizer widens; 0 for none.
        weight_copy: A copy of the matrices in the precision of the activations that forward makes and keeps for
            backward, for every microbatch; 0 for none.
        linear: How the linear layers of blocks are quantized, where they are; of one training, not of a catalogue.
        gathers_experts: FSDP shards and gathers experts of which other ranks have others; of one plan.
    """

    parameter: Count
    frozen: Count
    gradient: Count
    master: NonNegative = 0
    moment: Count = 4
    activation: Count
    residual: Count
    boundary: Count
    gathered: Count
    reduced: Count
    product: Annotated[int, Field(ge=0)]
    placeholder: Annotated[int, Field(ge=0)] = 0
    unaccumulated: Annotated[int, Field(ge=0)] = 0
    flattened: Annotated[int, Field(ge=0)] = 0
    weight_copy: Annotated[int, Field(ge=0)] = 0
    linear: LinearFormat | None = Field(default=None, exclude=True)
    gathers_experts: bool = Field(default=False, exclude=True)

    if TYPE_CHECKING:  # fields without a default may be left out

        def __init__(self, **fields: Any) -> None: ...

    @property
    def widened_bytes(self) -> int:
        """Of a gradient while the optimizer runs: its copy as wide as the master copy, where it is narrower."""
        return int(self.master) + self.flattened if self.master > self.gradient else 0

    @property
    def narrowed_bytes(self) -> int:
        """Of a gradient that is kept wider than it is reduced: the copy that is reduced, just before the update."""
        return self.reduced if self.unaccumulated and self.reduced < self.gradient else 0

    @property
    def accumulation_bytes(self) -> int:
        """Read and written to add one gradient of a microbatch to the gradients that are held, in a kernel of its own.

        A product that is narrower is widened first; products that add to the gradients themselves take no kernel.
        """
        if not self.product:
            return 0
        widened = self.product + int(self.gradient) if self.product != self.gradient else 0
        return widened + 3 * int(self.gradient)

    def optimizer_bytes(self, optimizer: OptimizerName) -> int:
        """Bytes of optimizer states for one parameter, and of the master copy."""
        return OPTIMIZERS[optimizer].num_states * self.moment + int(self.master)

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        """Unless said otherwise residuals are as wide as activations, weights and gradients are as wide everywhere."""
        if not isinstance(data, dict):
            return data
        same = {
            "frozen": "parameter",
            "residual": "activation",
            "gathered": "parameter",
            "reduced": "gradient",
            "product": "activation",
        }
        return {key: data[source] for key, source in same.items() if source in data} | data


class SoftwareSpec(Spec):
    """A software profile: everything about a framework that moves time or memory.

    Attributes:
        id: Catalogue name.
        state_bytes: By training precision, where parameters are whole; a precision that is missing is not supported.
        sharded_state_bytes: The same where FSDP shards them.
        lora_state_bytes, sharded_lora_state_bytes: The same where adapters are trained and all other weights frozen.
        low_precision: Which precisions below 16 bits its linear layers have; all else is then as for bf16.
        layers: How it computes layers.
        rates: What it makes of kernels.
        compiled: Blocks are compiled, which joins memory-bound kernels; where the profile is ``executable`` they keep
            for backward what torch.compile does, else as much as others.
        options: Fields that a scenario may set.
        runtime: Whose replicas, pipelines and FSDP it has, with their limits.
            ``torch``: DDP makes its buckets anew before the second step, when it holds both for a moment. A pipeline
            rank has one receive buffer per microbatch and direction; what it sends lives to the end of the step, where
            it waits for all sends; gradients are divided by the number of microbatches once they are complete.
            ``megatron`` (DeepSpeed's is alike): a pipeline rank receives into new tensors, lets go of what is sent,
            divides losses instead of gradients, and waits for messages in ``synchronous_schedules``.
            ``xla``: as torch's, but buffers live as long as they are used, and FSDP copies nothing out of or into one
            flat buffer for each unit, as it does elsewhere.
        bucket_bytes: Size at which DDP closes a gradient bucket.
        first_bucket_bytes: Size of the first bucket, smaller so that the reduction starts early.
        grad_overlap: Buckets are reduced while the backward pass still runs.
        waits_for_gradients: Where DDP waits for reductions: at the end of a stage's last ``backward``, before what it
            sends (torch), or in the ``step``, after all backwards; reductions that do not overlap begin there.
        waits_for_batch: Before each forward of a stage the device runs dry, as it takes the microbatch from the host.
        lists_of_shards: What FSDP gathers and reduces goes matrix by matrix, as a list of one tensor for every rank;
            the host makes, checks and copies these one by one, and the device waits.
        live_elements: With such lists, something is gathered ahead only while fewer elements than these are gathered,
            and a matrix is let go of, and gathered again, if as many are used before it is; None for no such limit.
        splits_sends: Tensor-parallel ranks that hold equal tensors each send a part to the next stage, where the parts
            are gathered.
        reduces_each_microbatch: Where parameters are sharded, and without a pipeline, gradients are reduced after every
            microbatch, whatever ``plan.grad_sync`` says: nothing has room for whole ones.
        receives_ahead: Those in which a pipeline rank posts what it receives for its next forward and its next backward
            before the computation that comes first: a message waits for its sender only, and for those before it in
            its direction.
        ddp_in_pipelines: DDP reduces the gradients of a backward in two parts, and works with several stages on a rank.
        equal_stages: Stages without ``stage_layers`` have as many blocks as each other, or are balanced (``no``).
        packed_attention: How documents that share a sequence attend: in one call of the kernel for each, or in one for
            all; None where that is not modelled.
        context_bytes: Device memory of the driver context and the communication library, by device kind.
        zero_stages: Of ``ParallelPlan.zero_stage``, those that it has.
        sequence_parallelism: Tensor-parallel ranks can split the tokens of norms and sums as well.
        optimizer_shards: What ZeRO-1 deals out to ranks: whole parameters, which their owners broadcast once they are
            updated (torch's ZeroRedundancyOptimizer), or equal numbers of elements of flat buffers, whose gradients are
            reduced and scattered and whose updated parameters are gathered (Megatron's distributed optimizer,
            DeepSpeed).
        gathers_ahead: Where elements are dealt out, updated parameters are gathered beside the next forward, bucket by
            bucket, not at the end of the step.
        tp_overlap: Which exchanges of tensor-parallel ranks run beside the matrix products next to them in a block:
            ``none``, those of ``backward`` before and after matrices split by columns, ``gathers``, in both directions
            but no sums, or ``all``, in both directions.
        expert_dispatch: How tokens come to their experts (``simplan.model.implementations.expert_dispatch``).
        expert_overlap: Tokens of a microbatch travel to and from experts while another one, whose backward is next to
            its forward in the schedule, is computed (Megatron Core's overlap_moe_expert_parallel_comm).
        fused_experts: Activations of experts, and their casts to 8 bits, are part of the products before them.
        fp8_dot_product_attention: Where linear layers are in fp8 or mxfp8, the attention core is in 8 bits as well.
        grad_dtypes: Precisions of gradients that a plan may ask for besides the software's own (``plan.grad_dtype``).
        adds_apart: Gradients that a plan wants wider than the software's own are added up apart from those, and reduced
            as wide as those.
        flat_updates: What the optimizer makes for a step are single blocks, which the allocator has no room for in
            what layers left.
        recompute_modules: Modules of a block besides the attention core that it can run again alone.
        recompute_layers: It can run only the first blocks of every stage again.
        mtp: It trains layers for multi-token prediction.
        vocab_multiple: Vocabularies are padded to a multiple of this times ``tp``; 1 where they are as they are given,
            so that ``tp`` has to divide them. What is padded is held, computed and sent like other rows. A model keeps
            its ``vocab_size``; its parameters and FLOPs, which utilizations are of, are without padding, where
            Megatron's own num_floating_point_operations counts it.
        reserve_fraction: Of memory that comes and goes in a step, by how much more the allocator reserves.
        trainer: A trainer runs the steps, which loads data, reads results back and logs between them; else a bare loop.
        executable: ``simplan run`` runs plans of it.
        not_modelled: What it does and simplan does not model: there it is as torch is.
        sources: Field name -> where its value comes from.
    """

    id: str
    state_bytes: dict[_Wide, StateBytes]
    sharded_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    lora_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    sharded_lora_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    low_precision: dict[LowPrecision, LowPrecisionLinears] = Field(default_factory=dict)
    layers: LayerStyle = LayerStyle()
    rates: StackRates = StackRates()
    compiled: bool = False
    options: Annotated[tuple[SoftwareOption, ...], Field(strict=False)] = ()
    runtime: Literal["torch", "megatron", "xla"] = "torch"
    bucket_bytes: Count
    first_bucket_bytes: Count
    grad_overlap: bool = True
    waits_for_gradients: Literal["backward", "step"] = "backward"
    waits_for_batch: bool = False
    reduces_each_microbatch: bool = False
    lists_of_shards: bool = False
    live_elements: Count | None = None
    splits_sends: bool = False
    receives_ahead: Annotated[tuple[str, ...], Field(strict=False)] = ()
    ddp_in_pipelines: bool = False
    packed_attention: Literal["document_calls", "one_call"] | None = None
    context_bytes: dict[Literal["gpu", "tpu", "cpu", "other"], NonNegative] = Field(default_factory=dict)
    equal_stages: Literal["always", "where_possible", "no"] = "no"
    zero_stages: Annotated[tuple[int, ...], Field(strict=False)] = (0, 1, 2, 3)
    sequence_parallelism: bool = True
    optimizer_shards: Literal["parameters", "elements"] = "parameters"
    gathers_ahead: bool = False
    tp_overlap: TensorOverlap = "none"
    expert_dispatch: ExpertDispatch = "copies"
    expert_overlap: bool = False
    fused_experts: bool = False
    fp8_dot_product_attention: bool = False
    grad_dtypes: Annotated[tuple[Literal["fp32", "bf16", "fp16"], ...], Field(strict=False)] = ()
    adds_apart: bool = False
    flat_updates: bool = False
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(strict=False)] = ()
    recompute_layers: bool = False
    mtp: bool = False
    vocab_multiple: Annotated[int, Field(ge=1, le=100_000)] = 1
    reserve_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    trainer: bool = False
    executable: bool = False
    not_modelled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, with the options that are set."""
        words: dict[SoftwareOption, str] = {
            "compiled": "compiled" if self.compiled else "",
            "expert_dispatch": self.expert_dispatch if self.expert_dispatch != "copies" else "",
            "expert_overlap": "exchanges for experts beside another microbatch" if self.expert_overlap else "",
            "fp8_dot_product_attention": "attention in 8 bits" if self.fp8_dot_product_attention else "",
            "fused_experts": "fused experts" if self.fused_experts else "",
            "vocab_multiple": "",  # predictions tell it where it changes anything
        }
        return ", ".join([self.id, *(words[option] for option in self.options if words[option])])

    @property
    def preallocated_receives(self) -> bool:
        """Whether a pipeline rank keeps one receive buffer per microbatch and direction."""
        return self.runtime == "torch"

    @property
    def synchronous_schedules(self) -> tuple[str, ...]:
        """Those in which a pipeline rank computes nothing while it sends or receives.

        It asks for what it receives when it needs it, and goes on when all is there and sent.
        """
        return ("naive", "gpipe", "1f1b") if self.runtime == "megatron" else ()

    @property
    def traffic(self) -> float:
        """Of memory-bound kernels, as of ``StackRates``."""
        return self.rates.compiled_traffic if self.compiled else self.rates.traffic

    def layers_of(self, model: ModelSpec, plan: ParallelPlan) -> tuple[LayerSpec, ...]:
        """The layers of a model as one rank has and computes them."""
        style = self.layers.model_copy(
            update={
                "compiled": self.compiled and self.executable,
                "documents_in_one_call": self.packed_attention == "one_call",
                "expert_dispatch": self.expert_dispatch,
                "fused_experts": self.fused_experts,
                "eight_bit_attention": self.fp8_dot_product_attention,
            }
        )
        return styled_layers(self.padded(model, plan).layers_of(plan.shard), style, model.family)

    def padded(self, model: ModelSpec, plan: ParallelPlan) -> ModelSpec:
        """The model as the software makes it for so many tensor-parallel ranks: perhaps with a larger vocabulary."""
        return model if self.vocab_multiple == 1 else model.padded(self.vocab_multiple * plan.tp)

    def equal_stage_layers(self, num_blocks: int, num_stages: int) -> tuple[int, ...] | None:
        """As many blocks for each stage, where the software has it so; None for the balanced split."""
        if self.equal_stages == "no" or num_blocks % num_stages:
            return None
        return (num_blocks // num_stages,) * num_stages

    @property
    def cuts_products(self) -> bool:
        """Whether exchanges of tensor-parallel ranks run beside parts of the very products that need or make them."""
        return self.tp_overlap in ("gathers", "all")

    def reduces_every(self, plan: ParallelPlan) -> bool:
        """Whether gradients are reduced after every microbatch, not only after the last one."""
        unasked = self.reduces_each_microbatch and plan.shards_parameters and plan.pp == 1
        return unasked or plan.grad_sync == "microbatch"

    def states(self, training: TrainingSpec, plan: ParallelPlan) -> Mapping[_Wide, StateBytes]:
        """Element widths by precision, as far as the software has them for such a training under such a plan."""
        if training.task == "lora":
            return self.sharded_lora_state_bytes if plan.shards_parameters else self.lora_state_bytes
        return self.sharded_state_bytes if plan.shards_parameters else self.state_bytes

    def state(self, training: TrainingSpec, plan: ParallelPlan) -> StateBytes:
        """Element widths of one training under one plan."""
        kinds = self.states(training, plan)
        low = self.low_precision.get(training.precision)  # type: ignore[arg-type]
        if low is None:
            return self._with_gradients(kinds[training.precision], plan)  # type: ignore[index]
        weights = "microbatch" if plan.shards_parameters and low.weights == "step" else low.weights
        form = linear_format(
            training.precision,  # type: ignore[arg-type]
            training.fp8_recipe,
            low.kept,
            weights,
            experts=low.experts,
            eager=low.eager and not self.compiled,
        )
        return self._with_gradients(kinds["bf16"], plan).model_copy(update={"linear": form})

    def gathers_quantized(self, state: StateBytes) -> bool:
        """Whether tensor-parallel ranks gather in 8 bits what the linear layers of blocks compute with."""
        linear = state.linear
        low = None if linear is None else self.low_precision.get(linear.precision)
        return low is not None and linear is not None and linear.recipe in low.gathers

    def _with_gradients(self, state: StateBytes, plan: ParallelPlan) -> StateBytes:
        """With gradients reduced, and where they are whole also kept, in the precision that the plan asks for."""
        if plan.expert_shards > 1:
            state = state.model_copy(update={"gathers_experts": True})
        if plan.grad_dtype is None:
            return state
        width = 4 if plan.grad_dtype == "fp32" else 2
        if plan.shards_parameters:
            return state.model_copy(update={"reduced": width})
        apart = state.gradient if self.adds_apart and width > state.gradient else 0
        return state.model_copy(update={"gradient": width, "reduced": apart or width, "unaccumulated": apart})
