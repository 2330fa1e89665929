"""Megatron Bridge's configurations: public ones read, jobs written and read again, Megatron Core's own checks."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from simplan.errors import NotModelledError, SpecError
from simplan.interop.frameworks.bridge.export import export
from simplan.interop.frameworks.bridge.words import blocks_of_layout, layout_of_blocks
from simplan.job import Job
from simplan.predict import predict
from simplan.scenario.published.reading import read_published
from simplan.scenario.source import make_job, read_source
from tests.interop.public import CLUSTER, cases, chosen, read, without_clipping
from tests.support.problems import says

_CASES = cases("bridge")
_READ = [case for case in _CASES if "expect" in case]
_SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios" / "published"
_DUMP: dict[str, Any] = next(case["settings"] for case in _CASES if case["name"] == "llama3.2-1b-dump")
_MODELS = (
    "llama3-8b",
    "qwen2.5-7b",
    "qwen3-8b",
    "mistral-7b",
    "gpt2-124m",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v3",
)


def imported(job: Job, folder: Path) -> Job:
    """The job, exported and read again."""
    file = folder / "job.yaml"
    text = export(job, "job").files["job.yaml"]
    assert isinstance(text, str)
    file.write_text(text, encoding="utf-8")
    overrides = CLUSTER | {"cluster.num_devices": job.cluster.num_devices}
    read_job = read_source(file, overrides).scenario().job
    return dataclasses.replace(
        read_job, model=read_job.model.model_copy(update={"name": job.model.name, "sources": job.model.sources})
    )


@pytest.mark.parametrize("case", _READ, ids=lambda case: case["name"])
def test_public_configuration_read(case: dict[str, Any], tmp_path: Path) -> None:
    source = read(case, tmp_path)
    job = source.scenario().job
    assert chosen(job, case["expect"]) == case["expect"]
    assert source.configuration is not None
    assert {setting.key for setting in source.configuration.unknown} == set(case.get("unknown", ()))
    assert predict(job).step_time_s > 0
    assert imported(job, tmp_path) == job


@pytest.mark.parametrize("case", [case for case in _CASES if "refused" in case], ids=lambda case: case["name"])
def test_public_configuration_refused(case: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read(case, tmp_path)
    assert case["refused"] in str(refused.value)


@pytest.mark.parametrize("case", [case for case in _CASES if "run" in case], ids=lambda case: case["name"])
def test_published_run_predicted_alike(case: dict[str, Any], tmp_path: Path) -> None:
    """The recipe that a published run was started with predicts what the row of the run does, to the last bit."""
    (file,) = read_published([_SCENARIOS / "megatron_bridge_dense.yaml"])
    expected = next(run for run in file.runs or () if run.id == case["run"]).known_job
    job = read(case, tmp_path).scenario().job
    assert job.plan == expected.plan.with_changes(stage_layers=None)
    assert predict(without_clipping(job)).step_time_s == predict(expected).step_time_s


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs that follow the rules, over what both sides can say."""
    model = draw(st.sampled_from(_MODELS))
    experts = model in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    pp, tp, cp = choose(1, 2, 4), choose(1, 2, 4), choose(1, 1, 2)
    zero_stage = choose(0, 1, 1, 3)
    keys: dict[str, Any] = {
        "plan.tp": tp,
        "plan.pp": pp,
        "plan.cp": cp,
        "plan.microbatch_size": choose(1, 2),
        "plan.zero_stage": zero_stage,
        "plan.recompute": choose("none", "selective", "full"),
        "plan.dp_replicate": 128 // (tp * pp * cp) if zero_stage == 0 else choose(1, 2),
        "training.precision": choose("bf16", "bf16", "fp8", "mxfp8"),
        "training.optimizer": choose("adam", "adamw"),
        "plan.grad_dtype": choose(None, "bf16"),
    }
    keys["plan.dp_shard"] = 128 // (tp * pp * cp * keys["plan.dp_replicate"])
    if cp > 1:
        keys["plan.cp_comm"] = choose("ring", "all_gather", "a2a")
    if keys["plan.recompute"] == "full" and draw(st.booleans()):
        keys["plan.recompute_layers"] = 2
    if tp > 1:
        keys["plan.sequence_parallel"] = draw(st.booleans())
    if pp > 1 and draw(st.booleans()):
        keys["plan.virtual_stages"] = 2
    if keys["training.precision"] == "fp8":
        keys["training.fp8_recipe"] = choose("tensorwise", "delayed", "blockwise")
    options: dict[str, Any] = {"preset": "megatron-bridge", "vocab_multiple": choose(1, 128)}
    if experts:
        keys |= {"plan.ep": choose(1, 2, 4), "plan.etp": 1}
        options["expert_dispatch"] = choose("all_to_all", "deepep", "hybridep")
    if draw(st.booleans()) and not experts and zero_stage < 3:
        keys |= {"training.task": "lora", "model.lora_rank": 16, "model.lora_targets": [choose("all", "qkv", "mlp")]}
    keys |= {"software": options, "training.global_batch_size": 512, **CLUSTER, "cluster.num_devices": 128}
    try:
        return make_job(model, keys)
    except SpecError:  # a plan that violates rules
        reject()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(job=jobs())
