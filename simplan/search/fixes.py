"""Smallest changes with which a plan that does not fit does; each is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.base_weights import BaseWeights
from simplan.plan.plan import DEPENDENT
from simplan.predict import predict
from simplan.predict.step_summary import evaluate_step
from simplan.prediction import MemoryVerdict, Prediction
from simplan.problems import setting_words
from simplan.rules import MEMORY_RULES, RULES, SEARCH_RULES, violations
from simplan.units import GIB
from simplan.wording import divisors

_MAX_TRIED = 48  # evaluations of single changes
_MAX_PAIRS = 24
_MAX_SMALLER = 16  # evaluations of pairs with a smaller change of the same kind
_MAX_PREDICTED = 8
_MAX_OPERATIONS = 1_000_000
_MAX_INDIVIDUAL = 100_000
"""Operations of a step of which changed ones are tried: up to eight are predicted. With jitter, and on links, all ranks
are simulated, many times or for longer."""
_MAX_AXIS = 8  # factor by which one axis of the mesh grows
_LORA_RANK = 16  # as in the recipes of torchtune and LLM Foundry
_MAX_SLOWER = 3  # predictions of slower pairs, where no other change fits for sure
_TRAINS_OTHERWISE = {"training.task", "training.base_weights"}
"""Settings of changes after which a step no longer computes the same."""
_RECOMPUTE = ("selective", "selective_op", "full")
"""Recomputation by saved memory, least first; a framework without a value rejects it by its rules."""


Kind = Callable[[Job], Iterator[Job]]
"""One kind of change: yields changed jobs, smallest change first; they may violate rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change of one or two settings with which a job fits.

    Attributes:
        changes: New value by setting, as in a scenario file: ``{"plan.grad_sync": "microbatch"}``.
        job: The changed job.
        step_time_s: Step time after the change, in seconds.
        step_time_change: Relative change of the step time: 0.1 for 10 % slower. The plan that does not fit is the
            baseline.
        device_bytes: Device memory of the worst rank after the change.
        headroom_bytes: Device memory that the worst rank leaves free.
        memory_verdict: Verdict on that rank; ``may not fit`` if its 90 % interval ends above the device memory.
    """

    changes: Mapping[str, Any]
    job: Job
    step_time_s: float
    step_time_change: float
    device_bytes: int
    headroom_bytes: int
    memory_verdict: MemoryVerdict | None

    @property
    def words(self) -> str:
        """The changes as lines of a scenario file: ``plan.recompute: full, plan.tp: 8``."""
        return ", ".join(f"{setting}: {setting_words(value)}" for setting, value in self.changes.items())

    @property
    def is_unsure(self) -> bool:
        """True if the change may not fit."""
        return self.memory_verdict != "fits"

    @property
    def trains_otherwise(self) -> bool:
        """True if a step after the change no longer computes the same."""
        return not _TRAINS_OTHERWISE.isdisjoint(self.changes)

    @property
    def more_devices(self) -> bool:
        """True if the change takes more devices."""
        return "cluster.num_devices" in self.changes

    def to_json(self) -> dict[str, Any]:
        """As in the list ``fixes`` of ``simplan predict --json``."""
        return {
            "changes": dict(self.changes),
            "num_devices": self.job.cluster.num_devices,
            "step_time_s": self.step_time_s,
            "step_time_change": self.step_time_change,
            "peak_memory_gib": {"device": self.device_bytes / GIB},
            "headroom_gib": self.headroom_bytes / GIB,
            "memory_verdict": self.memory_verdict,
        }


@dataclass(frozen=True, slots=True)
class _Tried:
    """A changed job that violates no rule; ``step_time_s`` is None if it does not fit."""

    changes: Mapping[str, Any]
    job: Job
    device_bytes: int
    step_time_s: float | None

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key of jobs that fit: the same devices and training first, then the fastest."""
        return (
            "cluster.num_devices" in self.changes,
            not _TRAINS_OTHERWISE.isdisjoint(self.changes),
            self.step_time_s or 0.0,
        )


