"""Comparisons against a measurement made by hand from the prediction itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simplan.cli
from simplan.interop.compare_files import compare as compare_files
from simplan.io import write_json
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.plan.replication import Replication
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.program.action import ActionKind
from simplan.program.program import Stream
from simplan.report.comparison import comparison_text
from simplan.runs.measurement import MeasuredCollective, Measurement, PeakMemory, SlowRank
from simplan.training import TrainingSpec
from simplan.units import GIB
from simplan.validate.activity import ActivityShare, stream_words
from simplan.validate.attribution import TermDifference
from simplan.validate.compare import AT_THIS_SPEED, compare
from simplan.validate.measured import measured_timeline, predicted_timeline, stream_of
from tests.jobs import job_of, lowered, tiny_model
from tests.support.problems import refuses
from tests.validate.measuring import measure, predicted


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predicted(ParallelPlan(pp=2, stage_layers=(2, 2)))  # no communication arrives while its receiver computes


def test_a_run_as_predicted_has_no_error(prediction: Prediction) -> None:
    comparison = compare(prediction, measure(prediction))
    assert comparison == compare(json.loads(json.dumps(prediction.to_json())), measure(prediction)), (
        "the file says the same"
    )
    step = comparison.rows[0]
    assert step.name == "step time"
    assert step.signed_error == pytest.approx(0.0, abs=1e-12)
    assert comparison.structure_equal
    assert comparison.interval_holds
    assert comparison.unexplained_s == pytest.approx(0.0, abs=1e-12)
    assert [term.difference_s for term in comparison.terms] == pytest.approx([0.0] * len(comparison.terms), abs=1e-12)
    for split in comparison.splits:
        assert split.measured_s == pytest.approx(split.predicted_s, abs=1e-12)
    assert {r.name for r in comparison.rows} >= {"F of stage 0", "B of stage 1", "OPTIM of stage 0"}


def test_errors_are_signed_and_relative_to_the_measurement(prediction: Prediction) -> None:
    """Twice as slow as predicted: every error is -50 %, whatever the part."""
    comparison = compare(prediction.to_json(), measure(prediction, factor=2.0))
    timed = [row for row in comparison.rows if row.unit == "s"]
    assert [row.signed_error for row in timed] == pytest.approx([-0.5] * len(timed))
    assert comparison.rows[0].within_spread is False
    assert not comparison.interval_holds


def test_memory_rows_are_of_the_rank_that_needed_most(prediction: Prediction) -> None:
    rows = {r.name: r for r in compare(prediction.to_json(), measure(prediction)).rows}
    assert rows["peak memory, device, rank 1"].measured == 6.0
    assert rows["peak memory, device, rank 1"].predicted == prediction.memory[1].device_bytes / GIB
    assert not any("reserved" in name for name in rows)
    said = []
    for backend in ("gloo", "nccl"):
        run = measure(prediction).model_copy(update={"environment": {"backend": backend}})
        said.append(any("is its resident set" in note for note in compare(prediction.to_json(), run).notes))
    assert said == [True, False]


def test_more_memory_than_the_device_has_is_noted(prediction: Prediction) -> None:
    def with_peak(gib: int) -> Measurement:
        full = measure(prediction)
        memory = PeakMemory(allocated_bytes=3 * GIB, device_bytes=gib * GIB)
        last = full.ranks[1].model_copy(update={"peak_memory": memory})
        return full.model_copy(update={"ranks": (full.ranks[0], last)})

    said = "rank 1 was measured to hold 90 GiB, and a device of the predicted job has 79.11: "
    assert any(note.startswith(said) for note in compare(prediction.to_json(), with_peak(90)).notes)
    assert not any("to hold" in note for note in compare(prediction.to_json(), with_peak(79)).notes)


def test_a_slow_rank_is_named(prediction: Prediction) -> None:
    slow = SlowRank(rank=1, factor=2.14, compared_with=(0,), compute_s=0.0412, others_compute_s=0.0193)
    comparison = compare(prediction.to_json(), measure(prediction).model_copy(update={"slow_ranks": (slow,)}))
    said = "- rank 1 needs 2.1 times the compute time of rank 0, which has the same work: 41.2 ms per step"
    assert said in comparison_text(comparison)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="device_bytes"):
        PeakMemory(device_bytes=0)


def test_another_order_of_actions_is_noticed(prediction: Prediction) -> None:
    measured = measure(prediction)
    first = measured.ranks[0]
    swapped = first.model_copy(update={"actions": (first.actions[1], first.actions[0], *first.actions[2:])})
    ran = measured.model_copy(update={"ranks": (swapped, measured.ranks[1])})
    assert not compare(prediction.to_json(), ran).structure_equal


@pytest.mark.parametrize("change", [{"num_bytes": 1}, {"ranks": (1, 0)}, {"kind": "recv"}, {"action": "0SEND_F1"}])
def test_another_communication_is_noticed(prediction: Prediction, change: dict[str, Any]) -> None:
    measured = measure(prediction)
    first = measured.ranks[0]
    wrong = first.model_copy(
        update={"collectives": (first.collectives[0].model_copy(update=change), *first.collectives[1:])}
    )
    ran = measured.model_copy(update={"ranks": (wrong, measured.ranks[1])})
    assert compare(prediction.to_json(), measured).structure_equal
    assert not compare(prediction.to_json(), ran).structure_equal


@pytest.mark.parametrize(
    ("change", "field"),
    [({"training": TrainingSpec(global_batch_size=8)}, "training"), ({"boundaries": (0, 2, 6)}, "stage_boundaries")],
)
def test_another_job_is_refused(prediction: Prediction, change: dict[str, Any], field: str) -> None:
    other = measure(prediction)
    with refuses(field, rule="differs between"):
        compare(prediction.to_json(), other.model_copy(update={"job": other.job.model_copy(update=change)}))


def test_a_run_that_ended_before_its_first_steady_step_is_refused(prediction: Prediction) -> None:
    failed = measure(prediction, step_times_s=(), complete=False, failure="rank 1 was killed by signal 9")
    with refuses("step_times_s", rule="holds no steady step"):
        compare(prediction.to_json(), failed)


def test_timelines_survive_the_file(prediction: Prediction) -> None:
    assert predicted_timeline(prediction.to_json()) == prediction.timeline
    measured = measured_timeline(measure(prediction))
    predicted_compute = {(s.rank, s.action) for s in prediction.timeline.spans if s.stream == "compute"}
    assert {(s.rank, s.action) for s in measured.spans if s.stream == "compute"} == predicted_compute


def test_a_machine_that_became_slower_is_told_apart_from_a_wrong_prediction(prediction: Prediction) -> None:
    document = prediction.to_json()
    assert compare(document, measure(prediction, reference_s=0.003)).slowdown is None  # nothing to compare it with
    document["reference_s"] = 0.002
    comparison = compare(document, measure(prediction, factor=1.5, reference_s=0.003))
    assert comparison.slowdown == pytest.approx(1.5)
    row = comparison.rows[1]
    assert row.name == AT_THIS_SPEED
    moving_s = sum(
        t.predicted_s for t in comparison.terms if t.share in (ActivityShare.EXPOSED_COMMUNICATION, ActivityShare.WAIT)
    )
    assert 0 < moving_s < prediction.step_time_s
    assert row.predicted == pytest.approx(1.5 * prediction.step_time_s - 0.5 * moving_s)
    assert row.signed_error is not None
    assert abs(row.signed_error) < 0.02 < 0.3 < abs(comparison.rows[0].signed_error or 0.0)
    assert "a matmul took 1.50 times as long in the run" in comparison_text(comparison)


@pytest.mark.parametrize(
    ("plan", "ranks", "stream"),
    [
        (ParallelPlan(tp=2), (0, 1), Stream.TENSOR),
        (ParallelPlan(cp=2, cp_comm="all_gather"), (0, 1), Stream.CONTEXT),
        (ParallelPlan(dp_shard=2), (0, 1), Stream.SHARD),
        (ParallelPlan(dp_shard=2, tp=2), (0, 1), Stream.TENSOR),
        (ParallelPlan(dp_shard=2, tp=2), (0, 2), Stream.SHARD),
    ],
)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathers_are_of_the_axis_of_their_ranks(
    plan: ParallelPlan, ranks: tuple[int, ...], stream: Stream, kind: str
) -> None:
    communication = MeasuredCollective.model_validate(
        {"kind": kind, "action": "0F0", "ranks": ranks, "num_bytes": 8, "start_s": 0.0, "end_s": 1.0}
    )
    assert stream_of(communication, 0, RankMapping.of(plan)) is stream


def test_replicas_that_train_alone_have_gradients_and_outer_steps_on_two_streams() -> None:
    plan = ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=0, replication=Replication(kind="local_sgd"))
    issued = {"kind": "all_reduce", "num_bytes": 8, "start_s": 0.0, "end_s": 1.0}
    gradients = MeasuredCollective.model_validate({**issued, "action": "0B0", "ranks": (0, 1)})
    parameters = MeasuredCollective.model_validate({**issued, "action": "0OPTIM", "ranks": (0, 2)})
    mapping = RankMapping.of(plan)
    assert stream_of(gradients, 0, mapping) is Stream.DATA
    assert stream_of(parameters, 0, mapping) is Stream.REPLICATE


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_transfer_of_another_action_is_refused(kind: Any) -> None:
    """It has no stream: the comparison ended with an error of the program."""
    with pytest.raises(ValueError, match=f"{kind} .* SEND, RECV or OPTIM, .*0F0"):
        MeasuredCollective(kind=kind, action="0F0", ranks=(0, 1), num_bytes=8, start_s=0.0)


def test_prediction_with_an_unknown_stream_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prediction = predicted(ParallelPlan(pp=2, stage_layers=(2, 2)))
    document = prediction.to_json()
    document["timeline"][0]["stream"] = "bf16"
    write_json(tmp_path / "prediction.json", document)
    (tmp_path / "measurement.json").write_text(measure(prediction).model_dump_json())
    assert simplan.cli.main(["compare", str(tmp_path / "prediction.json"), str(tmp_path / "measurement.json")]) == 2
    assert 'timeline.0.stream = "bf16"' in capsys.readouterr().err


CLIPPED = (
    ("gpt", {"pp": 2}),
    ("gpt", {"pp": 4, "dp_shard": 2, "zero_stage": 2}),
    ("llama", {"pp": 2, "dp_replicate": 2, "tp": 2}),
    ("llama", {"dp_shard": 2, "cp": 2, "tp": 2, "cp_comm": "all_gather"}),
    ("moe", {"pp": 2, "dp_shard": 4, "ep": 2}),
)


@pytest.mark.parametrize(("family", "plan"), CLIPPED)
def test_communication_is_called_the_same_predicted_and_measured(family: str, plan: dict[str, Any]) -> None:
    """The 4-byte norm was once the tied embedding, and in a pipeline no name was known for it."""
    sizes = {"intermediate_size": 128} | (
        {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 32} if "ep" in plan else {}
    )
    model = tiny_model(family, num_hidden_layers=4, tied_embeddings=family == "gpt", **sizes)
    job = job_of(model, plan, num_microbatches=4, clip_grad_norm=1.0)
    program, mapping = lowered(job), RankMapping.of(job.plan)
    names = set()
    for op in program.ops:
        for communication in op.communications:
            receives = op.action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
            run = MeasuredCollective.model_validate(
                {
                    "kind": "recv" if receives else communication.kind.value,
                    "action": str(op.action),
                    "ranks": communication.ranks,
                    "num_bytes": communication.num_bytes,
                    "start_s": 0.0,
                }
            )
            name = stream_words(op.stream)
            assert stream_words(stream_of(run, op.rank, mapping)) == name, op
            names.add(name)
    assert ("all-reduce of the gradient norm over stages" in names) == (job.plan.pp > 1)
    assert ("all-reduce of the tied embedding" in names) == model.tied_embeddings


def test_a_clipped_pipeline_is_compared() -> None:
    """Its comparison ended with an error of the program, after all steps were run."""
    job = job_of(
        tiny_model(num_hidden_layers=4, tied_embeddings=False), {"pp": 2}, num_microbatches=4, clip_grad_norm=1.0
    )
    prediction = predict(job)
    comparison = compare(prediction.to_json(), measure(prediction))
    terms = {term.part: term for term in comparison.terms}
    assert len(terms) == len(comparison.terms), "no two terms have one name"
    assert terms["gradient clipping"].predicted_s > 0
    assert terms["all-reduce of the gradient norm over stages"].measured_s > 0
    assert "all-reduce of the tied embedding" not in terms
    assert any(
        note.startswith("gradient clipping is predicted, and the run does not time it") for note in comparison.notes
    )
    rows = {row.name: row for row in comparison.rows}
    assert rows["OPTIM of stage 0"].signed_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("largest_s", "step_s", "sentence"),
    [
        (0.6, 1.0, "most of the difference: backward (+600 ms of +1.000 s)"),
        (0.4, 1.0, "largest term: backward (+400 ms of +1.000 s)"),
        (1.2, 1.0, "largest term: backward (+1.200 s of +1.000 s)"),
        (-0.109, 0.0292, "largest term: backward (-109 ms of +29.2 ms)"),
    ],
)
def test_most_is_more_than_half_and_no_more_than_all(
    largest_s: float, step_s: float, sentence: str, prediction: Prediction
) -> None:
    terms = (TermDifference("backward", ActivityShare.COMPUTE, max(largest_s, 0.0), max(-largest_s, 0.0)),)
    row = replace(compare(prediction, measure(prediction)).rows[0], predicted=2.0 + step_s, measured=2.0)
    text = comparison_text(replace(compare(prediction, measure(prediction)), rows=(row,), terms=terms))
    assert sentence in text


def test_only_a_missing_key_is_called_missing(prediction: Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program was once told as a key that the file lacks."""
    document = prediction.to_json()
    del document["inputs"]["cluster"]
    with refuses("inputs.cluster", rule="is missing", file="prediction"):
        compare_files(document, measure(prediction))
    monkeypatch.setattr("simplan.validate.activity._STREAMS", {})
    with pytest.raises(KeyError):
        compare_files(prediction.to_json(), measure(prediction))
