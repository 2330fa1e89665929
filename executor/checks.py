"""Checks before anything starts: jobs that the executor does not run, or that this machine cannot hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, pairwise
from operator import attrgetter

import torch

from executor.distributed.precision import fp8_recipe
from executor.distributed.recompute import unmodelled_recompute
from simplan import catalog
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.model.low_precision import TORCHAO_RECIPES
from simplan.optimizers import OPTIMIZERS
from simplan.plan.compression import Compression
from simplan.program.tables.executable import check_executable
from simplan.rules import RULES, violations
from simplan.rules.schedule import stages_within_layers
from simplan.runs.run_spec import RunSpec, rounds_beyond_run
from simplan.wording import either

_DTYPES = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp8": "bf16"}  # dtype of a job by precision
_EXTRAS = {"bitsandbytes": "bitsandbytes", "torchao": "float8", "transformers": "transformers"}
"""Extra of this project with each package that has optimizers."""
_CPU_RANK_BYTES = 512 * 1024**2  # resident set of a process that has imported torch, with a margin
_RULES = [rule for rule in RULES if not rule.reads_cluster and rule is not stages_within_layers]
"""Rules about plans; ranks know the boundaries of stages, one of which may be the embedding alone."""


def check_job(job: RunSpec, num_local_ranks: int | None = None) -> None:
    """Checks a job against the abilities of the executor and of this machine.

    Args:
        num_local_ranks: Ranks of the job on this machine; None for all.

    Raises:
        NotModelledError: The executor does not run an option of the plan or the training.
        SpecError: The plan cannot split the model, the machine cannot hold the ranks, or parts of the job contradict
            each other.
        ProgramError: torch would run the table wrongly or not at all.
    """
    num_ranks = num_local_ranks or job.plan.num_devices
    impossible = [*_too_many_ranks(job, num_ranks), *_no_compiler(job, num_ranks)]
    limited = (_unmodelled_late_ranks, _unmodelled_leaving, _unmodelled_nodes_of_workers)
    _check(job, chain.from_iterable(limit(job, num_ranks) for limit in limited), impossible)


def check_rehearsal(job: RunSpec, rank: int, *, fake: bool) -> None:
    """Checks a job of which one rank is to be run alone.

    Args:
        fake: Run it without a device.

    Raises:
        NotModelledError, SpecError, ProgramError: As ``check_job``, except that the number of ranks does not matter;
            there is no such rank, or no such device here.
    """
    impossible = [*_no_such_rank(job, rank), *(() if fake else _no_such_device(job))]
    _check(job, _unmodelled_rehearsal(job, fake=fake), impossible)


def runs_on_cuda(job: RunSpec, num_local_ranks: int) -> bool:
    """True when the job's ranks on this machine compute on CUDA devices."""
    return job.device == "cuda" or (job.device == "auto" and torch.cuda.device_count() >= num_local_ranks)


def _check(job: RunSpec, unmodelled: Iterator[Problem] | tuple[()], impossible: list[Problem]) -> None:
    """Raises the problems of the general job rules together with further problems."""
    # rules take a cluster, and the rules of this module do not read it
    for_rules = Job(job.model, catalog.cluster("this-machine", 1), job.training, job.plan, job.software)
    not_modelled = violations(for_rules, [rule for rule in _RULES if not rule.modelled])
    if problems := [*not_modelled, *_unmodelled(job), *unmodelled]:
        raise NotModelledError(problems)
    could_not_be = violations(for_rules, [rule for rule in _RULES if rule.modelled])
    if problems := [*could_not_be, *_inconsistent(job), *impossible]:
        raise SpecError(problems)
    check_executable(job.parsed_table(), job.plan, job.software)


