"""The Measurement of a run from the files of its ranks, also when the run ended early."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError

from executor.checks import runs_on_cuda
from executor.launch.rank import RankFiles
from executor.profiling.recorder import StepRecord
from executor.profiling.rounds import ElasticSteps, curve_of_workers, first_end_s, mean_s, time_of_updates
from executor.profiling.steps import find_slow_ranks, steady_from
from simplan.runs.checkpoint import CheckpointTiming
from simplan.runs.faults import RunTimes
from simplan.runs.measurement import (
    EarlierSegment,
    LossPoint,
    MeasuredCollective,
    MeasuredSpan,
    MeasuredWorkers,
    Measurement,
    PeakMemory,
    RankMeasurement,
    ReplicaArrivals,
)
from simplan.runs.run_spec import RunSpec

_Timed = TypeVar("_Timed", StepRecord, MeasuredSpan, MeasuredCollective)

Environment = dict[str, str | int | float | None]
Written = Mapping[int, tuple[str, Mapping[str, str]]]
"""By global rank, the name of its node and its texts by the names of ``RankFiles``; a rank may be missing."""


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Segment of a run with one plan: the whole run, unless nodes left or came.

    Attributes:
        num_nodes: Nodes that had work.
        first_step: Steps that were done before.
        why: Reason for the start of the segment.
    """

    job: RunSpec
    num_nodes: int = 1
    first_step: int = 0
    why: str = ""


def environment(num_ranks: int, *, cuda: bool) -> Environment:
    """Facts about this machine that change a measurement: hardware, versions, threads, backend.

    Args:
        num_ranks: Ranks on this machine.
        cuda: The ranks compute on CUDA devices.
    """
    cores = len(os.sched_getaffinity(0))
    nccl = torch.cuda.nccl.version() if cuda else None  # type: ignore[no-untyped-call]
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": _driver() if cuda else None,
        "backend": "nccl" if cuda else "gloo",
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "num_cores": cores,
        "num_ranks": num_ranks,
        "threads_per_rank": None if cuda else max(1, cores // num_ranks),
    }


def _driver() -> str | None:
    """Version of NVIDIA's kernel module, e.g. ``550.54.15``; None where Linux has none."""
    words = _lines("/proc/driver/nvidia/version")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _processor() -> str:
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(names, platform.machine())


def _lines(file: str) -> list[str]:
    return Path(file).read_text(errors="replace").splitlines() if Path(file).exists() else [""]


def written_here(folder: Path, num_ranks: int) -> Written:
    """Texts of all ranks of a run on this machine."""
    return {rank: ("", RankFiles(folder, rank).texts()) for rank in range(num_ranks)}


