"""Which recomputation the executor has beside what."""

from __future__ import annotations

from collections.abc import Iterator

from executor.recompute import RECOMPUTES
from simplan.errors import Problem
from simplan.program.run_spec import RunSpec

__all__ = ["unmodelled_recompute"]


def unmodelled_recompute(job: RunSpec) -> Iterator[Problem]:
    """Modes that the executor does not have, and selective_op beside what hides its products or was not tried."""
    mode = job.plan.recompute
    if mode not in RECOMPUTES:
        yield Problem(
            field="plan.recompute",
            value=mode,
            rule="the executor does not recompute like this",
            fix=f"use {', '.join(RECOMPUTES[:-1])} or {RECOMPUTES[-1]}",
        )
    if mode == "selective_op":
        for what, fix in _beside_selective_op(job):
            rule = f"the executor does not keep single products {what}"
            yield Problem(field="plan.recompute", value=mode, rule=rule, fix=f"use selective or full{fix}")


def _beside_selective_op(job: RunSpec) -> Iterator[tuple[str, str]]:
    """With what else that would help."""
    plan, model = job.plan, job.model
    if plan.offload_activations:
        yield "beside activations that are moved to the host", ", or offload_activations = false"
    if job.software.compiled:
        yield "of blocks that are compiled", ", or software.compiled = false"
    if job.training.precision == "fp8":
        yield "in fp8", ", or precision = bf16"
    if model.family == "t5":
        yield "of T5, whose attention is not one operation", ""
    if model.lora_rank:
        yield "of matrices with adapters", ", or lora_rank = 0"
    if len(model.segments) > 1:
        yield "of packed documents", ", or no document_lengths"
