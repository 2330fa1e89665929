"""A recording of a user's loop beside a prediction: what a log has, and states and communication of every rank."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.interop.logs.formats import parse_run
from simplan.plan.plan import ParallelPlan
from simplan.predict import run_spec_of
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory
from simplan.report.comparison import logged_text
from simplan.runs.measurement import PeakMemory
from simplan.runs.recording import RankRecording, RecordedCollective, Recording
from simplan.units import GIB
from simplan.validate.compare import predicted_communications
from simplan.validate.logged import LoggedComparison, compare_logged
from simplan.validate.logged_run import LoggedRun
from tests.support.problems import says
from tests.validate.measuring import predicted

GPU: dict[str, Any] = {"backend": "nccl", "device": "NVIDIA A100", "torch": "2.13"}
CPU: dict[str, Any] = {"backend": "gloo", "device": "a CPU", "torch": "2.13"}


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predicted(ParallelPlan(dp_replicate=2))


def recording_of(prediction: Prediction, **changes: Any) -> Recording:
    """A recording of two ranks that did what was predicted."""
    document = prediction.to_json()
    issued = predicted_communications(run_spec_of(prediction))
    times_s = tuple(prediction.step_time_s * factor for factor in (0.99, 1.0, 1.01, 1.0, 1.0))
    ranks = tuple(
        RankRecording(
            rank=rank["rank"],
            step_times_s=times_s,
            peak_memory=PeakMemory(
                **{f"{column}_bytes": round(gib * GIB) for column, gib in rank["peak_memory_gib"].items()}
            ),
            states_bytes={
                MemoryCategory(name): round(rank["memory_gib"][name] * GIB)
                for name in ("parameters", "gradients", "optimizer_states")
            },
            collectives=tuple(
                RecordedCollective(kind=kind, ranks=ranks, num_bytes=num_bytes)  # type: ignore[arg-type]
                for kind, ranks, num_bytes, _ in issued[rank["rank"]]
            ),
        )
        for rank in document["ranks"]
    )
    fields = {"step_times_s": times_s, "first_step": 4, "samples_per_step": 4, "ranks": ranks, "environment": GPU}
    return Recording(**{**fields, **changes})


def compared(prediction: Prediction, recording: Recording) -> LoggedComparison:
    """By way of the file."""
    run = parse_run(recording.model_dump_json().encode(), "measurement.json")
    assert isinstance(run, LoggedRun)
    return compare_logged(prediction.to_json(), run)


def test_recording_of_the_predicted_step_has_no_error_in_any_row(prediction: Prediction) -> None:
    comparison = compared(prediction, recording_of(prediction))
    names = ["step time", *(f"peak memory, {column}, rank 0" for column in ("allocated", "reserved", "device"))]
    names += ["throughput", "parameters, rank 0", "optimizer states, rank 0", "all-reduce of 2 ranks"]
    assert [row.name for row in comparison.rows] == names
    assert [row.signed_error for row in comparison.rows] == pytest.approx([0] * len(names), abs=1e-6)
    assert comparison.interval_holds
    text = logged_text(comparison)
    assert "gradients are not compared" in text
    assert "only `simplan run` can say" in text
    assert " are predicted" not in text


def test_collectives_that_were_not_predicted_are_rows_and_counted(prediction: Prediction) -> None:
    """One all-reduce more, as for a logged loss, and a broadcast that no plan has, both on each rank."""
    before = recording_of(prediction)
    more = (
        RecordedCollective(kind="all_reduce", ranks=(0, 1), num_bytes=GIB),
        RecordedCollective(kind="broadcast", ranks=(0, 1), num_bytes=2 * GIB),
    )
    ranks = tuple(rank.model_copy(update={"collectives": (*(rank.collectives or ()), *more)}) for rank in before.ranks)
    comparison = compared(prediction, recording_of(prediction, ranks=ranks))
    reduced, sent = (
        next(row for row in comparison.rows if row.name == f"{kind} of 2 ranks") for kind in ("all-reduce", "broadcast")
    )
    assert reduced.measured - reduced.predicted == pytest.approx(1)
    assert sent.predicted == 0
    assert sent.measured == pytest.approx(2)
    number = len(before.ranks[0].collectives or ())
    notes = "\n".join(comparison.notes)
    assert says(notes, f"all-reduce of 2 ranks: {number + 1} a step", f"{number} are predicted")
    assert says(notes, "broadcast of 2 ranks: 1 a step", "0 are predicted")


def test_recording_without_details_names_what_is_not_compared(prediction: Prediction) -> None:
    bare = tuple(RankRecording(rank=rank, step_times_s=(1.0,), peak_memory=PeakMemory()) for rank in range(2))
    comparison = compared(prediction, recording_of(prediction, ranks=bare, samples_per_step=None))
    assert [row.name for row in comparison.rows] == ["step time"]
    notes = "\n".join(comparison.notes)
    assert "communication is not compared: no step was looked at" in notes
    assert says(notes, "parameters and optimizer states are not compared", "record(module=..., optimizer=...)")
    assert "peak memory is not compared" in notes


def test_times_and_device_memory_of_another_device_are_left_out(prediction: Prediction) -> None:
    comparison = compared(prediction, recording_of(prediction, environment=CPU))
    assert {row.name.split(",")[0] for row in comparison.rows} == {
        "peak memory", "parameters", "optimizer states", "all-reduce of 2 ranks",
    }  # fmt: skip
    assert [row.name for row in comparison.rows if "peak" in row.name] == ["peak memory, allocated, rank 0"]
    assert comparison.interval_holds is None
    assert any("are not compared: recorded on a CPU, predicted for " in note for note in comparison.notes)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"samples_per_step": 8}, "global_batch_size = 8: ... predicted ... 4"),
        ({"num_ranks": 1}, "ranks = 1: ... predicted ... 2"),
        ({"environment": CPU, "bare": True}, "allocated ... communication ... give record(module=...)"),
    ],
)
def test_recording_of_another_job_is_refused(changes: dict[str, Any], rule: str, prediction: Prediction) -> None:
    ranks = recording_of(prediction).ranks[: changes.pop("num_ranks", 2)]
    if changes.pop("bare", False):
        ranks = tuple(rank.model_copy(update={"peak_memory": PeakMemory(device_bytes=1)}) for rank in ranks)
    with pytest.raises(SpecError) as error:
        compared(prediction, recording_of(prediction, ranks=ranks, **changes))
    assert says(str(error.value), rule)


def test_recording_with_ranks_out_of_order_is_refused(prediction: Prediction) -> None:
    text = recording_of(prediction).model_dump_json().replace('"rank":1', '"rank":2')
    with pytest.raises(SpecError, match="ranks must be 0 to 1, in order"):
        parse_run(text.encode(), "measurement.json")
