"""Steps in backward, projected gradients and BAdam where they cannot be, in sentences with what would work."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.scenario import scenario_from

IN_BACKWARD = {"training.optimizer_in_backward": True}
GALORE = {"training.optimizer": "galore_adamw", "training.optimizer_rank": 64}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "accumulated gradients": (
        {**IN_BACKWARD, "plan.dp_shard": 8, "training.global_batch_size": 16},
        "training.global_batch_size = 16: is 2 microbatches of a step, and training.optimizer_in_backward uses the "
        "gradient of one; use 8, or optimizer_in_backward: false",
    ),
    "a norm of all gradients": (
        {**IN_BACKWARD, "plan.dp_shard": 8, "training.clip_grad_norm": 1.0},
        "is over before the norm of all gradients is known, which training.clip_grad_norm needs; leave",
    ),
    "replicas": (
        {**IN_BACKWARD, "plan.dp_replicate": 8},
        "update every replica before gradients are averaged; use zero_stage = 3 with dp_shard (FSDP2), or",
    ),
    "tensor parallelism": (
        {**IN_BACKWARD, "plan.tp": 8, "training.global_batch_size": 1},
        "plan.tp = 8: training.optimizer_in_backward with it is not modeled yet; use 1, or",
    ),
    "weights on the host": (
        {**IN_BACKWARD, "plan.dp_shard": 8, "plan.offload_optimizer": True},
        "plan.offload_optimizer = true: training.optimizer_in_backward with it is not modeled yet; use false, or",
    ),
    "gathered matrices": (
        {**IN_BACKWARD, "plan.dp_shard": 8, "training.optimizer": "muon"},
        "an optimizer in backward for which ranks communicate is not modeled yet; use adamw, or",
    ),
    "another framework": (
        {**IN_BACKWARD, "plan.dp_shard": 8, "plan.zero_stage": 1, "software": "megatron-core"},
        "it with megatron-core is not modeled yet; use software torch or accelerate, or false",
    ),
    "projections without a rank": (
        {"training.optimizer": "apollo_adamw", "plan.dp_replicate": 8},
        "training.optimizer_rank = none: is needed by apollo_adamw, which projects gradients to this rank; use 128",
    ),
    "a rank without projections": (
        {"training.optimizer_rank": 8, "plan.dp_replicate": 8},
        "is of optimizers with projected gradients, and adamw is none; remove it, or use galore_adamw,",
    ),
    "projections of shards": (
        {**GALORE, "plan.dp_shard": 8},
        "projects whole matrices, and FSDP2 leaves shards; use zero_stage = 0",
    ),
    "BAdam of all blocks": (
        {"training.optimizer": "badam", "cluster.num_devices": 1, "training.global_batch_size": 1},
        'must leave one block to badam, and leaves 34 layers; use ["embedding", "head", "blocks.1-31"]',
    ),
    "BAdam of replicas": (
        {"training.optimizer": "badam", "model.frozen": ["embedding", "head", "blocks.1-31"], "plan.dp_replicate": 8},
        "trains by several processes with DeepSpeed's ZeRO-3 only, which is not modeled yet; use one device",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_update_is_refused(name: str) -> None:
    """One sentence says field, value, rule and fix."""
    changes, sentence = WRONG[name]
    usual = {"software": "torch", "training.global_batch_size": 8, "cluster.preset": "dgx-h100"}
    with pytest.raises(SpecError) as error:
        scenario_from("llama3-8b", {**usual, **changes})
    assert sentence in str(error.value)
