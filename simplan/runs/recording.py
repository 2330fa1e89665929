"""Recordings of training loops that users wrote. The executor writes them, ``compare`` reads them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simplan.base import MAX_DEVICES, Count, Line, Natural, Positive, Spec
from simplan.program.program import MemoryCategory
from simplan.runs.measurement import PeakMemory

RECORDING_KIND: Literal["recording"] = "recording"
RecordedKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
]
_Rank = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]


class RecordedCollective(Spec):
    """A collective or P2P transfer of a step, as it was issued.

    Attributes:
        ranks: Global ranks of the group, ascending; of a P2P transfer, source and destination.
        num_bytes: Size in bytes as in ``simplan.model.kernel.CollectiveKind``.
    """

    kind: RecordedKind
    ranks: Annotated[tuple[_Rank, ...], Field(min_length=1)]
    num_bytes: Natural


class RankRecording(Spec):
    """Recording of one rank.

    Attributes:
        node: Host name of the rank.
        step_times_s: The rank's own time of each counted step, in seconds.
        peak_memory: Peaks over the counted steps; of a CPU rank, allocated bytes are those of the steps before them.
        states_bytes: Bytes of parameters, gradients and optimizer states at an update, this rank's shards; empty
            without the module.
        collectives: Communication of one step in issue order; None if no step was looked at.
    """

    rank: _Rank
    node: Line = ""
    step_times_s: tuple[Positive, ...]
    peak_memory: PeakMemory
    states_bytes: dict[MemoryCategory, Natural] = Field(default_factory=dict)
    collectives: tuple[RecordedCollective, ...] | None = None


class Recording(Spec):
    """Steps of a user's own training loop. The job is unknown: it has no actions, no plan and no losses.

    Attributes:
        step_times_s: Counted steps in seconds, the mean over ranks: ranks wait for each other in a step, and leave it
            at slightly different times.
        first_step: Number of the first counted step, from 1; the steps before it were looked at.
        samples_per_step: Samples of all ranks in a step; None if the user did not say it.
        ranks: One entry per rank, in order.
        environment: Machine, versions, threads, backend.
    """

    schema_version: Literal[1] = 1
    kind: Literal["recording"] = RECORDING_KIND
    step_times_s: Annotated[tuple[Positive, ...], Field(min_length=1)]
    first_step: Count = 1
    samples_per_step: Count | None = None
    ranks: Annotated[tuple[RankRecording, ...], Field(min_length=1)]
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)

    @property
    def is_of_cpu(self) -> bool:
        """True if the ranks computed on CPU cores."""
        return self.environment.get("backend") != "nccl"

    @model_validator(mode="after")
    def _has_every_rank(self) -> Self:
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"ranks must be 0 to {len(self.ranks) - 1}, in order")
        return self
