"""Comparison of a prediction with a measurement: signed errors, spread of repeats, unexplained time, and structure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from simplan import catalog
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.lower import Lowerer, Lowering
from simplan.program.lowering.servers import PULL
from simplan.program.program import HostCopy, Program, Stream
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.units import GIB, counted
from simplan.validate.activity import CLIPPING, UNEXPLAINED, ActivityShare
from simplan.validate.attribution import RankSplit, TermDifference, attribute
from simplan.validate.goodput import GoodputComparison
from simplan.validate.logged_memory import measurable_gib
from simplan.validate.losses import LossComparison, LossCurve
from simplan.validate.measured import measured_timeline, predicted_timeline, times_recomputation
from simplan.validate.rows import ComparisonRow, compared, relative_spread

AT_THIS_SPEED = "step time, computing as fast as in the run"
"""Name of the row with predicted compute rescaled to the compute speed of the run (reference matmul)."""

_COMPUTING = (ActivityShare.COMPUTE, ActivityShare.RECOMPUTE, ActivityShare.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction compared with a measurement of the same job.

    Attributes:
        rows: Step time, then memory, then the parts of the step.
        structure_equal: True if every rank ran exactly the predicted actions, and issued exactly the predicted
            communication of Level 2 (kind, group, bytes), both in order.
        interval_holds: True if the measured step time is inside the predicted 90% interval.
        unexplained_s: Seconds on the measured critical path without recorded activity or known wait.
        notes: Notes for the reader.
        terms: Terms of both critical paths; their differences sum to the step-time difference.
        splits: Time split of each rank; per rank, the differences sum to the step-time difference.
        slowdown: Time of the reference matmul in the run over its time in the calibration; None if either did not time
            it.
        loss_curve: Loss of the run; None if its data has nothing to learn.
        baselines: The run's loss compared with other runs; empty if none were given.
        goodput: Goodput of a run with restarts or faults, over all of its parts; None for other runs.
    """

    rows: tuple[ComparisonRow, ...]
    structure_equal: bool
    interval_holds: bool
    unexplained_s: float
    notes: tuple[str, ...]
    terms: tuple[TermDifference, ...] = ()
    splits: tuple[RankSplit, ...] = ()
    slowdown: float | None = None
    loss_curve: LossCurve | None = None
    baselines: tuple[LossComparison, ...] = ()
    goodput: GoodputComparison | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {"schema_version": 1, "kind": "comparison", **asdict(self)}


def _of_parts(plan: ParallelPlan) -> str:
    """Note on the step whose parts are compared."""
    if plan.round_steps == 1:
        return "parts of the step are those of the representative step, the one with the median step time"
    assert plan.replication is not None
    step_time = "the step time is the mean step of a round, its median over the rounds that were measured"
    if plan.replication.steps_beside:
        further = counted(plan.replication.steps_beside, "further step")
        return f"{step_time}; parts of steps are not compared, for an outer step overlaps {further}"
    return f"{step_time}; parts of the step are those of a step with an outer step, the one with the median step time"


_DEVICE_ROW = "peak memory, device"
_RESIDENT_SET = (
    "device memory of a CPU rank is its resident set: free blocks that glibc keeps between tensors are not predicted"
)


