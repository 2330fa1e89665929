"""What ranks hold of a layer's parameters."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from simplan.model.layer import ParameterSpec
from simplan.program.lowering.units import padded_elements, shard_elements
from simplan.program.memory.states import layer_states

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)


@given(SHAPES, st.integers(1, 16))
def test_shards_are_the_chunks_that_torch_cuts_a_tensor_into(shape: tuple[int, ...], num_shards: int) -> None:
    chunks = [chunk.numel() for chunk in torch.empty(shape).chunk(num_shards)]
    chunks += [0] * (num_shards - len(chunks))
    assert [shard_elements(shape, num_shards, index) for index in range(num_shards)] == chunks
    assert padded_elements(shape, num_shards) == num_shards * chunks[0]


@given(SHAPES, SHAPES, st.integers(1, 16), st.integers(1, 4))
def test_a_layer_is_the_sum_of_its_parameters(
    dense: tuple[int, ...], expert: tuple[int, ...], num_shards: int, expert_shards: int
) -> None:
    parameters = [
        ParameterSpec("frozen", dense, frozen=True),
        ParameterSpec("partial", dense, partial_gradient=True),
        ParameterSpec("expert", expert, expert=True),
    ]
    found = layer_states(parameters, num_shards, expert_shards)
    shard, of_experts = shard_elements(dense, num_shards), shard_elements(expert, expert_shards)
    assert found == (2 * shard + of_experts, shard + of_experts, of_experts, shard)
