"""What a log says beside a prediction: read strictly, and told apart from what only a timeline shows."""

from __future__ import annotations

import re

import pytest

from simplan.errors import SpecError
from simplan.interop.logs.formats import KNOWN_LOGS
from simplan.plan.plan import ParallelPlan
from simplan.prediction import Prediction
from simplan.report.comparison import candidate_causes, logged_text
from simplan.runs.measurement import Measurement
from simplan.validate.compare import compare
from simplan.validate.logged import compare_logged
from simplan.validate.logged_run import LoggedRun, parse_measured
from tests.support.problems import says
from tests.validate.measuring import measure, predicted


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predicted(ParallelPlan(pp=2, stage_layers=(2, 2)))


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.5, False)])
def test_step_time_is_that_of_the_full_measurement(prediction: Prediction, factor: float, holds: bool) -> None:
    """The log of a run and its measurement have the same error, spread and verdict."""
    full = measure(prediction, factor=factor)
    whole = compare(prediction.to_json(), full)
    bare = compare_logged(prediction.to_json(), LoggedRun(step_times_s=full.step_times_s))
    assert bare.rows[0] == whole.rows[0]
    assert bare.interval_holds == whole.interval_holds == holds
    assert bare.difference_s == pytest.approx((1 - factor) * prediction.step_time_s)


@pytest.mark.parametrize(
    ("times_s", "steady", "num_warmup", "outliers"),
    [
        ((20.0, 5.0, 2.0, 2.1, 3.5, 2.0), (2, 3, 4, 5), 2, ()),  # one in four is no outlier
        ((1.0,), (0,), 0, ()),
        ((9.0, 2.0, 2.6, *[2.0] * 17), tuple(range(3, 20)), 3, ()),  # a second compilation
        ((2.3, *[2.0, 2.02] * 10, 3.4, *[2.01] * 10), (*range(1, 21), *range(22, 32)), 1, (21,)),
        ((2.0, 2.1, 1.9, 2.05, 2.0, 1.95), tuple(range(6)), 0, ()),  # noise
        ((2.0, 4.0) * 10, tuple(range(20)), 0, ()),  # every second step accumulates
    ],
)
def test_steady_steps(
    times_s: tuple[float, ...], steady: tuple[int, ...], num_warmup: int, outliers: tuple[int, ...]
) -> None:
    steady_steps = LoggedRun(step_times_s=times_s).steady
    assert (steady_steps.indices, steady_steps.num_warmup, steady_steps.outliers) == (steady, num_warmup, outliers)


def test_parts_are_those_of_the_predicted_critical_path(prediction: Prediction) -> None:
    whole = compare(prediction.to_json(), measure(prediction))
    bare = compare_logged(prediction.to_json(), LoggedRun(step_time_s=2 * prediction.step_time_s))
    on_path = {term.part: term.predicted_s for term in whole.terms if term.predicted_s}
    assert {part.part: part.predicted_s for part in bare.parts} == pytest.approx(on_path)
    assert sum(part.predicted_s for part in bare.parts) == pytest.approx(prediction.step_time_s)
    stds_s = [part.std_s for part in bare.parts]
    assert stds_s == sorted(stds_s, reverse=True)
    for part in bare.parts:
        assert part.times_as_long == pytest.approx(1 + prediction.step_time_s / part.predicted_s)


def test_deviations_of_computing_add_up_to_the_interval() -> None:
    """A pipeline of two with small communications, and kernels that no host delays: the interval is 1.645 deviations of
    computing, which errs together."""
    prediction = predicted(ParallelPlan(pp=2, stage_layers=(2, 2)), hidden_size=3072, num_attention_heads=24)
    bare = compare_logged(prediction.to_json(), LoggedRun(step_time_s=1.0))
    computing_s = sum(part.std_s for part in bare.parts if part.share != "exposed_communication")
    low_s, high_s = prediction.step_time_interval_s
    assert (high_s - low_s) / 2 / 1.645 == pytest.approx(computing_s, rel=0.15)


def test_a_throughput_is_a_step_time(prediction: Prediction) -> None:
    """124 M parameters do not matter here: 4 sequences of 1,024 tokens on 2 devices."""
    comparison = compare_logged(prediction.to_json(), LoggedRun(tokens_per_s_per_device=(1024.0,)))
    assert comparison.rows[0].measured == pytest.approx(4 * 1024 / 2 / 1024.0)