def compare(
    prediction: Prediction | Mapping[str, Any], measurement: Measurement, program: Program | None = None
) -> Comparison:
    """Compare a prediction with a measurement.

    Args:
        prediction: A prediction, or its JSON document.
        measurement: A run of the same job.
        program: Program of the prediction; None to lower it here.

    Raises:
        SpecError: The jobs differ, or the measurement has no steady step.
    """
    if isinstance(prediction, Prediction):
        predicted, prediction = prediction.timeline, prediction.to_json(timeline=False)
    else:
        predicted = predicted_timeline(prediction)
    _same_job(prediction, measurement)
    measured = measured_timeline(measurement)
    rows = [compared("step time", prediction["step_time_s"], measurement.step_time_s, "s", measurement.spread)]
    replication = measurement.job.plan.replication
    overlaps_steps = replication is not None and replication.steps_beside > 0
    terms, splits = ((), ()) if overlaps_steps else attribute(predicted, measurement, prediction["step_time_s"])
    calibrated_s, slowdown = prediction.get("reference_s"), None
    if calibrated_s is not None and measurement.reference_s is not None and not overlaps_steps:
        slowdown = float(measurement.reference_s / calibrated_s)
        computing_s = sum(term.predicted_s for term in terms if term.share in _COMPUTING)
        computing_share = computing_s / predicted.step_time_s
        predicted_s = prediction["step_time_s"] * (1 + (slowdown - 1) * computing_share)
        rows.append(compared(AT_THIS_SPEED, predicted_s, measurement.step_time_s, "s", measurement.spread))
    rows += _memory_rows(prediction, measurement)
    dropped = {rank.rank for rank in measurement.ranks if rank.is_dropped}  # they left their passes
    expected, timed_s = _action_times(predicted), _action_times(measured, dropped)
    timed = () if overlaps_steps else expected.keys() & timed_s.keys()
    for key in sorted(timed, key=lambda key: (TIMED_KINDS.index(key[1]), key[0])):
        means_s = statistics.fmean(expected[key]), statistics.fmean(timed_s[key])
        rows.append(compared(f"{key[1].value} of stage {key[0]}", *means_s, "s", relative_spread(timed_s[key])))
    rows += _worker_rows(prediction, measurement)
    rows += _rows_of_replicas_left(prediction, measurement)
    unexplained_s = sum(term.measured_s for term in terms if term.part == UNEXPLAINED)
    low_s, high_s = prediction["step_time_interval_s"]
    notes = [_of_parts(measurement.job.plan)]
    notes += [
        f"the steps that are kept of the part on {counted(part.num_nodes, 'node')} with "
        f"{counted(part.plan.num_devices, 'rank')} ({part.end_step - part.first_step}) are not compared: {part.ended}"
        for part in measurement.earlier
    ]
    if splits and not times_recomputation(measurement):
        notes.append("compute contains recomputation, on both sides: the run did not time it apart")
    if any(term.part == CLIPPING for term in terms):
        notes.append(f"{CLIPPING} is predicted, and the run does not time it: what it took there is unexplained")
    if measurement.environment.get("backend") == "gloo" and any(row.name.startswith(_DEVICE_ROW) for row in rows):
        notes.append(_RESIDENT_SET)
    notes += _beyond_the_device(prediction, measurement)
    notes += [slow.sentence for slow in measurement.slow_ranks]
    notes += _dropped_gradients(measurement)
    if not measurement.complete:
        notes.append(f"the run ended early: {measurement.failure}")
    return Comparison(
        rows=tuple(rows),
        structure_equal=ran_as_predicted(measurement) and issued_as_predicted(measurement, program),
        interval_holds=low_s <= measurement.step_time_s <= high_s,
        unexplained_s=unexplained_s,
        notes=tuple(notes),
        terms=terms,
        splits=splits,
        slowdown=slowdown,
        loss_curve=LossCurve.of(measurement),
        goodput=GoodputComparison.of(measurement),
    )


def _same_job(prediction: Mapping[str, Any], measurement: Measurement) -> None:
    inputs, job = prediction["inputs"], measurement.job
    problems = [
        Problem(field=name, rule="differs between prediction and measurement", fix="predict the job that was run")
        for name, planned, value in (
            ("model", inputs["model"], job.model.model_dump(mode="json")),
            ("training", inputs["training"], job.training.model_dump(mode="json")),
            ("plan", inputs["plan"], job.plan.model_dump(mode="json")),
            ("software", inputs["software"], job.software.title),
            ("stage_boundaries", prediction["stage_boundaries"], list(job.boundaries)),
            ("table", prediction["table"], [list(row) for row in job.table]),
        )
        if planned != value
    ]
    ranks = [rank.rank for rank in measurement.ranks]
    if ranks and (max(ranks) >= job.plan.num_devices or len(set(ranks)) < len(ranks)):
        rule = f"must be different ranks of the {job.plan.num_devices} of the plan"
        problems.append(Problem(field="ranks", value=str(ranks), rule=rule, fix="measure again"))
    if not measurement.step_times_s:
        problems.append(
            Problem(
                field="step_times_s",
                rule=f"holds no steady step ({measurement.failure or 'none was asked for'})",
                fix="measure again",
            )
        )
    if problems:
        raise SpecError(problems)


