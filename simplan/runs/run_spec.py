"""Job files, the executor's input: one fully specified plan with the action table that was simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from simplan.base import Count, Natural, Positive, Spec
from simplan.cluster.hardware import Slowdown
from simplan.errors import Problem
from simplan.job import with_objective
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.action import Table, parse_table
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import FewerNodes
from simplan.runs.faults import ExpectedRun, Fault
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec

_USUAL_WARMUP = 5
"""Additional steps to run if the number of warm-up steps is unspecified."""


def rounds_beyond_run(plan: ParallelPlan, num_steps: int, field: str) -> Iterator[Problem]:
    """Yields a problem if no whole round of replicas that train alone is measured.

    Args:
        plan: Plan of the run.
        num_steps: Steps to measure.
        field: Their name for the user.
    """
    if num_steps < plan.round_steps:
        rule = f"is less than a round of plan.replication, of {plan.round_steps:,} steps, whose mean is measured"
        fix = f"use {plan.round_steps}, or replication.inner_steps = {num_steps} or less"
        yield Problem(field=field, value=str(num_steps), rule=rule, fix=fix)


class RunSpec(Spec):
    """A job file: all settings that the ranks need.

    Attributes:
        name: Name of the scenario.
        model, training, plan, software: Resolved settings of the request.
        boundaries: The stage assignment (see ``StageAssignment``).
        table: The complete action table, text form, one row per pipeline rank.
        num_steps: Number of steady steps to measure.
        num_warmup_steps: Number of steps before them that are not counted; None to run a few more steps and to detect
            the warm-up afterwards from the step times.
        seed: Seed of weights and synthetic tokens.
        dtype: ``fp64`` replaces the training precision, for comparison with the single-process reference.
        device: ``auto`` uses CUDA devices if there are enough, otherwise the CPU.
        timeout_s: Seconds without progress of a rank after which the run is aborted.
        checkpointing: Checkpointing options; None for no checkpoints.
        predicted_memory_bytes: Per rank, predicted bytes on its device; empty without a prediction.
        fewer_nodes: Plans for continuation on fewer nodes, in descending number of nodes; empty for no continuation.
        replica_restarts: Restarts, by each node, of replicas that have left (``Replication.min_replicas``).
        slowdowns: Per rank, the factor by which the executor slows down its compute; empty without slow ranks.
        faults: Faults that the run is to meet; empty for none.
        expected: What the run is predicted to lose by faults of this kind; None without a prediction.
        profile_memory: True to run one extra step under the allocation profiler (CPU only) for peak allocated bytes.
    """

    schema_version: Literal[2] = 2
    name: str
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec
    boundaries: tuple[Natural, ...]
    table: tuple[tuple[str, ...], ...]
    num_steps: Count = 10
    num_warmup_steps: Natural | None = 2
    seed: Natural = 0
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 120.0
    predicted_memory_bytes: tuple[Natural, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    profile_memory: bool = True
    checkpointing: Checkpointing | None = None
    fewer_nodes: tuple[FewerNodes, ...] = ()
    faults: tuple[Fault, ...] = ()
    expected: ExpectedRun | None = None
    replica_restarts: Natural = 0

    @model_validator(mode="after")
    def _has_objective(self) -> RunSpec:
        """Gives model and software what belongs to a job and is in no file."""
        for name, part in zip(
            ("model", "software"), with_objective(self.model, self.training, self.software), strict=True
        ):
            object.__setattr__(self, name, part)
        return self

    @property
    def num_processes(self) -> int:
        """Number of ranks, and of parameter servers behind them, which are processes of their own."""
        replication = self.plan.replication
        has_servers = replication is not None and replication.has_servers
        return self.plan.num_devices + (replication.servers if replication is not None and has_servers else 0)

    def ranks_by_node(self, ranks_per_node: int) -> list[list[int]]:
        """Ranks of every node, and behind them its parameter servers, which count on from the last rank."""
        num_ranks, replication = self.plan.num_devices, self.plan.replication
        nodes = [list(range(first, first + ranks_per_node)) for first in range(0, num_ranks, ranks_per_node)]
        for server in range(self.num_processes - num_ranks):
            assert replication is not None
            nodes[replication.server_rank(server, num_ranks, 0) // ranks_per_node].append(num_ranks + server)
        return nodes

    def processes_per_node(self, ranks_per_node: int) -> int:
        """Processes of every node: its ranks, and as many more as a node has parameter servers at most."""
        return max(map(len, self.ranks_by_node(ranks_per_node)))

    def rank_of_process(self, process: int, ranks_per_node: int) -> int:
        """Rank or parameter server of a process; a number above both for a process without work.

        Args:
            process: torchrun's number of the process, which counts those of one node after the other.
        """
        nodes = self.ranks_by_node(ranks_per_node)
        node, place = divmod(process, max(map(len, nodes)))
        ranks = nodes[node] if node < len(nodes) else []
        return ranks[place] if place < len(ranks) else self.num_processes + process

    @property
    def num_all_steps(self) -> int:
        """Number of steps, warm-up included."""
        return self.num_steps + (_USUAL_WARMUP if self.num_warmup_steps is None else self.num_warmup_steps)

    @property
    def num_whole_steps(self) -> int:
        """Number of first steps with whole gradients, before gradient compression or Local SGD starts; 0 without."""
        compression, replication = self.plan.compression, self.plan.replication
        first = 0 if compression is None else compression.warmup_steps(self.num_all_steps)
        return first if replication is None else replication.start_step

    @property
    def round_steps(self) -> int:
        """Steps of a round of replicas that train alone; 1 if all steps are alike."""
        return self.plan.round_steps

    @property
    def traced_steps(self) -> tuple[int, ...]:
        """Indices of steps whose allocations are traced: the first two, or the last two of a round and those beside.

        First steps with whole gradients come before.
        """
        first, replication = self.num_whole_steps, self.plan.replication
        if replication is None or not replication.has_rounds:
            return tuple(range(first + 2))
        sent = first + replication.inner_steps // replication.outer_steps
        return (*range(first), *range(max(first, sent - 2), max(first + 2, sent + replication.steps_beside)))

    @property
    def assignment(self) -> StageAssignment:
        """Assignment of layers to stages."""
        return StageAssignment(self.boundaries)

    def on_nodes(self, fewer: FewerNodes) -> RunSpec:
        """Returns the job with the plan for fewer nodes."""
        keys = ("plan", "boundaries", "table", "predicted_memory_bytes")
        return self.model_copy(update={key: getattr(fewer, key) for key in keys})

    def on_ranks(self, num_ranks: int) -> RunSpec | None:
        """Returns the job with the largest plan that fits ``num_ranks`` (torchrun's WORLD_SIZE); None if none fits."""
        plans = (self, *map(self.on_nodes, self.fewer_nodes))
        return next((job for job in plans if job.plan.num_devices <= num_ranks), None)

    def parsed_table(self) -> Table:
        """Returns the table as actions.

        Raises:
            ProgramError: A cell is not an action.
        """
        return parse_table(self.table)
