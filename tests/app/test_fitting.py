"""The form offers what the rulebook allows: values of the plan, presets and clusters, and changes that fit."""

from __future__ import annotations

import pytest

from app.figures.plans import importance_figure, search_plans, setting_effects
from app.fitting import (
    applied,
    changed,
    degrees_of,
    document_text,
    fitted,
    mended,
    microbatch_sizes,
    valid_values,
    with_plan,
)
from app.state import START, USUAL
from simplan import catalog
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import predict, predict_step
from simplan.scenario import parse_scenario
from simplan.search.fixes import fixes
from tests.app.figures.drawn import checked
from tests.app.questions import TINY, is_valid
from tests.support.problems import says


@pytest.mark.parametrize("key", ["tp", "cp", "pp", "dp_replicate", "ep"])
def test_offered_degrees_are_those_that_scenarios_accept(key: str) -> None:
    offered = degrees_of(USUAL, key)
    divisors = [size for size in range(1, 65) if 64 % size == 0]
    candidates = {size: changed(USUAL, key, size) for size in divisors}
    kept = [size for size, candidate in candidates.items() if candidate["plan"].get(key, 1) == size]
    assert offered == tuple(size for size in kept if is_valid(candidates[size]))
    assert 16 not in degrees_of(USUAL, "pp"), "8 tensor-parallel x 16 pipeline ranks are more than 64 devices"


def test_offered_options_follow_the_others() -> None:
    pipeline = changed(USUAL, "pp", 4)
    assert valid_values(pipeline, "schedule", tuple(SCHEDULE_FACTS)) != tuple(SCHEDULE_FACTS)
    assert microbatch_sizes(USUAL) == (1, 2, 4, 8, 16)  # 128 sequences over 8 data-parallel ranks
    assert microbatch_sizes(pipeline) == (1, 2, 4, 8, 16, 32, 64)
    broken = USUAL | {"training": {"global_batch_size": "many"}}
    assert valid_values(broken, "tp", (1, 2, 3)) == (1, 2, 3), "nothing is hidden while another section is wrong"


def test_every_preset_replaces_the_model_of_the_first_page() -> None:
    for start in (START, USUAL):
        documents = {preset: start | {"model": {"preset": preset}} for preset in catalog.names("models")}
        assert [preset for preset, document in documents.items() if not is_valid(mended(document)[0])] == []
    assert not is_valid(fitted(documents["gpt2-1.5b"])), "25 heads are not for 8 ranks"


@pytest.mark.parametrize(("preset", "heads"), [("gpt3-175b", 96), ("gpt2-1.5b", 25)])
def test_tp_pads_the_vocabulary_of_gpt(preset: str, heads: int) -> None:
    document = fitted(USUAL | {"model": {"preset": preset}})
    assert document["model"]["vocab_size"] == 50264 == -(-50257 // 8) * 8
    assert is_valid(document) is (heads % 8 == 0)
    padded_by_megatron = fitted(USUAL | {"model": {"preset": preset}, "software": "megatron-core"})
    assert "vocab_size" not in padded_by_megatron["model"]
    without_tp, [note] = mended(USUAL | {"model": {"preset": "gpt2-1.5b"}})
    assert (without_tp["plan"]["tp"], without_tp["plan"]["dp_shard"]) == (1, 64)
    assert says(note, "tp is now 1", "plan.tp = 8: ", "model.num_attention_heads = 25", "use 5 or 25")


@pytest.mark.parametrize("devices", [8, 24, 100, 1024])
def test_another_cluster_keeps_the_plan_valid(devices: int) -> None:
    cluster = {"preset": "dgx-h100", "num_devices": devices}
    training = USUAL["training"] | {"global_batch_size": 3 * devices}
    document, _ = mended(USUAL | {"cluster": cluster, "training": training})
    assert is_valid(document)


def test_an_applied_fix_is_the_job_that_was_predicted() -> None:
    document = changed(changed(USUAL, "tp", 1), "recompute", "none")
    prediction, _ = predict_step(parse_scenario(document_text(document)).job, name="x")
    assert prediction.fits is False
    changes = fixes(prediction)
    assert changes
    for fix in changes:
        assert parse_scenario(document_text(applied(document, fix.changes))).job == fix.job


@pytest.mark.slow
def test_no_fitting_point_of_importance_beats_the_search() -> None:
    cluster, training = {"preset": "dgx-a100-40gb", "num_devices": 8}, {"global_batch_size": 32}
    document = {**USUAL, "cluster": cluster, "model": {"preset": "llama2-7b"}, "training": training}
    asked = {key: value for key, value in document.items() if key != "plan"}
    best = search_plans(document_text(asked | {"search": {"top": 1}}), lambda _: None).ranked[0]
    effects = setting_effects(document_text(with_plan(document, best)), 0.95)
    assert [effect for effect in effects if effect.fits and effect.step_time_s < best.step_time_s * (1 - 1e-9)] == []
    assert any(effect.fits and effect.searched for effect in effects)


def test_best_plan_of_the_first_question_is_beaten_by_no_point_of_importance() -> None:
    """The form may choose every point."""
    effects = setting_effects(document_text(START), 0.95)
    assert [(effect.key, effect.value) for effect in effects if effect.fits and effect.step_time_change < 0] == []
    assert any(effect.fits for effect in effects)


@pytest.mark.parametrize(("software", "offered"), [("torch", False), ("maxtext", True)])
def test_recomputation_that_the_framework_lacks_is_not_offered(software: str, offered: bool) -> None:
    document = {**USUAL, "software": software, "plan": {"dp_shard": 64, "recompute": "full"}}
    values = valid_values(document, "recompute", ("none", "full", "qkv_proj_offloaded"))
    assert ("qkv_proj_offloaded" in values) is offered


def test_importance_is_the_change_that_predict_has() -> None:
    document = {**TINY, "plan": {"dp_shard": 4}}
    base = predict(parse_scenario(document_text(document)).job, name="x")
    effects = setting_effects(document_text(document), 1.0)
    assert {"tp", "pp", "zero_stage", "recompute", "microbatch_size"} <= {effect.key for effect in effects}
    for effect in effects[:: max(1, len(effects) // 6)]:
        prediction = predict(parse_scenario(document_text(changed(document, effect.key, effect.value))).job, name="x")
        assert effect.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-4)
        assert effect.step_time_change == pytest.approx(prediction.step_time_s / base.step_time_s - 1, abs=1e-4)
        assert (effect.device_bytes, effect.fits) == (prediction.worst_memory.device_bytes, prediction.fits)
    drawn = checked(importance_figure(effects))
    assert sum(len(trace.x) for trace in drawn.data) == len(effects)
    largest = max(effects, key=lambda effect: abs(effect.step_time_change))
    assert drawn.layout.yaxis.categoryarray[0] == largest.key, "the most important setting is on top"
    sizes, capacity = sorted(effect.device_bytes for effect in effects), base.capacity_bytes
    assert capacity is not None
    limit = sizes[len(sizes) // 2]
    for effect in setting_effects(document_text(document), (limit + 0.5) / capacity):
        assert effect.fits is (effect.device_bytes <= limit), "the limit of a search, not the whole device"
