"""Runs of the former schema as scenarios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from simplan import catalog
from simplan.accuracy.run import PublishedRun
from simplan.errors import SpecError
from simplan.job import Job
from simplan.scenario.published.former.conversion import layers_of_stages
from simplan.scenario.published.former.frameworks import framework_defaults
from simplan.scenario.published.former.schema import Framework
from simplan.scenario.published.reading import parse_published, read_published
from tests.scenario.published.former.former_runs import former, former_text
from tests.support.problems import says
from tests.support.published import published_files

SCENARIOS = Path(__file__).resolve().parents[4] / "scenarios"
FORMER = {run.id: run for read in read_published([Path(__file__).parent / "runs.yaml"]) for run in read.runs or ()}


@pytest.fixture(scope="module")
def of_project() -> dict[str, PublishedRun]:
    return {run.id: run for read in published_files() for run in read.runs or ()}


def without_sources(run: PublishedRun) -> Job:
    """Job of a run; a model of the catalog has the same sizes as one written out, and a source."""
    return replace(run.known_job, model=run.known_job.model.with_changes(sources={}))


@pytest.mark.parametrize("name", FORMER)
def test_run_of_the_former_schema_is_its_scenario(name: str, of_project: dict[str, PublishedRun]) -> None:
    """Of many frameworks: experts, adapters, packed documents, FP8, context parallelism, NVL72 domains, images."""
    former_run, run = FORMER[name], of_project[name]
    assert without_sources(former_run) == without_sources(run)
    assert former_run.steps_overlap == run.steps_overlap
    assert former_run.fallback_for == run.fallback_for
    said = {"notes"}  # a scenario that names a model of the catalog has no note on its switches
    assert former_run.measured.model_dump(exclude=said) == run.measured.model_dump(exclude=said)


@pytest.mark.parametrize(
    ("framework", "version", "plan", "name"),
    [
        ("megatron-lm", "2020", {}, "megatron-lm-2021"),
        ("megatron-lm", "fork by sail-sg (zero-bubble), 2023", {}, "megatron-lm-2023"),
        ("megatron-lm", "23e00ed0963c + torch 2.10", {}, "megatron-core"),
        ("megatron-lm", None, {}, "megatron-core"),
        ("deepspeed", "2021", {}, "deepspeed-2021"),
        ("nemo", "NeMo24.07, table at commit 164b0097f83a", {}, "nemo"),
        ("nemo", "NeMo-Megatron 23.08", {}, "nemo-2022"),
        ("gpipe", None, {}, "torch"),
        ("other", None, {"tp": 2, "pp": 2}, "megatron-core"),
        ("other", None, {"dp_shard": 2, "zero_stage": 1}, "megatron-core"),
        ("other", None, {"dp_shard": 2, "zero_stage": 3}, "torch"),
    ],
)
def test_framework_and_date_name_a_profile(
    framework: str, version: str | None, plan: dict[str, Any], name: str
) -> None:
    """Unnamed frameworks with tensor parallelism in a pipeline, or sharded optimizer states, are as Megatron."""
    changes = {f"plan__{key}": value for key, value in plan.items()}
    assert former(software__framework=framework, software__version=version, **changes).software["preset"] == name


def test_profiles_of_all_frameworks_are_in_the_catalog() -> None:
    assert set(framework_defaults()) == set(get_args(Framework))
    for framework in framework_defaults().values():
        for name in (*framework.profiles.values(), *framework.combining.values()):
            assert catalog.software(name).id == name


@pytest.mark.parametrize(
    ("framework", "version", "changes", "note"),
    [
        ("deepspeed", "2023", {"zero_stage": 2}, "plan.zero_stage = 2 with megatron-deepspeed: parameters"),
        ("megatron-lm", "2021", {"zero_stage": 1}, "plan.zero_stage = 1 with megatron-lm-2021: equal numbers"),
        ("nemo", "24.07", {"zero_stage": 3}, "plan.zero_stage = 3 with nemo: parameters are gathered"),
        ("llm-foundry", None, {"zero_stage": 3, "precision": "fp16"}, "plan.precision = fp16 with llm-foundry: el"),
        ("torchtitan", None, {"zero_stage": 2, "precision": "fp16"}, "plan.precision = fp16 with torchtitan: el"),
        ("maxtext", None, {"zero_stage": 3, "precision": "fp8"}, "plan.precision = fp8 with maxtext: quantized"),
        ("maxtext", None, {"zero_stage": 3, "grad_dtype": "bf16"}, "plan.grad_dtype = bf16 with maxtext: kept and red"),
    ],
)
def test_features_that_a_profile_lacks_are_added_and_noted(
    framework: str, version: str | None, changes: dict[str, Any], note: str
) -> None:
    device = "h100-sxm-80gb" if changes.get("precision") == "fp8" else "a100-sxm-80gb"
    plan = {f"plan__{key}": value for key, value in {"dp_shard": 4, "pp": 1, **changes}.items()}
    run = former(software__framework=framework, software__version=version, cluster__device=device, **plan)
    assert run.job is not None, run.reason
    assert any(said.startswith(note) for said in run.notes), run.notes


@pytest.mark.parametrize(
    ("by_rank", "virtual_stages", "placement", "stages"),
    [
        ((2, 2), 1, "loop", [2, 2]),
        ((3, 4, 4, 3), 4, "loop", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
        ((15, 16, 15), 4, "loop", [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3]),
        ((2, 2), 2, "v", [1, 1, 1, 1]),
    ],
)
def test_layers_of_ranks_are_distributed_over_their_stages(
    by_rank: tuple[int, ...], virtual_stages: int, placement: Any, stages: list[int]
) -> None:
    assert layers_of_stages(by_rank, virtual_stages, placement) == stages


def test_values_that_a_source_leaves_open_are_assumed() -> None:
    run = former(
        cluster__devices_per_node=2, model__tied_embeddings=None, model__vocab_size=1023, plan__tp=2, plan__pp=1
    )
    assert run.known_job.cluster.inter_link is not None
    assert run.known_job.cluster.inter_link.id == "network-200gbit", "as a DGX A100 has it"
    assert says(run.notes[0], "assumed: ", "model.tied_embeddings", "cluster.inter_link_gbit_per_device")
    assert says(run.notes[1], "1024", "128 x tp = 256", "megatron-lm-2022")


@pytest.mark.parametrize(("framework", "size"), [("megatron-lm", 1023), ("torchtitan", 1024), ("other", 1024)])
def test_vocabulary_is_padded_for_tp_unless_the_software_pads_it(framework: str, size: int) -> None:
    run = former(software__framework=framework, model__vocab_size=1023, plan__tp=4, plan__pp=1)
    assert run.known_job.model.vocab_size == size
    assert run.known_job.padded_model.vocab_size == 1024


@pytest.mark.parametrize(
    ("devices", "domain", "of_each"),
    [(256, 72, 64), (128, 72, 64), (144, 72, 72), (160, 72, 40), (64, 72, 72), (64, 8, 8)],
)
def test_job_on_several_large_domains_takes_as_many_devices_of_each(devices: int, domain: int, of_each: int) -> None:
    run = former(cluster__num_devices=devices, cluster__devices_per_node=domain)
    assert run.known_job.cluster.devices_per_node == of_each
    assert any(f"takes {of_each} of each" in note for note in run.notes) == (of_each != domain)


@pytest.mark.parametrize(("version", "usual"), [("2024", "fused"), ("2022", "unfused")])
def test_stated_software_settings_override_the_profile(version: str, usual: str) -> None:
    def software(**said: bool | None) -> Any:
        fields: dict[str, Any] = {f"software__{key}": value for key, value in said.items()}
        return former(software__version=version, **fields).known_job.software

    assert software(flash_attention=None).layers.attention == usual
    assert software(flash_attention=False).layers.attention == "unfused"
    assert software(flash_attention=True).layers.attention == "fused"
    assert software(compile=True).compiled
    assert not software(grad_overlap=False).grad_overlap


@pytest.mark.parametrize(
    ("framework", "version", "etp"),
    [
        ("megatron-core", "0.10, 2024", 1),
        ("torchtitan", None, 1),
        ("nemo", "24.07", 2),
        ("nemo", "NeMo container 25.04", 1),
        ("megatron-lm", "2023", 2),
        ("maxtext", None, 2),
    ],
)
def test_framework_decides_if_tensor_parallel_ranks_split_experts(
    framework: str, version: str | None, etp: int
) -> None:
    moe = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 64}
    plan: dict[str, Any] = {"plan__tp": 2, "plan__sequence_parallel": True, "plan__pp": 1}
    software: dict[str, Any] = {"software__framework": framework, "software__version": version}
    run = former(model__family="moe", model__moe=moe, **plan, **software)
    assert run.known_job.plan.etp == etp
    assert "plan.etp" in run.measured.assumed


def test_synchronous_optimizer_step_is_the_same_schedule_without_overlap() -> None:
    bypassing, synchronous = (former(plan__schedule=name) for name in ("zb-2p", "zb-2p-optsync"))
    assert bypassing.known_job.plan == synchronous.known_job.plan
    assert (bypassing.steps_overlap, synchronous.steps_overlap) == (True, False)


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "mistral-7b-v0.3", "gpt-oss-120b"])
def test_switches_are_those_of_the_catalogs_model_of_the_same_sizes(name: str) -> None:
    """One of the two mistral models attends in a window; gpt-oss has biases and sinks."""
    fields = catalog.model_fields(name)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    fields_of_run = {f"model__{size}": fields.get(size, 2880) for size in (*sizes, "vocab_size")}
    fields_of_run |= {
        "model__family": fields["family"],
        "model__gated_mlp": True,
        "model__head_dim": fields.get("head_dim"),
    }
    experts = {size: fields[size] for size in ("num_experts", "top_k", "moe_intermediate_size") if size in fields}
    model = former(**fields_of_run, model__moe=experts or None).known_job.model
    expected = catalog.model(name)
    for switch in ("sliding_window", "sliding_window_pattern", "attention_sinks", "expert_bias"):
        assert getattr(model, switch) == getattr(expected, switch), switch


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan__microbatchsize": 2}, "f:28:5: runs.0.plan.microbatchsize: is not a known key; did you mean microba"),
        ({"model__seq_len": 256.5}, "runs.0.model.seq_len = 256.5: must be a whole number"),
        ({"software__framework": "torchtitann"}, 'runs.0.software.framework = "torchtitann": is not a known choice'),
        ({"measured__oom": True}, "measured: step_time_s must be left out where oom is true"),
    ],
)
def test_error_names_the_key_of_the_former_schema(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_published(former_text(**changes), "f")
    assert sentence.partition(": ")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster__device": "h1000"}, "device = h1000: is not in the catalog"),
        ({"plan__global_batch_size": 31}, "plan.global_batch_size = 31: ... num_microbatches x microbatch_size x"),
        ({"plan__dp_replicate": 4}, "dp_replicate 4 x pp 2: ... 8 ... 4"),
        ({"plan__schedule": "1f2b"}, 'plan.schedule = "1f2b": ... known schedule; did you mean 1f1b?'),
        ({"plan__optimizer": "adan"}, "plan.optimizer = "),
        ({"plan__pp": 10**9, "plan__dp_replicate": 1}, "the plan needs"),
        ({"task": "lora", "plan__lora_rank": 8}, "task = lora: training adapters with megatron-lm-2022"),
    ],
)
def test_run_that_no_scenario_can_describe_is_skipped_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    run = former(**changes)
    assert run.job is None
    assert says((run.reason or ""), reason)