def _unmodelled(job: RunSpec) -> Iterator[Problem]:
    model, plan, training, software = job.model, job.plan, job.training, job.software
    fp8 = training.precision == "fp8"
    not_split = "the executor does not split {} whose scale in fp8 is one for all of them; use 1, or precision bf16"
    no_torchao = fp8_recipe(job) is not None and find_spec("torchao") is None
    stored = software.state(training, plan) if software.states(training, plan) else None
    no_transformers = software.layers.model_code == "transformers" and find_spec("transformers") is None
    limits = {
        "model.attention_sinks": (model.attention_sinks, "the executor has no attention sinks; use false"),
        "model.expert_bias": (model.expert_bias, "its experts have no biases; use false"),
        "model.mtp_num_layers": (
            model.mtp_num_layers > 0,
            "the executor has no layers for multi-token prediction; use 0",
        ),
        "model.max_predictions_per_seq": (
            model.max_predictions_per_seq > 0,
            "the executor computes logits of all tokens; use 0",
        ),
        "plan.cp_comm": (
            plan.cp > 1 and plan.cp_comm == "ring",
            "the executor has no ring attention; use all_gather or a2a",
        ),
        "plan.offload_layers": (
            plan.offload_layers is not None,
            "the executor moves activations of all blocks; remove it",
        ),
        "plan.collectives": (
            plan.collectives is not None,
            "the executor leaves algorithms to the library; remove it",
        ),
        "software.dtensor": (
            software.dtensor,
            "the executor splits plain tensors, not DTensors; use false",
        ),
        "plan.grad_dtype": (
            plan.grad_dtype not in (None, "fp32"),
            "the executor keeps gradients in the precision of the weights; leave it out",
        ),
        "training.precision": (
            no_torchao or (training.precision not in _DTYPES and job.dtype != "fp64"),
            "needs torchao, which is not installed; pip install 'simplan[float8]', or use bf16"
            if no_torchao
            else "the executor does not run this precision; use bf16, fp8 or fp32 (or tf32 on CUDA devices)",
        ),
        "training.pure_bf16": (
            training.pure_bf16 and fp8,
            "the executor's FP8 layers have FP32 weights; use false, or precision bf16",
        ),
        "training.fp8_recipe": (
            fp8 and training.fp8_recipe not in (None, *TORCHAO_RECIPES),
            f"the executor's linear layers have no such recipe; use {either(TORCHAO_RECIPES)}",
        ),
        "plan.cp": (fp8 and plan.cp > 1, not_split.format("sequences")),
        "training.base_weights.format": _base_weights_limit(job),
        "training.fake_quantization.weights": (
            training.fake_quantization is not None
            and (find_spec("torchao") is None or job.dtype == "fp64" or model.lora_rank > 0),
            "needs torchao, and weights of 32 or 16 bits without adapters; pip install 'simplan[float8]', or use dtype "
            "fp32",
        ),
        "software.autocast": (
            not software.autocast,
            "the executor trains adapters under autocast; use true",
        ),
        "training.preference.logits": (
            training.preference is not None and training.preference.logits,
            "the executor's reward models have no logits; use false",
        ),
        "software.flat_shards": (
            software.flat_shards,
            "the executor shards by FSDP2; use false",
        ),
        "software.flat_parameters": (
            software.flat_parameters,
            "the executor shards by FSDP2; use false",
        ),
        "software.channels_last": (
            software.channels_last,
            "the executor stores images channels first; use false",
        ),
        "software.loading": (
            software.loading not in ("auto", "none"),
            "the executor begins with random weights; use none",
        ),
        "software.loss": (
            software.loss == "fused",
            "the executor has no kernel that fuses output projection and loss; use chunked or whole",
        ),
        "plan.tp": (
            (fp8 or training.is_of_preferences) and plan.tp > 1,
            not_split.format("matrices") if fp8 else "the executor takes losses on preferences of whole logits; use 1",
        ),
        "model.lora_modules_to_save": (
            bool(model.lora_modules_to_save)
            and (
                training.is_of_preferences
                or (stored is not None and job.dtype != "fp64" and stored.parameter != stored.frozen)
            ),
            "the executor switches adapters off, and no modules that are trained, which it has as wide as adapters; "
            "remove it, or use precision fp32",
        ),
        "plan.microbatch_size": (
            training.task == "kto" and min(plan.sizes_of_ranks) == 1,
            "the executor takes mismatched completions of KTO from the same microbatch; use 2 or more",
        ),
        "training.task": _task_limit(job),
        "software": (
            no_transformers or not software.executable,
            "needs Hugging Face transformers, which is not installed; pip install 'simplan[transformers]', or use torch"
            if no_transformers
            else "the executor runs plain torch, not another framework; use torch, or transformers for its models",
        ),
    }
    for field, (is_violated, sentence) in limits.items():
        if is_violated:
            rule, _, fix = sentence.partition("; ")
            yield Problem(field=field, value=_value(job, field), rule=rule, fix=fix)
    yield from unmodelled_recompute(job)
    yield from _unmodelled_optimizer(job)
    yield from _unmodelled_captures(job)
    yield from _unmodelled_workers(job)
    yield from _unmodelled_replication(job)
    yield from _unmeasured_first_steps(job)


