"""Memory of states and activations against published figures and arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.memory.footprint import brought_parameters, layer_footprint, layers_effects
from simplan.program.program import MemoryCategory
from simplan.program.tables.table import plan_table
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training.training import TrainingSpec
from tests.jobs import job_to_lower

GPT2 = ModelSpec(
    family="gpt", num_hidden_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, seq_len=1024
)


def software(state: StateBytes, **changes: bool) -> SoftwareSpec:
    return SoftwareSpec(
        id="test",
        state_bytes={"bf16": state},
        bucket_bytes=1,
        first_bucket_bytes=1,
        **changes,  # type: ignore[arg-type]
    )


def resting(training: TrainingSpec, plan: ParallelPlan, framework: SoftwareSpec) -> dict[MemoryCategory, int]:
    table, assignment = plan_table(plan, 1), StageAssignment((0, len(GPT2.layers)))
    return lower(job_to_lower(GPT2, training, plan, framework), assignment, table, Lowering(level=1)).persistent_bytes[
        0
    ]


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
    training = TrainingSpec(global_batch_size=8, precision="bf16", optimizer=optimizer)  # type: ignore[arg-type]
    assert sum(resting(training, ParallelPlan(), software(state)).values()) == bytes_per_parameter * 124_439_808


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
    found = layer_footprint(GPT2.layers[1], b, state, recomputation(GPT2.layers[1], "none")).activations
    assert found - norm_statistics - logsumexp == (34 - 2) * s * b * h


def test_group_has_the_peak_of_its_layers_one_by_one() -> None:
    state = StateBytes(parameter=4, gradient=4, activation=4, boundary=4)
    footprints = [layer_footprint(layer, 2, state, recomputation(layer, "none")) for layer in GPT2.layers]
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


def test_head_holds_log_probabilities_in_fp32() -> None:
    head = GPT2.layers[-1]
    assert head.kind is LayerKind.HEAD
    state = StateBytes(parameter=2, gradient=2, activation=2, boundary=2)
    assert layer_footprint(head, 3, state, recomputation(head, "none")).logits == 3 * 1024 * 50257 * 4


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
    autocast = StateBytes(parameter=4, gradient=4, activation=2, residual=4, boundary=4, weight_copy=2)
    block = GPT2.layers[1]
    for b in (1, 4):
        kept = [
            layer_footprint(block, b, state, recomputation(block, "none")).activations for state in (alike, autocast)
        ]
        residuals = 2 * b * 1024 * 768  # the input and what attention was added to
        assert kept[1] - kept[0] == 2 * 12 * 768**2 + 2 * residuals
