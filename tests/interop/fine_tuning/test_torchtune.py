"""torchtune: settings of its own configurations (recipes/configs at bd2a0fc), and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.scenario import scenario_from
from simplan.scenario.source import read_source

_USUAL = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/tokenizer.model, max_seq_len: 2048}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp, model_type: LLAMA3}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: false}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false, cpu: true, cuda: true}
device: cuda
dtype: bf16
batch_size: 2
gradient_accumulation_steps: 8
epochs: 1
seed: null
"""
_ADAMW = "optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}\n"
_LORA = (
    "lora_attn_modules: [q_proj, v_proj, output_proj], apply_lora_to_mlp: true, apply_lora_to_output: false, "
    "lora_rank: 8, lora_alpha: 16, lora_dropout: 0.0"
)


def model(builder: str, more: str = "") -> str:
    return f"model: {{_component_: torchtune.models.{builder}{f', {more}' if more else ''}}}\n"


CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "llama3_1/8B_lora_single_device": (
        model("llama3_1.lora_llama3_1_8b", _LORA) + _ADAMW + "enable_activation_checkpointing: true\n",
        {
            "model": {"name": "llama3.1-8b", "lora_rank": 8, "lora_targets": ("q", "v", "proj", "gate", "up", "down")},
            "training": {"task": "lora", "precision": "bf16", "optimizer": "adamw", "global_batch_size": 128},
            "plan": {"microbatch_size": 2, "recompute": "full", "zero_stage": 3, "dp_shard": 8},
        },
    ),
    "llama3_2/1B_qlora_single_device": (
        model("llama3_2.qlora_llama3_2_1b", f"{_LORA}, use_dora: true") + _ADAMW,
        {"model": {"name": "llama3.2-1b", "lora_dora": True}, "plan": {"recompute": "none"}},
    ),
    "llama3_1/70B_full": (
        model("llama3_1.llama3_1_70b")
        + "optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\nfsdp_cpu_offload: true\nclip_grad_norm: 1.0\n",
        {
            "model": {"lora_rank": 0, "seq_len": 2048},
            "training": {"task": "sft", "pure_bf16": True, "fused_optimizer": False, "clip_grad_norm": 1.0},
            "plan": {"offload_optimizer": True},
        },
    ),
    "three dimensions": (
        model("qwen2_5.qwen2_5_7b_instruct")
        + _ADAMW
        + "tensor_parallel_dim: 2\ndata_parallel_replicate_dim: 2\ndata_parallel_shard_dim: 2\ncompile: true\n",
        {"model": {"name": "qwen2.5-7b"}, "plan": {"tp": 2, "dp_replicate": 2, "dp_shard": 2}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_configuration_becomes_its_plan(name: str, tmp_path: Path) -> None:
    text, expected = CASES[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(_USUAL + text, encoding="utf-8")
    source = read_source(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8})
    assert source.configuration is not None
    assert source.configuration.format == "torchtune"
    assert not source.configuration.unknown
    job = source.scenario().job
    values = {section: {key: getattr(getattr(job, section), key) for key in keys} for section, keys in expected.items()}
    assert values == expected
    is_own = name != "three dimensions"  # of which torchtune's modules are not modeled
    assert job.software.id == ("torchtune" if is_own else "torch")
    assert job.software.loss == ("chunked" if is_own else "whole")


def test_weights_below_adapters_are_those_of_torchao(tmp_path: Path) -> None:
    """torchtune/modules/peft/lora.py: to_nf4, whose scales are always quantized; on one device pages are allowed."""
    path = tmp_path / "recipe.yaml"
    optimizer = "optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}\n"
    path.write_text(_USUAL + model("llama3.qlora_llama3_8b", _LORA) + optimizer, encoding="utf-8")
    job = scenario_from(path, {"cluster.device": "rtx-4090", "cluster.num_devices": 1}).job
    base = job.training.base_weights
    assert base is not None
    assert (base.format, base.library, base.double_quantization) == ("nf4", "torchao", True)
    assert job.training.optimizer == "paged_adamw_8bit"


@pytest.mark.parametrize("of", [model("llama3.llama3_8b"), model("llama3.lora_llama3_8b", _LORA)])
def test_simulated_quantization_is_that_of_torchao(of: str, tmp_path: Path) -> None:
    """recipes/configs/llama3/8B_qat_{full,lora}.yaml; torchao 0.18, quantization/qat/linear.py."""
    path = tmp_path / "recipe.yaml"
    quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
    more = f"quantizer: {{_component_: {quantizer}, groupsize: 256}}\nfake_quant_after_n_steps: 1000\n"
    path.write_text(_USUAL + of + _ADAMW + more, encoding="utf-8")
    form = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8}).job.training.fake_quantization
    assert form is not None
    assert (form.weights, form.activations, form.group_size) == ("intx_int4", "int8", 256)


REFUSED = {
    "training.optimizer": model("llama2.llama2_7b") + "optimizer: {_component_: torch.optim.Rprop}\n",
    "loss._component_": model("llama2.lora_llama2_7b", _LORA)
    + _ADAMW
    + "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.1}\n",
    "teacher_model._component_": model("qwen2.qwen2_0_5b")
    + _ADAMW
    + "teacher_model: {_component_: torchtune.models.qwen2.qwen2_1_5b}\n",
    "model.decoder_trainable": model("llama3_2_vision.llama3_2_vision_11b", "decoder_trainable: frozen") + _ADAMW,
    "model._component_": model("llama2.llama2_7b"),
    "model.lora_attn_modules": model("llama2.lora_llama2_7b", "lora_rank: 8, lora_attn_modules: [wq]") + _ADAMW,
}


@pytest.mark.parametrize("field", REFUSED)
def test_recipe_of_another_job_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    usual = _USUAL.replace("loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\n", "")
    path.write_text(usual + REFUSED[field], encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 1})
    assert [problem for problem in error.value.problems if field.removeprefix("training.") in problem.field]
