"""Fallbacks for features that a published run uses and its software profile does not support, each with a note.

A scenario with an unsupported plan raises an error, so that its author changes it. A published run cannot change, so a
prediction with stated assumptions is better than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from simplan import catalog
from simplan.accuracy.schema import RunPlan
from simplan.job import Job
from simplan.rules import violations
from simplan.rules.experts import expert_overlap_precision, expert_overlap_ranks, expert_overlap_stages
from simplan.software.software import SoftwareSpec

__all__ = ["with_stand_ins", "without_refused_overlap"]

_TORCH = "torch"  # the profile with the most features
_AS_WIDE: Mapping[str, str] = MappingProxyType({"fp16": "bf16", "bf16": "fp16", "tf32": "fp32"})
"""Precision with the same widths of weights and states."""


def with_stand_ins(profile: SoftwareSpec, plan: RunPlan, notes: list[str]) -> SoftwareSpec:
    """Add features to a profile that the plan of a run requires; ``notes`` gets a sentence per added feature."""
    if profile.id == _TORCH:
        profile = _torch(profile)
    changes: dict[str, object] = {}
    if plan.zero_stage not in profile.zero_stages and plan.dp_shard * plan.cp > 1:
        changes["zero_stages"] = (*profile.zero_stages, plan.zero_stage)
        how = "parameters are gathered and gradients reduced as FSDP2 does"
        if plan.zero_stage == 1:
            changes["optimizer_shards"] = "elements"
            how = "equal numbers of elements per rank, as in Megatron's distributed optimizer"
        notes.append(f"plan.zero_stage = {plan.zero_stage} with {profile.id}: {how}")
    if plan.sequence_parallel and plan.tp > 1 and not profile.sequence_parallelism:
        changes["sequence_parallelism"] = True
        notes.append(f"plan.sequence_parallel = true with {profile.id}: as Megatron-LM has it")
    if plan.grad_dtype is not None and plan.grad_dtype not in profile.grad_dtypes:
        changes["grad_dtypes"] = (*profile.grad_dtypes, plan.grad_dtype)
        notes.append(f"plan.grad_dtype = {plan.grad_dtype} with {profile.id}: kept and reduced as others do")
    changes |= _precision(profile, plan, notes)
    return profile.model_copy(update=changes)


def without_refused_overlap(job: Job, notes: list[str]) -> Job:
    """Disable ``expert_overlap`` in a job if the framework does not support it for the plan.

    A recipe enables expert overlap per model and device. A run with other stages or recomputation cannot have used it.
    ``notes`` gets a sentence if the overlap is disabled.
    """
    recomputes = job.plan.recompute == "full" or "moe" in (job.plan.recompute_modules or ())
    refused = violations(job, (expert_overlap_ranks, expert_overlap_stages, expert_overlap_precision))
    if not job.software.expert_overlap or not (refused or recomputes):
        return job
    why = f"{refused[0].field} = {refused[0].value}" if refused else "recomputation of experts"
    name = job.software.id
    notes.append(f"no expert dispatch overlapped with another microbatch: {name} does not support it with {why}")
    return replace(job, software=job.software.model_copy(update={"expert_overlap": False}))


def _torch(profile: SoftwareSpec) -> SoftwareSpec:
    """Add features that torch's runtime lacks, since its profile is the fallback for frameworks that have them."""
    low = profile.low_precision
    return profile.model_copy(
        update={
            "ddp_in_pipelines": True,
            "low_precision": low | {"nvfp4": low["nvfp4"].model_copy(update={"kept": "wide"})},
            "grad_dtypes": ("fp32", "bf16", "fp16"),
        }
    )


def _precision(profile: SoftwareSpec, plan: RunPlan, notes: list[str]) -> dict[str, object]:
    """Quantization and element widths of a precision that the profile lacks, from a precision of the same width."""
    changes: dict[str, object] = {}
    wide = plan.precision
    if wide in ("fp8", "mxfp8", "nvfp4"):
        if wide not in profile.low_precision:
            low = catalog.software(_TORCH).low_precision[wide].model_copy(update={"eager": False})
            changes["low_precision"] = profile.low_precision | {wide: low}
            notes.append(f"plan.precision = {wide} with {profile.id}: quantized as torch does")
        wide = "bf16"
    field = "sharded_state_bytes" if plan.zero_stage in (2, 3) and plan.dp_shard * plan.cp > 1 else "state_bytes"
    known = [getattr(profile, name) for name in (field, "state_bytes")]
    if wide not in known[0]:
        like = _AS_WIDE.get(wide, wide)
        found = [widths[name] for widths in known for name in (wide, like) if name in widths]
        if found:
            changes[field] = known[0] | {wide: found[0]}
            notes.append(f"plan.precision = {wide} with {profile.id}: elements as wide as elsewhere")
    return changes