def fixes(
    prediction: Prediction,
    calibration: Calibration | None = None,
    *,
    top: int = 5,
    max_memory_fraction: float = 1.0,
    kinds: Iterable[Kind] | None = None,
) -> tuple[Fix, ...]:
    """Find the smallest changes with which a predicted job fits; of each kind of change, the smallest one that does.

    Pairs of changes are shown if no single change is enough for sure, or if they are faster than all that are. Changes
    on the same devices come before those that take more, those that fit before those that may not fit, and faster ones
    before slower ones. A fix is left out if another one changes fewer settings, is no slower and needs no more memory.
    At most 96 steps are simulated.

    Args:
        prediction: Prediction of a job that does not fit, or likely does not.
        calibration: As for ``predict``.
        top: Number of fixes to return.
        max_memory_fraction: Device memory that a fix may use, as a fraction of all.
        kinds: Kinds of changes; None for all, and for pairs of them.

    Returns:
        Fixes; empty if the prediction fits or may not fit, the device memory is unknown, no change is enough, or the
        step has too many operations to try others.
    """
    cluster = prediction.job.cluster
    max_spans = _MAX_OPERATIONS if cluster.jitter is None and cluster.topology is None else _MAX_INDIVIDUAL
    if prediction.capacity_bytes is None or len(prediction.timeline.spans) > max_spans:
        return ()
    capacity = int(prediction.capacity_bytes * max_memory_fraction)
    least_bytes = prediction.worst_memory.needed_bytes
    fits = least_bytes <= capacity and prediction.memory_verdict in ("fits", "may not fit")
    if fits:
        return ()
    first, slower = _fitting(prediction.job, capacity, calibration, kinds)
    candidates = [fix for tried in first if (fix := _predicted(tried, prediction, capacity, calibration)) is not None]
    for tried in slower:
        if any(not fix.is_unsure for fix in candidates):
            break
        candidates += [fix] if (fix := _predicted(tried, prediction, capacity, calibration)) is not None else []
    candidates = [fix for fix in candidates if not any(_dominates(other, fix) for other in candidates)]
    return _shown(sorted(candidates, key=lambda fix: (fix.trains_otherwise, fix.is_unsure)), top)


def _predicted(tried: _Tried, before: Prediction, capacity_bytes: int, calibration: Calibration | None) -> Fix | None:
    """A change whose prediction fits; None if it does not, as the whole step needs more than its first part."""
    changed = predict(tried.job, calibration=calibration)
    device_bytes = changed.worst_memory.device_bytes
    if device_bytes > capacity_bytes or changed.host_fits is False:
        return None
    return Fix(
        changes=tried.changes,
        job=tried.job,
        step_time_s=changed.step_time_s,
        step_time_change=changed.step_time_s / before.step_time_s - 1,
        device_bytes=device_bytes,
        headroom_bytes=capacity_bytes - device_bytes,
        memory_verdict=changed.memory_verdict,
    )


def _dominates(other: Fix, fix: Fix) -> bool:
    """True if another fix, which trains alike, is no slower, needs no more memory or devices, and changes less."""
    return (
        len(other.changes) < len(fix.changes)
        and other.step_time_s <= fix.step_time_s
        and other.device_bytes <= fix.device_bytes
        and other.job.cluster.num_devices <= fix.job.cluster.num_devices
        and other.trains_otherwise == fix.trains_otherwise
    )


def _shown(candidates: list[Fix], top: int) -> tuple[Fix, ...]:
    """The first fixes; the last one takes more devices if any fix does."""
    more = [fix for fix in candidates if fix.more_devices][:1]
    same = [fix for fix in candidates if not fix.more_devices]
    return (*same[: top - len(more)], *more)