def _task_limit(job: RunSpec) -> tuple[bool, str]:
    """True for a task that the executor does not run with this model, and the sentence with the fix."""
    task, software = job.training.task, job.software
    if job.training.is_of_preferences and job.model.captured is not None:
        return True, "the executor has no losses on preferences for captured modules, which have their own; use lora"
    sentence = "the executor has the head of a reward model for its own models; use software torch"
    return task == "reward" and software.layers.model_code != "framework", sentence


def _base_weights_limit(job: RunSpec) -> tuple[bool, str]:
    """True if frozen weights of few bits are none that the executor runs, and the sentence with the fix."""
    base = job.training.base_weights
    if base is None:
        return False, ""
    library = base.library or "bitsandbytes"
    if base.format not in ("nf4", "fp4"):
        return True, "the executor runs nf4 and fp4 of bitsandbytes, and nf4 of torchao; use nf4"
    if base.upcast:
        return True, "the executor has frozen weights in the precision of computation; use upcast: false"
    if base.keeps_inputs:
        return True, "the executor needs a bitsandbytes that keeps no inputs; use keeps_inputs: false"
    if job.checkpointing is not None:
        return True, "the executor writes no checkpoints of packed weights; leave out checkpoints"
    extra = "simplan[bitsandbytes]" if library == "bitsandbytes" else "simplan[float8]"
    return find_spec(library) is None, f"needs {library}, which is not installed; pip install '{extra}'"


def _unmodelled_optimizer(job: RunSpec) -> Iterator[Problem]:
    """Optimizers of other packages, and what those cannot do on this machine."""
    if job.training.optimizer_in_backward and job.checkpointing is not None:
        rule = "has an optimizer for every parameter, of which the executor writes no checkpoints"
        yield Problem(
            field="training.optimizer_in_backward", value="true", rule=rule, fix="use false, or leave out checkpoints"
        )
    name, package = job.training.optimizer, OPTIMIZERS[job.training.optimizer].package
    on_cuda = runs_on_cuda(job, job.plan.num_devices)
    limits = {
        f"needs {package}, which is not installed; pip install 'simplan[{_EXTRAS.get(package)}]', or use adamw": (
            package in _EXTRAS and find_spec(package) is None
        ),
        "is not run by the executor; use adamw or muon": package not in ("torch", "simplan", *_EXTRAS),
        "has states in CUDA's managed memory; use the one without paged_, or CUDA devices": (
            OPTIMIZERS[name].is_paged and not on_cuda
        ),
        "updates FP32, BF16 and FP16 weights only; use dtype fp32 or bf16": (
            package == "bitsandbytes" and job.dtype == "fp64"
        ),
    }
    for sentence, is_violated in limits.items():
        if is_violated:
            rule, _, fix = sentence.partition("; ")
            yield Problem(field="training.optimizer", value=name, rule=rule, fix=fix)


