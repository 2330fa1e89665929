"""Explanations: parts sum to wholes, and differences to differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.job_draw import random_scenario
from simplan import catalog
from simplan.explain import ExplainedTerm, Explanation, difference, explain
from simplan.explain.term import ExplainedPart, exposed_s
from simplan.plan.plan import ParallelPlan
from simplan.predict import Simulated, predict_step
from simplan.prediction import Prediction
from simplan.report.explanation import difference_text, explanation_text
from tests.cost.formulas import value_of
from tests.jobs import job_of

PLANS = {
    "ddp": ParallelPlan(dp_replicate=4, microbatch_size=2),
    "fsdp": ParallelPlan(dp_shard=4, microbatch_size=2, recompute="full"),
    "pipeline-fsdp": ParallelPlan(pp=2, dp_shard=2, microbatch_size=2),
    "tensor": ParallelPlan(tp=4, microbatch_size=2),
    "lists": ParallelPlan(dp_shard=4, microbatch_size=1),
}
LISTS = catalog.software("torch").model_copy(update={"per_rank_tensor_lists": True})


def predicted(plan: ParallelPlan) -> tuple[Prediction, Simulated]:
    model = catalog.model("gpt2-124m").model_copy(update={"vocab_size": 50304, "tied_embeddings": False})
    software = LISTS if plan == PLANS["lists"] else "torch"
    return predict_step(job_of(model, plan, software=software, global_batch_size=16), name="test")


@pytest.fixture(scope="module")
def explained() -> dict[str, Explanation]:
    return {name: explain(*predicted(plan)) for name, plan in PLANS.items()}


@pytest.mark.parametrize("name", PLANS)
def test_parts_sum_to_the_step_and_to_the_memory(name: str, explained: dict[str, Explanation]) -> None:
    explanation = explained[name]
    assert sum(part.value for part in explanation.time) == pytest.approx(explanation.step_time_s, rel=1e-9)
    assert sum(part.value for part in explanation.memory) == pytest.approx(explanation.device_bytes, rel=1e-12)
    assert all(part.formula for part in (*explanation.time, *explanation.memory, *explanation.figures))


@pytest.mark.parametrize("name", PLANS)
def test_groups_are_the_split_of_the_rank(name: str, explained: dict[str, Explanation]) -> None:
    """The same numbers by another way: ``predict`` gets them from spans."""
    explanation, split = explained[name], predicted(PLANS[name])[0].splits[explained[name].rank]
    for group, seconds in {
        "compute": split.compute_s,
        "recompute": split.recompute_s,
        "exposed communication": split.exposed_communication_s,
        "host": split.host_s,
        "optimizer": split.optimizer_s,
    }.items():
        total_s = sum(part.value for part in explanation.time if part.group == group)
        assert total_s == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_a_formula_holds_its_numbers(explained: dict[str, Explanation]) -> None:
    """124,439,808 parameters of GPT-2, of which the head is not tied here and the vocabulary padded."""
    (parameters,) = [part for part in explained["ddp"].memory if part.name == "parameters"]
    assert parameters.formula.startswith(f"{124_439_808 + 50_304 * 768 + 47 * 768:,} parameters x 4 B")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_rows_of_random_jobs_are_worth_what_their_formulas_say(seed: int) -> None:
    """By a calculator; kernels sum to their terms, and terms to the step."""
    _check_rows(*predict_step(random_scenario(seed)[1].job, name="random"))


@pytest.mark.parametrize("name", PLANS)
def test_rows_are_worth_what_their_formulas_say(name: str) -> None:
    _check_rows(*predicted(PLANS[name]))


def test_rows_of_a_step_of_many_microbatches_sum_to_it() -> None:
    """Three microbatches of 2,048 are simulated; communication and slowdowns are those of the whole step."""
    job = job_of("gpt2-124m", {"dp_shard": 8}, precision="bf16", global_batch_size=8 * 4096)
    prediction, simulated = predict_step(job, name="long")
    assert simulated.shorter is not None
    _check_rows(prediction, simulated)


def _check_rows(prediction: Prediction, simulated: Simulated) -> None:
    explanation = explain(prediction, simulated)
    assert sum(term.value for term in explanation.time) == pytest.approx(prediction.step_time_s, rel=1e-9)
    for term in (*explanation.time, *explanation.memory, *explanation.figures):
        whole = explanation.device_bytes if term.unit == "bytes" else explanation.step_time_s
        rows: tuple[ExplainedTerm | ExplainedPart, ...] = (term, *term.parts)
        for row in rows:
            worth = value_of(row.formula)
            assert worth == pytest.approx(row.value, rel=0.01, abs=1e-9 * whole), (term.name, row.name, row.formula)
        if term.parts and term.group != "exposed communication":
            assert sum(part.value for part in term.parts) == pytest.approx(term.value, rel=1e-9), term.name


def test_differences_sum_to_the_difference(explained: dict[str, Explanation]) -> None:
    first, second = explained["ddp"], explained["fsdp"]
    of_both = difference(first, second)
    assert sum(row.difference for row in of_both.time) == pytest.approx(second.step_time_s - first.step_time_s)
    assert sum(row.difference for row in of_both.memory) == pytest.approx(second.device_bytes - first.device_bytes)
    assert any(row.group == "recompute" and row.first == 0.0 for row in of_both.time)
    assert all(row.difference == 0 for row in difference(first, first).time)


def test_layers_cut_at_collectives_are_compared_as_a_whole(explained: dict[str, Explanation]) -> None:
    """Tensor-parallel ranks compute a block in parts, and a rank of its own at once: no row lacks its partner."""
    first, second = explained["ddp"], explained["tensor"]
    assert any(term.name.startswith("block forward: ") for term in second.time)
    rows = {row.name: row for row in difference(first, second).time if row.group == "compute"}
    blocks = [name for name in rows if name.startswith(("block forward", "block backward"))]
    assert sorted(blocks) == ["block backward", "block forward"]
    for name in blocks:
        sums = [sum(term.value for term in side.time if term.name.startswith(name)) for side in (first, second)]
        assert [rows[name].first, rows[name].second] == pytest.approx(sums)
        assert min(sums) > 0
    same = {row.name for row in difference(second, second).time}
    assert same == {term.name for term in second.time}


def test_categories_are_the_splits_and_name_the_main_reason(explained: dict[str, Explanation]) -> None:
    """FSDP recomputes all blocks here; DDP recomputes nothing."""
    first, second = explained["ddp"], explained["fsdp"]
    splits = [predicted(PLANS[name])[0].splits[explained[name].rank] for name in ("ddp", "fsdp")]
    of_both = difference(first, second)
    assert [row.name for row in of_both.categories] == [
        "compute",
        "recompute",
        "exposed communication",
        "wait",
        "host",
        "optimizer",
    ]
    for row in of_both.categories:
        field = f"{row.name.replace(' ', '_')}_s"
        assert row.first == pytest.approx(getattr(splits[0], field), rel=1e-9, abs=1e-9)
        assert row.second == pytest.approx(getattr(splits[1], field), rel=1e-9, abs=1e-9)
    assert sum(row.difference for row in of_both.categories) == pytest.approx(second.step_time_s - first.step_time_s)
    reason = of_both.main_category
    assert reason is not None
    assert reason.name == "recompute"
    back = difference(second, first).main_category
    assert back is not None
    assert back.name == "recompute"
    assert back.difference == pytest.approx(-reason.difference)
    assert difference(first, first).main_category is None
    document = of_both.to_json()
    assert [row["name"] for row in document["categories"]] == [row.name for row in of_both.categories]
    assert document["main_category"] == "recompute"


def test_a_difference_begins_with_its_main_reason(explained: dict[str, Explanation]) -> None:
    of_both = difference(explained["ddp"], explained["fsdp"])
    head, summary, *_ = difference_text(of_both).split("\n\n")
    assert head.splitlines()[1].startswith("The second step is longer mainly because of recompute: +")
    assert "(largest term: block recompute: norm1 to gelu, +" in head
    rows = {line[: line.index("  ", 2)].strip() for line in summary.splitlines()[1:]}
    assert rows == {"compute", "recompute", "exposed communication", "wait", "host", "optimizer"}
    same = difference_text(difference(explained["ddp"], explained["ddp"]))
    assert same.splitlines()[1] == "The step times are equal within 0.1 %."


def test_texts_name_every_part(explained: dict[str, Explanation]) -> None:
    text = explanation_text(explained["fsdp"])
    for part in (*explained["fsdp"].time, *explained["fsdp"].memory):
        assert part.name.replace("_", " ") in text.replace("_", " ")
    assert "-> test: a step" in difference_text(difference(explained["ddp"], explained["fsdp"]))
    assert max(map(len, text.splitlines())) <= 120


def test_exposure_is_shared_by_what_moves_at_once() -> None:
    """Computing from 2 to 5; one communication from 0 to 4, another from 1 to 7."""
    seconds = exposed_s(np.array([[2.0], [5.0]]), np.array([[0.0, 1.0], [4.0, 7.0]]), np.array([0, 1]), 2)
    assert seconds.tolist() == [1.0 + 0.5, 0.5 + 2.0]


def test_microbatches_in_flight_are_named_at_the_peak() -> None:
    """Stage 0 of two holds two microbatches at the worst instant of 1F1B, which is inside a backward."""
    plan = ParallelPlan(pp=2, tp=2, sequence_parallel=False, microbatch_size=1, stage_layers=(8, 4))
    explanation = explain(*predicted(plan))
    (activations,) = [part for part in explanation.memory if part.name == "activations"]
    assert "2 microbatches (of stage 0) x" in activations.formula


def test_collectives_over_other_groups_are_one_row(explained: dict[str, Explanation]) -> None:
    """4.4 s over 4 ranks that become 10.3 s over 8 are 5.9 s more, and not +10.3 s and -4.4 s."""

    def with_gathers(num_ranks: int, seconds: float) -> Explanation:
        name = f"all_gather over {num_ranks} ranks (tensor_parallel)"
        terms = (
            ExplainedTerm("exposed communication", name, seconds, "s", f"of {num_ranks}"),
            ExplainedTerm("exposed communication", "all_reduce over 2 ranks (data_parallel)", 0.1, "s", ""),
        )
        return replace(explained["ddp"], time=terms, step_time_s=seconds + 0.1)

    of_both = difference(with_gathers(4, 4.4), with_gathers(8, 10.3))
    assert [row.name for row in of_both.time] == [
        "all_gather (tensor_parallel)",
        "all_reduce over 2 ranks (data_parallel)",
    ]
    assert of_both.time[0].difference == pytest.approx(5.9)
    assert (of_both.time[0].first_formula, of_both.time[0].second_formula) == ("of 4", "of 8")
    assert "(largest term: all_gather (tensor_parallel), +5.900 s)" in difference_text(of_both)