def _fitting(
    job: Job, capacity_bytes: int, calibration: Calibration | None, kinds: Iterable[Kind] | None
) -> tuple[list[_Tried], list[_Tried]]:
    """Changed jobs that fit on their devices, best first; and pairs of changes that are slower than a single one."""
    # per kind, the change that fits, or else the one that needs least
    best: list[_Tried] = []
    smaller: dict[int, list[_Tried]] = {}
    budget = _MAX_TRIED
    for kind in KINDS if kinds is None else kinds:
        of_kind: list[_Tried] = []
        for changed in islice(kind(job), budget):
            tried = _try(job, changed, capacity_bytes, calibration)
            if tried is None:
                continue
            budget -= 1
            of_kind.append(tried)
            if tried.step_time_s is not None:
                break
        fit = [tried for tried in of_kind if tried.step_time_s is not None]
        best += fit or sorted(of_kind, key=lambda tried: tried.device_bytes)[:1]
        smaller |= {id(tried): of_kind[: of_kind.index(tried)] for tried in best[-1:] if tried in of_kind}
    slower: list[_Tried] = []
    enough = sorted((tried for tried in best if tried.step_time_s is not None), key=lambda tried: tried.order)
    if kinds is None:
        fastest = enough[0].order if enough else None
        short = [tried for tried in best if tried.step_time_s is None]
        pairs = sorted(_pairs(job, short, smaller, capacity_bytes, calibration), key=lambda tried: tried.order)
        slower = [pair for pair in pairs if fastest is not None and pair.order >= fastest][:_MAX_SLOWER]
        enough = [pair for pair in pairs if fastest is None or pair.order < fastest] + enough
    more = [tried for tried in enough if "cluster.num_devices" in tried.changes]
    return [tried for tried in enough if tried not in more][: _MAX_PREDICTED - 1] + more[:1], slower


def _pairs(
    job: Job,
    singles: list[_Tried],
    smaller: Mapping[int, list[_Tried]],
    capacity_bytes: int,
    calibration: Calibration | None,
) -> Iterator[_Tried]:
    """Pairs of changes of different settings, those that together save the most first.

    Args:
        smaller: By identity of a single change, the smaller ones of its kind. A pair that fits is tried with these.
    """

    def both(pair: tuple[_Tried, _Tried]) -> int:
        return sum(first.device_bytes for first in pair)

    apart = [
        (first, other) for first, other in combinations(singles, 2) if not first.changes.keys() & other.changes.keys()
    ]
    budget = _MAX_SMALLER
    for first, other in sorted(apart, key=both)[:_MAX_PAIRS]:
        tried = _try_both(job, first, other, capacity_bytes, calibration)
        if tried is None:
            continue
        yield tried
        less = [(part, other) for part in smaller.get(id(first), [])] + [
            (first, part) for part in smaller.get(id(other), [])
        ]
        for pair in less[:budget]:
            fix = _try_both(job, *pair, capacity_bytes, calibration)
            if fix is not None:
                yield fix
        budget -= len(less[:budget])


def _try_both(
    job: Job, first: _Tried, second: _Tried, capacity_bytes: int, calibration: Calibration | None
) -> _Tried | None:
    """A job with two changes; None if it does not fit, or violates a rule."""
    try:
        changed = first.job.with_changes(second.changes)
    except SpecError:
        return None
    tried = _try(job, changed, capacity_bytes, calibration)
    return tried if tried is not None and tried.step_time_s is not None else None


def _try(job: Job, changed: Job, capacity_bytes: int, calibration: Calibration | None) -> _Tried | None:
    """Evaluate a changed job without jitter; None if it violates a rule, or a cost of it is unknown."""
    if violations(changed, (*RULES, *SEARCH_RULES)):
        return None
    try:
        steady = replace(changed, cluster=changed.cluster.model_copy(update={"jitter": None}))
        device_bytes, step_time_s = evaluate_step(steady, calibration, capacity_bytes)
    except SpecError:
        return None
    fits = step_time_s is not None and not violations(changed, MEMORY_RULES)
    return _Tried(_changes(job, changed), changed, device_bytes, step_time_s if fits else None)


