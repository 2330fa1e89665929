"""A split backward's memory by hand; ``executor/distributed/test_split_backward.py`` compares it with torch's own."""

from __future__ import annotations

import pytest

from simplan.model.layer import LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.program.memory.footprint import layer_footprint, layers_effects
from simplan.program.memory.split_footprint import SplitFootprint, split_effects, split_footprint, weighted_kernels
from simplan.program.program import MemoryCategory, MemoryEffect, Phase
from simplan.software.software import StateBytes

FP32 = StateBytes(parameter=4, gradient=4, activation=4, boundary=4)
AUTOCAST = StateBytes(parameter=4, gradient=4, activation=2, residual=4, boundary=4, weight_copy=2)
GPT2 = ModelSpec(
    family="gpt", num_hidden_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, seq_len=1024
)
LLAMA = ModelSpec(
    family="llama",
    num_hidden_layers=2,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    seq_len=8192,
)


def split(layer: LayerSpec, b: int, state: StateBytes, *, receives: bool = False) -> SplitFootprint:
    footprint = layer_footprint(layer, b, state, recomputation(layer, "none"))
    return split_footprint(layer, b, state, footprint, receives=receives)


def by_category(effects: tuple[MemoryEffect, ...]) -> dict[MemoryCategory, int]:
    """What is left."""
    return {effect.category: effect.after_bytes for effect in effects if effect.after_bytes}


def test_weights_are_found_in_the_order_of_parameters() -> None:
    assert [kernel.name for kernel in weighted_kernels(GPT2.layers[1])] == [
        "norm1", "qkv", "proj", "norm2", "up", "down",
    ]  # fmt: skip


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
    found = split(model.layers[1], b, state)
    assert found.gradients == b * elements * hidden
    assert found.between_activations == found.activations + found.gradients
    assert (found.between_logits, found.dropped) == (0, 0)


def test_a_received_gradient_counts_in_its_buffer_unless_it_is_cast() -> None:
    b, elements = 2, 1024 * 768
    pairs = {
        name: (split(GPT2.layers[1], b, state), split(GPT2.layers[1], b, state, receives=True))
        for name, state in (("fp32", FP32), ("autocast", AUTOCAST))
    }
    own, received = pairs["fp32"]
    assert own.gradients - received.gradients == b * elements * 4
    own, received = pairs["autocast"]
    assert own._replace(input=()) == received._replace(input=())


def test_a_head_has_the_gradients_of_logits_in_place_of_log_probabilities() -> None:
    """Which are fp32; the gradients are as wide as matrix products are."""
    b, logits = 2, 1024 * 50257
    for state, width in ((FP32, 4), (AUTOCAST, 2)):
        found = split(GPT2.layers[-1], b, state)
        assert found.logits == b * logits * 4
        assert found.between_logits == b * logits * width
        assert found.gradients == b * 1024 * 768 * 4  # of the norm


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


def test_what_the_second_part_lets_go_of_on_its_way() -> None:
    """All gradients that were left for it, two norms' statistics and outputs, the GELU's output, and one sum."""
    hidden, statistics = 1024 * 768 * 4, 2 * 1024 * 4
    assert split(GPT2.layers[1], 1, FP32).released == (11 + 2 + 4 + 1) * hidden + 2 * statistics
