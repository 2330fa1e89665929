"""Computing that has less of its device while communications move: against arithmetic by hand, and in whole steps."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cost.calibration.format import OverlapTiming
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.cost.program_costs import estimate_program
from simplan.explain import explain
from simplan.model.layer import CollectiveKind
from simplan.predict import Simulated, predict_step
from simplan.predict.build import cost_model
from simplan.predict.overlap_slowdown import apply_overlap_slowdown
from simplan.prediction import Prediction
from simplan.program.action import Action
from simplan.program.program import Communication, HostCopy, HostWait, LayerWork, Op, Phase, Stream, Work
from simplan.program.timeline import SpanKind, Times
from simplan.sim.engine import simulate
from tests.cost.test_grid import CALIBRATION
from tests.jobs import job_of, tiny_model
from tests.program.programs import program_of

BLOCK = tiny_model().layers[1]
BACKWARD = Action.parse("0B0")


class Tariff:
    """A layer takes as many seconds as it has sequences, a communication as many as it has bytes, and half of the
    device."""

    overlap_slowdown = 0.5

    def compute(self, work: LayerWork) -> CostEstimate:
        return CostEstimate.of(CostPart("", float(work.microbatch_size), Limit.COMPUTE, str), Provenance.DATASHEET, 0.1)

    def communication(self, communication: Communication) -> CostEstimate:
        return CostEstimate.of(
            CostPart("", float(communication.num_bytes), Limit.COMPUTE, str), Provenance.DATASHEET, 0.1
        )

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        raise AssertionError("nothing is copied to the host here")

    def host_wait(self, wait: HostWait) -> CostEstimate:
        raise AssertionError("nothing waits for the host here")


def computing(seconds: int, *waits: int, communication_s: int = 0) -> Op:
    """With a communication that is waited for on the spot."""
    work: list[Work] = [LayerWork(BLOCK, Phase.BACKWARD, seconds, 0)]
    if communication_s:
        work.append(communication(communication_s))
    return Op(0, Stream.COMPUTE, "x", BACKWARD, SpanKind.COMPUTE, tuple(work), waits)


def communication(seconds: int) -> Communication:
    return Communication(CollectiveKind.ALL_REDUCE, seconds, (0, 1))


def moving(seconds: int, *waits: int) -> Op:
    return Op(0, Stream.DATA, "bucket", BACKWARD, SpanKind.COMMUNICATION, (communication(seconds),), waits)


def step(*ops: Op) -> tuple[Times, Times]:
    """With nothing taken, and with half of the device."""
    program = program_of(ops)
    alone = estimate_program(program, Tariff())
    program_costs = apply_overlap_slowdown(program, alone, partial(simulate, program))
    assert program_costs.deviations_s == pytest.approx([0.1 * seconds for seconds in program_costs.durations_s])
    return simulate(program, alone.durations_s), simulate(program, program_costs.durations_s)


def test_computation_that_overlaps_communication_takes_half_of_its_time_longer() -> None:
    alone, later = step(computing(1), moving(1, 0), computing(3))
    assert alone.end_s.tolist() == [1.0, 2.0, 4.0]
    assert later.end_s == pytest.approx([1.0, 2.0, 4.5])


def test_communications_that_are_waited_for_on_the_spot_are_no_computing() -> None:
    """Four seconds beside the bucket, of which one is a communication."""
    _, later = step(computing(1), moving(8, 0), computing(3, communication_s=1))
    assert later.end_s[2] == pytest.approx(1 + 4 + 0.5 * 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_a_communication_that_hides_costs_its_share_and_one_that_does_not_costs_less(
    parts: list[int], moves: int
) -> None:
    _, later = step(computing(1), moving(moves, 0), *map(computing, parts))
    computed_s = sum(parts)
    assert later.end_s[-1] == pytest.approx(1 + computed_s + 0.5 * min(moves, computed_s))
    assert later.step_time_s >= 1 + max(moves, computed_s)


def predicted(slowdown: float | None) -> Prediction:
    return predicted_step(slowdown)[0]


def predicted_step(slowdown: float | None) -> tuple[Prediction, Simulated]:
    """With a calibration of an H100 that measured this slowdown of computing, or none."""
    measured = {"kind": CollectiveKind.ALL_REDUCE, "num_ranks": 8, "num_bytes": 2**24, "communication_slowdown": 1.0}
    overlaps = [] if slowdown is None else [OverlapTiming.model_validate({**measured, "compute_slowdown": slowdown})]
    calibration = CALIBRATION.model_copy(update={"overlaps": tuple(overlaps)})
    model = catalog.model("gpt2-124m").model_copy(update={"num_hidden_layers": 2})
    job = job_of(model, {"dp_shard": 8, "microbatch_size": 4}, num_microbatches=1)
    return predict_step(job, name="x", calibration=calibration)


def test_a_measured_slowdown_moves_the_prediction_by_no_more_than_what_overlaps() -> None:
    plain, apply_overlap_slowdown = predicted(1.0), predicted(1.25)
    assert plain.step_time_s < apply_overlap_slowdown.step_time_s < 1.25 * plain.step_time_s
    before, after = plain.splits[0], apply_overlap_slowdown.splits[0]
    assert before.compute_s < after.compute_s < 1.25 * before.compute_s
    said = "compute that overlaps communication loses 20.0 % of its throughput"
    assert said in apply_overlap_slowdown.assumptions
    assert not [sentence for sentence in plain.assumptions if "overlaps communication" in sentence]


def test_where_nobody_measured_it_is_as_published_runs_have_it() -> None:
    share = catalog.device("h100-sxm-80gb").kernels.overlap_slowdown
    assert 0.05 < share < 0.4
    assert predicted(None).step_time_s == pytest.approx(predicted(1 / (1 - share)).step_time_s, rel=1e-9)


def test_the_overlap_slowdown_is_explained() -> None:
    prediction, simulated = predicted_step(1.25)
    explained = explain(prediction, simulated)
    [lost] = [part for part in explained.time if part.name == "overlap slowdown"]
    assert 0 < lost.value < 0.2 * prediction.step_time_s
    assert sum(part.value for part in explained.time) == pytest.approx(prediction.step_time_s)


@pytest.mark.parametrize(("device", "link", "taken"), [("a100-sxm-80gb", "nvlink3", True), ("tpu-v5e", "ici", False)])
def test_engines_of_a_torus_take_nothing(device: str, link: str, taken: bool) -> None:
    link_of = {"device": catalog.device(device), "intra_link": catalog.link(link)}
    cluster = ClusterSpec.model_validate({"id": "inline", "devices_per_node": 16, "num_devices": 16, **link_of})
    assert (cost_model(job_of("gpt2-124m", cluster=cluster), None).overlap_slowdown > 0) is taken