def _changes(job: Job, other: Job) -> dict[str, Any]:
    """Settings in which another job differs, as in a scenario file."""
    pairs = {
        "model": (job.model, other.model),
        "training": (job.training, other.training),
        "plan": (job.plan, other.plan),
        "software": (job.software, other.software),
    }
    changes = {
        f"{section}.{name}": _as_written(getattr(theirs, name))
        for section, (mine, theirs) in pairs.items()
        if mine != theirs
        for name in type(mine).model_fields
        if getattr(mine, name) != getattr(theirs, name)
    }
    there, wanted = job.cluster.num_devices, other.cluster.num_devices
    changes = changes if there == wanted else {"cluster.num_devices": wanted} | changes
    implied, plan = job.with_changes(changes).plan, other.plan  # a default that would follow the others is said, too
    return changes | {
        f"plan.{name}": getattr(plan, name) for name in DEPENDENT if getattr(implied, name) != getattr(plan, name)
    }


def _as_written(value: Any) -> Any:
    """Value of a setting as in a file; base weights by their format."""
    return value.format if isinstance(value, BaseWeights) else value


def _with(job: Job, **fields: Any) -> Job:
    return job.with_plan(job.plan.model_copy(update=fields))


def _loading(job: Job) -> Iterator[Job]:
    """Another way of loading the model, where it does not fit meanwhile."""
    if violations(job, MEMORY_RULES):
        for way in job.software.checkpoint.methods:
            yield replace(job, software=job.software.model_copy(update={"loading": way}))


def _grad_sync(job: Job) -> Iterator[Job]:
    """Gradients that are accumulated in shards."""
    if job.plan.grad_sync == "step" and job.plan.shards_parameters and job.num_microbatches > 1:
        yield _with(job, grad_sync="microbatch")


def _reshard(job: Job) -> Iterator[Job]:
    if not job.plan.reshard_after_forward and job.plan.zero_stage == 3:
        yield _with(job, reshard_after_forward=True)


def _sequence_parallel(job: Job) -> Iterator[Job]:
    if job.plan.tp > 1 and not job.plan.sequence_parallel:
        yield _with(job, sequence_parallel=True)


def _fused_optimizer(job: Job) -> Iterator[Job]:
    """An optimizer step without temporaries as large as all parameters."""
    if job.training.fused_optimizer is False:
        yield replace(job, training=job.training.model_copy(update={"fused_optimizer": True}))


def _microbatch(job: Job) -> Iterator[Job]:
    """Smaller microbatches of the same global batch."""
    for size in reversed(divisors(job.plan.microbatch_size)[:-1]):
        yield _with(job, microbatch_size=size)


def _recompute(job: Job) -> Iterator[Job]:
    plan = job.plan
    if plan.recompute == "full" and plan.recompute_layers is not None:
        yield _with(job, recompute_layers=None)
    for mode in _RECOMPUTE[_RECOMPUTE.index(plan.recompute) + 1 if plan.recompute in _RECOMPUTE else 0 :]:
        yield _with(job, recompute=mode, recompute_modules=None, recompute_layers=None)


def _schedule(job: Job) -> Iterator[Job]:
    """The schedule with the fewest microbatches in flight."""
    if job.plan.pp > 1 and job.plan.schedule != "1f1b":
        yield _with(job, schedule="1f1b", virtual_stages=1, stage_layers=None)


def _zero_stage(job: Job) -> Iterator[Job]:
    """Higher ZeRO stages, over the replicas too if there are any."""
    plan = job.plan
    first = 1 if plan.dp_replicate > 1 else plan.zero_stage + 1
    for stage in range(max(1, first), 4 if plan.dp * plan.cp > 1 else 0):
        if plan.dp_replicate == 1 or stage >= plan.zero_stage:
            yield _with(job, dp_replicate=1, dp_shard=plan.dp, zero_stage=stage)


def _offload_optimizer(job: Job) -> Iterator[Job]:
    if not job.plan.offload_optimizer:
        yield _with(job, offload_optimizer=True)


def _offload_activations(job: Job) -> Iterator[Job]:
    if not job.plan.offload_activations:
        yield _with(job, offload_activations=True)


def _no_offload(job: Job) -> Iterator[Job]:
    """Less in the host memory, which can be what is full."""
    for name in ("offload_activations", "offload_optimizer"):
        if getattr(job.plan, name):
            yield _with(job, **{name: False}, **({"offload_layers": None} if name == "offload_activations" else {}))