def _memory_rows(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[ComparisonRow]:
    """Yield peak memory of the measured peak-memory rank, by column."""
    for column in ("allocated", "reserved", "device"):
        known = [
            (value, rank.rank)
            for rank in measurement.ranks
            if (value := getattr(rank.peak_memory, f"{column}_bytes")) is not None
        ]
        if not known:
            continue
        value, rank = max(known)
        predicted = {of_rank["rank"]: measurable_gib(of_rank, column) for of_rank in prediction["ranks"]}[rank]
        yield compared(f"peak memory, {column}, rank {rank}", predicted, value / GIB, "GiB", None)


def _worker_rows(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[ComparisonRow]:
    """Yield staleness and bytes of workers that do not wait for all others."""
    workers = measurement.workers
    if workers is None:
        return
    expected = prediction["replication"]
    yield compared("staleness, mean", expected["staleness_mean"], workers.staleness_mean, "updates", None)
    yield compared("staleness, 90 % quantile", expected["staleness_p90"], workers.staleness_p90, "updates", None)
    if workers.pushed_bytes:
        yield compared("pushed by a worker", expected["pushed_bytes"] / GIB, workers.pushed_bytes / GIB, "GiB", None)


def _rows_of_replicas_left(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[ComparisonRow]:
    """Yield the step time of the replicas that were left, by their number."""
    fewer = prediction.get("replication", {}).get("left", ())
    predicted = {part["num_replicas"]: part["step_time_s"] for part in fewer}
    for number, rounds in sorted(measurement.undisturbed_rounds().items(), reverse=True):
        if number in predicted:
            seconds = [part.seconds / measurement.job.round_steps for part in rounds]
            name, spread = f"step time, {counted(number, 'replica')} left", relative_spread(seconds)
            yield compared(name, predicted[number], statistics.median(seconds), "s", spread)


def _dropped_gradients(measurement: Measurement) -> Iterable[str]:
    """Yield a note on the gradients that steps with backup workers dropped, by rank."""
    counts = Counter(rank for step in measurement.arrivals for rank in step.dropped)
    if counts:
        by_rank = ", ".join(f"{count} of rank {rank}" for rank, count in counts.most_common())
        yield f"gradients that {counted(len(measurement.arrivals), 'step')} dropped, warm-up included: {by_rank}"


def _beyond_the_device(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[str]:
    """Yield a note if a measured peak exceeds the memory of the predicted device."""
    capacity_gib = prediction["capacity_gib"]
    held_gib = {
        rank.rank: max(value for _, value in rank.peak_memory if value is not None) / GIB
        for rank in measurement.ranks
        if any(value is not None for _, value in rank.peak_memory)
    }
    rank = max(held_gib, key=lambda rank_number: held_gib[rank_number], default=0)
    if capacity_gib is not None and held_gib and held_gib[rank] > capacity_gib:
        yield (
            f"rank {rank} was measured to hold {held_gib[rank]:.4g} GiB, and a device of the predicted job has "
            f"{capacity_gib:.4g}: another device was measured, or the file was changed"
        )


def _action_times(timeline: Timeline, without: Collection[int] = ()) -> dict[tuple[int, ActionKind], list[float]]:
    """(stage, kind) -> durations of its actions over microbatches and ranks, except some ranks.

    An action lasts from its first compute to the end of all its work, including gradient reduction, as the host sees
    it. OPTIM lasts from the start of the update: most of what comes before, the all-reduces of tied embeddings and of
    the gradient norm, is wait for other stages, and a run does not time clipping.
    """
    actions = {text: Action.parse(text) for text in {span.action for span in timeline.spans}}
    work: dict[tuple[int, Action], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        action = actions[span.action]
        if action.kind in TIMED_KINDS and span.rank not in without:
            work[span.rank, action].append(span)
    times_s: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for (_, action), spans in work.items():
        begins = [span for span in spans if action.kind is not ActionKind.OPTIM or span.kind is SpanKind.OPTIMIZER]
        duration_s = max(span.end_s for span in spans) - min(span.start_s for span in begins or spans)
        times_s[action.stage, action.kind].append(duration_s)
    return times_s


TIMED_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.REDUCE_GRAD,
    ActionKind.OPTIM,
)
"""Kinds of actions that a measurement records as spans; communication is recorded separately."""

_COPIES = (Stream.TO_HOST.value, Stream.FROM_HOST.value)

Issued = tuple[str, tuple[int, ...], int, str]
"""Kind, ranks, bytes and action of a collective, P2P send or copy."""


def ran_as_predicted(measurement: Measurement) -> bool:
    """True if every rank, except dropped ones, ran exactly the actions of its row of the action table, in order."""
    job, table = measurement.job, measurement.job.parsed_table()
    mapping = RankMapping.of(job.plan)
    return all(
        [action for action, _ in groupby(span.action for span in rank.actions)]  # an outer step has spans of OPTIM
        == [str(action) for action in table[mapping.place(rank.rank).pp] if action.kind in TIMED_KINDS]
        for rank in measurement.ranks
        if not rank.is_dropped
    )


def issued_as_predicted(measurement: Measurement, program: Program | None = None) -> bool:
    """True if every rank, except dropped ones, issued exactly the communication of Level 2: kind, group, bytes, order.

    Host copies are compared in a separate order, since hooks reduce gradients in the middle of a backward.

    With collectives inside layers, a DDP bucket may fill up between two of them, and FSDP reduces expert gradients
    there. Level 2 places both reductions after the layer. In that case, the order is compared only within each group
    and kind.
    """
    mixed = reduces_between_collectives(measurement.job.plan)
    predicted = predicted_communications(measurement.job, program)

    def comparable(collectives: list[Issued]) -> list[Issued]:
        ordered = sorted(collectives, key=lambda issued: (issued[1], issued[0])) if mixed else collectives
        return sorted(ordered, key=lambda issued: issued[0] in _COPIES)

    return all(
        comparable([(c.kind, c.ranks, c.num_bytes, c.action) for c in rank.collectives])
        == comparable(predicted[rank.rank])
        for rank in measurement.ranks
        if not rank.is_dropped
    )


def reduces_between_collectives(plan: ParallelPlan) -> bool:
    """True if gradients may be reduced between the collectives of a layer."""
    return plan.expert_shards > 1 or (plan.tp * plan.cp * plan.ep > 1 and not plan.shards_parameters)


def predicted_communications(job: RunSpec, program: Program | None = None) -> dict[int, list[Issued]]:
    """Communication that Level 2 of the job's Program issues, by rank, in host order.

    Args:
        job: Job of the run.
        program: Program of the job. It is lowered here if None, not fully expanded, or with optimizer offload.
    """
    plan, replication, table = job.plan, job.plan.replication, job.parsed_table()
    overlaps_steps = replication is not None and replication.steps_beside > 0
    if program is None or not program.all_written_out or plan.offload_optimizer or overlaps_steps:
        any_cluster = catalog.cluster("dgx-h100", plan.num_devices)  # a run has no cluster; the result is the same
        changes: dict[str, Any] = {"offload_optimizer": False}  # copies made by torch are not recorded
        if replication is not None and overlaps_steps:  # the step after which an outer step is sent
            changes["replication"] = replication.with_changes(overlap_steps=0)
        asked = Job(job.model, any_cluster, job.training, plan.model_copy(update=changes), job.software)
        has_workers = replication is not None and replication.has_workers and job.device == "cpu"
        # workers on CPUs have no copies of gradients between two memories
        lowerer = Lowerer(asked, job.assignment, table, Lowering(level=2, host_waits=has_workers))
        has_rounds = replication is not None and replication.has_rounds
        program = lowerer.round_of(table) if has_rounds else lowerer.program(table)
    issued: dict[int, list[Issued]] = {rank: [] for rank in program.ranks}
    for op in program.ops:
        if op.stream in (Stream.TO_HOST, Stream.FROM_HOST):
            moved = sum(work.num_bytes for work in op.work if isinstance(work, HostCopy))
            issued[op.rank].append((op.stream.value, (op.rank,), moved, str(op.action)))
        for communication in op.communications:
            receives = op.action.kind in (ActionKind.RECV_F, ActionKind.RECV_B) or op.name == PULL
            kind = "recv" if receives else communication.kind.value
            issued[op.rank].append((kind, communication.ranks, communication.num_bytes, str(op.action)))
    return issued
