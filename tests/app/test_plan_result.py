"""What the page Plan shows: shares that sum to the step, tiers as the ranks sit, and the same numbers twice."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from app.figures.plan import BETWEEN, WITHIN, plan_result, waterfall_figure
from app.fitting import document_text
from app.predictions import headline_of_prediction, idle_memory_words, prediction_text, quick_headline
from app.state import USUAL
from simplan.predict import predict
from simplan.scenario import parse_scenario
from simplan.training import TrainingBudget
from tests.app.figures.drawn import checked
from tests.app.questions import text_of
from tests.support.problems import says

NAMES = ["tensor-fsdp", "zb-h1", "moe-pipeline", "offload-optimizer", "four-dimensions"]


@pytest.mark.parametrize("name", NAMES)
def test_parts_sum_to_the_step_and_agree_with_the_split(name: str) -> None:
    result = plan_result(text_of(name), 0)
    prediction = result.prediction
    splits = {m.rank: split for m, split in zip(prediction.memory, prediction.splits, strict=True)}
    for rank, parts in result.steps.items():
        assert sum(part.seconds for part in parts) == pytest.approx(prediction.step_time_s, rel=1e-9)
        exposed = sum(part.seconds for part in parts if part.group == "exposed communication")
        assert exposed == pytest.approx(splits[rank].exposed_communication_s, rel=1e-9, abs=1e-12)
        figure = checked(waterfall_figure(parts, prediction.step_time_s))
        unit_s = 1.0 if prediction.step_time_s >= 1 else 1e-3
        *bars, step = figure.data
        ends = [bar.base[0] + bar.x[0] for bar in bars]
        assert [ends[-1], step.x[0]] == pytest.approx([prediction.step_time_s / unit_s] * 2)
        assert [bar.base[0] for bar in bars[1:]] == pytest.approx(ends[:-1])


def test_parts_sum_to_a_step_that_is_not_simulated_in_full() -> None:
    """Thousands of microbatches: three are simulated, and communication of the others is exposed as well."""
    result = plan_result(text_of("fsdp").replace("global_batch_size: 8", "global_batch_size: 16000"), 0)
    assert any("microbatches are simulated" in words for words in result.prediction.assumptions)
    for parts in result.steps.values():
        assert sum(part.seconds for part in parts) == pytest.approx(result.prediction.step_time_s, rel=1e-9)


def test_tiers_are_those_of_the_nodes() -> None:
    """8 devices a node: tensor parallelism over 8 stays inside, shards over 2 nodes do not."""
    inside = plan_result(text_of("tensor-fsdp"), 0)
    names = {part.name for parts in inside.steps.values() for part in parts}
    assert {f"exposed {WITHIN}", f"exposed {BETWEEN}"} <= names
    one_node = plan_result(text_of("fsdp"), 0)
    names = {part.name for parts in one_node.steps.values() for part in parts}
    assert f"exposed {WITHIN}" in names
    assert f"exposed {BETWEEN}" not in names


@pytest.mark.parametrize(
    "name",
    ["tensor-fsdp", "zb-h1", "interleaved", "pipeline-hsdp", "reduced once", "lora", "offload-optimizer", "zb-2p"],
)
def test_quick_and_whole_predictions_say_the_same(name: str) -> None:
    reduced_once = text_of("fsdp").replace("plan: {", "plan: {grad_sync: step, ")
    text = reduced_once if name == "reduced once" else text_of(name)
    early = quick_headline(parse_scenario(text))
    assert early is not None
    assert early.step_time_interval_s is None
    final = headline_of_prediction(plan_result(text, 0).prediction)
    for name in ("step_time_s", "mfu", "samples_per_s", "tokens_per_s"):
        assert getattr(early, name) == pytest.approx(getattr(final, name), rel=1e-9)
    for name in ("device_bytes", "device_interval_bytes", "capacity_bytes", "short_bytes"):
        assert getattr(early.memory, name) == getattr(final.memory, name)
    assert early.memory_verdict == final.memory_verdict


def test_a_whole_training_costs_what_its_hours_cost() -> None:
    headline = headline_of_prediction(plan_result(text_of("fsdp"), 0).prediction)
    day = headline.training(headline.tokens_per_s * 86_400, 2.0)
    one_step_days = headline.step_time_s / 86_400
    assert 1.0 <= day.days <= 1.0 + one_step_days, "whole steps"
    assert (day.device_hours, day.cost) == pytest.approx((192.0 * day.days, 384.0 * day.days))
    assert headline.training(1e9, None).cost is None


def test_page_and_predict_agree_on_the_training() -> None:
    """Same numbers from the page's rates as from the keys of the scenario, exactly."""
    text = text_of("fsdp")
    scenario = parse_scenario(text)
    scenario = replace(scenario, budget=TrainingBudget(num_tokens=3e11, price_per_device_hour=2.5))
    prediction = scenario.predict()
    headline = headline_of_prediction(plan_result(text, 0).prediction)
    assert prediction.training_run is not None
    assert headline.training(3e11, 2.5) == prediction.training_run


def test_quick_headline_has_no_interval_of_days() -> None:
    headline = quick_headline(parse_scenario(text_of("fsdp")))
    assert headline is not None
    training = headline.training(1e12, 2.0)
    assert (training.days_interval, training.cost_interval) == (None, None)


def test_downloaded_prediction_has_the_training_of_the_keys() -> None:
    text = text_of("fsdp").replace("training: {", "training: {num_tokens: 1e9, ")
    assert json.loads(prediction_text(text, 0))["training_run"]["num_tokens"] == 1e9


def test_results_travel_between_processes() -> None:
    result = plan_result(text_of("zb-h1"), 0)
    assert pickle.loads(pickle.dumps(result)) == result
    assert not result.prediction.timeline.spans


def test_idle_memory_of_a_plan_that_recomputes_is_told() -> None:
    """The first plan leaves three quarters free; the best plan of the same question leaves a tenth."""
    first = parse_scenario(document_text(USUAL)).job
    assert says(idle_memory_words(predict(first)), "71%", "device memory", "recomputes")
    assert idle_memory_words(predict(first.with_changes(recompute="none"))) == ""
    assert idle_memory_words(predict(first.with_changes(tp=1, dp_shard=64, microbatch_size=2))) == ""
