"""Computing that slows down while bytes move: against arithmetic by hand, and in a whole step."""

from __future__ import annotations

import pytest
from simpy import Environment, Event

from simplan.cost.calibration import OverlapTiming
from simplan.errors import NotModelledError
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.program.action import Action
from simplan.program.program import Op, Program, Stream
from simplan.program.timeline import SpanKind
from simplan.sim.compiled import compile_program
from simplan.sim.engine import Slowdown, simulate
from simplan.sim.interference import SlowedStream
from simplan.spec import catalogue
from simplan.spec.layer import CollectiveKind
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from tests.cost.test_grid import CALIBRATION

BACKWARD = Action.parse("0B0")


@pytest.mark.parametrize(
    ("moves", "end_s"),
    [
        ([], 4.0),
        ([(1.0, 2.0)], 4.5),  # in the second from 1 to 2 half of a second's work is done
        ([(1.0, 3.0), (2.0, 5.0)], 6.0),  # 1 alone, then 4 s at half speed, then 1 alone
        ([(5.0, 6.0)], 4.0),
    ],
)
def test_work_beside_bytes_takes_twice_as_long(moves: list[tuple[float, float]], end_s: float) -> None:
    env = Environment()
    stream, done, ended = SlowedStream(env, 2.0), env.event(), []

    def moving(start_s: float, stop_s: float):  # type: ignore[no-untyped-def]
        yield env.timeout(start_s)
        stream.move(+1)
        yield env.timeout(stop_s - start_s)
        stream.move(-1)

    def watching(event: Event):  # type: ignore[no-untyped-def]
        yield event
        ended.append(env.now)

    stream.run(done, 4.0)
    env.process(watching(done))
    for interval in moves:
        env.process(moving(*interval))
    env.run()
    assert ended == pytest.approx([end_s])


def step() -> Program:
    """Both ranks compute; then they have a collective, and rank 0 computes twice as long."""

    def op(rank: int, stream: Stream, waits: tuple[int, ...], meeting: str | None = None) -> Op:
        kind = SpanKind.COMPUTE if stream is Stream.COMPUTE else SpanKind.COMMUNICATION
        return Op(rank, stream, "x", BACKWARD, kind, (), waits, meeting)

    ops = (
        op(0, Stream.COMPUTE, ()),
        op(0, Stream.DATA, (0,), "bucket"),
        op(0, Stream.COMPUTE, ()),
        op(1, Stream.COMPUTE, ()),
        op(1, Stream.DATA, (3,), "bucket"),
    )
    return Program(2, (), ops, (0, 1), (0, 1), {}, {})


def test_a_collective_slows_its_members_and_only_while_it_runs() -> None:
    """It runs from 1 to 2; of rank 0's second operation, 2 s alone, that leaves 1.5 s."""
    durations_s = [1.0, 1.0, 2.0, 1.0, 1.0]
    assert simulate(step(), durations_s).end_s == [1.0, 2.0, 3.0, 1.0, 2.0]
    slowed = simulate(step(), durations_s, Slowdown(2.0))
    assert slowed.end_s == pytest.approx([1.0, 2.0, 3.5, 1.0, 2.0])
    with pytest.raises(NotModelledError, match="computing is slower beside communication"):
        compile_program(step(), Slowdown(2.0))


def predicted(slowdown: float | None) -> Prediction:
    overlaps = [
        OverlapTiming(
            kind=CollectiveKind.ALL_REDUCE,
            num_ranks=8,
            num_bytes=2**24,
            compute_slowdown=measured,
            communication_slowdown=1.0,
        )
        for measured in (slowdown,)
        if measured is not None
    ]
    calibration = CALIBRATION.model_copy(update={"overlaps": tuple(overlaps)})
    model = catalogue.model("gpt2-124m").model_copy(update={"num_hidden_layers": 2})
    training, software = TrainingSpec(global_batch_size=32, precision="bf16"), catalogue.software("torch")
    cluster = catalogue.cluster("dgx-h100", num_devices=8)
    return predict("x", model, cluster, training, ParallelPlan(dp_shard=8, microbatch_size=4), software, calibration)


def test_a_measured_slowdown_moves_the_prediction_by_no_more_than_what_overlaps() -> None:
    plain, unslowed, slowed = predicted(None), predicted(1.0), predicted(1.25)
    assert unslowed.step_time_s == plain.step_time_s
    assert plain.step_time_s < slowed.step_time_s < 1.25 * plain.step_time_s
    before, after = plain.splits[0], slowed.splits[0]
    assert before.compute_s < after.compute_s < 1.25 * before.compute_s
    assert "computing takes 1.25 times as long while its rank communicates, as was measured" in slowed.assumptions
