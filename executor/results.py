"""Gathers what the ranks wrote into one Measurement, also when the run ended early."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from executor.checks import runs_on_cuda
from executor.environment import environment
from executor.host_clock import ClockReading, common_time_s
from executor.loss_log import read_losses
from executor.rank import RankFiles
from executor.recorder import StepRecord
from executor.regroup import Part
from executor.slow_ranks import find_slow_ranks, told
from executor.steady import steady_from
from simplan.program.checkpoint import CheckpointTiming
from simplan.program.measurement import EarlierPart, MeasuredSpan, Measurement, PeakMemory, RankMeasurement
from simplan.program.run_spec import RunSpec

__all__ = ["gather", "gather_parts"]


def gather_parts(
    parts: Sequence[Part],
    failure: str | None,
    clocks: Mapping[int, Sequence[ClockReading]],
    notes: Sequence[str] = (),
) -> Measurement:
    """The measurement of a run of one part or several: of the last, with an account of those before.

    Args:
        parts: In order.
        failure, clocks, notes: As of ``gather``; clocks are those of the last part.
    """
    last = parts[-1]
    before = tuple(timing for part in parts[:-1] for timing in _read_checkpoints(part.folder))
    measurement = gather(last.job, last.folder, failure, clocks, notes, before)
    earlier = tuple(
        EarlierPart(
            num_nodes=len(part.team.hosts),
            plan=part.job.plan,
            first_step=part.first_step,
            end_step=following.first_step,
            losses=read_losses(RankFiles(part.folder, 0).losses, part.first_step, following.first_step),
            ended=following.why,
        )
        for part, following in pairwise(parts)
        if part.team is not None
    )
    return measurement.model_copy(update={"earlier": earlier}) if earlier else measurement


def gather(
    job: RunSpec,
    out_dir: Path,
    failure: str | None,
    clocks: Mapping[int, Sequence[ClockReading]] | None = None,
    notes: Sequence[str] = (),
    checkpoints: Sequence[CheckpointTiming] = (),
) -> Measurement:
    """The measurement of a run whose ranks have ended; steps count that every rank finished.

    Args:
        job: What was run.
        out_dir: The folder of the run.
        failure: Why it ended early; None when it did not.
        clocks: By rank, readings of its node's clock; None or none for ranks on the clock of this node.
        notes: What is known besides.
        checkpoints: Those of earlier parts.
    """
    num_ranks, clocks = job.plan.num_devices, clocks or {}
    read = [_read(RankFiles(out_dir, rank).steps, clocks.get(rank, ())) for rank in range(num_ranks)]
    steps = list(zip(*(records for records, _ in read), strict=False))
    times_s = [max(r.end_s for r in step) - min(r.start_s for r in step) for step in steps]
    begin = 0
    if job.num_warmup_steps is None:
        begin = steady_from(times_s)
    steady = [i for i, step in enumerate(steps) if i >= begin and not step[0].is_warmup]
    shown = _representative([times_s[i] for i in steady]) if steady else None
    checkpoints = (*checkpoints, *_read_checkpoints(out_dir))
    ranks = []
    for rank, (records, memory) in enumerate(read):
        record = None if shown is None else _from_start(records[steady[shown]], steps[steady[shown]])
        ranks.append(
            RankMeasurement(
                rank=rank,
                peak_memory=memory,
                actions=() if record is None else record.spans,
                reruns=None if record is None or job.software.compiled else record.reruns,
                collectives=() if record is None else record.collectives,
                step_times_s=tuple(records[i].end_s - records[i].start_s for i in steady),
            )
        )
    facts = _environment(job, num_ranks - len(clocks), clocks)
    slow = find_slow_ranks(job, [steps[i] for i in steady], cuda=facts["backend"] == "nccl")
    return Measurement(
        job=job,
        complete=failure is None,
        failure=failure,
        step_times_s=tuple(times_s[i] for i in steady),
        warmup_step_times_s=tuple(time_s for i, time_s in enumerate(times_s) if i not in set(steady)),
        reference_s=_reference_s([steps[i] for i in steady]),
        losses=tuple(statistics.fmean(loss for record in step for loss in record.losses) for step in steps),
        ranks=tuple(ranks),
        first_step=steps[0][0].step if steps else 0,
        checkpoints=checkpoints,
        slow_ranks=slow,
        notes=(*notes, *_unwritten(checkpoints), *map(told, slow)),
        environment=facts,
    )


def _reference_s(steps: Sequence[Sequence[StepRecord]]) -> float | None:
    """Median over steps and ranks, as of a calibration (``executor.reference``)."""
    found = [record.reference_s for step in steps for record in step if record.reference_s is not None]
    return statistics.median(found) if found else None


def _environment(
    job: RunSpec, num_local_ranks: int, clocks: Mapping[int, Sequence[ClockReading]]
) -> dict[str, str | int | float | None]:
    """Of this machine; with several, how many, and how far their clocks are off at most."""
    facts = environment(num_local_ranks, cuda=runs_on_cuda(job, num_local_ranks))
    if clocks:
        facts["num_nodes"] = job.plan.num_devices // num_local_ranks
        facts["clock_error_s"] = max((r.error_s for readings in clocks.values() for r in readings), default=None)
    return facts


def _read(path: Path, clock: Sequence[ClockReading]) -> tuple[list[StepRecord], PeakMemory]:
    """Step records of a rank, on node 0's clock, and, when it came so far, its peak memory.

    A line cut short by its death is dropped.
    """
    records: list[StepRecord] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            records.append(_shifted(StepRecord.model_validate_json(line), clock))
        except ValidationError:
            try:
                return records, PeakMemory.model_validate_json(line)
            except ValidationError:
                break
    return records, PeakMemory()


def _read_checkpoints(out_dir: Path) -> Iterator[CheckpointTiming]:
    """Of all attempts, without a line that was cut short by the end of one."""
    file = RankFiles(out_dir, 0).checkpoints
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValidationError):
            yield CheckpointTiming.model_validate_json(line)


def _unwritten(checkpoints: Sequence[CheckpointTiming]) -> Iterator[str]:
    for checkpoint in checkpoints:
        if checkpoint.failure is not None:
            yield f"the checkpoint of step {checkpoint.step} was not written ({checkpoint.failure}); training went on"


def _representative(times_s: list[float]) -> int:
    """Index of the step whose time is the (lower) median."""
    return sorted(range(len(times_s)), key=lambda i: times_s[i])[(len(times_s) - 1) // 2]


def _from_start(record: StepRecord, step: tuple[StepRecord, ...]) -> StepRecord:
    """The record with times counted from the step's common start."""
    start_s = min(other.start_s for other in step)
    return _moved(record, lambda time_s: time_s - start_s)


def _shifted(record: StepRecord, clock: Sequence[ClockReading]) -> StepRecord:
    """The record on node 0's clock."""
    return _moved(record, lambda time_s: common_time_s(clock, time_s)) if clock else record


def _moved(record: StepRecord, to: Callable[[float], float]) -> StepRecord:
    """The record with all its times changed."""
    return record.model_copy(
        update={
            "start_s": to(record.start_s),
            "end_s": to(record.end_s),
            "spans": tuple(_moved_span(span, to) for span in record.spans),
            "reruns": tuple(_moved_span(span, to) for span in record.reruns),
            "collectives": tuple(
                c.model_copy(
                    update={"start_s": to(c.start_s), "end_s": None if c.end_s is None else to(c.end_s)},
                )
                for c in record.collectives
            ),
        }
    )


def _moved_span(span: MeasuredSpan, to: Callable[[float], float]) -> MeasuredSpan:
    return span.model_copy(update={"start_s": to(span.start_s), "end_s": to(span.end_s)})