def _unmodelled_captures(job: RunSpec) -> Iterator[Problem]:
    """A captured module is run whole, as it is, by processes that wait for each other."""
    model, plan, replication = job.model.captured, job.plan, job.plan.replication
    if model is None:
        return
    has_blocks, wholes = any(model.modules), ("none", "selective_op", "selective_layer", "full")
    idle = _idle_stage(job)
    limits = {
        "pp": (
            plan.pp > 1 and (plan.tp > 1 or idle is not None or model.images is not None),
            "the executor cuts no captured module with tensor parallelism, or with images; use 1"
            if plan.tp > 1 or model.images is not None
            else f"stage {idle} has no adapters, and torch's optimizers need a weight to train; name its layers too",
        ),
        "offload_activations": (plan.offload_activations, "the executor moves activations of families only; use false"),
        "recompute": (
            plan.recompute not in (wholes if has_blocks else wholes[:1]),
            f"the executor recomputes whole blocks of a captured module; use {either(wholes)}"
            if has_blocks
            else "the executor recomputes blocks, and this module has none; use none",
        ),
        "replication": (
            replication is not None and replication.has_workers,
            "the executor trains captured modules on ranks that wait for each other; use another kind",
        ),
    }
    for key, (is_violated, sentence) in limits.items():
        if is_violated:
            rule, _, fix = sentence.partition("; ")
            value = replication.kind if replication is not None and key == "replication" else _value(job, f"plan.{key}")
            yield Problem(field=f"plan.{key}", value=value, rule=rule, fix=fix)


def _idle_stage(job: RunSpec) -> int | None:
    """First stage of a captured model all of whose weights are frozen; None for none."""
    layers = job.software.layers_of(job.model, job.plan)
    trains = [any(not p.frozen for p in layer.parameters) for layer in layers]
    stages = enumerate(pairwise(job.boundaries))
    return next((stage for stage, (begin, end) in stages if not any(trains[begin:end])), None)


def _unmodelled_late_ranks(job: RunSpec, num_local_ranks: int) -> Iterator[Problem]:
    """Slow ranks, and replicas that are dropped when they are late, are whole replicas on the CPUs of one host."""
    plan, num_dropped, saves = job.plan, job.training.backup_workers, job.checkpointing is not None
    asked = {"cluster.stragglers": job.slowdowns, "training.backup_workers": num_dropped}
    limits = {
        "is run only where every replica is one rank; use no other axis than plan.dp_replicate": plan.num_devices
        > plan.dp_replicate,
        "is run only on CPUs; use device cpu": runs_on_cuda(job, num_local_ranks),
        "is run only on one node; use one node": num_local_ranks < plan.num_devices or bool(job.fewer_nodes),
    }
    sentences = [(field, sentence) for field in asked if asked[field] for sentence, is_so in limits.items() if is_so]
    if num_dropped and saves:
        sentences.append(("training.backup_workers", "is run without checkpoints, for which all ranks wait; use none"))
    if num_dropped and job.software.gradient_as_bucket_view:
        sentences.append(("software.gradient_as_bucket_view", "is not run with training.backup_workers; use false"))
    for field, sentence in sentences:
        rule, _, fix = sentence.partition("; ")
        yield Problem(field=field, rule=rule, fix=fix)


def _unmodelled_leaving(job: RunSpec, num_local_ranks: int) -> Iterator[Problem]:
    """Replicas that may leave are worlds of their own, of ranks that follow each other on one node."""
    plan, replication = job.plan, job.plan.replication
    if replication is None or replication.min_replicas is None:
        return
    of_replica = plan.num_devices // plan.dp_replicate
    limits = {
        f"is run only where ranks of a replica follow each other, and plan.pp = {plan.pp}; use pp = 1": plan.pp > 1,
        "is run only with ranks on the devices of their number; remove plan.placement": plan.placement is not None,
        "is run only on CPUs; use device cpu": runs_on_cuda(job, num_local_ranks),
        "goes on without restart and makes no checkpoints; run without checkpoints": job.checkpointing is not None,
        f"has replicas of {of_replica} ranks, and a node has {num_local_ranks}; use whole replicas on every node": (
            num_local_ranks % of_replica > 0
        ),
    }
    for sentence, is_so in limits.items():
        if is_so:
            rule, _, fix = sentence.partition("; ")
            value = str(replication.min_replicas)
            yield Problem(field="plan.replication.min_replicas", value=value, rule=rule, fix=fix)


def _unmodelled_replication(job: RunSpec) -> Iterator[Problem]:
    """Replicas have states of their own, with which no other number of replicas can resume."""
    replication = job.plan.replication
    if replication is not None and job.fewer_nodes:
        rule, fix = "has replicas with states of their own, with which fewer nodes cannot go on", "use --nnodes N"
        yield Problem(field="plan.replication.kind", value=replication.kind, rule=rule, fix=fix)


