"""Strategies of published and own runs: how many runs a strategy has, and how well they were predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.statistics import step_time_figures
from simplan.job import Job
from simplan.model.weight_format import WeightFormatName
from simplan.plan.compression import CompressionKind
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.plan.replication import ReplicationKind
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.report.table import format_table_markdown
from simplan.training import Task

Strategy = Callable[[Job], bool]


def _plan(holds: Callable[[ParallelPlan], bool]) -> Strategy:
    return lambda job: holds(job.plan)


def _literals(of: object, name: Callable[[str], str], value: Callable[[Job], object]) -> dict[str, Strategy]:
    """One strategy for each value that a key may have, but for ``none``."""
    return {
        name(option): lambda job, option=option: value(job) == option  # type: ignore[misc]
        for option in get_args(of)
        if option != "none"
    }


STRATEGIES: Mapping[str, Strategy] = {
    "one device": lambda job: job.cluster.num_devices == 1,
    "DDP": _plan(lambda plan: plan.dp_replicate > 1 and plan.zero_stage == 0 and not plan.replicas_apart),
    "ZeRO-1": _plan(lambda plan: plan.dp_shard > 1 and plan.zero_stage == 1),
    "ZeRO-2": _plan(lambda plan: plan.dp_shard > 1 and plan.zero_stage == 2),
    "ZeRO-3 (FSDP)": _plan(lambda plan: plan.dp_shard > 1 and plan.zero_stage == 3 and plan.dp_replicate == 1),
    "HSDP": _plan(lambda plan: plan.dp_shard > 1 and plan.zero_stage == 3 and plan.dp_replicate > 1),
    "tensor parallelism, without sequence parallelism": _plan(lambda plan: plan.tp > 1 and not plan.sequence_parallel),
    "tensor and sequence parallelism": _plan(lambda plan: plan.tp > 1 and plan.sequence_parallel),
    "context parallelism, ring": _plan(lambda plan: plan.cp > 1 and plan.cp_comm == "ring"),
    "context parallelism, all-gather": _plan(lambda plan: plan.cp > 1 and plan.cp_comm == "all_gather"),
    "context parallelism, all-to-all": _plan(lambda plan: plan.cp > 1 and plan.cp_comm == "a2a"),
    "expert parallelism": _plan(lambda plan: plan.ep > 1),
    "experts split by tensor parallelism": _plan(lambda plan: plan.etp > 1),
    **{
        f"pipeline, {name}": _plan(lambda plan, name=name: plan.pp > 1 and plan.schedule == name)  # type: ignore[misc]
        for name in SCHEDULE_FACTS
    },
    "pipeline, custom schedule": _plan(lambda plan: plan.pp > 1 and plan.schedule not in SCHEDULE_FACTS),
    **_literals(Recompute, lambda kind: f"recomputation, {kind}", lambda job: job.plan.recompute),
    "activations on the host": _plan(lambda plan: plan.offload_activations),
    "parameters and optimizer on the host": _plan(lambda plan: plan.offload_optimizer),
    "loss in chunks": lambda job: job.software.loss != "whole",
    "compiled blocks": lambda job: job.software.compiled,
    "CUDA graphs": lambda job: job.software.cuda_graphs,
    "packed sequences": lambda job: bool(job.model.document_lengths),
    **_literals(Task, lambda task: f"task, {task}", lambda job: job.training.task),
    "DoRA": lambda job: job.model.lora_dora,
    **_literals(
        WeightFormatName,
        lambda name: f"base weights in {name}",
        lambda job: job.training.base_weights and job.training.base_weights.format,
    ),
    **_literals(
        CompressionKind,
        lambda kind: f"compression, {kind}",
        lambda job: job.plan.compression and job.plan.compression.kind,
    ),
    **_literals(
        ReplicationKind,
        lambda kind: f"replication, {kind}",
        lambda job: job.plan.replication and job.plan.replication.kind,
    ),
    "backup workers": lambda job: job.training.backup_workers > 0,
    "captured models": lambda job: job.model.family == "captured",
}
"""Conditions of strategies on a job, by name; each value of a key with several values is a strategy."""


def strategy_table(outcomes: Sequence[RunOutcome], fitted: Callable[[RunOutcome], bool]) -> str:
    """Table of runs, devices, frameworks, precisions, error and coverage by strategy; a run may have several."""
    headers = ["strategy", "runs", "of them in the fit", "mean error", "in 90 % interval", "precisions", "frameworks"]
    rows = [_row(name, [o for o in outcomes if holds(o.run.known_job)], fitted) for name, holds in STRATEGIES.items()]
    return format_table_markdown([*headers, "devices"], rows)


def _row(name: str, outcomes: Sequence[RunOutcome], fitted: Callable[[RunOutcome], bool]) -> list[str]:
    if not outcomes:
        return [name, "0", "0", "", "", "", "", ""]
    figures, jobs = step_time_figures(outcomes), [outcome.run.known_job for outcome in outcomes]
    assert figures.errors.mape is not None
    inside = figures.interval_coverage
    return [
        name,
        str(len(outcomes)),
        str(sum(map(fitted, outcomes))),
        f"{100 * figures.errors.mape:.1f} %",
        "" if inside is None else f"{100 * inside:.0f} %",
        _names(job.training.precision for job in jobs),
        _names(outcome.run.fallback_for or job.software.id for outcome, job in zip(outcomes, jobs, strict=True)),
        _names(job.cluster.device.id for job in jobs),
    ]


def _names(of: Iterable[str]) -> str:
    return ", ".join(_counted(of))


def _counted(of: Iterable[str]) -> Iterator[str]:
    """Names with their numbers, the most frequent first."""
    counts: dict[str, int] = {}
    for name in of:
        counts[name] = counts.get(name, 0) + 1
    for name, number in sorted(counts.items(), key=lambda named_number: (-named_number[1], named_number[0])):
        yield f"{name} ({number})"
