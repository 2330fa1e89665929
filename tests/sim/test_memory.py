"""The memory walk against sums by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.model.recompute import recomputation
from simplan.program.action import Table
from simplan.program.memory.footprint import LayerFootprint, layer_footprint
from simplan.program.program import MemoryCategory
from simplan.program.schedules import PipelineShape, gpipe, naive, one_f_one_b
from simplan.sim.engine import simulate
from simplan.sim.memory import memory_peak, memory_trace
from tests.jobs import tiny_model
from tests.program.tables.tables import compute_tables
from tests.sim.test_engine import SOFTWARE, durations, program

BLOCK_PARAMETERS = 12 * 64 * 64 + 13 * 64
BOUNDARY_BYTES = 16 * 64 * 4


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 4, 9])
def test_activations_are_those_of_the_microbatches_in_flight(p: int, m: int) -> None:
    """A middle stage at its worst: in-flight microbatches times a block's activations, plus communications and
    buffers."""
    software = SOFTWARE.model_copy(update={"zero_grad_set_to_none": False})  # else all gradients may weigh more
    for schedule, in_flight in ((naive, 1), (gpipe, m), (one_f_one_b, min(p - 1, m))):
        lowered = program(schedule(PipelineShape(p, m)), software=software)
        peak = memory_peak(lowered, 1)
        assert peak.activations_in_flight == {1: in_flight}
        if p == 2:
            continue
        block = _block()
        assert peak.by_category[MemoryCategory.ACTIVATIONS] == in_flight * (block.activations - block.input_bytes)
        assert peak.by_category[MemoryCategory.PARAMETERS] == 4 * BLOCK_PARAMETERS
        assert peak.by_category[MemoryCategory.OPTIMIZER] == 8 * BLOCK_PARAMETERS
        # receives of m microbatches both ways are allocated beforehand; sends stay until the end of the step
        assert peak.by_category[MemoryCategory.BUFFERS] >= 2 * m * BOUNDARY_BYTES


def _block() -> LayerFootprint:
    block = tiny_model().layers[1]
    return layer_footprint(block, 1, SOFTWARE.state_bytes["fp32"], recomputation(block, "none"))


@given(compute_tables(), st.sampled_from([1, 2]), st.integers(1, 2))
def test_memory_returns_to_its_base_and_both_levels_agree(compute: Table, level: int, dp: int) -> None:
    lowered = program(compute, dp=dp, level=level, layers_per_stage=2)
    other = program(compute, dp=dp, level=3 - level, layers_per_stage=2)
    times = simulate(lowered, durations(lowered, 1.0, 2.0, 0.1))
    for rank in lowered.ranks:
        samples = list(memory_trace(lowered, rank, times))
        assert samples[0].by_category == samples[-1].by_category
        assert [s.time_s for s in samples] == sorted(s.time_s for s in samples)
        peak = memory_peak(lowered, rank)
        rebuilding = sum(lowered.persistent_bytes[rank].values()) + lowered.rebuild_bytes[rank]
        assert peak.total_bytes == max(rebuilding, *(sum(s.by_category.values()) for s in samples))
        assert peak.total_bytes == memory_peak(other, rank).total_bytes


def test_rebuilding_buckets_is_the_peak_when_activations_are_small() -> None:
    """Adam at 16 bytes a parameter and DDP's second set of buckets: 20, as measured on real ranks.

    Gradients that are views keep the first set.
    """
    changes = {"gradient_as_bucket_view": True, "zero_grad_set_to_none": False}
    lowered = program(one_f_one_b(PipelineShape(1, 1)), dp=2, software=SOFTWARE.model_copy(update=changes))
    peak = memory_peak(lowered, 0)
    parameters = peak.by_category[MemoryCategory.PARAMETERS] // 4
    assert peak.action == ""
    assert peak.total_bytes == 20 * parameters
