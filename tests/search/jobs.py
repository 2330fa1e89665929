"""Small jobs to search for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from simplan import catalog
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.search import SearchSpace
from simplan.search.candidates import Candidates
from simplan.search.enumeration import Enumeration
from tests.jobs import job_of

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
    "neox": {**SIZES, "partial_rotary_factor": 0.5},
    "gemma": {**SIZES, "num_key_value_heads": 2},
    "gemma2": {**SIZES, "num_key_value_heads": 2},
    "gemma3": {**SIZES, "num_key_value_heads": 2},
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


def small_job(
    family: str = "llama",
    num_devices: int = 4,
    cluster: str = "dgx-h100",
    memory_bytes: int | None = None,
    batch: int = 8,
    precision: Any = "bf16",
    task: Any = "pretrain",
    software: str = "torch",
    **changes: Any,
) -> Job:
    """A small model on a few devices.

    Args:
        family: One of ``FAMILIES``.
        num_devices, cluster, memory_bytes: On what; memory of a device, if not its own.
        batch, precision, task: Of the training.
        changes: Fields of the model.
    """
    devices = catalog.cluster(cluster, num_devices)
    if memory_bytes is not None:
        device = devices.device.model_copy(update={"memory_bytes": memory_bytes})
        devices = devices.model_copy(update={"device": device})
    model = ModelSpec.model_validate({"family": family, **FAMILIES[family], **changes})
    how = {"global_batch_size": batch, "precision": precision, "task": task}
    return job_of(model, cluster=devices, software=software, **how)


def plain_plan(**fields: Any) -> ParallelPlan:
    """A plan whose other fields have their plain defaults, whatever these are."""
    return ParallelPlan().model_copy(update=fields)


def candidates_of(job: Job, space: SearchSpace) -> Candidates:
    """All plans of a space that keep the rules, as a table: making a plan takes longer than making its row."""
    return Candidates.joined(list(Enumeration(space, job).tables(Counter())))


def plans_of(job: Job, space: SearchSpace) -> list[ParallelPlan]:
    """All plans of a space that keep the rules."""
    candidates = candidates_of(job, space)
    return [candidates.plan(row) for row in range(len(candidates))]
