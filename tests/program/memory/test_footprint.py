"""Memory of states and activations against published figures and arithmetic by hand.

``executor/distributed/test_split_backward.py`` compares that of a split backward with torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.model.layer import LayerSpec, ParameterSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.program.lowering.fsdp_units import padded_elements, shard_elements
from simplan.program.memory.footprint import brought_parameters, layer_footprint, layers_effects
from simplan.program.memory.split_footprint import SplitFootprint, split_effects, split_footprint
from simplan.program.memory.states import layer_states
from simplan.program.program import MemoryCategory, MemoryEffect, Phase
from simplan.software.software import SoftwareSpec, StateBytes
from tests.jobs import job_of, lowered, states_at_update

GPT2, LLAMA = catalog.model("gpt2-124m"), catalog.model("llama3-8b")
FP32 = StateBytes(parameter=4, gradient=4, activation=4, boundary=4)
AUTOCAST = StateBytes(parameter=4, gradient=4, activation=2, residual=4, boundary=4, weight_copy=2)


@pytest.mark.parametrize(
    ("state", "optimizer", "bytes_per_parameter"),
    [
        # torch autocast: fp32 weights, gradients and two moments
        (StateBytes(parameter=4, gradient=4, activation=2, boundary=2), "adamw", 16),
        # ZeRO paper (Rajbhandari et al. 2020, section 3.1): fp16 weights and gradients, fp32 copy and moments
        (StateBytes(parameter=2, gradient=2, master=4, activation=2, boundary=2), "adam", 16),
        # Megatron-LM: bf16 weights, fp32 gradients, fp32 copy and moments
        (StateBytes(parameter=2, gradient=4, master=4, activation=2, boundary=2), "adam", 18),
        (StateBytes(parameter=4, gradient=4, activation=4, boundary=4), "sgd", 8),
    ],
)
def test_bytes_per_parameter(state: StateBytes, optimizer: str, bytes_per_parameter: int) -> None:
    software = SoftwareSpec(id="test", state_bytes={"bf16": state}, bucket_bytes=1, first_bucket_bytes=1)
    program = lowered(job_of(GPT2, software=software, num_microbatches=1, optimizer=optimizer), 1)
    assert states_at_update(program) == bytes_per_parameter * 124_439_808


def test_a_tied_head_owns_its_matrix_only_apart_from_the_embedding() -> None:
    def elements(layers: Sequence[LayerSpec]) -> list[int]:
        return [sum(p.num_elements for p in parameters) for parameters in brought_parameters(layers)]

    assert sum(elements(GPT2.layers)) == 124_439_808
    assert elements(GPT2.layers[6:])[-1] == 50257 * 768 + 2 * 768


def test_gpt_block_keeps_the_published_activations() -> None:
    """Korthikanti et al. 2022, section 4.1: s b h (34 + 5 a s / h) bytes in 16 bit.

    Of these our blocks lack two dropout masks of one byte an element (2 s b h), and FlashAttention keeps one fp32
    number per row and head instead of the softmax and its mask (5 a s^2 b).
    """
    b, s, h, a = 4, 1024, 768, 12
    state = StateBytes(parameter=2, gradient=4, activation=2, boundary=2)
    norm_statistics, logsumexp = 4 * s * b * 4, a * s * b * 4
    activations = layer_footprint(GPT2.layers[1], b, state, recomputation(GPT2.layers[1], "none")).activations
    assert activations - norm_statistics - logsumexp == (34 - 2) * s * b * h


def test_group_has_the_peak_of_its_layers_one_by_one() -> None:
    footprints = [layer_footprint(layer, 2, FP32, recomputation(layer, "none")) for layer in GPT2.layers]
    for forward in (True, False):
        order = footprints if forward else footprints[::-1]
        held = peak = 0
        for footprint in order:
            effects = layers_effects([footprint], forward=forward)
            peak = max(peak, held + sum(e.during_bytes for e in effects))
            held += sum(e.after_bytes for e in effects)
        whole = layers_effects(order, forward=forward)
        assert sum(e.during_bytes for e in whole) == peak
        assert sum(e.after_bytes for e in whole) == held


def test_full_recomputation_keeps_the_input_and_makes_the_rest_in_backward() -> None:
    """Korthikanti et al. 2022, table 2: 2 s b h bytes a layer; at its worst backward has one layer's as without."""
    state = StateBytes(parameter=2, gradient=4, activation=2, boundary=2)
    block = GPT2.layers[1]
    plain, full = (layer_footprint(block, 4, state, recomputation(block, mode)) for mode in ("none", "full"))
    assert full.activations == full.input_bytes == 2 * 1024 * 4 * 768
    assert full.activations + max(map(sum, full.backward)) == plain.activations + max(map(sum, plain.backward))


def test_autocast_keeps_copies_of_matrices_for_every_microbatch() -> None:
    """12 h^2 weights of a block in 16 bits, whatever the microbatch; residuals are fp32."""
    alike = StateBytes(parameter=4, gradient=4, activation=2, boundary=4)
    block = GPT2.layers[1]
    for b in (1, 4):
        kept = [
            layer_footprint(block, b, state, recomputation(block, "none")).activations for state in (alike, AUTOCAST)
        ]
        residuals = 2 * b * 1024 * 768  # the input and what attention was added to
        assert kept[1] - kept[0] == 2 * 12 * 768**2 + 2 * residuals


def split(layer: LayerSpec, b: int, state: StateBytes, *, receives: bool = False) -> SplitFootprint:
    footprint = layer_footprint(layer, b, state, recomputation(layer, "none"))
    return split_footprint(layer, b, state, footprint, receives=receives)


