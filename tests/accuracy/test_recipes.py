"""Settings of recipes that tables of published runs name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan import catalog
from simplan.accuracy.evaluate import predict_runs
from simplan.accuracy.published_job import job_of_published_run
from simplan.accuracy.reading import read_published
from simplan.accuracy.recipe import RunConditions, Settings, parse_recipes, recipes_of, shipped_recipes
from simplan.accuracy.schema import PublishedRun
from simplan.errors import SpecError
from tests.accuracy.runs import run, run_data


def bridge(version: str = "NeMo container 26.02", **changes: Any) -> PublishedRun:
    return run(software__framework="megatron-bridge", software__version=version, **changes)


def qwen(version: str, device: str, precision: str, **changes: Any) -> PublishedRun:
    """Qwen3 30B-A3B in a container of this version."""
    experts = {"num_experts": 128, "top_k": 8, "moe_intermediate_size": 768}
    model = {"model__family": "moe", "model__hidden_size": 2048, "model__moe": experts}
    how = {"cluster__device": device, "plan__precision": precision}
    return bridge(f"NeMo container {version}", **model, **how, **changes)


def test_a_recipe_holds_for_the_runs_it_names() -> None:
    def ranks(**changes: Any) -> list[int]:
        found = [recipe.sets.lora_rank for recipe in recipes_of(bridge(model__name="llama3-70b", **changes))]
        return [rank for rank in found if rank is not None]

    assert ranks(task="lora") == [16]
    assert ranks(task="sft") == []
    assert not any(recipe.sets.lora_rank for recipe in recipes_of(bridge(model__name="llama3-8b", task="lora")))


def test_a_recipe_begins_with_a_release() -> None:
    def reduced(version: str) -> list[str | None]:
        runs = run(software__framework="nemo", software__version=version)
        return [recipe.sets.grad_dtype for recipe in recipes_of(runs)]

    assert reduced("24.05") == []
    assert reduced("24.07") == ["bf16"]


def test_gradients_are_reduced_as_the_recipe_says_unless_the_run_does() -> None:
    assert job_of_published_run(bridge()).job.plan.grad_dtype == "bf16"
    assert job_of_published_run(bridge(plan__grad_dtype="fp32")).job.plan.grad_dtype == "fp32"
    assert job_of_published_run(run()).job.plan.grad_dtype is None


@pytest.mark.parametrize(("task", "width"), [("pretrain", 8 + 2), ("sft", 4 + 2)])
def test_optimizer_states_of_nemo_are_in_16_bits_where_models_are_tuned(task: str, width: int) -> None:
    job = job_of_published_run(
        run(software__framework="nemo", software__version="NeMo24.07", task=task, plan__precision="fp8")
    )
    assert job.job.software.state(job.job.training, job.job.plan).optimizer_bytes("adamw") == width


def test_stages_of_a_rank_that_a_table_has_no_column_for_are_those_of_the_script() -> None:
    shape: dict[str, Any] = {
        "model__num_hidden_layers": 40,
        "cluster__num_devices": 8,
        "plan__pp": 4,
        "plan__schedule": "1f1b",
    }
    tuned: dict[str, Any] = {"software__framework": "nemo", "software__version": "NeMo24.07", "task": "sft", **shape}
    tuned |= {"plan__dp_shard": 2, "plan__precision": "fp8"}
    plan = job_of_published_run(run(**tuned, model__name="llama2-13b")).job.plan
    assert (plan.virtual_stages, plan.schedule, len(plan.stage_layers or ())) == (10, "interleaved_1f1b", 40)
    assert job_of_published_run(run(**tuned, model__name="another-13b")).job.plan.virtual_stages == 1


def test_deepseek_v3_has_a_layer_for_the_token_after_the_next_and_kimi_k2_has_none() -> None:
    moe = {"top_k": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_dense_layers": 3}
    of_model: dict[str, Any] = {"model__family": "moe", "model__gated_mlp": True, "model__hidden_size": 7168}
    found = [
        job_of_published_run(
            bridge(**of_model, model__moe={"num_experts": experts, **moe}, **changes)
        ).job.model.mtp_num_layers
        for experts, changes in ((256, {}), (384, {}), (256, {"task": "sft"}))
    ]
    assert found == [1, 0, 0]
    without = bridge(
        "NeMo container 25.11", **of_model, model__moe={"num_experts": 256, **moe}, cluster__device="gb300"
    )
    assert job_of_published_run(without).job.model.mtp_num_layers == 0  # as its table says


def test_what_recipes_set_is_told() -> None:
    assert "as its recipe says: gradients reduced in bf16" in job_of_published_run(bridge()).notes


def test_the_shipped_recipes_say_what_they_set_of_devices_that_there_are() -> None:
    assert set(shipped_recipes()) == {"megatron-bridge", "nemo"}
    listed = [recipe for recipes in shipped_recipes().values() for recipe in recipes]
    assert all(list(recipe.sets.words()) for recipe in listed)
    named = {device for recipe in listed for kind in recipe.where for device in kind.devices}
    assert named
    assert named <= set(catalog.names("devices"))


def test_the_readme_lists_the_keys_of_recipes() -> None:
    text = (Path(__file__).parents[2] / "scenarios" / "published" / "README.md").read_text(encoding="utf-8")
    for name, spec in (("where", RunConditions), ("sets", Settings)):
        listed = text.partition(f"- `{name}`: ")[2].partition("\n- ")[0].partition("\n\n")[0]
        keys = re.sub(r"\([^)]*\)", "", listed)
        assert {*re.findall(r"`(\w+)`", keys)} == {*spec.model_fields}, name


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"sets": {"expert_dispatcher": "deepep"}}, "recipes.megatron-lm.0.sets.expert_dispatcher: is not a known key; "
         "did you mean expert_dispatch?"),
        ({"sets": {"expert_dispatch": "deep"}},
         'recipes.megatron-lm.0.sets.expert_dispatch = "deep": is not a known choice'),
        ({"where": [{"devise": ["gb200"]}]}, "recipes.megatron-lm.0.where.0.devise: is not a known key; did you mean"),
        ({"where": [{"since": "26"}]},
         'where.0.since = "26": must be the year and month of a release, such as "26.04"'),
        ({"where": [{"since": 26.04}]}, 'where.0.since = 26.04: must be text; write "26.04"'),
        ({"sets": {"states": {"momentum": 2}}}, "sets.states.momentum: is not a known key"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_recipe_is_a_sentence(recipe: dict[str, Any], sentence: str) -> None:
    """In a file of recipes and in a file of runs, with its line."""
    data = {"recipes": {"megatron-lm": [{"sets": {}, "source": "a test"} | recipe]}}
    with pytest.raises(SpecError) as caught:
        parse_recipes(yaml.safe_dump(data), "recipes.yaml")
    assert sentence in str(caught.value)
    assert "recipes.yaml:" in str(caught.value)


def test_a_file_of_runs_brings_its_own_recipes(tmp_path: Path) -> None:
    """For the runs that they name, over those that simplan knows, and for no run of another file."""
    sets = {"recompute_layers": 2, "grad_dtype": "fp32"}
    recipes = {"megatron-lm": [{"where": [{"models": ["small"]}], "sets": sets, "source": "a test"}]}
    whole = {"meta": {}, "recipes": recipes, "runs": [run_data("own"), run_data("other", model__name="big")]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(whole))
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump({"meta": {}, "runs": [run_data("plain")]}))
    outcomes = {outcome.run.id: outcome.predicted for outcome in predict_runs(read_published([tmp_path]))}
    said = "as its recipe says: gradients reduced in fp32, the first 2 blocks of each stage are recomputed"
    assert {name for name, predicted in outcomes.items() if predicted and said in predicted.notes} == {"own"}
    own, plain = outcomes["own"], outcomes["plain"]
    assert own is not None
    assert plain is not None
    assert own.step_time_s > plain.step_time_s
    last = parse_recipes(yaml.safe_dump({"recipes": {"nemo": [{"sets": {"lora_rank": 8}, "source": "a test"}]}}), "r")
    tuned = run(software__framework="nemo", task="lora")
    assert job_of_published_run(tuned, last).job.model.lora_rank == 8
    assert job_of_published_run(tuned, last).job.model.lora_targets == ("qkv",), "as the shipped recipe has it"


def test_the_rate_of_a_run_s_machine_is_in_place_of_the_catalogue_s() -> None:
    question = job_of_published_run(run(cluster__matmul_flop_per_s={"bf16": 200e12}))
    usual = catalog.device("a100-sxm-80gb").matmul_flop_per_s
    assert question.job.cluster.device.matmul_flop_per_s == usual | {"bf16": 200e12}
    assert "best GEMM rates of its machine, measured by its owners: bf16 200 TFLOP/s" in question.notes


@pytest.mark.parametrize(
    ("plan", "overlaps", "why"),
    [
        ({"pp": 1, "schedule": "none"}, True, None),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, True, None),
        ({"pp": 2}, False, "plan.virtual_stages = 1"),
        ({"pp": 1, "schedule": "none", "recompute": "full"}, False, "recomputation of experts"),
    ],
)
def test_a_run_has_no_overlap_that_its_framework_refuses(plan: dict[str, Any], overlaps: bool, why: str | None) -> None:
    """Its recipe has it, for other plans: the run is predicted without, and says so."""
    changes = {f"plan__{key}": value for key, value in plan.items()}
    question = job_of_published_run(qwen("26.06", "gb300", "mxfp8", plan__ep=2, **changes))
    assert question.job.software.expert_overlap is overlaps
    said = [note for note in question.notes if note.startswith("no expert dispatch overlapped with another microbatch")]
    assert said == ([] if why is None else [f"{BESIDE}: megatron-bridge does not support it with {why}"])


BESIDE = "no expert dispatch overlapped with another microbatch"


@pytest.mark.parametrize(
    ("version", "device", "precision", "found"),
    [
        ("25.09", "gb200", "mxfp8", ("all_to_all", False, False)),
        ("26.02", "gb200", "bf16", ("hybridep", False, False)),
        ("26.02", "b200-sxm", "mxfp8", ("all_to_all", False, False)),
        ("26.04.01", "b200-sxm", "mxfp8", ("hybridep", False, False)),
        ("26.04.01", "gb300", "mxfp8", ("hybridep", False, False)),
        ("26.06", "gb300", "mxfp8", ("hybridep", True, True)),
        ("26.06", "gb300", "bf16", ("hybridep", False, False)),
    ],
)
def test_tokens_come_to_experts_as_the_recipe_of_the_container_has_it(
    version: str, device: str, precision: str, found: tuple[str, bool, bool]
) -> None:
    question = job_of_published_run(qwen(version, device, precision, plan__ep=2, plan__pp=1, plan__schedule="none"))
    software = question.job.software
    assert (software.expert_dispatch, software.expert_overlap, software.fused_experts) == found
    told = [
        note for note in question.notes if note.startswith("as its recipe says: tokens brought to experts by hybridep")
    ]
    assert bool(told) is (found[0] == "hybridep")


@pytest.mark.parametrize(
    ("version", "device", "precision", "found"),
    [
        ("26.04", "gb300", "mxfp8", False),
        ("26.06", "gb300", "mxfp8", True),
        ("26.06", "gb300", "bf16", False),
        ("26.06", "h100-sxm-80gb", "fp8", False),
    ],
)
def test_attention_is_in_8_bits_where_the_recipe_has_it(version: str, device: str, precision: str, found: bool) -> None:
    question = job_of_published_run(qwen(version, device, precision))
    assert question.job.software.fp8_dot_product_attention is found
    assert ("as its recipe says: FP8 attention" in question.notes) is found