def _unmeasured_first_steps(job: RunSpec) -> Iterator[Problem]:
    """First steps with whole gradients are not those that are predicted."""
    num_whole, num_warmup = job.num_whole_steps, job.num_all_steps - job.num_steps
    if num_whole <= num_warmup:
        return
    section, key = job.plan.replication or job.plan.compression, "start_step"
    fewest = f"{num_warmup}"
    if isinstance(section, Compression):
        key = "start_step" if section.kind == "powersgd" else "warmup_share"
        fewest = f"{max(2, num_warmup)}" if key == "start_step" else f"{num_warmup / job.num_all_steps:.2g} or less"
    rule = f"has {num_whole:,} steps with whole gradients, and this run measures all after its first {num_warmup}"
    field = f"plan.{'compression' if isinstance(section, Compression) else 'replication'}.{key}"
    fix = f"use {fewest}, or {num_whole} warm-up steps"
    yield Problem(field=field, value=str(getattr(section, key)), rule=rule, fix=fix)


def _unmodelled_workers(job: RunSpec) -> Iterator[Problem]:
    """Workers have no step in which all could save the same parameters."""
    replication = job.plan.replication
    if replication is not None and replication.has_workers and job.checkpointing is not None:
        rule = "has workers that do not wait for each other, and no checkpoint is made of their steps"
        yield Problem(field="plan.replication", value=replication.kind, rule=rule, fix="run without checkpoints")


def _unmodelled_nodes_of_workers(job: RunSpec, num_local_ranks: int) -> Iterator[Problem]:
    """Servers are processes of the workers' nodes, with which they begin and end."""
    replication, several = job.plan.replication, num_local_ranks < job.plan.num_devices
    if replication is None or not replication.has_workers:
        return
    nodes = job.ranks_by_node(num_local_ranks)
    serves_apart = any(rank >= job.plan.num_devices for node in nodes[1:] for rank in node)
    limits = {
        "kind": (
            replication.kind == "hogwild" and several,
            "shares the memory of one node; use one node, or kind: parameter_server with staleness: unbounded",
        ),
        "server_nodes": (
            replication.server_nodes == "apart",
            "is not run, as nodes without ranks would need to be started; use workers",
        ),
        "min_replicas": (
            replication.has_servers and replication.min_replicas is not None and several and serves_apart,
            "cannot be kept where servers are on nodes that may leave; use servers: 1, which is on the first node",
        ),
    }
    for key, (is_violated, sentence) in limits.items():
        if is_violated:
            rule, _, fix = sentence.partition("; ")
            value = str(getattr(replication, key))
            yield Problem(field=f"plan.replication.{key}", value=value, rule=rule, fix=fix)


def _value(job: RunSpec, field: str) -> str:
    """Value of a dotted field as in a scenario."""
    value = job.software.id if field == "software" else attrgetter(field)(job)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _inconsistent(job: RunSpec) -> Iterator[Problem]:
    dtype, num_stages = _DTYPES.get(job.training.precision), job.plan.num_stages
    if job.dtype not in (dtype, "fp64"):
        rule = f"must be {dtype} for training.precision = {job.training.precision}, or fp64"
        yield Problem(field="dtype", value=job.dtype, rule=rule)
    ends = job.boundaries[:1], job.boundaries[-1:]
    increase = all(before < after for before, after in pairwise(job.boundaries))
    yield from rounds_beyond_run(job.plan, job.num_steps, "num_steps")
    if ends != ((0,), (len(job.model.layers),)) or len(job.boundaries) != num_stages + 1 or not increase:
        rule = f"must split {len(job.model.layers)} layers into {num_stages} stages"
        yield Problem(field="boundaries", value=str(list(job.boundaries)), rule=rule)


def _no_such_rank(job: RunSpec, rank: int) -> Iterator[Problem]:
    num_ranks = job.plan.num_devices
    if not 0 <= rank < num_ranks:
        rule = f"is none of the {num_ranks} ranks of the plan"
        yield Problem(field="rank", value=str(rank), rule=rule, fix=f"use 0 to {num_ranks - 1}")


