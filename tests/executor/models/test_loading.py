"""Predicted memory while a checkpoint is loaded, against what torch allocates for checkpoints of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from simplan import catalog
from simplan.interop.frameworks.model_names import config_of
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.loading_peaks import LoadingPeaks, loading_peaks
from simplan.training import TrainingSpec
from tests.executor.forked import run_program
from tests.executor.models.layer_runs import traced

pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 4000, "seq_len": 32,
}  # fmt: skip
LLAMA = ModelSpec(**SIZES, family="llama", intermediate_size=768, tied_embeddings=False)
MIXTRAL = ModelSpec(
    **SIZES, family="moe", moe_intermediate_size=512, num_experts=4, top_k=2, tied_embeddings=False
)  # fmt: skip
NF4: Any = {"format": "nf4", "double_quantization": True}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that saves a random model in 16 bits, in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees this thread alone

    def save(model: ModelSpec) -> Path:
        config = config_of(model)
        assert config is not None
        folder = tmp_path / "model"
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16).save_pretrained(folder)
        return folder

    return save


def predicted(model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, method: str, ranks: int) -> LoadingPeaks:
    software = catalog.software("accelerate").with_changes(loading=method)
    peaks = loading_peaks(software, model, plan, training, ranks)
    assert peaks is not None
    return peaks


def is_mapped(tensor: Tensor) -> bool:
    """True if the memory of a tensor is that of a mapped checkpoint."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return line.endswith(".safetensors")
    raise AssertionError("a tensor is in some mapping")


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("model", "dtype"), [(LLAMA, "bfloat16"), (LLAMA, "float32"), (MIXTRAL, "bfloat16"), (MIXTRAL, "float32")]
)
def test_host_memory_of_from_pretrained_is_what_torch_allocates(model: ModelSpec, dtype: str, saved: Any) -> None:
    """A checkpoint of 16 bits is mapped, so that only tensors that are cast or stacked take memory of their own."""
    from transformers import AutoModelForCausalLM

    folder = saved(model)
    parameters = [*AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).parameters()]
    allocated = sum(p.nbytes for p in parameters if not is_mapped(p))
    fields = {"precision": "bf16", "pure_bf16": True} if dtype == "bfloat16" else {"precision": "fp32"}
    training = TrainingSpec(global_batch_size=1, task="sft", **fields)
    peaks = predicted(model, training, ParallelPlan(), "cpu", 1)
    assert peaks.host_bytes == allocated
    assert peaks.device_bytes == sum(p.nbytes for p in parameters)
    assert size_of(folder) == pytest.approx(peaks.mapped_bytes, abs=20_000)  # with headers


def test_host_memory_of_a_model_that_is_quantized_on_the_cpu(saved: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = saved(LLAMA)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    options = {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": "cpu"}}
    loaded, held, _ = traced(lambda: AutoModelForCausalLM.from_pretrained(folder, **options))
    assert loaded is not None
    adapted = LLAMA.with_changes(lora_rank=8)
    training = TrainingSpec(global_batch_size=1, precision="bf16", task="lora", base_weights=NF4)
    peaks = predicted(adapted, training, ParallelPlan(), "cpu", 1)
    assert held - size_of(folder) == pytest.approx(peaks.host_bytes, rel=0.02)  # torch counts what it maps


@pytest.mark.slow
def test_ranks_of_fsdp_need_what_is_predicted(saved: Any, tmp_path: Path) -> None:
    """On a CPU, host and device are one memory: a unit that is moved whole to its device is that of the host."""
    deeper = LLAMA.with_changes(num_hidden_layers=8)
    saved(deeper)
    run_program("loading_ranks", 2, tmp_path)
    first, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    training = TrainingSpec(global_batch_size=2, precision="bf16", task="sft")
    plan = ParallelPlan(dp_shard=2)
    cpu, rank0 = (predicted(deeper, training, plan, method, 2) for method in ("cpu", "rank0"))
    whole, embedding = 4 * deeper.num_parameters, 4 * 4000 * 256
    assert cpu.host_bytes == 2 * whole
    assert rank0.host_bytes == whole
    for rank in (first, other):
        assert rank["every_rank_loads"] == pytest.approx(whole + cpu.device_bytes - embedding, rel=0.01)
    assert other["rank_0_loads"] == pytest.approx(rank0.device_bytes, rel=0.03)
    assert first["rank_0_loads"] == pytest.approx(whole + rank0.device_bytes, rel=0.03)