def gather(
    segments: Sequence[RunSegment],
    written: Written,
    failure: str | None = None,
    notes: Sequence[str] = (),
    times: RunTimes | None = None,
) -> Measurement:
    """Makes the measurement of ranks that have ended: of the last segment, with a summary of those before.

    Steps count that every rank finished; of replicas that may leave, those that were in a round.

    Args:
        written: Texts of the last segment's ranks.
        failure: Reason of an early end; None for a complete run.
        notes: Notes about the run so far, for the user.
        times: Time of the whole run, if known.
    """
    segment = segments[-1]
    job, first_step = segment.job, segment.first_step
    num_ranks = job.plan.num_devices
    nodes = [written[rank][0] if rank in written else "" for rank in range(num_ranks)]
    files = [written[rank][1] if rank in written else {} for rank in range(num_ranks)]
    names = [RankFiles(Path(), rank) for rank in range(num_ranks)]
    read = [_read(texts.get(name.steps.name, "")) for name, texts in zip(names, files, strict=True)]
    checkpoints = tuple(_read_checkpoints(files[0].get(names[0].checkpoints.name, "")))
    replication = job.plan.replication
    has_workers = replication is not None and replication.has_workers
    is_elastic = replication is not None and replication.min_replicas is not None
    present = [rank for rank, (records, _) in enumerate(read) if records or not is_elastic]
    elastic = ElasticSteps.of(job, {rank: read[rank][0] for rank in present}) if is_elastic else None
    if elastic is not None:
        steps, num_samples = [*elastic.steps], elastic.num_samples(job)
        times_s = list(map(time_of_updates if has_workers else mean_s, steps))
        steady = elastic.steady(job, len(present))
    else:
        steps = _common_steps([records for records, _ in read], first_step)
        starts = [steps[0] if has_workers else step for step in steps]
        steps = [_on_one_clock(step, nodes, start) for step, start in zip(steps, starts, strict=True)]
        num_samples = [job.training.global_batch_size * (step[0].step + 1) for step in steps]
        times_s = [time_of_updates(step) if has_workers else _end_s(step) - _start_s(step) for step in steps]
        begin = steady_from(times_s) if job.num_warmup_steps is None and job.round_steps == 1 else 0
        steady = [i for i, step in enumerate(steps) if i >= begin and not step[0].is_warmup]
        steady = steady[len(steady) % job.round_steps :]  # whole rounds
    shown = None
    if steady:
        together = not has_workers and not is_elastic
        shown = _from_start(steps[_representative(_comparable(job, steps, steady), times_s)], together=together)
    ranks = []
    for place, rank in enumerate(present):
        record, memory = None if shown is None else shown[place], read[rank][1]
        ranks.append(
            RankMeasurement(
                rank=rank,
                node=nodes[rank],
                peak_memory=memory,
                actions=() if record is None else record.spans,
                reruns=None if record is None or job.software.compiled else record.reruns,
                collectives=() if record is None else record.collectives,
                step_times_s=tuple(steps[i][place].end_s - steps[i][place].start_s for i in steady),
                is_dropped=record is not None and bool(record.kept) and rank not in record.kept,
            )
        )
    losses = [statistics.fmean(loss for record in step for loss in record.losses) for step in steps]
    if has_workers:
        curve = tuple(curve_of_workers(steps, job))
    else:
        points = zip(num_samples, accumulate(times_s), losses, strict=True)
        curve = tuple(LossPoint(num_samples=n, seconds=s, loss=loss) for n, s, loss in points)
    num_nodes = len({nodes[rank] for rank in present}) or 1
    num_local = num_ranks // num_nodes
    facts = environment(num_local, cuda=runs_on_cuda(job, num_local))
    compared = [steps[i] for i in steady] if len(present) == num_ranks else []
    slow = find_slow_ranks(job, compared, cuda=facts["backend"] == "nccl")
    changes = [] if elastic is None else elastic.sentences
    return Measurement(
        job=job,
        complete=failure is None,
        failure=failure,
        step_times_s=tuple(times_s[i] for i in steady),
        warmup_step_times_s=tuple(time_s for i, time_s in enumerate(times_s) if i not in set(steady)),
        reference_s=_reference_s([steps[i] for i in steady]),
        losses=tuple(losses),
        loss_curve=() if job.training.data == "random" else curve,
        ranks=tuple(ranks),
        first_step=steps[0][0].step if steps else 0,
        checkpoints=checkpoints,
        slow_ranks=slow,
        arrivals=tuple(_arrivals(steps)),
        notes=(*notes, *_unwritten(checkpoints), *changes, *(rank.sentence for rank in slow)),
        environment={**facts, "num_nodes": num_nodes} if num_nodes > 1 else facts,
        earlier=tuple(_earlier(segments)),
        workers=measured_workers(steps, steady) if has_workers and steady else None,
        times=times,
        rounds=() if elastic is None else elastic.rounds,
    )


def measured_workers(steps: Sequence[Sequence[StepRecord]], steady: Sequence[int]) -> MeasuredWorkers:
    """Updates of workers that do not wait for all others, until the first of them has taken all of its steps.

    Args:
        steps: Records of all workers in every step.
        steady: Indices of the steady steps.
    """
    until_s = first_end_s(steps)
    among = [record for index in steady for record in steps[index] if record.end_s <= until_s]
    updates = [update for record in among for update in record.updates]
    staleness = sorted(update.staleness for update in updates)
    sent = [record.collectives for index in steady for record in steps[index]]
    total = sum(collective.num_bytes for collectives in sent for collective in collectives if collective.kind == "send")
    return MeasuredWorkers(
        num_updates=len(updates),
        staleness_mean=statistics.fmean(staleness),
        staleness_p90=staleness[math.ceil(0.9 * len(staleness)) - 1],
        staleness_counts=Counter(staleness),
        queued_s=statistics.fmean(update.queued_s for update in updates),
        held_s=statistics.fmean(update.held_s for update in updates),
        most_ahead=max(update.steps_ahead for step in steps for record in step for update in record.updates),
        pushed_bytes=total // len(sent),
    )


def _earlier(segments: Sequence[RunSegment]) -> Iterator[EarlierSegment]:
    checkpointing = segments[-1].job.checkpointing
    losses: dict[int, float] = {}
    if len(segments) > 1 and checkpointing is not None:
        from executor.train.run_state import read_losses  # imports torch.distributed.checkpoint: a second

        losses = read_losses(Path(checkpointing.folder))
    for segment, following in pairwise(segments):
        steps = range(segment.first_step, following.first_step)
        yield EarlierSegment(
            num_nodes=segment.num_nodes,
            plan=segment.job.plan,
            first_step=segment.first_step,
            end_step=following.first_step,
            losses=tuple(losses[step] for step in steps if step in losses),
            ended=following.why,
        )


def _read(text: str) -> tuple[list[StepRecord], PeakMemory]:
    """Step records of a rank and its peak memory, if any; a line cut short by the rank's death is dropped."""
    records: list[StepRecord] = []
    for line in text.splitlines():
        try:
            records.append(StepRecord.model_validate_json(line))
        except ValidationError:
            try:
                return records, PeakMemory.model_validate_json(line)
            except ValidationError:
                break
    return records, PeakMemory()


