"""Small questions to search for."""

from __future__ import annotations

from typing import Any

from simplan.search import Question
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.training import TrainingSpec

__all__ = ["FAMILIES", "SIZES", "TORCH", "question"]

TORCH = catalogue.software("torch")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
    "seq_len": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {**SIZES, "tied_embeddings": True},
    "llama": {**SIZES, "num_key_value_heads": 2, "tied_embeddings": False},
    "mpt": SIZES,
    "bert": SIZES,
    "vit": {key: value for key, value in SIZES.items() if key not in ("vocab_size", "seq_len")}
    | {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_classes": 8},
    "moe": {**SIZES, **_EXPERTS, "tied_embeddings": False},
    "deepseek": {
        **SIZES,
        **_EXPERTS,
        "tied_embeddings": False,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "t5": SIZES,
    "resnet": {"depths": (1, 1), "embedding_size": 16, "image_size": 32, "num_classes": 8},
}


def question(
    family: str = "llama",
    num_devices: int = 4,
    cluster: str = "dgx-h100",
    memory_bytes: int | None = None,
    batch: int = 8,
    precision: Any = "bf16",
    task: Any = "pretrain",
    **changes: Any,
) -> Question:
    """A small model on a few devices.

    Args:
        family: One of ``FAMILIES``.
        num_devices, cluster, memory_bytes: On what; memory of a device, if not its own.
        batch, precision, task: Of the training.
        changes: Fields of the model.
    """
    devices = catalogue.cluster(cluster, num_devices)
    if memory_bytes is not None:
        device = devices.device.model_copy(update={"memory_bytes": memory_bytes})
        devices = devices.model_copy(update={"device": device})
    model = ModelSpec.model_validate({"family": family, **FAMILIES[family], **changes})
    training = TrainingSpec(global_batch_size=batch, precision=precision, task=task)
    return Question(model, devices, training, TORCH)
