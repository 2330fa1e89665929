"""NeMo's configurations: public ones read, compared with what their sources say, and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.errors import NotModelledError, SpecError
from simplan.predict import predict
from simplan.scenario.published.reading import read_published
from simplan.scenario.source import read_source
from tests.interop.public import CLUSTER, cases, chosen, read, without_clipping, written

_CASES = cases("nemo")
_READ = [case for case in _CASES if "expect" in case]
_SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios" / "published"
_GPT: dict[str, Any] = next(case["settings"] for case in _CASES if case["name"] == "gpt3-126m")


@pytest.mark.parametrize("case", _READ, ids=lambda case: case["name"])
def test_public_configuration_read(case: dict[str, Any], tmp_path: Path) -> None:
    source = read(case, tmp_path)
    job = source.scenario().job
    assert chosen(job, case["expect"]) == case["expect"]
    assert job.software.id == "nemo"
    assert source.configuration is not None
    assert not source.configuration.unknown
    nodes, devices = (case["settings"][f"trainer.{name}"] for name in ("num_nodes", "devices"))
    assert job.plan.num_devices == job.cluster.num_devices == nodes * devices
    assert predict(job).step_time_s > 0


@pytest.mark.parametrize("case", [case for case in _CASES if "refused" in case], ids=lambda case: case["name"])
def test_public_configuration_refused(case: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read(case, tmp_path)
    assert case["refused"] in str(refused.value)


@pytest.mark.parametrize(
    ("name", "run", "changes"),
    [
        # docs/source/performance/performance_summary.md at 9c5c5e9: GPT-3 175B on 512 H100, the submission to MLPerf
        ("gpt3-175b_mlperf", "nemo24-04", {"model.vocab_size": 51200}),
        # its Llama 2 70B on 64 H100 has tp 4, pp 4, vp 20, gbs 128; the launcher's file is for 1,024 devices
        (
            "llama-llama2_70b",
            "nemo24-07",
            {
                "cluster.num_devices": 64, "plan.virtual_stages": 20, "training.global_batch_size": 128,
                "training.precision": "fp8", "training.fp8_recipe": "delayed", "plan.grad_dtype": "bf16",
            },
        ),
    ],
)  # fmt: skip
def test_published_run_predicted_alike(name: str, run: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The file that a published run was started with predicts what the row of the run does, to the last bit."""
    case = next(case for case in _CASES if case["name"] == name)
    (file,) = read_published([_SCENARIOS / "nemo_24_h100.yaml"])
    expected = next(other for other in file.runs or () if other.id == run).known_job
    job = read_source(written(case, tmp_path), CLUSTER | case.get("add", {}) | changes).scenario().job
    assert job.plan == expected.plan.with_changes(stage_layers=None)
    assert predict(without_clipping(job)).step_time_s == predict(expected).step_time_s


@pytest.mark.parametrize(
    ("modules", "targets"),
    [
        (None, ["qkv"]),
        (["attention_qkv", "attention_dense"], ["attention"]),
        (["mlp", "attention_qkv"], ["mlp", "qkv"]),
        (["all"], ["all"]),
    ],
)
def test_lora_is_read(modules: list[str] | None, targets: list[str], tmp_path: Path) -> None:
    """``target_modules`` of NeMo 1.23, collections/nlp/parts/peft_config.py; NeMo 2.0 has Megatron Core's names."""
    lora: dict[str, Any] = {"model.peft.peft_scheme": "lora", "model.peft.lora_tuning.adapter_dim": 8}
    if modules is not None:
        lora["model.peft.lora_tuning.target_modules"] = modules
    source = read({"name": "gpt", "settings": _GPT | lora}, tmp_path)
    job = source.scenario().job
    assert (job.training.task, job.model.lora_rank, list(job.model.lora_targets)) == ("lora", 8, targets)
    assert source.configuration is not None
    assert not source.configuration.unknown


@pytest.mark.parametrize(
    ("option", "value"), [("variant", "canonical"), ("layer_selection", [0, 1]), ("weight_tying", True)]
)
def test_other_lora_is_refused_by_name(option: str, value: Any, tmp_path: Path) -> None:
    lora = {"model.peft.peft_scheme": "lora", f"model.peft.lora_tuning.{option}": value}
    with pytest.raises(NotModelledError, match=rf"lora_tuning\.{option}.*is not modeled yet"):
        read({"name": "gpt", "settings": _GPT | lora}, tmp_path)


def test_device_count_from_command_line_keeps_file_plan(tmp_path: Path) -> None:
    case = {"name": "gpt", "settings": _GPT, "add": {"cluster.num_devices": 16}}
    assert read(case, tmp_path).scenario().job.plan.dp_shard == 16


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"model.tensor_model_parallel_size": 3}, SpecError, "trainer.devices = 8: is 64 devices, and tensor x"),
        ({"model.tensor_model_parallel_size": "two"}, SpecError, "model.tensor_model_parallel_size"),
        ({"model.activation": "mish"}, NotModelledError, "model.activation = \"mish\": is not known"),
        ({"model.optim.name": "sophia"}, NotModelledError, "model.optim.name = \"sophia\": is not modeled yet"),
        ({"model.fsdp": True}, NotModelledError, "model.fsdp: sharded parameters are not modeled yet"),
        ({"model.micro_batch_size": "${oc.env:MBS}"}, SpecError, "model.micro_batch_size"),
        ({"model.hidden_size": "${.hidden_size}"}, SpecError, "model.hidden_size"),
        ({"model.num_layers": [1, {"a": "!!python/object:os.system"}]}, SpecError, "model.num_layers"),
    ],
)  # fmt: skip
def test_wrong_setting_is_named(changes: dict[str, Any], error: type[SpecError], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(error) as refused:
        read({"name": "gpt", "settings": _GPT | changes}, tmp_path).scenario()
    assert sentence in str(refused.value)


def test_half_a_file_asks_for_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "half.yaml"
    file.write_text("trainer: {max_steps: 10}\nmodel: {tensor_model_parallel_size: 2, micro_batch_size: 1}\n")
    with pytest.raises(SpecError) as missing:
        read_source(file)
    for option in ("--seq-len 4096", "--set model.vocab_size=", "--cluster dgx-h100 --num-nodes"):
        assert option in str(missing.value)
