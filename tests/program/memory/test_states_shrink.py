"""States of a rank never grow with more shards, for every framework that shards and every model of experts."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.program.memory.states import layer_states
from simplan.program.program import MemoryCategory
from simplan.rules import violations
from tests.jobs import job_of

MODELS = [name for name in catalog.names("models") if catalog.model(name).num_experts]
WITHOUT_EXPERTS = {"torchtune"}
FRAMEWORKS = [
    name
    for name in catalog.names("software")
    if {2, 3} & {*catalog.software(name).zero_stages} and name not in WITHOUT_EXPERTS
]
SHARDS = (4, 8, 16, 32, 64, 96, 128, 256, 512)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_states_of_experts_shrink_with_shards(model: str, framework: str) -> None:
    software, spec = catalog.software(framework), catalog.model(model)
    layers = {layer.key: layer for layer in software.layers_of(spec, ParallelPlan(dp_shard=8))}
    held = {}
    for shards in SHARDS:
        job = job_of(spec, {"dp_shard": shards}, software=software, global_batch_size=shards)
        if not any(problem.field == "plan.dp_shard" for problem in violations(job)):
            held[shards] = sum(layer_states(layer.parameters, shards, 1).weights for layer in layers.values())
    assert list(held.values()) == sorted(held.values(), reverse=True), held
    assert {4, 8, 16, 32, 64} <= held.keys()
    everything = sum(p.num_elements for layer in layers.values() for p in layer.parameters)
    few = {shards: num for shards, num in held.items() if shards > spec.num_experts}
    assert all(num < 1.1 * everything / shards for shards, num in few.items()), "no experts are padded to the shards"


def test_deepspeed_zero2_holds_whole_weights_in_its_step() -> None:
    """By hand, per weight: 2 bytes whole; of the own half 12 of states, 2 of gradients, 2 flat and 4 upcast."""
    job = job_of("llama2-7b", {"dp_shard": 2, "zero_stage": 2, "recompute": "full"}, software="deepspeed")
    peaks = {stage: predict(job.with_changes({"plan.zero_stage": stage})).worst_memory for stage in (2, 3)}
    weights = catalog.published_parameters("llama2-7b")
    assert peaks[2].peak_action == "0OPTIM"
    assert peaks[2].allocated_bytes == pytest.approx(weights * (2 + (12 + 2 + 2 + 4) / 2), rel=0.002)
    assert peaks[3].allocated_bytes < 0.9 * peaks[2].allocated_bytes


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_frozen_experts_have_no_states(zero_stage: int) -> None:
    """Adapters next to attention alone: optimizer states are two copies in FP32 of what is trained."""
    changes = {"dp_shard": 2, "ep": 2, "zero_stage": zero_stage} if zero_stage else {"dp_replicate": 2, "ep": 2}
    spec = catalog.model("deepseek-v2-lite").model_copy(update={"lora_rank": 64})
    job = job_of(spec, changes, software=catalog.software("torch"), global_batch_size=2)
    job = job.with_changes({"training.task": "lora"})
    assert not violations(job)
    states = predict(job).worst_memory.by_category[MemoryCategory.OPTIMIZER]
    assert 0 < states <= 8.1 * job.model.num_trained_parameters