def by_category(effects: tuple[MemoryEffect, ...]) -> dict[MemoryCategory, int]:
    """What is left."""
    return {effect.category: effect.after_bytes for effect in effects if effect.after_bytes}


@pytest.mark.parametrize(
    ("model", "state", "hidden"),
    [
        # norm1 1, qkv 3, proj 1, norm2 1, up 4, down 1 hidden states of 4 bytes
        (GPT2, FP32, 11 * 4),
        # the two norms in 4 bytes, the matrices in 2
        (GPT2, AUTOCAST, 2 * 4 + 9 * 2),
        # q 1, k and v 1/4 each, proj 1, down 1, and gate and up 3.5 each
        (LLAMA, FP32, (2 + 1.5 + 1 + 7 + 1) * 4),
        (LLAMA, AUTOCAST, 2 * 4 + (1.5 + 1 + 7 + 1) * 2),
    ],
)
def test_a_block_leaves_the_gradients_of_its_matrices_and_norms(
    model: ModelSpec, state: StateBytes, hidden: float
) -> None:
    b, elements = 2, model.seq_len * model.hidden_size
    split_footprint = split(model.layers[1], b, state)
    assert split_footprint.gradients == b * elements * hidden
    assert split_footprint.between_activations == split_footprint.activations + split_footprint.gradients
    assert (split_footprint.between_logits, split_footprint.dropped) == (0, 0)


def test_a_received_gradient_counts_in_its_buffer_unless_it_is_cast() -> None:
    b, elements = 2, 1024 * 768
    pairs = {
        name: (split(GPT2.layers[1], b, state), split(GPT2.layers[1], b, state, receives=True))
        for name, state in (("fp32", FP32), ("autocast", AUTOCAST))
    }
    plain, received = pairs["fp32"]
    assert plain.gradients - received.gradients == b * elements * 4
    plain, received = pairs["autocast"]
    assert plain._replace(input=()) == received._replace(input=())


def test_a_head_has_the_gradients_of_logits_in_place_of_log_probabilities() -> None:
    """Which are fp32; the gradients are as wide as matrix products are."""
    b, logits = 2, 1024 * 50257
    for state, width in ((FP32, 4), (AUTOCAST, 2)):
        split_footprint = split(GPT2.layers[-1], b, state)
        assert split_footprint.logits == b * logits * 4
        assert split_footprint.between_logits == b * logits * width
        assert split_footprint.gradients == b * 1024 * 768 * 4  # of the norm


@pytest.mark.parametrize("state", [FP32, AUTOCAST])
def test_two_parts_leave_what_a_whole_backward_does(state: StateBytes) -> None:
    """Nothing of what forward kept, layer by layer and category by category."""
    layers = GPT2.layers[5:]
    footprints = [layer_footprint(layer, 2, state, recomputation(layer, "none")) for layer in layers]
    parts = [split_footprint(layer, 2, state, footprint) for layer, footprint in zip(layers, footprints, strict=True)]
    first = by_category(split_effects(parts[::-1], Phase.BACKWARD_INPUT))
    second = by_category(split_effects(parts, Phase.BACKWARD_WEIGHT))
    whole = by_category(layers_effects(footprints[::-1], forward=False))
    assert {category: first.get(category, 0) + second[category] for category in second} == whole


def test_log_probabilities_are_there_until_all_layers_have_their_gradients() -> None:
    """With few logits the worst moment of I is at its end: gradients of six blocks, the first of which adds up two."""
    model = GPT2.model_copy(update={"vocab_size": 1000})
    parts = [split(layer, 1, FP32) for layer in model.layers[7:]]
    effects = {effect.category: effect for effect in split_effects(parts[::-1], Phase.BACKWARD_INPUT)}
    hidden, logits = 1024 * 768 * 4, 1024 * 1000 * 4
    assert effects[MemoryCategory.LOGITS] == (MemoryCategory.LOGITS, logits, 0)
    assert effects[MemoryCategory.ACTIVATIONS].during_bytes == 6 * 11 * hidden + hidden
    assert effects[MemoryCategory.WORKSPACE].during_bytes == 2 * hidden


def test_the_second_part_holds_two_gradients_of_weights_and_has_let_go_of_what_it_is_past() -> None:
    """One block of 4096 of one sequence of 16 tokens: weights are all that counts, of which up and down are largest."""
    model = LLAMA.model_copy(update={"seq_len": 16})
    (effect,) = [
        effect
        for effect in split_effects([split(model.layers[1], 1, FP32)], Phase.BACKWARD_WEIGHT)
        if effect.category is MemoryCategory.GRADIENTS
    ]
    assert effect == (MemoryCategory.GRADIENTS, 2 * 4096 * 14336 * 4, 0)


def test_the_second_part_frees_tensors_on_its_way() -> None:
    """All gradients that were left for it, two norms' statistics and outputs, the GELU's output, and one sum."""
    hidden, statistics = 1024 * 768 * 4, 2 * 1024 * 4
    assert split(GPT2.layers[1], 1, FP32).released == (11 + 2 + 4 + 1) * hidden + 2 * statistics


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
        ParameterSpec("next to trained ones", dense, frozen=True, is_flat=True),
        ParameterSpec("partial", dense, partial_gradient=True),
        ParameterSpec("expert", expert, expert=True),
    ]
    states = layer_states(parameters, num_shards, expert_shards)
    shard, of_experts = shard_elements(dense, num_shards), shard_elements(expert, expert_shards)
    assert (states.weights, *states[3:6]) == (3 * shard + of_experts, shard + of_experts, of_experts, shard)
    assert states.gradients == 2 * shard + of_experts
