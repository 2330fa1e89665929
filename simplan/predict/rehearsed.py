"""A step time of a whole job from one rank's rehearsal: its measured computing, and modelled communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from simplan.cost.pricing import Pricing
from simplan.plan.plan import RankMapping
from simplan.predict.simulated import Simulated, interval_s, moved_durations_s
from simplan.predict.slowed import slowed
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.program import HostCopy, Message, Op, Stream
from simplan.program.timeline import Split, split_of_rank
from simplan.runs.rehearsal import Rehearsal
from simplan.sim.engine import timeline

__all__ = ["KindTime", "Rehearsed", "rehearsed_step"]


@dataclass(frozen=True, slots=True)
class KindTime:
    """What one kind of action of one stage computes, mean over its microbatches.

    Attributes:
        kind, stage: Which.
        predicted_s: Without communication.
        measured_s: On the rehearsed rank: mean over microbatches of medians over steps.
        relative_std: Of the mean over microbatches, from step to step.
    """

    kind: ActionKind
    stage: int
    predicted_s: float
    measured_s: float
    relative_std: float


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The step of the whole job, with what the rehearsed rank was measured to compute.

    Attributes:
        step_time_s: Of the whole job.
        step_time_interval_s: In 9 of 10 cases: spread of what was measured, doubts about what was not.
        split: Of the rehearsed rank's step.
        kinds: Predicted beside measured, by kind of action and stage.
        measured_share: Share of all computing, over ranks, that is of ranks at the rehearsed place of the pipeline. The
            rest is the prediction's, scaled as that of the rehearsed rank had to be.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    split: Split
    kinds: tuple[KindTime, ...]
    measured_share: float


def rehearsed_step(prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal) -> Rehearsed:
    """Runs the simulator once more, computing as measured.

    Ranks at the same place of the pipeline do the same work, so the measured times are theirs as well. Layers of an
    action keep their shares of its time, so that communication overlaps with it as predicted.

    Args:
        prediction: Of the whole job.
        simulated: The step behind it.
        rehearsal: Of one of its ranks, with times.
    """
    assert rehearsal.actions, "a rehearsal without a device has no times"
    kinds = _kinds(prediction, simulated, rehearsal)
    alone, measured_share = _repriced(prediction, simulated, rehearsal, kinds)
    program, engine = simulated.program, simulated.engine
    repriced = slowed(program, alone, engine.times)
    times = engine.times(repriced.durations_s)
    moved = moved_durations_s(program, repriced)
    spans = timeline(program, times)
    stands_for = program.stands_for[rehearsal.rank]
    return Rehearsed(
        step_time_s=times.step_time_s,
        step_time_interval_s=interval_s(times.step_time_s, engine.step_times_s(moved)),
        split=split_of_rank(spans.by_rank()[stands_for], times.step_time_s),
        kinds=tuple(kinds.values()),
        measured_share=measured_share,
    )


_Key = tuple[ActionKind, int]


def _kinds(prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal) -> dict[_Key, KindTime]:
    """Predicted beside measured, in the order of the rank's row."""
    predicted_s: dict[Action, float] = defaultdict(float)
    stands_for = simulated.program.stands_for[rehearsal.rank]
    for op in simulated.program.ops:
        if op.rank == stands_for and _computes(op, prediction):
            predicted_s[op.action] += _computing_s(op, simulated.alone)
    actions: dict[_Key, list[Action]] = defaultdict(list)
    seconds = {Action.parse(measured.action): measured for measured in rehearsal.actions}
    for action in seconds:
        actions[action.kind, action.stage].append(action)
    found = {}
    for (kind, stage), some in actions.items():
        by_step = [fmean(step) for step in zip(*(seconds[action].seconds for action in some), strict=True)]
        measured_s = fmean(seconds[action].median_s for action in some)
        found[kind, stage] = KindTime(
            kind,
            stage,
            predicted_s=fmean(predicted_s[action] for action in some),
            measured_s=measured_s,
            relative_std=pstdev(by_step) / measured_s if measured_s > 0 else 0.0,
        )
    return found


def _repriced(
    prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal, kinds: Mapping[_Key, KindTime]
) -> tuple[Pricing, float]:
    """Prices with computing as measured, and the share of it that is of ranks at the rehearsed place."""
    mapping = RankMapping.of(prediction.job.plan)
    place = mapping.place(rehearsal.rank).pp
    of_kind = _ratios_by_kind(kinds)
    program, pricing = simulated.program, simulated.alone
    durations_s, deviations_s = pricing.durations_s.copy(), pricing.deviations_s.copy()
    measured_s = total_s = 0.0
    for index, op in enumerate(program.ops):
        if not _computes(op, prediction):
            continue
        predicted_s = _computing_s(op, pricing)
        key = op.action.kind, op.action.stage
        here = mapping.place(op.rank).pp == place and key in kinds
        ratio = _ratio(kinds[key]) if here else of_kind.get(op.action.kind, 1.0)
        computing_s = predicted_s * ratio
        durations_s[index] += computing_s - predicted_s
        deviations_s[index] *= ratio
        if here:
            deviations_s[index] = kinds[key].relative_std * computing_s
            measured_s += computing_s
        total_s += computing_s
    repriced = replace(pricing, durations_s=durations_s, deviations_s=deviations_s)
    return repriced, measured_s / total_s if total_s else 0.0


def _ratio(time: KindTime) -> float:
    return time.measured_s / time.predicted_s if time.predicted_s > 0 else 1.0


def _ratios_by_kind(kinds: Mapping[_Key, KindTime]) -> dict[ActionKind, float]:
    """Measured over predicted, stages of the rehearsed rank together."""
    measured_s: dict[ActionKind, float] = defaultdict(float)
    predicted_s: dict[ActionKind, float] = defaultdict(float)
    for (kind, _), time in kinds.items():
        measured_s[kind] += time.measured_s
        predicted_s[kind] += time.predicted_s
    return {kind: measured_s[kind] / predicted_s[kind] for kind in measured_s if predicted_s[kind] > 0}


def _computes(op: Op, prediction: Prediction) -> bool:
    """Whether an operation's work is inside of the span that a rank measures for its action.

    On a CPU everything is done on the spot, by one thread; on other devices copies around gathers and reductions of
    data parallelism are beside the computation.
    """
    return op.meeting is None and (op.stream is Stream.COMPUTE or prediction.job.cluster.device.kind == "cpu")


def _computing_s(op: Op, pricing: Pricing) -> float:
    """Of an operation, what is no communication."""
    return sum(pricing.by_work[part].price.seconds for part in op.work if not isinstance(part, Message | HostCopy))
