"""Losses on preferences, and the forwards without gradients that they need: reference model, mismatched completions.

A microbatch of pairs has the chosen sequences first, then the rejected ones, as TRL's trainers have. The first half of
every sequence is the prompt. Sources: Rafailov et al. 2023, arXiv:2305.18290, equation 7 (DPO); Ethayarajh et al. 2024,
arXiv:2402.01306, equation 8 (KTO); Hong et al. 2024, arXiv:2403.07691, equations 6 and 7 (ORPO); Meng et al. 2024,
arXiv:2405.14734, equation 6 (SimPO); Ouyang et al. 2022, arXiv:2203.02155, equation 1 (reward models). Constants are
defaults of TRL, which change nothing that is predicted. Precomputed log-probabilities of a reference are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from executor.distributed.mesh import ParallelDims
from executor.distributed.precision import Autocast, compute_dtype, weight_dtype
from executor.models.embedding_and_head import OutputHead
from executor.models.model import build_stage
from executor.train.data import IGNORED
from executor.train.loss import LossInChunks, cross_entropy, log_probs
from simplan.runs.run_spec import RunSpec
from simplan.training import ForwardPassName, Task

if TYPE_CHECKING:
    from executor.distributed.fsdp import StageSharding

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

BETA = 0.1
"""Weight of the difference to the reference (DPO, KTO, ASFT), and of the odds ratio (ORPO)."""
SIMPO_BETA, SIMPO_GAMMA = 2.0, 1.0
"""Scale of the rewards of SimPO, and the least difference of two rewards of a pair."""

LogProbs = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of targets (batch, tokens), given what the module gives and the targets, 0 without a target."""


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Loss of a microbatch of preferences.

    Attributes:
        task: Task of the run.
        passes: Forwards without gradients.
        log_probs: See ``LogProbs``; for reward models unused.
        of_chosen: Mean cross-entropy of chosen sequences for ORPO, from what the module gives and the targets; None to
            take it from the log-probabilities.
        second_model: The reference model; None for the model that is trained without its adapters.
    """

    task: Task
    passes: tuple[ForwardPassName, ...]
    log_probs: LogProbs
    of_chosen: Callable[[Tensor, Tensor], Tensor] | None = None
    second_model: nn.Module | None = None

    def __call__(self, module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            module: The model that is trained, plain, sharded or wrapped in DistributedDataParallel.
            tokens, targets: Of the microbatch, (sequences, tokens) int64.
        """
        if self.task == "reward":
            chosen, rejected = module(tokens)[:, -1, 0].chunk(2)
            return -functional.logsigmoid(chosen.to(_wide(chosen)) - rejected).mean()
        if self.task == "asft":
            with torch.no_grad(), self._reference(module) as model:
                of_reference = model(tokens)
            return _divergence(module(tokens), of_reference, targets)
        mismatched = self._mismatched(module, tokens, targets)
        if self.task == "orpo":
            return self._odds_ratio(module(tokens), targets)
        scores = self._of_completions(module(tokens), targets)
        if self.task == "simpo":
            chosen, rejected = (scores / _completions(targets).sum(1)).chunk(2)
            return -functional.logsigmoid(SIMPO_BETA * (chosen - rejected) - SIMPO_GAMMA).mean()
        reference, of_mismatched = torch.zeros_like(scores), torch.zeros(1, device=scores.device)
        if "reference" in self.passes:
            with torch.no_grad(), self._reference(module) as model:
                if "mismatched reference" in self.passes:
                    of_mismatched = self._of_completions(model(_mismatched(tokens)), _mismatched(targets))
                reference = self._of_completions(model(tokens), targets)
        ratios = scores - reference
        if self.task == "dpo":
            chosen, rejected = ratios.chunk(2)
            return -functional.logsigmoid(BETA * (chosen - rejected)).mean()
        assert mismatched is not None
        divergence = (mismatched - of_mismatched).mean().clamp(min=0)
        desirable, undesirable = ratios[0::2] - divergence, divergence - ratios[1::2]
        return (1 - torch.sigmoid(BETA * torch.cat((desirable, undesirable)))).mean()

    def _mismatched(self, module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Log-probabilities of completions of other prompts (sequences); None for tasks without."""
        if "mismatched" not in self.passes:
            return None
        with torch.no_grad():
            return self._of_completions(_bare(module)(_mismatched(tokens)), _mismatched(targets))

    def _of_completions(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed log-probabilities of completions, (sequences)."""
        log_probs = self.log_probs(inputs, targets)
        return (log_probs * _completions(targets)).sum(1)

    def _odds_ratio(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """ORPO's loss: the cross-entropy of chosen sequences, prompts among them, and the log odds ratio."""
        if self.of_chosen is not None:
            inputs = inputs.to(_wide(inputs))  # once, for both
        log_probs, mask = self.log_probs(inputs, targets), _completions(targets)
        half = len(targets) // 2
        if self.of_chosen is None:
            nll = -log_probs[:half].sum() / (targets[:half] != IGNORED).sum()
        else:
            nll = self.of_chosen(inputs[:half], targets[:half])
        mean = (log_probs * mask).sum(1) / mask.sum(1)
        odds = mean - torch.log1p(-torch.exp(mean))
        chosen, rejected = odds.chunk(2)
        return nll - BETA * functional.logsigmoid(chosen - rejected).mean()

    @contextmanager
    def _reference(self, module: nn.Module) -> Iterator[nn.Module]:
        """The reference model: a second one, or the one that is trained, inside of the context without its adapters."""
        if self.second_model is not None:
            yield self.second_model
            return
        adapted: list[Any] = [layer for layer in module.modules() if hasattr(layer, "lora_a")]
        assert all(hasattr(layer, "is_on") for layer in adapted), "adapters that can be turned off"
        for layer in adapted:
            layer.is_on = False
        try:
            yield _bare(module)
        finally:
            for layer in adapted:
                layer.is_on = True


def preference_loss(
    job: RunSpec,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    dims: ParallelDims,
    sharding: StageSharding | None,
) -> PreferenceLoss:
    """Loss of a job, with its reference model.

    Args:
        loss: The loss of tokens with the same output projection, whole or in chunks.
        sharding: Shards a second model; None for whole ones.
    """
    reference = job.training.reference(has_adapters=job.model.lora_rank > 0)
    chunks = loss if isinstance(loss, LossInChunks) else None
    second = reference == "second_model"
    return PreferenceLoss(
        job.training.task,
        job.training.passes(reference),
        log_probs if chunks is None else chunks.log_probs,
        of_chosen=cross_entropy if chunks is None else None,
        second_model=_second_model(job, device, dims, sharding, in_chunks=chunks is not None) if second else None,
    )


def _second_model(
    job: RunSpec, device: torch.device, dims: ParallelDims, sharding: StageSharding | None, *, in_chunks: bool
) -> nn.Module:
    """A reference model, whose weights are those with which training begins."""
    preference, model = job.training.preference, job.model.without_training
    dtype = None if preference is None else preference.reference_dtype
    stored = None if dtype is None or job.dtype == "fp64" else _DTYPES[dtype]
    last = len(model.layers) - 1
    shared = (0, last) if model.layers[-1].tied else ()

    def finish(number: int, layer: nn.Module) -> None:
        if sharding is not None and number not in shared:
            sharding.shard(layer, reshards=True)

    stage = build_stage(
        model,
        range(last + 1),
        stored or weight_dtype(job),
        device,
        None if dims.alone else job.seed,
        dims,
        frozen_dtype=stored or compute_dtype(job),
        model_code=job.software.layers.model_code,
        finish=finish,
    )
    if in_chunks:
        head = stage.layers[str(last)]
        assert isinstance(head, OutputHead)
        head.leaves_logits = True
    computed = compute_dtype(job)
    if sharding is not None:
        sharding.finish(stage, reshards=True)
    elif computed is not None:
        return Autocast(stage, computed, device.type)
    return stage


def _bare(module: Any) -> nn.Module:
    """The module below DistributedDataParallel, which prepares every forward for a backward."""
    bare: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return bare


def _divergence(logits: Tensor, of_reference: Tensor, targets: Tensor) -> Tensor:
    """ASFT's loss: cross-entropy weighted by the probability of the target, and the divergence from the reference.

    As LLaMA-Factory at ff6d4d1 has it (train/trainer_utils.py, ``asft_loss_func``), which copies both logits.
    """
    wide = logits.to(_wide(logits))
    trained, other = wide.clone().flatten(0, -2), of_reference.clone().flatten(0, -2)
    entropy = cross_entropy(trained, targets, reduction="none")
    number, mask = (targets != IGNORED).sum(), (targets != IGNORED).flatten()
    log_probs, probs = functional.log_softmax(trained, dim=-1), functional.softmax(other, dim=-1)
    divergence = functional.kl_div(log_probs, probs, reduction="none").sum(-1)
    weighted = entropy * torch.exp(-entropy).detach() + BETA * divergence * mask
    return weighted.sum() / number


def _mismatched(samples: Tensor) -> Tensor:
    """Prompts, each with the completion of the example before it."""
    half = samples.shape[1] // 2
    return torch.cat((samples[:, :half], samples.roll(1, 0)[:, half:]), 1)


def _completions(targets: Tensor) -> Tensor:
    """Mask of completions, (sequences, tokens) bool."""
    mask = targets != IGNORED
    mask[:, : targets.shape[1] // 2] = False
    return mask


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
