"""What is refused before anything starts: jobs that this machine cannot hold or that would not run as asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from executor.distributed.recompute import unmodelled_recompute
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.program.executable import check_executable
from simplan.program.run_spec import RunSpec
from simplan.rules import RULES, violations
from simplan.rules.schedule import stages_within_layers
from simplan.spec import catalogue

__all__ = ["check_job", "check_rehearsal", "runs_on_cuda"]

_DTYPES = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp8": "bf16"}  # by precision, the dtype of a job
_CPU_RANK_BYTES = 512 * 1024**2  # resident set of a process that has imported torch, with some room


_OF_PLAN = [rule for rule in RULES if not rule.reads_cluster and rule is not stages_within_layers]
"""Ranks know the boundaries of stages, and one may be the embedding alone."""
_COULD_NOT_BE = [rule for rule in _OF_PLAN if rule.modelled]
_NOT_MODELLED = [rule for rule in _OF_PLAN if not rule.modelled]


def _asked(job: RunSpec) -> Job:
    """As rules take it; which cluster it was planned for does not matter to those that are asked here."""
    return Job(job.model, catalogue.cluster("this-machine", 1), job.training, job.plan, job.software)


def check_job(job: RunSpec, num_local_ranks: int | None = None) -> None:
    """Checks a job against what the executor does and what this machine has.

    Args:
        job: The job.
        num_local_ranks: Ranks of it on this machine; None for all.

    Raises:
        NotModelledError: The plan or the training asks for something the executor does not do.
        SpecError: The plan cannot split the model, the machine cannot hold so many ranks, or parts of the job do not
            fit each other.
        ProgramError: The table is one that torch would run wrongly or not at all.
    """
    not_modelled = [*violations(_asked(job), _NOT_MODELLED), *_not_modelled(job)]
    if not_modelled:
        raise NotModelledError(not_modelled)
    num_ranks = num_local_ranks or job.plan.num_devices
    problems = [*_inconsistent(job), *_too_many_ranks(job, num_ranks), *_no_compiler(job, num_ranks)]
    if problems:
        raise SpecError(problems)
    check_executable(job.parsed_table(), job.plan, job.software)


def check_rehearsal(job: RunSpec, rank: int, *, fake: bool) -> None:
    """Checks a job of which one rank is to be run alone.

    Args:
        job: The job.
        rank: Which rank.
        fake: Without a device.

    Raises:
        NotModelledError, SpecError, ProgramError: As ``check_job``, however many ranks the job has; there is no such
            rank, or no such device here.
    """
    not_modelled = [
        *violations(_asked(job), _NOT_MODELLED),
        *_not_modelled(job),
        *_unmodelled_rehearsal(job, fake=fake),
    ]
    if not_modelled:
        raise NotModelledError(not_modelled)
    problems = [*_inconsistent(job), *_no_such_rank(job, rank), *(() if fake else _no_such_device(job))]
    if problems:
        raise SpecError(problems)
    check_executable(job.parsed_table(), job.plan, job.software)


def runs_on_cuda(job: RunSpec, num_local_ranks: int) -> bool:
    """Whether the job's ranks on this machine compute on CUDA devices."""
    return job.device == "cuda" or (job.device == "auto" and torch.cuda.device_count() >= num_local_ranks)


def _not_modelled(job: RunSpec) -> Iterator[Problem]:
    plan, training = job.plan, job.training
    for field in ("attention_sinks", "expert_bias"):
        if getattr(job.model, field):
            rule = "the executor has no attention sinks" if field == "attention_sinks" else "its experts have no biases"
            yield Problem(field=f"model.{field}", value="true", rule=rule, fix="use false")
    if job.model.mtp_num_layers:
        yield Problem(
            field="model.mtp_num_layers",
            value=str(job.model.mtp_num_layers),
            rule="the executor has no layers for multi-token prediction",
            fix="use 0",
        )
    if plan.cp > 1 and plan.cp_comm == "ring":
        yield Problem(
            field="plan.cp_comm",
            value=plan.cp_comm,
            rule="the executor has no ring attention",
            fix="use all_gather or a2a",
        )
    if plan.offload_layers is not None:
        yield Problem(
            field="plan.offload_layers",
            value=str(plan.offload_layers),
            rule="the executor moves activations of all blocks",
            fix="remove it",
        )
    yield from unmodelled_recompute(job)
    if plan.grad_dtype not in (None, "fp32"):
        yield Problem(
            field="plan.grad_dtype",
            value=plan.grad_dtype,
            rule="the executor keeps gradients in the precision of the weights",
            fix="leave it out",
        )
    if training.precision not in _DTYPES and job.dtype != "fp64":
        yield Problem(
            field="training.precision",
            value=training.precision,
            rule="the executor does not run this precision",
            fix="use bf16, fp8 or fp32 (or tf32 on CUDA devices)",
        )
    if plan.offload_optimizer:
        yield Problem(
            field="plan.offload_optimizer",
            value="true",
            rule="is predicted only: the executor does not stream optimizer states through the device",
            fix="use false, or FSDP over more ranks (plan.dp_shard)",
        )
    yield from _unmodelled_fp8(job)
    if not job.software.executable:
        yield Problem(
            field="software",
            value=job.software.id,
            rule="the executor runs plain torch, not another framework",
            fix="use torch, or transformers for its models",
        )
    if job.software.layers.model_code == "transformers" and find_spec("transformers") is None:
        yield Problem(
            field="software",
            value=job.software.id,
            rule="needs Hugging Face transformers, which is not installed",
            fix="pip install 'simplan[transformers]', or use torch",
        )