def test_memory_is_of_the_rank_that_needed_most(prediction: Prediction) -> None:
    of_one = LoggedRun(step_time_s=1.0, peak_device_gib=(6.0,))
    row = compare_logged(prediction.to_json(), of_one).rows[1]
    assert (row.name, row.measured) == ("peak memory, device", 6.0)
    assert row.predicted == prediction.worst_memory.device_bytes / 2**30
    of_ranks = LoggedRun(step_time_s=1.0, peak_reserved_gib=(5.0, 6.0))
    row = compare_logged(prediction.to_json(), of_ranks).rows[1]
    assert (row.name, row.measured) == ("peak memory, reserved, rank 1", 6.0)
    assert row.predicted == prediction.memory[1].reserved_bytes / 2**30


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "step_times_s: is missing, and nothing else tells a time"),
        ({"step_time_s": 1.0, "step_times_s": (1.0,)}, "step_time_s: says the same as step_times_s"),
        ({"step_time_s": 1.0, "tokens_per_s_per_device": 1024.0}, "is a step of 2.000 s in the predicted job"),
        ({"step_time_s": 1.0, "samples_per_s": (1.0,)}, "is a step of 4.000 s .* the throughput of one device"),
        ({"step_time_s": 1.0, "global_batch_size": 8}, "global_batch_size = 8: is in the log, .* job has 4"),
        ({"step_time_s": 1.0, "seq_len": 512}, "seq_len = 512: .* has 1024; predict .* .model.seq_len: 512"),
        ({"step_time_s": 1.0, "peak_device_gib": (1.0, 2.0, 3.0)}, "has 3 numbers, and the predicted job has 2 ranks"),
        ({"step_time_s": 1.0, "peak_reserved_gib": (60.0, 81.9)}, "peak_reserved_gib = 81.9: is more than the 79.11 "
         "GiB of a device of .*; if it is in GB, write 76"),
        ({"step_time_s": 1.0, "peak_device_gib": (71522.0,)},
         r"peak_device_gib = 71522: .*; if it is in MiB, write 69.85"),
        ({"step_time_s": 1.0, "peak_device_gib": (7e13,)}, "peak_device_gib = 7e.13: .*; write what one device held"),
        ({"step_time_s": 1.0, "peak_allocated_gib": (70.0,), "peak_reserved_gib": (60.0,)}, "peak_allocated_gib = 70: "
         "is more than peak_reserved_gib = 60, of which it is a part"),
    ],
)  # fmt: skip
def test_contradictions_with_itself_or_the_prediction_are_refused(
    fields: dict[str, float], words: str, prediction: Prediction
) -> None:
    with pytest.raises(SpecError, match=words):
        compare_logged(prediction.to_json(), LoggedRun(**fields))  # type: ignore[arg-type]


def test_a_peak_below_the_parameters_is_noted(prediction: Prediction) -> None:
    comparison = compare_logged(prediction.to_json(), LoggedRun(step_time_s=1.0, peak_reserved_gib=(0.0715,)))
    assert any(note.startswith("peak_reserved_gib = 0.0715 is less than the ") for note in comparison.notes)
    plain = compare_logged(prediction.to_json(), LoggedRun(step_time_s=1.0, peak_reserved_gib=(7.15,)))
    assert not any("less than" in note for note in plain.notes)


@pytest.mark.parametrize(("factor", "noted"), [(1000.0, True), (310.0, True), (290.0, False), (3100.0, False)])
def test_a_log_in_milliseconds_is_noted(factor: float, noted: bool, prediction: Prediction) -> None:
    logged = LoggedRun(step_times_s=(factor * prediction.step_time_s,))
    notes = compare_logged(prediction.to_json(), logged).notes
    assert any(note.endswith("if the log is in ms, write seconds") for note in notes) == noted


