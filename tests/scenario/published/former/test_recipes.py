"""Settings of the scripts behind published tables."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.accuracy.run import PublishedRun
from simplan.errors import SpecError
from simplan.scenario.published.former.recipes import shipped_recipes
from simplan.scenario.published.reading import parse_published
from tests.scenario.published.former.former_runs import former, former_text
from tests.support.problems import says


def bridge(version: str = "NeMo container 26.02", **changes: Any) -> PublishedRun:
    return former(software__framework="megatron-bridge", software__version=version, **changes)


def qwen(version: str, device: str, precision: str, **changes: Any) -> PublishedRun:
    """Qwen3 30B-A3B in a container of this version."""
    experts = {"num_experts": 128, "top_k": 8, "moe_intermediate_size": 768}
    model = {"model__family": "moe", "model__hidden_size": 2048, "model__moe": experts}
    how = {"cluster__device": device, "plan__precision": precision}
    return bridge(f"NeMo container {version}", **model, **how, **changes)


@pytest.mark.parametrize(("version", "grad_dtype"), [("24.05", None), ("24.07", "bf16"), ("", None)])
def test_recipe_begins_with_a_release(version: str, grad_dtype: str | None) -> None:
    assert former(software__framework="nemo", software__version=version).known_job.plan.grad_dtype == grad_dtype


def test_printed_setting_wins_over_the_recipe() -> None:
    reduced = bridge()
    assert reduced.known_job.plan.grad_dtype == "bf16"
    assert reduced.measured.sources.keys() == {"plan.grad_dtype"}
    assert any(note.startswith("plan.grad_dtype: NVIDIA-NeMo/Megatron-Bridge: docs/") for note in reduced.notes)
    assert bridge(plan__grad_dtype="fp32").known_job.plan.grad_dtype == "fp32"
    assert former().known_job.plan.grad_dtype is None


def test_stages_without_a_column_are_those_of_the_script() -> None:
    tuned: dict[str, Any] = {"software__framework": "nemo", "software__version": "NeMo24.07", "task": "sft"}
    tuned |= {"model__num_hidden_layers": 40, "cluster__num_devices": 8, "plan__pp": 4, "plan__dp_shard": 2,
              "plan__zero_stage": 1}  # fmt: skip
    plan = former(**tuned, model__name="llama2-13b").known_job.plan
    assert (plan.virtual_stages, plan.schedule, len(plan.stage_layers or ())) == (10, "interleaved_1f1b", 40)
    assert former(**tuned, model__name="another-13b").known_job.plan.virtual_stages == 1


def test_shipped_recipes_name_devices_of_the_catalog() -> None:
    assert set(shipped_recipes()) == {"megatron-bridge", "nemo"}
    listed = [recipe for recipes in shipped_recipes().values() for recipe in recipes]
    named = {device for recipe in listed for kind in recipe.where for device in kind.devices or ()}
    assert named
    assert named <= set(catalog.names("devices"))


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"sets": {"expert_dispatcher": "deepep"}},
         "recipes.megatron-lm.0.sets.expert_dispatcher: is not ... known ... did you mean expert_dispatch?"),
        ({"where": [{"devise": ["gb200"]}]}, "recipes.megatron-lm.0.where.0.devise: is not ... known ... did you mean"),
        ({"where": [{"since": "26"}]},
         'where.0.since = "26": ... release ... "26.04"'),
        ({"where": [{"since": 26.04}]}, 'where.0.since = 26.04: must be text; write "26.04"'),
    ],
)  # fmt: skip
def test_wrong_recipe_is_refused_in_a_sentence(recipe: dict[str, Any], sentence: str) -> None:
    text = former_text({"megatron-lm": [{"sets": {}, "source": "a test"} | recipe]})
    with pytest.raises(SpecError) as caught:
        parse_published(text, "f")
    assert says(str(caught.value), sentence)


def test_recipes_of_a_file_come_last() -> None:
    sets = {"recompute_layers": 2, "grad_dtype": "fp32"}
    recipes = {"megatron-lm": [{"where": [{"models": ["small"]}], "sets": sets, "source": "a test"}]}
    plan = former(recipes).known_job.plan
    assert (plan.recompute, plan.recompute_layers, plan.grad_dtype) == ("full", 2, "fp32")
    assert former(recipes, model__name="big").known_job.plan.recompute == "none"
    nemo: dict[str, Any] = {"software__framework": "nemo", "software__version": "NeMo24.07", "task": "lora"}
    tuned = former({"nemo": [{"sets": {"lora_rank": 8}, "source": "a test"}]}, **nemo)
    assert tuned.known_job.model.lora_rank == 8
    assert tuned.known_job.model.lora_targets == ("qkv",), "as the shipped recipe has it"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"pp": 1, "ep": 2}, None),
        ({"pp": 2, "ep": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, None),
        ({"pp": 2, "ep": 2}, "plan.virtual_stages = 1"),
        ({"pp": 1, "ep": 2, "recompute": "full"}, "recomputation of experts"),
        ({"pp": 1, "ep": 1}, "plan.ep = 1"),
    ],
)
def test_run_has_no_overlap_that_its_framework_refuses(plan: dict[str, Any], why: str | None) -> None:
    """Its recipe has it, for other plans."""
    run = qwen("26.06", "gb300", "mxfp8", **{f"plan__{key}": value for key, value in plan.items()})
    assert run.known_job.software.expert_overlap is (why is None)
    without = "no expert dispatch overlapped with another microbatch: megatron-bridge does not support it with "
    assert [note for note in run.notes if note.startswith(without)] == ([] if why is None else [without + why])


@pytest.mark.parametrize(
    ("version", "device", "precision", "expected"),
    [
        ("25.09", "gb200", "mxfp8", ("all_to_all", False, False, False)),
        ("26.02", "gb200", "bf16", ("hybridep", False, False, False)),
        ("26.02", "b200-sxm", "mxfp8", ("all_to_all", False, False, False)),
        ("26.04.01", "b200-sxm", "mxfp8", ("hybridep", False, False, False)),
        ("26.06", "gb300", "mxfp8", ("hybridep", True, True, True)),
        ("26.06", "gb300", "bf16", ("hybridep", False, False, False)),
        ("26.06", "h100-sxm-80gb", "fp8", ("hybridep", False, False, False)),
    ],
)
def test_expert_settings_are_those_of_the_containers_recipe(
    version: str, device: str, precision: str, expected: tuple[str, bool, bool, bool]
) -> None:
    software = qwen(version, device, precision, plan__ep=2, plan__pp=1).known_job.software
    settings = (software.expert_dispatch, software.expert_overlap, software.fused_experts)
    assert (*settings, software.fp8_dot_product_attention) == expected