def _unmodelled_fp8(job: RunSpec) -> Iterator[Problem]:
    """The executor's fp8 layers have one scale for all of a tensor, and each rank all of it."""
    plan, training = job.plan, job.training
    if training.precision != "fp8":
        return
    if training.fp8_recipe not in (None, "tensorwise"):
        yield Problem(
            field="training.fp8_recipe",
            value=training.fp8_recipe,
            rule="the executor's linear layers have no such recipe",
            fix="use tensorwise",
        )
    for axis, number, what in (("tp", plan.tp, "matrices"), ("cp", plan.cp, "sequences")):
        if number > 1:
            yield Problem(
                field=f"plan.{axis}",
                value=str(number),
                rule=f"the executor does not split {what} whose scale in fp8 is one for all of them",
                fix="use 1, or precision bf16",
            )


def _inconsistent(job: RunSpec) -> Iterator[Problem]:
    plan = job.plan
    yield from violations(_asked(job), _COULD_NOT_BE)
    dtype = _DTYPES.get(job.training.precision)
    if job.dtype not in (dtype, "fp64"):
        yield Problem(
            field="dtype",
            value=job.dtype,
            rule=f"must be {dtype} for training.precision = {job.training.precision}, or fp64",
        )
    if job.boundaries[-1] != len(job.model.layers) or len(job.boundaries) != plan.num_stages + 1:
        yield Problem(
            field="boundaries",
            value=str(list(job.boundaries)),
            rule=f"must split {len(job.model.layers)} layers into {plan.num_stages} stages",
        )


def _no_such_rank(job: RunSpec, rank: int) -> Iterator[Problem]:
    if not 0 <= rank < job.plan.num_devices:
        yield Problem(
            field="rank",
            value=str(rank),
            rule=f"is none of the {job.plan.num_devices} ranks of the plan",
            fix=f"use 0 to {job.plan.num_devices - 1}",
        )


def _unmodelled_rehearsal(job: RunSpec, *, fake: bool) -> Iterator[Problem]:
    """A rehearsal follows every tensor, for which torch must run every operation by itself."""
    if job.software.layers.model_code != "framework":
        rule = "has modules whose tensors a rehearsal cannot tell apart"
        yield Problem(field="software", value=job.software.id, rule=rule, fix="use torch, or `simplan run`")
    if job.software.compiled:
        rule = "makes kernels that need tensors with data" if fake else "makes tensors that a rehearsal cannot follow"
        fix = "use false, which keeps a little more, or `simplan run`"
        yield Problem(field="software.compiled", value="true", rule=rule, fix=fix)


def _no_compiler(job: RunSpec, num_ranks: int) -> Iterator[Problem]:
    """On CPUs torch.compile writes C++; on CUDA devices triton, which comes with torch."""
    if not job.software.compiled or runs_on_cuda(job, num_ranks):
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        rule = "needs a C++ compiler on this machine, and there is no g++ or clang++"
        yield Problem(field="software.compiled", value="true", rule=rule, fix="install one, or use false")


def _no_such_device(job: RunSpec) -> Iterator[Problem]:
    if job.device == "cuda" and not torch.cuda.is_available():
        rule = "is a CUDA device, and this machine has none"
        yield Problem(field="device", value=job.device, rule=rule, fix="rehearse without a device: --fake")
    if job.device == "cpu" and job.training.precision == "tf32":
        yield Problem(field="training.precision", value="tf32", rule="needs CUDA devices", fix="use fp32")


def _too_many_ranks(job: RunSpec, num_ranks: int) -> Iterator[Problem]:
    num_gpus = torch.cuda.device_count()
    if runs_on_cuda(job, num_ranks):
        if num_ranks > num_gpus:
            yield Problem(
                field="plan",
                value=f"{num_ranks} ranks",
                rule=f"this machine has {num_gpus} CUDA devices",
                fix="use device cpu" if num_gpus == 0 else f"use at most {num_gpus} ranks, or device cpu",
            )
        return
    if job.training.precision == "tf32":
        yield Problem(field="training.precision", value="tf32", rule="needs CUDA devices", fix="use fp32")
    most = max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _CPU_RANK_BYTES)
    if num_ranks > most:
        yield Problem(
            field="plan",
            value=f"{num_ranks} ranks",
            rule=f"the memory of this machine holds at most {most} ranks",
            fix=f"use at most {most}",
        )
