"""Families of models, against the modules of transformers that they are, captured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.architectures import small_config
from executor.capture.capture import model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from simplan.interop.huggingface import model_fields_from_config, model_types
from simplan.model.base_weights import BaseWeights, FrozenBase, with_frozen_base
from simplan.model.captured.adapters import with_adapters
from simplan.model.captured.file import FORMAT
from simplan.model.captured.layers import captured_layers
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layers
from simplan.model.layer import Gemm, LayerSpec
from simplan.model.model import ModelSpec
from simplan.scenario import scenario_from
from tests.support.problems import refuses
from tests.support.slow import slow_except

pytest.importorskip("transformers")

SEQ_LEN = 64
LABELLED = {"vit": "ViTForImageClassification", "resnet": "ResNetForImageClassification"}
"""Classes of models that a family has with a head, where transformers' first choice has none."""
SPECS: dict[str, dict[str, Any]] = {
    "resnet": {"family": "resnet", "depths": (2, 2, 2, 2), "image_size": 224, "num_classes": 2},
    "t5": {
        "family": "t5", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32_128,
        "intermediate_size": 2048, "seq_len": SEQ_LEN,
    },
}  # fmt: skip
"""Families whose config.json simplan does not read."""
TRANSFORMERS = LayerImplementation(model_code="transformers")
AS_TRANSFORMERS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral"}
"""Models whose layers `software: transformers` has as transformers runs them; others are those of the executor."""


def flops_of(layers: Sequence[LayerSpec]) -> list[int]:
    """FLOPs of forward and of backward, with the scores of all queries and keys."""
    passes = [(layer.flops(full_attention=True), layer.backward_flops(full_attention=True)) for layer in layers]
    return [sum(of_pass) for of_pass in zip(*passes, strict=True)]


@pytest.mark.parametrize("kind", slow_except(["gemma2", "mixtral", "t5", "resnet"], [*model_types(), *SPECS]))
def test_a_family_is_the_model_of_transformers(kind: str) -> None:
    data = small_config(kind)
    if kind in LABELLED:
        data["architectures"] = [LABELLED[kind]]
    module, config = module_of_config(data)
    published = config.to_dict() | ({"num_experts": config.num_experts} if kind == "qwen3_moe" else {})
    seq_len = None if kind == "vit" else SEQ_LEN
    spec = ModelSpec(**(SPECS.get(kind) or model_fields_from_config(published, name=kind, seq_len=seq_len)))
    captured = captured_layers(model_from_module(module, batch_of(module, config, SEQ_LEN), precisions=("fp32",)))
    assert spec.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    ours, theirs = flops_of(spec.layers), flops_of(captured)
    assert ours == pytest.approx(theirs, rel=1e-6)
    if kind in AS_TRANSFORMERS:
        block = implemented_layers(spec.layers, TRANSFORMERS, spec.family)[1]
        assert sum(block.saved_bytes(4)) == sum(captured[1].saved_bytes(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_adapters_of_a_family_are_those_of_the_module_of_transformers(kind: str) -> None:
    """Linear layers of GPT-2 are Conv1D, whose matrices are transposed."""
    module, config = module_of_config(small_config(kind))
    fields = model_fields_from_config(config.to_dict(), name=kind, seq_len=SEQ_LEN)
    plain = model_from_module(module, batch_of(module, config, SEQ_LEN), precisions=("fp32",))
    theirs = captured_layers(with_adapters(plain, 4, ("all",)))
    spec = ModelSpec(**fields, lora_rank=4)
    ours = implemented_layers(spec.layers, TRANSFORMERS, spec.family)
    assert flops_of(ours) == flops_of(theirs)
    assert ours[2].num_trained == theirs[2].num_trained
    assert sum(ours[2].saved_bytes(4)) == sum(theirs[2].saved_bytes(4))


def test_packed_weights_of_a_capture_are_those_of_the_family() -> None:
    """QLoRA of transformers' Llama: packed bytes, what forward saves, and weights unpacked in either pass."""
    module, config = module_of_config(small_config("llama"))
    fields = model_fields_from_config(config.to_dict(), name="llama", seq_len=SEQ_LEN)
    plain = model_from_module(module, batch_of(module, config, SEQ_LEN), precisions=("fp32",))
    spec = ModelSpec(**fields, lora_rank=4)
    base = BaseWeights(format="nf4", double_quantization=True, upcast=False)
    form = FrozenBase(
        weights=base.stored(4),
        activation_bytes=4,
        compute_bytes=4,
        adapter_bytes=4,
        attention_bytes=4,
        autocast=True,
        peft=False,
    )
    packings = []
    for layers in (
        implemented_layers(spec.layers, TRANSFORMERS, spec.family),
        captured_layers(with_adapters(plain, 4, ("all",))),
    ):
        block = with_frozen_base(layers[2], form)
        packed = [p.stored.packed_bytes(p.num_elements) for p in block.parameters if p.stored is not None]
        unpacked = [(k.n, k.k, k.propagates) for k in block.kernels if isinstance(k, Gemm) and k.stored is not None]
        packings.append((sorted(packed), sorted(unpacked), sum(block.saved_bytes(4))))
    assert packings[0] == packings[1]
    assert len(packings[0][0]) == 7


def test_launch_file_with_a_capture_is_the_capture(tmp_path: Path) -> None:
    """Targets by PEFT's names, dropout and packed weights of an axolotl file, whose length must be the capture's."""
    module, config = module_of_config(small_config("llama"))
    plain = model_from_module(module, batch_of(module, config, SEQ_LEN), precisions=("bf16",), name="small")
    capture, run = tmp_path / "small.json", tmp_path / "run.yaml"
    capture.write_text(json.dumps({"format": FORMAT, **plain.model_dump(mode="json")}), encoding="utf-8")
    text = (
        "base_model: someone/model\nmicro_batch_size: 1\nsequence_len: 64\noptimizer: adamw_torch\nbf16: true\n"
        "adapter: qlora\nload_in_4bit: true\nlora_r: 4\nlora_dropout: 0.1\nlora_target_modules: [q_proj, down_proj]\n"
    )
    run.write_text(text, encoding="utf-8")
    overrides = {"model.file": str(capture), "cluster.device": "rtx-4090", "cluster.num_devices": 1}
    model = scenario_from(run, overrides).job.model
    adapted = {p.name.removesuffix(".lora_a.weight") for p in model.layers[1].parameters if "lora_a" in p.name}
    assert adapted == {"self_attn.q_proj", "mlp.down_proj"}
    assert model.lora_dropout == 0.1
    run.write_text(text.replace("sequence_len: 64", "sequence_len: 128"), encoding="utf-8")
    with refuses("sequence_len", "128", rule="cannot go with file"):
        scenario_from(run, overrides)
