"""What is handed to the executor: one plan, fully decided, with the Level 1 table that was simulated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, Positive, Spec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.action import Table, parse_table
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.fewer_nodes import FewerNodes
from simplan.software.software import SoftwareSpec
from simplan.training.training import TrainingSpec

__all__ = ["RunSpec"]

_USUAL_WARMUP = 5
"""Steps that are run beside those asked for, where it is left open how many do not count."""


class RunSpec(Spec):
    """A job file: everything the ranks need, decided beforehand.

    Attributes:
        name: Name of the scenario.
        model, training, plan, software: What was asked, resolved.
        boundaries: The stage assignment (see ``StageAssignment``).
        table: The complete Level 1 table, text form, one row per pipeline rank.
        num_steps: Steady steps to measure.
        num_warmup_steps: Steps run before them and not counted; None for finding afterwards from the step times which
            these were, of a few steps more.
        seed: Of weights and synthetic tokens.
        dtype: ``fp64`` replaces the training precision, for checking against one process.
        device: ``auto`` takes CUDA devices when there are enough, else the CPU.
        timeout_s: A rank that makes no progress for so long ends the run.
        checkpointing: How the state is kept; None for not at all.
        predicted_memory_bytes: By rank, what the prediction says it needs on its device; empty without a prediction.
        fewer_nodes: How it goes on with fewer nodes than all, more of them first; empty when it does not.
        profile_memory: Run one extra step under the allocation profiler (CPU only) for peak allocated bytes.
    """

    schema_version: Literal[1] = 1
    name: str
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec
    boundaries: tuple[int, ...]
    table: tuple[tuple[str, ...], ...]
    num_steps: Count = 10
    num_warmup_steps: Annotated[int, Field(ge=0)] | None = 2
    seed: int = 0
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 120.0
    predicted_memory_bytes: tuple[Annotated[int, Field(ge=0)], ...] = ()
    profile_memory: bool = True
    checkpointing: Checkpointing | None = None
    fewer_nodes: tuple[FewerNodes, ...] = ()

    @property
    def num_all_steps(self) -> int:
        """Steps of the training, warm-up included."""
        return self.num_steps + (_USUAL_WARMUP if self.num_warmup_steps is None else self.num_warmup_steps)

    @property
    def assignment(self) -> StageAssignment:
        """Which layers each stage holds."""
        return StageAssignment(self.boundaries)

    def on_nodes(self, fewer: FewerNodes) -> RunSpec:
        """The job as so many nodes go on with it."""
        keys = ("plan", "boundaries", "table", "predicted_memory_bytes")
        return self.model_copy(update={key: getattr(fewer, key) for key in keys})

    def on_ranks(self, num_ranks: int) -> RunSpec | None:
        """The job on as many of these ranks (torchrun's WORLD_SIZE) as have a plan; None when they are too few."""
        plans = (self, *map(self.on_nodes, self.fewer_nodes))
        return next((job for job in plans if job.plan.num_devices <= num_ranks), None)

    def parsed_table(self) -> Table:
        """The table as actions.

        Raises:
            ProgramError: A cell is not an action.
        """
        return parse_table(self.table)