def test_both_may_be_given_when_they_agree(prediction: Prediction) -> None:
    logged = LoggedRun(step_times_s=(1.99, 2.0, 2.02), tokens_per_s_per_device=(1024.0,))
    assert compare_logged(prediction.to_json(), logged).rows[0].measured == 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mfu: 0.45", "log.yaml:1:1: mfu: is not a known key; write step_time_s or tokens_per_s_per_device"),
        ("peak_memory_gib: 70", "log.yaml:1:1: peak_memory_gib: is not a known key; write peak_reserved_gib"),
        ("step_time_ms: 70", "write step_time_s, in seconds"),
        ("tps: 70", "write tokens_per_s_per_device"),
        ("step_times_s: 3", "step_times_s = 3: must be a list"),
        ("step_times_s: []", "step_times_s = \\[\\]: must not be empty"),
        ("step_times_s: [1.0, -1.0]", "step_times_s.1 = -1.0: must be greater than 0"),
        ("peak_device_gib: x", 'peak_device_gib = "x": must be a list'),
        ("schema_version: 2\nstep_time_s: 1", "schema_version = 2"),
        ("meta: {}\nruns: []", "holds published runs; `simplan accuracy`"),
        ("model: {}\ncluster: {}", "is a scenario; give the log of a run, or its measurement.json"),
        ("- 1", "must be a mapping"),
    ],
)
def test_a_log_is_read_strictly(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_measured(text, "log.yaml")


def test_yaml_and_json_say_the_same(prediction: Prediction) -> None:
    expected = LoggedRun(step_times_s=(2.0, 3.0), peak_reserved_gib=(71.5,))
    assert parse_measured("step_times_s: [2.0, 3]\npeak_reserved_gib: 71.5\n", "log.yml") == expected
    assert parse_measured('{"step_times_s": [2.0, 3], "peak_reserved_gib": [71.5]}', "log.json") == expected
    full = measure(prediction)
    assert parse_measured(full.model_dump_json(), "measurement.json") == full
    assert isinstance(full, Measurement)


def test_words(prediction: Prediction) -> None:
    slow = LoggedRun(step_times_s=(9.0, *[1.5 * prediction.step_time_s] * 5))
    text = logged_text(compare_logged(prediction.to_json(), slow))
    assert re.search(r"-[\d.]+ ms .*: backward .*\([\d.]+ ms .*, \+/- \d+ %\)", text)
    assert says(text, "first step", "warm-up", "1.1 times the median of the later half")
    assert "only `simplan run` can say" in text
    assert "/how-to/troubleshooting/" in text
    as_predicted = LoggedRun(step_time_s=prediction.step_time_s)
    assert "/how-to/troubleshooting/" not in logged_text(compare_logged(prediction.to_json(), as_predicted))
    noisy = LoggedRun(step_times_s=tuple(prediction.step_time_s * f for f in (0.8, 0.9, 1.01, 1.1, 1.3, 1.01)))
    assert "it is not significant" in candidate_causes(compare_logged(prediction.to_json(), noisy))


def test_causes_of_an_error_beyond_every_uncertainty_are_candidates(prediction: Prediction) -> None:
    """Ten times the step: no deviation of a term comes near it, so the terms that take most of the step are named."""
    comparison = compare_logged(prediction.to_json(), LoggedRun(step_time_s=10 * prediction.step_time_s))
    sentence = candidate_causes(comparison)
    assert sentence.startswith("no term's uncertainty explains the difference of -")
    assert "could come from" not in sentence
    named = sentence.partition("candidates are the largest terms: ")[2]
    assert [name.rpartition(" (")[0] for name in re.split(r"(?<=\)), ", named)] == ["backward", "forward"]


def test_small_causes_of_a_difference_are_not_named(prediction: Prediction) -> None:
    """A fifth of the step: compute is within its deviations, and P2P sends between stages are far outside of theirs."""
    comparison = compare_logged(prediction.to_json(), LoggedRun(step_time_s=1.2 * prediction.step_time_s))
    (sends,) = [part for part in comparison.parts if part.share == "exposed_communication"]
    assert comparison.difference_s is not None
    assert abs(comparison.difference_s) > 10 * sends.std_s > 0
    sentence = candidate_causes(comparison)
    assert "could come from: backward" in sentence
    assert sends.part not in sentence


@pytest.mark.parametrize(("factor", "bound"), [(1.2, "<= x "), (0.995, ">= x ")])
def test_factor_of_overlapped_communication_is_a_bound(factor: float, bound: str) -> None:
    """Time that is hidden slows down as well, so a smaller change suffices."""
    overlapped = predicted(ParallelPlan(dp_replicate=2))
    text = logged_text(compare_logged(overlapped.to_json(), LoggedRun(step_time_s=factor * overlapped.step_time_s)))
    (row,) = [line for line in text.splitlines() if line.startswith("data-parallel communication")]
    assert bound in row
    assert bound not in next(line for line in text.splitlines() if line.startswith("backward"))
    assert "a bound for communication that overlaps compute (<= or >=)" in text


@pytest.mark.parametrize("software", ["torch", "maxtext", "megatron-core", "deepspeed"])
def test_framework_of_a_log_is_held_against_the_predicted_one(prediction: Prediction, software: str) -> None:
    written_by = {"megatron-core": {"Megatron-LM", "Megatron Bridge", "NeMo"}}
    written_by["deepspeed"] = {"DeepSpeed", "the Hugging Face Trainer"}
    document = prediction.to_json()
    document["inputs"] |= {"software": f"{software}, compiled"}
    known = KNOWN_LOGS.replace(" and ", ", ").split(", ")
    for program in (*known, "torch.profiler", None):
        logged = LoggedRun(step_time_s=prediction.step_time_s, program=program)
        text = logged_text(compare_logged(document, logged))
        warning = f"warning: the log is of {program}, and the predicted job has software: {software};"
        assert text.startswith(warning) is (program in known and program not in written_by.get(software, ())), program