def test_job_is_the_same_after_export_and_import(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert imported(job, tmp_path_factory.mktemp("bridge")) == job


@pytest.mark.parametrize(
    ("model", "keys", "refused"),
    [
        ("gemma2-9b", {}, "model.family"),
        ("llama3-8b", {"software": "megatron-core"}, "software"),
        ("llama3-8b", {"plan.pp": 2, "plan.schedule": "gpipe"}, "plan.schedule"),
        ("llama3-8b", {"training.optimizer": "sgd"}, "training.optimizer"),
        ("llama3-8b", {"training.precision": "fp32", "plan.zero_stage": 1, "plan.dp_shard": 8}, "training.precision"),
        ("olmoe-1b-7b", {}, "model.qk_norm"),
        ("gpt-oss-20b", {}, "model.attention_bias"),
        (
            "llama3-8b",
            {"plan.dp_shard": 8, "plan.zero_stage": 3, "plan.reshard_after_forward": False},
            "plan.reshard_after_forward",
        ),
    ],
)
def test_job_that_cannot_be_said_is_refused(model: str, keys: dict[str, Any], refused: str) -> None:
    job = make_job(model, {**CLUSTER, "cluster.num_devices": 8, "software": "megatron-bridge", **keys})
    with pytest.raises(NotModelledError) as error:
        export(job, "job")
    assert f"{refused} = " in str(error.value)
    assert "cannot be said in Megatron Bridge" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        # src/megatron/bridge/recipes/deepseek/h100/deepseek_v3.py and perf_recipes at 067f987
        ("Et|(tt|)*30mL", (1, *[2] * 30, 0)),
        ("Et*4|(t*4|)*14tmL", (*[4] * 15, 1)),
        ("Ettt|tt|t|L", (3, 2, 1, 0)),
        ("Et|t", None),
        ("E(t|)*9999999L", None),
        (["embedding", "decoder"], None),
    ],
)
def test_layout_of_stages(layout: Any, blocks: tuple[int, ...] | None) -> None:
    assert blocks_of_layout(layout) == blocks
    if blocks is not None:
        assert blocks_of_layout(layout_of_blocks(blocks, 0)) == blocks


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"model.tensor_model_parallel_size": 3}, SpecError, "model.tensor_model_parallel_size = 3"),
        ({"model.pipeline_model_parallel_layout": "Et|tL"}, SpecError, "has 2 stages, and the pipeline has 1"),
        ({"model.pipeline_model_parallel_size": 10**12, "model.num_layers_in_first_pipeline_stage": 16}, SpecError,
         "model.pipeline_model_parallel_size = 1000000000000: ... 1,000,000,000,000 ... 16"),
        ({"optimizer.optimizer": "soap"}, NotModelledError, 'optimizer.optimizer = "soap": is not modeled yet'),
        ({"mixed_precision.fp8": "e4m3", "mixed_precision.fp8_recipe": "custom"}, NotModelledError, "fp8_recipe"),
        ({"model.is_hybrid_model": True}, NotModelledError, "model.is_hybrid_model: Mamba layers are not modeled yet"),
        ({"dist.use_torch_fsdp2": True}, NotModelledError, "dist.use_torch_fsdp2"),
        ({"train.micro_batch_size": -1}, SpecError, "train.micro_batch_size = -1"),
        ({"model.recompute_granularity": "half"}, NotModelledError, 'recompute_granularity = "half": is not known'),
    ],
)  # fmt: skip
def test_wrong_setting_is_named(changes: dict[str, Any], error: type[SpecError], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(error) as refused:
        read({"name": "dump", "settings": _DUMP | changes}, tmp_path).scenario()
    assert says(str(refused.value), sentence)


@pytest.mark.parametrize("value", [[1, [2]], {"a": 1}, "${.x}", -1, 10**30], ids=str)
def test_any_value_of_a_setting_is_read_or_refused(value: Any, tmp_path: Path) -> None:
    settings = next(case["settings"] for case in _CASES if case["name"] == "llama3-70b-64gpu-h100-fp8cs")
    for key in settings:
        try:
            read({"name": "dump", "settings": settings | {key: value}}, tmp_path).scenario()
        except SpecError as error:
            assert str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"peft.block_size": 32}, "peft.block_size"),  # OFT, whose class the file does not name
        ({"peft.dim": 16, "peft.exclude_modules": ["linear_fc2"]}, "peft.exclude_modules"),
        ({"peft._target_": "megatron.bridge.peft.dora.DoRA", "peft.dim": 16}, "peft._target_"),
        ({"peft": "dora"}, "peft"),
        ({"peft.alpha": 32}, "peft.alpha"),
        ({"peft.a_new_adapters_option": 1}, "peft.a_new_adapters_option"),
    ],
)
def test_any_adapter_but_lora_is_refused_by_name(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    """None is read as training of all weights, whose memory has nothing to do with an adapter's."""
    settings = {key: value for key, value in _DUMP.items() if key != "peft"}
    with pytest.raises(NotModelledError) as refused:
        read({"name": "dump", "settings": settings | changes}, tmp_path)
    assert [problem.field for problem in refused.value.problems] == [key]


@pytest.mark.parametrize(("position", "dropout"), [(None, 0.1), ("pre", 0.1), ("post", 0.0)])
def test_dropout_of_adapters_is_that_of_their_input(position: str | None, dropout: float, tmp_path: Path) -> None:
    """Megatron Bridge, peft/lora.py: before A by default; ``lora_dtype`` is for modules that its models have not."""
    changes = {"peft._target_": "megatron.bridge.peft.lora.LoRA", "peft.dim": 16, "peft.dropout": 0.1}
    changes |= {"peft.lora_dtype": "torch.float32"} | ({} if position is None else {"peft.dropout_position": position})
    settings = {key: value for key, value in _DUMP.items() if key != "peft"}
    source = read({"name": "dump", "settings": settings | changes}, tmp_path)
    assert source.configuration is not None
    assert source.scenario().job.model.lora_dropout == dropout
    left = [setting.name for setting, _ in source.configuration.not_modeled]
    assert ("peft.dropout" in left) is (position == "post")
    assert "peft.lora_dtype" not in left


def test_unknown_settings_are_listed(tmp_path: Path) -> None:
    case = {"name": "dump", "settings": _DUMP | {"model.new_kernel": True, "optimizer.magic": 3}}
    configuration = read(case, tmp_path).configuration
    assert configuration is not None
    assert [setting.key for setting in configuration.unknown] == ["model.new_kernel", "optimizer.magic"]


def test_overrides_of_a_recipe_ask_for_what_the_recipe_says(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text("train: {train_iters: 5}\nlogger: {log_interval: 1}\nmodel: {seq_length: 4096}\n", encoding="utf-8")
    with pytest.raises(SpecError) as missing:
        read_source(file)
    for option in ("--model llama3-8b", "--tp 1", "--pp 1", "--global-batch-size", "--microbatch-size 1", "--cluster"):
        assert option in str(missing.value)


def test_file_with_several_plans_is_refused(tmp_path: Path) -> None:
    """A file of the launcher of Megatron Bridge 0.1 (scripts/performance/configs at 0aa7db3)."""
    keys = {"perf_matrix.h100.num_gpus_8.bf16.cp": 2, "ConfigContainer.train.train_iters": 25}
    with pytest.raises(NotModelledError, match=r"perf_matrix\.h100.*one of several plans"):
        read({"name": "matrix", "settings": keys}, tmp_path)


@pytest.mark.filterwarnings("ignore")  # Megatron Core's about its own defaults
def test_megatron_core_takes_the_settings() -> None:
    """Megatron Core's configuration classes take the exported settings, and check them against each other."""
    distributed, optimizer, transformer = (
        pytest.importorskip(f"megatron.core.{name}")
        for name in ("distributed", "optimizer", "transformer.transformer_config")
    )
    # fields that GPTModelProvider adds: src/megatron/bridge/models/gpt_provider.py at 067f987
    provider = {
        "vocab_size", "seq_length", "share_embeddings_and_output_weights", "position_embedding_type",
        "make_vocab_size_divisible_by", "virtual_pipeline_model_parallel_size",
    }  # fmt: skip
    selective = {"plan.ep": 8, "plan.recompute": "selective"}
    plans: list[tuple[str, dict[str, Any]]] = [
        ("llama3-8b", {"plan.tp": 4, "plan.pp": 2, "plan.virtual_stages": 2, "plan.recompute": "full"}),
        ("qwen3-30b-a3b", selective | {"plan.dp_shard": 16, "plan.recompute_modules": ["moe_act"]}),
        ("deepseek-v3", selective | {"plan.pp": 2, "plan.recompute_modules": ["mla_up_proj"]}),
        ("gpt2-124m", {"plan.tp": 2, "model.vocab_size": 50304}),
    ]
    for model, keys in plans:
        job = make_job(model, {**CLUSTER, "cluster.num_devices": 16, "software": "megatron-bridge", **keys})
        files = export(job, "job").files
        document = yaml.safe_load(files["job.yaml"])
        kind = transformer.MLATransformerConfig if model == "deepseek-v3" else transformer.TransformerConfig
        known = {field.name for field in dataclasses.fields(kind)}
        assert set(document["model"]) - known <= provider
        left = ("activation_func", "apply_rope_fusion")  # a name there; and what needs Transformer Engine
        taken = {key: value for key, value in document["model"].items() if key in known and key not in left}
        config = kind(**taken, bf16=True, pipeline_dtype="bf16")
        assert config.tensor_model_parallel_size == job.plan.tp
        distributed.DistributedDataParallelConfig(**document["ddp"])
        optimizer.OptimizerConfig(**document["optimizer"])
        ast.parse(str(files["pretrain.py"]))