def _of_axis(axis: str) -> Kind:
    """More ranks along an axis of the mesh, taken from data parallelism; for tp, else from the pipeline."""

    def grown(job: Job) -> Iterator[Job]:
        factor = 2
        while factor <= _MAX_AXIS:
            for source in ("dp_replicate", "dp_shard", "pp") if axis == "tp" else ("dp_replicate", "dp_shard"):
                there = getattr(job.plan, source)
                if there % factor == 0:
                    yield _on_axis(job, axis, factor, {source: there // factor})
                    break
            factor *= 2

    return grown


def _on_axis(job: Job, axis: str, factor: int, fields: Mapping[str, Any]) -> Job:
    """Job with ``factor`` times the ranks on an axis, and with what the first rank more on it needs."""
    plan = job.plan
    update: dict[str, Any] = {axis: getattr(plan, axis) * factor, **fields}
    if axis == "tp" and plan.tp == 1:
        update["sequence_parallel"] = job.software.sequence_parallelism
    if axis == "pp" and plan.pp == 1:
        update["schedule"] = "1f1b"
    if "pp" in update:
        update["stage_layers"] = None
    if update.get("pp") == 1:
        update |= {"schedule": "none", "virtual_stages": 1}
    if plan.etp == plan.tp > 1 and axis == "tp":
        update["etp"] = update["tp"]
    if update.get("dp_shard") == 1 and plan.cp == 1 and axis != "cp":
        update["zero_stage"] = 0
    return _with(job, **update)


def _ep(job: Job) -> Iterator[Job]:
    """More ranks among which the experts are divided."""
    ep = 2 * job.plan.ep
    while job.model.num_experts and ep <= min(job.model.num_experts, _MAX_AXIS * job.plan.ep):
        yield _with(job, ep=ep)
        ep *= 2


def _twice_the_devices(job: Job) -> Iterator[Job]:
    if job.cluster.cores_per_node is not None:
        return
    try:
        more = job.with_num_devices(2 * job.cluster.num_devices)
    except SpecError:
        return
    if more.cluster.num_nodes > 1 and more.cluster.inter_link is None:
        return
    if job.plan.shards_parameters or job.plan.shards_optimizer_only:
        yield _on_axis(more, "dp_shard", 2, {})
    yield _on_axis(more, "tp", 2, {})
    yield _on_axis(more, "pp", 2, {})


def _lora(job: Job) -> Iterator[Job]:
    """Adapters instead of all weights, for a job that fine-tunes."""
    if job.training.task == "sft":
        model = job.model.model_copy(update={"lora_rank": job.model.lora_rank or _LORA_RANK})
        yield replace(job, model=model, training=job.training.model_copy(update={"task": "lora"}))


def _loss(job: Job) -> Iterator[Job]:
    """Output projection and loss in chunks, of the first kind that the framework has."""
    if job.software.loss == "whole" and job.software.chunked_losses:
        first = next(iter(job.software.chunked_losses))
        yield replace(job, software=job.software.model_copy(update={"loss": first}))


def _base_weights(job: Job) -> Iterator[Job]:
    """Base weights of 4 bits under adapters."""
    if job.training.task == "lora" and job.training.base_weights is None:
        base = BaseWeights(format="nf4")
        yield replace(job, training=job.training.model_copy(update={"base_weights": base}))


OUTSIDE_OF_SEARCHES: tuple[Kind, ...] = (_offload_optimizer, _offload_activations, _loss, _lora, _base_weights)
"""Kinds of changes that no search varies."""

KINDS: tuple[Kind, ...] = (
    _loading, _grad_sync, _reshard, _sequence_parallel, _fused_optimizer, _schedule, _microbatch, _recompute,
    _zero_stage, _of_axis("tp"), _of_axis("pp"), _of_axis("cp"), _ep, _no_offload, *OUTSIDE_OF_SEARCHES,
    _twice_the_devices,
)  # fmt: skip
"""All kinds of changes."""