def _read_checkpoints(text: str) -> Iterator[CheckpointTiming]:
    """Checkpoints of all attempts, without a line that was cut short by the end of one."""
    for line in text.splitlines():
        with suppress(ValidationError):
            yield CheckpointTiming.model_validate_json(line)


def _unwritten(checkpoints: Sequence[CheckpointTiming]) -> Iterator[str]:
    for checkpoint in checkpoints:
        if checkpoint.failure is not None:
            yield f"the checkpoint of step {checkpoint.step} was not written ({checkpoint.failure}); training went on"


def _common_steps(ranks: Sequence[Sequence[StepRecord]], first_step: int) -> list[tuple[StepRecord, ...]]:
    """Records of the steps that all ranks finished, in order; of a repeated step, the last."""
    by_step = [{record.step: record for record in records if record.step >= first_step} for records in ranks]
    common = sorted(set.intersection(*map(set, by_step))) if by_step else []
    steps = [tuple(records[step] for records in by_step) for step in common]
    return [step for step in steps if any(record.losses for record in step)]  # others are damaged


def _on_one_clock(
    step: tuple[StepRecord, ...], nodes: Sequence[str], start: tuple[StepRecord, ...]
) -> tuple[StepRecord, ...]:
    """Aligns the clocks of nodes: on each, a step begins when its first rank leaves the barrier before the step.

    The error is the time between nodes leaving the barrier, about a round trip of the network.

    Args:
        start: The last step with a barrier before it, of which all clocks begin.
    """
    starts_s: dict[str, float] = {}
    for record, node in zip(start, nodes, strict=True):
        starts_s[node] = min(starts_s.get(node, record.start_s), record.start_s)
    if len(starts_s) == 1:
        return step
    return tuple(_moved(record, starts_s[node]) for record, node in zip(step, nodes, strict=True))


def _reference_s(steps: Sequence[Sequence[StepRecord]]) -> float | None:
    """Median over steps and ranks, as in a calibration (``executor.calibration.timing``)."""
    seconds = [record.reference_s for step in steps for record in step if record.reference_s is not None]
    return statistics.median(seconds) if seconds else None


def _comparable(job: RunSpec, steps: Sequence[Sequence[StepRecord]], steady: Sequence[int]) -> list[int]:
    """Steady steps of the kind whose Program is predicted: of replicas that train alone, those with an outer step."""
    replication = job.plan.replication
    if job.round_steps == 1 or replication is None:
        return [*steady]
    between = job.round_steps // replication.outer_steps
    return [i for i in steady if (steps[i][0].step + 1 - replication.start_step) % between == 0]


def _representative(steps: Sequence[int], times_s: Sequence[float]) -> int:
    """Step whose time is the (lower) median."""
    return sorted(steps, key=lambda step: times_s[step])[(len(steps) - 1) // 2]


def _from_start(step: tuple[StepRecord, ...], *, together: bool) -> list[StepRecord]:
    """The records with times from the common start of the step, or each from its own."""
    start_s, end_s = _start_s(step), _end_s(step)
    kept = {id(record) for record in _kept(step)}
    return [
        _moved(record if id(record) in kept else _until(record, end_s), start_s if together else record.start_s)
        for record in step
    ]


def _kept(step: tuple[StepRecord, ...]) -> list[StepRecord]:
    """Records of the ranks whose gradients the step used: all ranks without backup workers."""
    return [step[rank] for rank in step[0].kept] or list(step)


def _start_s(step: tuple[StepRecord, ...]) -> float:
    return min(record.start_s for record in _kept(step))


def _end_s(step: tuple[StepRecord, ...]) -> float:
    return max(record.end_s for record in _kept(step))


def _until(record: StepRecord, end_s: float) -> StepRecord:
    """Record of a dropped replica, which ends with the step."""
    spans = tuple(
        span.model_copy(update={"end_s": min(span.end_s, end_s)}) for span in record.spans if span.start_s < end_s
    )
    reruns = tuple(rerun for rerun in record.reruns if rerun.end_s < end_s)
    return record.model_copy(update={"spans": spans, "reruns": reruns, "collectives": ()})


def _arrivals(steps: Sequence[tuple[StepRecord, ...]]) -> Iterator[ReplicaArrivals]:
    """Arrivals in steps with backup workers."""
    for step in steps:
        if step[0].kept:
            times_s = tuple((record.arrived_s or 0.0) - _start_s(step) for record in step)
            yield ReplicaArrivals(step=step[0].step, kept=step[0].kept, arrived_s=times_s)


def _moved(record: StepRecord, zero_s: float) -> StepRecord:
    """The record with all times relative to ``zero_s``."""

    def moved(timed: _Timed) -> _Timed:
        end_s = None if timed.end_s is None else timed.end_s - zero_s
        return timed.model_copy(update={"start_s": timed.start_s - zero_s, "end_s": end_s})

    parts = {name: tuple(map(moved, getattr(record, name))) for name in ("spans", "reruns", "collectives")}
    arrived_s = None if record.arrived_s is None else record.arrived_s - zero_s
    return moved(record).model_copy(update={**parts, "arrived_s": arrived_s})
