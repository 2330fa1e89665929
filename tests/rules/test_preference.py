"""Preference training that could not be, or is not modeled, in sentences with the nearest thing that would work."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import make_job
from simplan.errors import SpecError
from simplan.rules import violations
from simplan.scenario import scenario_from
from simplan.training import PREFERENCE_TASKS

TORCH: dict[str, Any] = {"plan.dp_shard": 8, "software": "torch"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no preferences": (
        {"training.task": "sft", "training.preference": "precomputed"},
        "training.preference: is about preference training, and training.task = sft; use task dpo,",
    ),
    "adapters off without adapters": (
        {"training.task": "dpo", "training.preference": "adapters_off"},
        "training.preference.reference = adapters_off: is a forward without adapters, and model.lora_rank = 0; use "
        "second_model or precomputed, or give model.lora_rank, e.g. 16",
    ),
    "a reference that no loss reads": (
        {"training.task": "orpo", "training.preference": "second_model"},
        "is the reference model of dpo, kto or asft, and training.task = orpo has none; remove it",
    ),
    "no reference": (
        {"training.task": "kto", "training.preference": "none"},
        "leaves out the reference model, with which the loss of kto compares; use second_model or precomputed,",
    ),
    "stored sums where logits are compared": (
        {"training.task": "asft", "training.preference": "precomputed"},
        "keeps log-probabilities of whole sequences, and the loss of asft compares all logits; use second_model,",
    ),
    "no reference of adapters": (
        {"training.task": "dpo", "model.lora_rank": 8, "training.preference": "none"},
        "use adapters_off, second_model or precomputed, or task orpo or simpo",
    ),
    "shards of no second model": (
        {"training.task": "dpo", "model.lora_rank": 8, "training.preference": {"reference_sharded": True}},
        "reference_sharded = true: is about a second model, and training.preference.reference = adapters_off",
    ),
    "shards without sharding": (
        {
            "training.task": "dpo",
            "training.preference": {"reference_sharded": True},
            "plan.dp_shard": 1,
            "plan.dp_replicate": 8,
        },
        "needs a plan that shards parameters, and plan.zero_stage = 0; remove it, or use plan.zero_stage = 3",
    ),
    "a narrow second model": (
        {"training.task": "dpo", "training.precision": "fp32", "training.preference": {"reference_dtype": "bf16"}},
        "would compute in 16 bits next to training.precision = fp32",
    ),
    "a second model larger than the host": (
        {"training.task": "dpo", "plan.offload_optimizer": True, "cluster.host_memory_bytes": 2**34},
        "is 29.92 GiB of weights on the host of every node, which has 16.00 GiB; use precomputed, or model.lora_rank",
    ),
    "weights of few bits without adapters": (
        {"training.task": "dpo", "training.base_weights": "nf4"},
        "is for frozen weights below adapters, and model.lora_rank = 0; give model.lora_rank, e.g. 16,",
    ),
    "an adapter of a score": (
        {"training.task": "reward", "model.lora_rank": 1, "model.lora_targets": ["all", "head"]},
        "model.lora_targets = head: names the head, which training.task = reward replaces by a score",
    ),
    "a score in chunks": (
        {"training.task": "reward", "software": {"preset": "torch", "loss": "fused"}},
        "computes logits in chunks, and training.task = reward has no logits; use software.loss = whole",
    ),
    "chunks whose gradients forward computes": (
        {"training.task": "dpo", "software": {"preset": "torch", "loss": "chunked"}},
        "is not modeled yet; use software.loss = whole, recomputed or fused",
    ),
    "a pipeline": (
        {"training.task": "dpo", "plan.dp_shard": 4, "plan.pp": 2},
        "plan.pp = 2: a pipeline in preference training (training.task = dpo) is not modeled yet; use 1, and",
    ),
    "packing": (
        {"training.task": "simpo", "model.document_lengths": [1000, 3000]},
        "packing, with which TRL trains on no preferences either, in preference training (training.task = simpo)",
    ),
    "another framework": (
        {"training.task": "dpo", "software": "torchtitan"},
        "with torchtitan is not modeled yet; use software torch, accelerate, deepspeed or transformers",
    ),
    "another family": (
        {"model": "bert-base", "training.task": "dpo"},
        "of family bert is not modeled yet; use gpt,",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_preference_training_is_refused(name: str) -> None:
    """One sentence says field, value, rule and fix."""
    changes, sentence = WRONG[name]
    keys = {**TORCH, "cluster.preset": "dgx-h100", **changes}
    with pytest.raises(SpecError) as error:
        scenario_from(keys.pop("model", "llama3-8b"), keys)
    assert sentence in str(error.value)


@pytest.mark.parametrize("task", PREFERENCE_TASKS)
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("software", ["torch", "transformers", "accelerate", "deepspeed"])
def test_tasks_need_no_other_keys(task: str, rank: int, software: str) -> None:
    """Each has a reference by default, of all weights and of adapters."""
    if software == "transformers" and rank:
        return  # has no adapters
    keys = {"plan.dp_shard": 8, "training.task": task, "model.lora_rank": rank, "software": software}
    assert not violations(make_job("llama3-8b", keys, cluster="dgx-h100", microbatch_size=2))