def _unmodelled_rehearsal(job: RunSpec, *, fake: bool) -> Iterator[Problem]:
    """A rehearsal follows every tensor, so torch must run every operation separately."""
    replication = job.plan.replication
    if replication is not None and replication.has_workers:
        rule = "updates what other processes have, and a rehearsal has one rank"
        yield Problem(field="plan.replication", value=replication.kind, rule=rule, fix="remove it, or `simplan run`")
    if job.plan.compression is not None:
        rule, fix = (
            "communicates what other ranks compress, and a rehearsal has one rank",
            "remove it, or `simplan run`",
        )
        yield Problem(field="plan.compression", value=job.plan.compression.kind, rule=rule, fix=fix)
    if job.plan.replication is not None:
        rule, fix = "has replicas that meet between steps, and a rehearsal has one rank", "remove it, or `simplan run`"
        yield Problem(field="plan.replication", value=job.plan.replication.kind, rule=rule, fix=fix)
    if job.training.backup_workers or job.slowdowns:
        field = "training.backup_workers" if job.training.backup_workers else "cluster.stragglers"
        rule, fix = "is about ranks that others wait for, and a rehearsal has one rank", "remove it, or `simplan run`"
        yield Problem(field=field, rule=rule, fix=fix)
    if job.software.layers.model_code != "framework":
        rule = "has modules whose tensors a rehearsal cannot tell apart"
        yield Problem(field="software", value=job.software.id, rule=rule, fix="use torch, or `simplan run`")
    facts = OPTIMIZERS[job.training.optimizer]
    if facts.by_tensor and (fake or facts.package == "torchao") and not facts.orthogonalizes:
        rule, fix = "has a step that a rehearsal cannot follow", "use adamw or muon, or `simplan run`"
        yield Problem(field="training.optimizer", value=job.training.optimizer, rule=rule, fix=fix)
    if job.software.compiled:
        rule = "makes kernels that need tensors with data" if fake else "makes tensors that a rehearsal cannot follow"
        fix = "use false, which keeps a little more, or `simplan run`"
        yield Problem(field="software.compiled", value="true", rule=rule, fix=fix)


def _no_compiler(job: RunSpec, num_ranks: int) -> Iterator[Problem]:
    """On CPUs torch.compile writes C++; on CUDA devices triton, which comes with torch."""
    of_torchao = OPTIMIZERS[job.training.optimizer].package == "torchao"
    if runs_on_cuda(job, num_ranks) or not (job.software.compiled or of_torchao):
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        rule = "needs a C++ compiler on this machine, and there is no g++ or clang++"
        if job.software.compiled:
            yield Problem(field="software.compiled", value="true", rule=rule, fix="install one, or use false")
        if of_torchao:
            name = job.training.optimizer
            yield Problem(field="training.optimizer", value=name, rule=rule, fix="install one, or use adamw")


def _no_such_device(job: RunSpec) -> Iterator[Problem]:
    if job.device == "cuda" and not torch.cuda.is_available():
        rule = "is a CUDA device, and this machine has none"
        yield Problem(field="device", value=job.device, rule=rule, fix="rehearse without a device: --fake")
    if job.device == "cpu":
        yield from _no_tf32(job)


def _no_tf32(job: RunSpec) -> Iterator[Problem]:
    if job.training.precision == "tf32":
        yield Problem(field="training.precision", value="tf32", rule="needs CUDA devices", fix="use fp32")


def _too_many_ranks(job: RunSpec, num_ranks: int) -> Iterator[Problem]:
    num_gpus, value = torch.cuda.device_count(), f"{num_ranks} ranks"
    if runs_on_cuda(job, num_ranks):
        if num_ranks > num_gpus:
            fix = "use device cpu" if num_gpus == 0 else f"use at most {num_gpus} ranks, or device cpu"
            yield Problem(field="plan", value=value, rule=f"this machine has {num_gpus} CUDA devices", fix=fix)
        return
    yield from _no_tf32(job)
    max_ranks = max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _CPU_RANK_BYTES)
    if num_ranks > max_ranks:
        rule = f"the memory of this machine holds at most {max_ranks} ranks"
        yield Problem(field="plan", value=value, rule=rule, fix=f"use at most {max_ranks}")
