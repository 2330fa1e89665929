"""Step times of pipelines from profiled stage times, without the cost model.

A profile gives the time of a stage for one microbatch and the time of a P2P send, measured in a few steps of the same
run. The step time then follows from the schedule: the longest time of a rank from its first to its last action
(``simplan.program.schedules.shape``). Two effects are not in a profile, and are the same for all runs:

- after the arrival of an input, the host has to wake up and launch the first kernel of the pass;
- next to communication, and once the device is warm, kernels take longer than in the profile.

Both were fitted on the visible runs of Qi et al. 2024 (arXiv:2401.10241, tables 4 and 6; 18 runs of 4 models). The
error is 8.5% without them (all too short) and 1.1% with them; leave-one-model-out, 1.4%.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.run import PublishedRun, ReadFile, sentences
from simplan.accuracy.statistics import step_flops
from simplan.base import Count, NonNegative, Positive, Spec
from simplan.errors import Problem, SpecError
from simplan.io import read_yaml
from simplan.job import Job
from simplan.predict.simulated import NINE_IN_TEN
from simplan.problems import parse_model
from simplan.program.schedules import SCHEDULES, PipelineShape, StageTimes
from simplan.program.schedules.shape import longest_span_s

PASS_START_S = 0.7e-3
"""Seconds from the arrival of an input to the first kernel of its pass; bounds 0 to 2 ms."""
SLOWDOWN = 1.04
"""Slowdown of all compute relative to the profile; bounds 1 to 1.1."""
_RELATIVE_STD = 0.018  # of the leave-one-model-out errors


class StageProfile(Spec):
    """Profiled times of one pipeline.

    Attributes:
        run_ids: By schedule, the id of the run with the same model, stages and microbatches.
        t_f_ms, t_b_ms, t_w_ms: Milliseconds per stage and microbatch: forward, dgrad, wgrad.
        t_comm_ms: Milliseconds of a P2P send between neighbors.
    """

    id: str
    source: str
    model: str
    pp: Count
    num_microbatches: Count
    run_ids: dict[str, str]
    t_f_ms: Positive
    t_b_ms: Positive
    t_w_ms: Positive
    t_comm_ms: NonNegative


class _ProfileFile(Spec):
    meta: dict[str, Any]
    profiled_stage_times: tuple[StageProfile, ...]
    bubble_rates: tuple[Any, ...] = ()


def read_profiles(path: Path) -> dict[str, StageProfile]:
    """Read profiles, by the id of their run.

    Raises:
        SpecError: The file cannot be read, or contains no profiles.
    """
    document = read_yaml(path)
    if not isinstance(document.data, dict) or "profiled_stage_times" not in document.data:
        problem = Problem(field="profiled_stage_times", rule="is missing", fix="name a file of profiled stage times")
        raise SpecError(problem, file=str(path))
    profiles = parse_model(_ProfileFile, document.data, document.lines, str(path)).profiled_stage_times
    return {run_id: profile for profile in profiles for run_id in profile.run_ids.values()}


def predict_from_profiles(files: Iterable[ReadFile], profiles: dict[str, StageProfile]) -> list[RunOutcome]:
    """Predict the runs with a profile; skip the others."""
    return [_outcome(read, run, profiles) for read in files for run in read.runs or ()]


def _outcome(read: ReadFile, run: PublishedRun, profiles: dict[str, StageProfile]) -> RunOutcome:
    if run.id not in profiles:
        return RunOutcome(read.file, run, None, "has no profiled stage times")
    if run.job is None:
        return RunOutcome(read.file, run, None, run.reason)
    try:
        return RunOutcome(read.file, run, _predicted(run.job, profiles[run.id]))
    except Exception as error:
        return RunOutcome(read.file, run, None, sentences(error))


def _predicted(job: Job, profile: StageProfile) -> Predicted:
    plan = job.plan
    if (plan.pp, job.num_microbatches) != (profile.pp, profile.num_microbatches):
        rule = f"is of {profile.pp} stages and {profile.num_microbatches} microbatches, unlike the run"
        raise SpecError(Problem(field="profile", value=profile.id, rule=rule))
    if plan.schedule not in SCHEDULES:
        rule = "is not a schedule that profiled times are predicted for"
        raise SpecError(Problem(field="plan.schedule", value=plan.schedule, rule=rule))
    step_time_s = profiled_step_s(profile, plan.schedule, plan.virtual_stages)
    half_width_s = NINE_IN_TEN * _RELATIVE_STD * step_time_s
    return Predicted(
        step_time_s=step_time_s,
        step_time_interval_s=(step_time_s - half_width_s, step_time_s + half_width_s),
        memory_gib={},
        memory_interval_gib={},
        oom=None,
        flops=step_flops(job),
        software="profiled stage times",
    )


def profiled_step_s(
    profile: StageProfile,
    schedule: str,
    virtual_stages: int,
    pass_start_s: float = PASS_START_S,
    slowdown: float = SLOWDOWN,
) -> float:
    """Step time of a pipeline, in seconds.

    Args:
        profile, schedule: Profiled times, and one of ``SCHEDULES``.
        virtual_stages: Stages per rank, which take equal parts of the rank's time.
        pass_start_s, slowdown: Effects that a profile lacks; 0 and 1 use the profile as is.
    """
    part = slowdown / 1e3 / virtual_stages
    num_stages = profile.pp * virtual_stages
    times = StageTimes.equal(
        num_stages,
        profile.t_f_ms * part + pass_start_s,
        profile.t_b_ms * part + pass_start_s,
        profile.t_w_ms * part,
        profile.t_comm_ms / 1e3,
    )
    shape = PipelineShape(profile.pp, profile.num_microbatches, virtual_stages, times)
    return longest_span_s(SCHEDULES[schedule](shape), times)
