"""States of a rank never grow with more shards, for every framework that shards and every model of experts."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.states import layer_states
from simplan.rules import violations
from tests.jobs import job_of

MODELS = [name for name in catalog.names("models") if catalog.model(name).num_experts]
FRAMEWORKS = [name for name in catalog.names("software") if {2, 3} & {*catalog.software(name).zero_stages}]
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
