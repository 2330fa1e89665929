"""Gathers what the ranks wrote into one Measurement, also when the run ended early."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from executor.checks import runs_on_cuda
from executor.environment import environment
from executor.launch.rank import RankFiles
from executor.profiling.recorder import StepRecord
from executor.profiling.slow_ranks import find_slow_ranks, told
from executor.profiling.steady import steady_from
from executor.train.keeping import read_losses
from simplan.program.checkpoint import CheckpointTiming
from simplan.program.measurement import EarlierPart, MeasuredSpan, Measurement, PeakMemory, RankMeasurement
from simplan.program.run_spec import RunSpec

__all__ = ["Elsewhere", "Part", "gather", "gather_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """What a run did with one plan: all of it, unless nodes went or came.

    Attributes:
        job: With the plan.
        folder: Of its ranks' files.
        num_nodes: That had work.
        first_step: Steps that were done when it began.
        why: What was told about its beginning.
    """

    job: RunSpec
    folder: Path
    num_nodes: int
    first_step: int
    why: str


Elsewhere = Mapping[int, tuple[str, Mapping[str, str]]]
"""By global rank, the name of its node and what it has written, by the names of ``RankFiles``."""


def gather_parts(
    parts: Sequence[Part], failure: str | None, elsewhere: Elsewhere | None = None, notes: Sequence[str] = ()
) -> Measurement:
    """The measurement of a run of one part or several: of the last, with an account of those before.

    Args:
        parts: In order.
        failure, elsewhere, notes: As of ``gather``.
    """
    last = parts[-1]
    measurement = gather(last, failure, elsewhere or {}, notes)
    losses = _losses(last.job)
    earlier = tuple(
        EarlierPart(
            num_nodes=part.num_nodes,
            plan=part.job.plan,
            first_step=part.first_step,
            end_step=following.first_step,
            losses=tuple(losses[k] for k in range(part.first_step, following.first_step) if k in losses),
            ended=following.why,
        )
        for part, following in pairwise(parts)
    )
    return measurement.model_copy(update={"earlier": earlier}) if earlier else measurement


def _losses(job: RunSpec) -> dict[int, float]:
    asked = job.checkpointing
    return {} if asked is None or not job.fewer_nodes else read_losses(Path(asked.folder))


def gather(part: Part, failure: str | None, elsewhere: Elsewhere, notes: Sequence[str] = ()) -> Measurement:
    """The measurement of ranks that have ended; steps count that every rank finished.

    Args:
        part: What was run.
        failure: Why it ended early; None when it did not.
        elsewhere: What ranks of all nodes have written; empty on one machine, whose files are all here.
        notes: What is known besides.
    """
    job = part.job
    num_ranks = job.plan.num_devices
    files = [RankFiles(part.folder, rank) for rank in range(num_ranks)]
    read = [_read(_text(file.steps, elsewhere.get(rank))) for rank, file in enumerate(files)]
    checkpoints = tuple(_read_checkpoints(_text(files[0].checkpoints, elsewhere.get(0))))
    nodes = [elsewhere[rank][0] if rank in elsewhere else "" for rank in range(num_ranks)]
    steps = [_on_one_clock(step, nodes) for step in _common_steps([records for records, _ in read], part.first_step)]
    times_s = [max(r.end_s for r in step) - min(r.start_s for r in step) for step in steps]
    begin = 0
    if job.num_warmup_steps is None:
        begin = steady_from(times_s)
    steady = [i for i, step in enumerate(steps) if i >= begin and not step[0].is_warmup]
    shown = _representative([times_s[i] for i in steady]) if steady else None
    ranks = []
    for rank, (_, memory) in enumerate(read):
        record = None if shown is None else _from_start(steps[steady[shown]][rank], steps[steady[shown]])
        ranks.append(
            RankMeasurement(
                rank=rank,
                peak_memory=memory,
                actions=() if record is None else record.spans,
                reruns=None if record is None or job.software.compiled else record.reruns,
                collectives=() if record is None else record.collectives,
                step_times_s=tuple(steps[i][rank].end_s - steps[i][rank].start_s for i in steady),
            )
        )
    facts = _environment(num_ranks, job, nodes)
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


def _common_steps(ranks: Sequence[Sequence[StepRecord]], first_step: int) -> list[tuple[StepRecord, ...]]:
    """The records of every step that all ranks have finished, in order; of one done again, the last."""
    by_step = [{record.step: record for record in records if record.step >= first_step} for records in ranks]
    common = sorted(set.intersection(*map(set, by_step))) if by_step else []
    return [tuple(records[step] for records in by_step) for step in common]


def _on_one_clock(step: tuple[StepRecord, ...], nodes: Sequence[str]) -> tuple[StepRecord, ...]:
    """Nodes have clocks of their own: on each, a step begins when the first of its ranks leaves the barrier before it.

    That is off by how far nodes leave the barrier apart, about a round trip of the network.
    """
    starts_s: dict[str, float] = {}
    for record, node in zip(step, nodes, strict=True):
        starts_s[node] = min(starts_s.get(node, record.start_s), record.start_s)
    if len(starts_s) == 1:
        return step
    return tuple(
        _moved(record, lambda time_s, start_s=starts_s[node]: time_s - start_s)  # type: ignore[misc]
        for record, node in zip(step, nodes, strict=True)
    )


def _reference_s(steps: Sequence[Sequence[StepRecord]]) -> float | None:
    """Median over steps and ranks, as of a calibration (``executor.calibration.timing``)."""
    found = [record.reference_s for step in steps for record in step if record.reference_s is not None]
    return statistics.median(found) if found else None


def _environment(num_ranks: int, job: RunSpec, nodes: Sequence[str]) -> dict[str, str | int | float | None]:
    """Of this machine; with several, how many."""
    num_nodes = len(set(nodes))
    local = num_ranks // num_nodes
    facts = environment(local, cuda=runs_on_cuda(job, local))
    return {**facts, "num_nodes": num_nodes} if num_nodes > 1 else facts


def _text(file: Path, elsewhere: tuple[str, Mapping[str, str]] | None) -> str:
    """What a rank has written, here or on its node."""
    if elsewhere is not None:
        return elsewhere[1].get(file.name, "")
    return file.read_text() if file.exists() else ""


def _read(text: str) -> tuple[list[StepRecord], PeakMemory]:
    """Step records of a rank and, when it came so far, its peak memory; a line cut short by its death is dropped."""
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
    """Of all attempts, without a line that was cut short by the end of one."""
    for line in text.splitlines():
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
