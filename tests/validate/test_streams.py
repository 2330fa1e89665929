"""The axis of a measured collective, by the ranks that took part in it."""

from __future__ import annotations

import pytest

from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.program import Stream
from simplan.runs.measurement import MeasuredCollective
from simplan.validate.measured import stream_of


@pytest.mark.parametrize(
    ("plan", "ranks", "stream"),
    [
        (ParallelPlan(tp=2), (0, 1), Stream.TENSOR),
        (ParallelPlan(cp=2, cp_comm="all_gather"), (0, 1), Stream.CONTEXT),
        (ParallelPlan(dp_shard=2), (0, 1), Stream.SHARD),
        (ParallelPlan(dp_shard=2, tp=2), (0, 1), Stream.TENSOR),
        (ParallelPlan(dp_shard=2, tp=2), (0, 2), Stream.SHARD),
    ],
)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathers_are_of_the_axis_of_their_ranks(
    plan: ParallelPlan, ranks: tuple[int, ...], stream: Stream, kind: str
) -> None:
    communication = MeasuredCollective.model_validate(
        {"kind": kind, "action": "0F0", "ranks": ranks, "num_bytes": 8, "start_s": 0.0, "end_s": 1.0}
    )
    assert stream_of(communication, 0, RankMapping.of(plan)) is stream
