"""Interleaved 1F1B whose messages go in batches: closed forms, and what one rank waits for."""

from __future__ import annotations

import pytest

from simplan.program.action import Action, ActionKind
from simplan.program.batches import in_batches, waits_for
from simplan.program.complete import complete_table
from simplan.program.lower import Lowering, lower
from simplan.program.partition import assign_stage_layers
from simplan.program.schedules import PipelineShape, interleaved_1f1b
from simplan.sim.engine import simulate
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec, StateBytes
from simplan.spec.training import TrainingSpec
from tests.jobs import job_to_lower

SOFTWARE = SoftwareSpec(
    id="test",
    state_bytes={"fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4)},
    bucket_bytes=2**17,
    first_bucket_bytes=2**16,
    synchronous_schedules=("interleaved_1f1b",),
)


def step_time_s(p: int, v: int, m: int, forward_s: float, backward_s: float, send_s: float) -> float:
    """Of equal stages, by the engine."""
    model = ModelSpec(
        family="gpt",
        num_hidden_layers=p * v,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=256,
        seq_len=16,
        tied_embeddings=False,
    )
    found = lower(
        job_to_lower(
            model, TrainingSpec(global_batch_size=m, precision="fp32"), ParallelPlan(pp=p, virtual_stages=v), SOFTWARE
        ),
        assign_stage_layers([1] * (p * v)),
        complete_table(interleaved_1f1b(PipelineShape(p, m, v))),
        Lowering(1),
    )
    costs = {ActionKind.FORWARD: forward_s, ActionKind.BACKWARD: backward_s}
    return simulate(
        found, [send_s if op.message else costs.get(op.action.kind, 0.0) if op.work else 0.0 for op in found.ops]
    ).step_time_s


@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 2, 2), (2, 3, 4), (4, 2, 2), (4, 3, 3), (5, 2, 2)])
@pytest.mark.parametrize("send_s", [0, 1])
def test_ranks_are_in_step(p: int, v: int, rounds: int, send_s: int) -> None:
    """The ideal time, and one message for every batch.

    The last rank has m v forwards and backwards, of which the first (v - 1) p forwards and the last as many backwards
    are alone, so m v + (v - 1) p things to do one batch apart; the first of them comes over p - 1 ranks, and what the
    last one makes goes back over as many.
    """
    m, forward_s, backward_s = rounds * p, 3, 5
    batches = m * v + (v - 1) * p - 1 + 2 * (p - 1)
    ideal_s = (m * v + p - 1) * (forward_s + backward_s)
    assert step_time_s(p, v, m, forward_s, backward_s, send_s) == ideal_s + batches * send_s


def test_what_the_second_of_two_ranks_does() -> None:
    """As forward_backward_pipelining_with_interleaving has it: forwards, then pairs, then backwards."""
    row = complete_table(interleaved_1f1b(PipelineShape(2, 4, 2)))[1]
    found = [str(action) for action in in_batches(row)]
    assert found[:5] == ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "1F1"]
    assert found[5:12] == ["1SEND_F1", "3RECV_F0", "3F0", "3B0", "3SEND_B0", "3RECV_F1", "3F1"]
    assert found[-5:] == ["1RECV_B3", "1B3", "1SEND_B3", "1REDUCE_GRAD", "1OPTIM"]
    assert sorted(map(str, row)) == sorted(found)


def test_what_a_rank_reduces_is_not_in_the_way_of_messages() -> None:
    row = complete_table(interleaved_1f1b(PipelineShape(2, 4, 2)))[1]
    found = list(in_batches(row))
    last = found.index(Action(3, ActionKind.BACKWARD, 3))
    assert [str(action) for action in found[last : last + 4]] == ["3B3", "3SEND_B3", "1RECV_B2", "3REDUCE_GRAD"]


@pytest.mark.parametrize(("m", "expected"), [(4, "none"), (6, "none"), (8, "batch")])
def test_only_whole_rounds_of_microbatches_are_in_step(m: int, expected: str) -> None:
    """Others would wait for each other forever."""
    assert waits_for(ParallelPlan(pp=4, virtual_stages=2), SOFTWARE, m) == expected
    assert waits_for(ParallelPlan(pp=4), SOFTWARE, m) == "none"
    assert waits_for(ParallelPlan(pp=4), SOFTWARE.model_copy(update={"synchronous_schedules": ("1f1b",)}), m) == "each"
