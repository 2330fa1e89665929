"""A scenario from a file, a model, a config.json or a mapping: equal jobs, overrides, assumptions, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.plan.plan import ParallelPlan
from simplan.program.program import MemoryCategory
from simplan.scenario import load_scenario, load_search, make_job, scenario_from
from simplan.scenario.search import plan_section
from simplan.scenario.source import read_source
from tests.support.problems import is_of, refuses, says

ONE_LINE = {
    "cluster.preset": "dgx-h100",
    "cluster.num_nodes": 8,
    "plan.tp": 8,
    "plan.dp_shard": 8,
    "training.global_batch_size": 128,
}
FILE = """\
model: {preset: llama3-8b}
cluster: {preset: dgx-h100, num_nodes: 8}
training: {global_batch_size: 128}
plan: {tp: 8, dp_shard: 8}
"""
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def refusal(source: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        scenario_from(source, overrides)
    return str(caught.value)


def test_model_with_overrides_is_the_job_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE)
    job = load_scenario(file).job
    assert scenario_from("llama3-8b", ONE_LINE).job == job
    alias = scenario_from("llama3.1-8b", ONE_LINE).job
    assert (alias.model.num_parameters, alias.plan) == (job.model.num_parameters, job.plan)
    assert scenario_from(yaml.safe_load(FILE)).job == job
    assert scenario_from(file).job == job
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    for source in ("config.json", tmp_path, "."):
        read_job = scenario_from(source, ONE_LINE | {"model.seq_len": 8192}).job
        assert read_job.model.num_parameters == job.model.num_parameters == catalog.published_parameters("llama3-8b")
        assert (read_job.cluster, read_job.plan, read_job.training) == (job.cluster, job.plan, job.training)


@pytest.mark.parametrize("name", sorted({*catalog.names("software")} - {"unsloth"}))
def test_context_ranks_alone_shard_where_the_software_does(name: str) -> None:
    of_fsdp = {
        "torch",
        "torchtitan",
        "torchtitan-2024",
        "torchtitan-2025",
        "transformers",
        "accelerate",
        "deepspeed",
        "maxtext",
        "litgpt",
        "torchtune",
    }
    wanted = 3 if name in of_fsdp else 0
    overrides = {"cluster.num_devices": 8, "model.seq_len": 4096, "software": name}
    unsharded = scenario_from("llama2-7b", overrides | {"plan.dp_replicate": 8}).job
    moved = unsharded.with_changes({"plan.dp_replicate": 1, "plan.cp": 8})
    back = moved.with_changes({"plan.cp": 1, "plan.dp_replicate": 8})
    assert (moved.plan.zero_stage, back.plan.zero_stage) == (wanted, 0)
    try:
        scenario = scenario_from("llama2-7b", overrides | {"plan.cp": 8})
    except NotModelledError:  # context parallelism as such
        return
    assert scenario.job.plan == moved.plan
    file = {"model": {"preset": "llama2-7b"}, "cluster": {"preset": "dgx-h100", "num_nodes": 1},
            "training": {"global_batch_size": 1}, "software": name, "plan": {"cp": 8}}  # fmt: skip
    assert scenario_from(file).job.plan == moved.plan
    assert (f"plan.zero_stage = 3 (the highest that {name} has" in scenario.assumptions[0]) == (wanted == 3)
    for stage in (wanted, 0):  # written out, a plan stays as it is
        plan = scenario.job.plan.with_changes(zero_stage=stage)
        again = scenario_from(
            "llama2-7b", overrides | {f"plan.{key}": value for key, value in plan_section(plan).items()}
        )
        assert again.job.plan == plan


def test_context_parallel_plan_of_eight_gpus_has_the_memory_of_fsdp() -> None:
    long = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1, "plan.recompute": "full", "model.seq_len": 65536}
    by_context = scenario_from("llama3-8b", long | {"plan.cp": 8}).predict().worst_memory
    by_data = scenario_from("llama3-8b", long | {"plan.dp_shard": 8, "model.seq_len": 8192}).predict().worst_memory
    for category in (MemoryCategory.PARAMETERS, MemoryCategory.OPTIMIZER):  # states have no tokens
        assert by_context.by_category[category] == by_data.by_category[category]
    assert by_context.device_bytes / 2**30 == pytest.approx(30.04, abs=0.05)


def test_values_that_are_not_given_are_assumed_and_listed() -> None:
    scenario = scenario_from("llama3-8b", {"cluster.num_devices": 64, "plan.tp": 8})
    plan, [said] = scenario.job.plan, scenario.assumptions
    assert (plan.dp_shard, plan.zero_stage, plan.dp_replicate, scenario.job.num_microbatches) == (8, 3, 1, 1)
    for words in ("model.seq_len = 8192", "cluster.preset = dgx-h100", "software = torch", "training.precision = bf16",
                  "plan.dp_shard = 8", "plan.microbatch_size = 1", "training.global_batch_size = 8"):  # fmt: skip
        assert words in said
    assert "plan.tp" not in said
    assert scenario.predict().assumptions[0] == said
    assert scenario_from("llama3-8b", {"cluster.num_devices": 16, "plan.pp": 4}).job.num_microbatches == 16
    for schedule in ("interleaved_1f1b", "dualpipe-v"):
        changes = {"cluster.num_devices": 4, "plan.pp": 4, "plan.schedule": schedule}
        assert scenario_from("llama3-8b", changes).job.plan.virtual_stages == 2


@pytest.mark.parametrize(
    ("model", "software", "expected"),
    [
        ("llama3-8b", "torch", (16, 3, 1)),
        ("llama3-8b", "megatron-core", (16, 1, 1)),
        ("llama3-8b", "megatron-lm-2021", (1, 0, 16)),  # has no distributed optimizer and no sequence parallelism
        ("gpt3-175b", "megatron-lm-2022", (16, 1, 1)),  # pads the vocabulary of 50257 by itself
        ("gpt2-1.5b", "megatron-core", (16, 1, 1)),
    ],
)
def test_remaining_devices_shard_what_the_framework_can(
    model: str, software: str, expected: tuple[int, int, int]
) -> None:
    tp = 1 if model == "gpt2-1.5b" else 8  # 25 heads
    plan = scenario_from(model, {"cluster.num_devices": 16 * tp, "plan.tp": tp, "software": software}).job.plan
    assert (plan.dp_shard, plan.zero_stage, plan.dp_replicate) == expected


def test_vocabulary_that_tp_does_not_divide_names_the_padded_size() -> None:
    asked = {"cluster.num_nodes": 16, "plan.tp": 8}
    assert refusal("gpt3-175b", asked).endswith("use 1 or 29, or model.vocab_size = 50264 (padded)")
    assert scenario_from("gpt3-175b", asked | {"model.vocab_size": 50264}).job.plan.tp == 8


def test_file_wins_over_a_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama3-8b").write_text(FILE.replace("preset: llama3-8b", "preset: gpt2-124m").replace("tp: 8", "tp: 4")
                                 .replace("dp_shard: 8", "dp_replicate: 16"))  # fmt: skip
    assert refusal("llama3-8b").startswith("llama3-8b:4:"), "the file's own error, with its line"
    Path("llama3-8b").unlink()
    Path("llama3-8b").mkdir()
    assert scenario_from("llama3-8b").job.model == catalog.model("llama3-8b")


def test_unknown_names_are_compared_with_files_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text(FILE)
    assert says(refusal("lama3-8b"), "neither a file nor a model", "did you mean llama3-8b?")
    assert refusal("fsdp").endswith("did you mean fsdp.yaml?")
    assert refusal("fsd.yaml").endswith("does not exist; did you mean fsdp.yaml?")
    with pytest.raises(NotModelledError, match="the Phi family is not modeled yet"):
        scenario_from("phi-2")
    Path("empty").mkdir()
    with refuses("", rule="is a folder without config.json", file="empty"):
        scenario_from("empty")
    Path("train.py").write_text("import os\ndef main(x):\n    return {x: [1\n")
    assert says(refusal("train.py"), "train.py: ", "Python script", "does not run; give the command")
    assert "`simplan capture train:MODULE --inputs train:BATCH -o model.json`" in refusal("train.py")


def test_overrides_change_a_file_and_replace_what_contradicts_them(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE.replace("}\ntraining", ", inter_link: efa-400gbit}\ntraining").replace("t: {g", "t: {g"))
    job = scenario_from(file, {"cluster.num_devices": 32, "plan.dp_shard": 4, "plan.recompute": "full"}).job
    assert (job.cluster.num_nodes, job.plan.dp_shard, job.plan.recompute) == (4, 4, "full")
    assert job.cluster.inter_link == catalog.link("efa-400gbit")
    assert scenario_from(file, {"cluster.nic_gbit": 100}).job.cluster.inter_link == catalog.link("network-100gbit")
    assert scenario_from(file, {"num_microbatches": 3}).job.training.global_batch_size == 24
    smaller = scenario_from(file, {"cluster.device.memory_bytes": 10**10}).job.cluster
    assert (smaller.device.memory_bytes, smaller.device.id) == (10**10, "h100-sxm-80gb")
    other = scenario_from(file, {"cluster.preset": "dgx-a100-80gb"}).job.cluster
    assert other == catalog.cluster("dgx-a100-80gb", 64), "a preset replaces links, and keeps the number of nodes"


def test_errors_name_overrides_as_they_were_typed(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE)
    with pytest.raises(SpecError) as caught:
        scenario_from(file, {"plan.tp": 3}, {"plan.tp": "--tp"})
    heads = next(p for p in caught.value.problems if "num_attention_heads" in p.rule)
    assert is_of(heads, "--tp", "3", rule="model.num_attention_heads = 32", fix="use 2 or 4")
    assert heads.line is None
    with refuses("plan.recomput", rule="is not a known key", fix="did you mean recompute"):
        scenario_from(file, {"plan.recomput": 3})
    assert refusal(file, {"gpus": 3}).endswith("gpus: is not a known key; write cluster.num_devices")
    with refuses("training.precision", '{"x": 3}', rule="is not a known choice"):
        scenario_from(file, {"training.precision.x": 3})
    both = {"num_microbatches": 2, "training.global_batch_size": 8}
    with refuses("num_microbatches", "2", rule="is given twice"):
        scenario_from(file, both)


@pytest.mark.parametrize("key", ["plan.microbatch_size", "num_microbatches"])
def test_batch_that_is_too_large_names_its_largest_factor(key: str) -> None:
    sentence = f"{key} = 1000000000000: makes a global batch of 8,000,000,000,000, and the largest is 1,000,000,000,000"
    assert sentence in refusal("gpt2-124m", {key: 10**12, "cluster.num_devices": 8})


def test_batch_that_is_too_large_names_the_setting_of_a_framework(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1_000_000_000_000\n')
    overrides = {"cluster.preset": "dgx-h100", "cluster.num_devices": 4}
    with refuses("training.local_batch_size", "1000000000000", rule="makes a global batch of 4,000,"):
        scenario_from(file, overrides)


@pytest.mark.parametrize(
    ("tokens", "changes", "sequences"),
    [
        (10**6, {}, 128),  # 1M is 2**20, as 1,000,000 is no multiple of 8,192
        (4 * 10**6, {}, 512),  # Llama 3: 4M tokens in sequences of 8,192 (arXiv:2407.21783, section 3.4.1)
        (1_008_000, {"model.seq_len": 1000}, 1008),  # exact
        (122 * 8192, {"plan.dp_shard": 1, "plan.tp": 8, "plan.pp": 2}, 122),
        (10**6, {"plan.microbatch_size": 3}, 144),  # multiples of 48: the nearest, outside of 5 %
    ],
)
def test_tokens_of_a_step_are_the_nearest_batch(tokens: int, changes: dict[str, int], sequences: int) -> None:
    overrides = {"cluster.num_devices": 16, "global_batch_tokens": tokens, **changes}
    scenario = scenario_from("llama3-8b", overrides)
    assert scenario.job.training.global_batch_size == sequences
    said = f"training.global_batch_size = {sequences} ({sequences * scenario.job.model.seq_len:,} tokens"
    assert any(said in note for note in scenario.assumptions)


def test_tokens_of_a_step_change_a_file_and_a_search(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE)
    length = scenario_from(file).job.model.seq_len
    assert scenario_from(file, {"global_batch_tokens": 24 * length}).job.training.global_batch_size == 24
    assert make_job("llama3-8b", num_devices=16, global_batch_tokens=2**20).training.global_batch_size == 128
    for devices, sequences in ((16, 128), (96, 128), (1024, 128)):  # of 96 devices, plans of 32 data-parallel ranks
        searched = read_source(
            "llama3-8b", {"cluster.num_devices": devices, "global_batch_tokens": 10**6}, searches=True
        ).search()
        assert searched.job.training.global_batch_size == sequences
    near = {"cluster.num_devices": 16, "global_batch_tokens": 200_000}
    assert says(refusal("llama3-8b", near), "multiple of 16", "give 131072 or 262144")
    assert "must be a whole number" in refusal("llama3-8b", {"global_batch_tokens": 0.5})
    assert "is for models of tokens" in refusal("resnet-50", {"global_batch_tokens": 100})
    for other in ("num_microbatches", "training.global_batch_size"):
        assert "is given twice, with" in refusal("llama3-8b", {"global_batch_tokens": 10**6, other: 16})


def test_search_from_a_plan_keeps_its_prescribed_collectives(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE.replace("dp_shard: 8}", "dp_shard: 8, collectives: {all_reduce: tree}}"))
    searched = read_source(file, searches=True, from_current=True).search()
    assert searched.current is not None
    assert searched.job.plan == ParallelPlan(collectives=searched.current.job.plan.collectives)
    assert searched.job.plan.collectives is not None
    assert "all plans have plan.collectives: all_reduce by tree" in searched.assumptions


def test_search_of_a_model_takes_ranges(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(FILE.replace("plan: {tp: 8, dp_shard: 8}", "search: {tp: [4, 8]}"))
    wanted = load_search(file)
    searched = read_source("llama3-8b", {key: value for key, value in ONE_LINE.items() if "plan" not in key}
                        | {"search.tp": [4, 8]}, searches=True).search()  # fmt: skip
    assert (searched.job, searched.space) == (wanted.job, wanted.space)
    file.write_text(FILE)
    replaced = read_source(file, {"search.tp": [4, 8]}, searches=True).search()
    assert replaced.space == wanted.space, "a range replaces the plan of a file"
    assert replaced.assumptions[0] == f"plan of {file}: replaced by search"


@pytest.mark.parametrize("source", ["llama3-8b", "config.json", "table.yaml"])
def test_written_scenario_is_the_same_from_another_folder(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of a config and an action table are relative to the file."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "table.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (tmp_path / "table.yaml").write_text(
        "name: 1f1b table\nmodel: {preset: gpt2-124m, num_hidden_layers: 2}\n"
        "cluster: {preset: dgx-h100, num_devices: 2, price_per_device_hour: 2.5}\n"
        "training: {global_batch_size: 2, num_tokens: 1e9}\nplan: {pp: 2, schedule: table.csv}\n"
        "expect:\n  - {metric: fits, value: true, why: 'small: it is'}\n"
    )
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    read = read_source(source, {} if source == "table.yaml" else {"cluster.num_nodes": 2})
    file = tmp_path / "other" / "written.yaml"
    file.write_text(read.text(file.parent, "by a test"))
    first, again = read.scenario(), load_scenario(file)
    assert (again.job, again.name, again.expect, again.budget) == (first.job, first.name, first.expect, first.budget)
    assert again.predict().step_time_s == first.predict().step_time_s
    if source == "llama3-8b":
        assert says(file.read_text(), "  seq_len: 8192  # assumed: ", "llama3-8b\n")
