"""What must hold between model, cluster, training, plan and software; every violation is told at once.

Two kinds of violation: a plan that cannot be (``SpecError``), with the nearest values that can, and an option that is
known but not modelled yet (``NotModelledError``), refused by name so that it is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job
from simplan.spec.adapter_rules import adapter_task_rules, unmodelled_adapters
from simplan.spec.attention_rules import unmodelled_low_attention
from simplan.spec.compile_rules import unmodelled_compilation
from simplan.spec.convolution_rules import unmodelled_convolutions
from simplan.spec.cuda_graph_rules import cuda_graph_rules, unmodelled_cuda_graphs
from simplan.spec.document_rules import unmodelled_documents
from simplan.spec.expert_rules import expert_overlap_rules
from simplan.spec.hardware import ClusterSpec
from simplan.spec.low_precision_rules import low_precision_rules, low_precision_sizes, unmodelled_low_precision
from simplan.spec.model import ModelSpec
from simplan.spec.model_rules import model_rules
from simplan.spec.mtp_rules import mtp_rules, unmodelled_mtp
from simplan.spec.numbers import either, nearest_divisors
from simplan.spec.offload_rules import offload_rules, unmodelled_offload
from simplan.spec.optimizer_rules import unmodelled_optimizers
from simplan.spec.parallel_rules import parallel_rules, unmodelled_parallelism
from simplan.spec.plan import ParallelPlan
from simplan.spec.recompute_rules import recompute_rules, unmodelled_recompute
from simplan.spec.schedule_rules import schedule_rules, stage_rules
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["MAX_PIPELINE_CELLS", "check_plan", "num_microbatches"]

MAX_PIPELINE_CELLS = 30_000
"""Most microbatches times pipeline ranks of a step that has to be simulated whole."""


def num_microbatches(training: TrainingSpec, plan: ParallelPlan) -> int:
    """Microbatches per step of one data-parallel rank: global_batch_size / (dp * microbatch_size)."""
    return training.global_batch_size // (plan.dp * plan.microbatch_size)


def check_plan(job: Job) -> None:
    """Checks a job's plan, and whether its parts go together.

    Raises:
        NotModelledError: All that is wrong is that the plan uses options that are not modelled yet.
        SpecError: With every violation, options that are not modelled included.
    """
    model, cluster, training, plan, software = job.model, job.cluster, job.training, job.plan, job.software
    unmodelled = [
        *_unmodelled_plan(plan, cluster),
        *unmodelled_parallelism(model, plan, software),
        *unmodelled_convolutions(model, training, plan),
        *unmodelled_offload(model, plan),
        *unmodelled_recompute(model, plan, software),
        *unmodelled_documents(model, plan, software),
        *unmodelled_adapters(model, training, plan, software),
        *_unmodelled_training(training, plan, software),
        *_unmodelled_here(cluster, software),
        *unmodelled_optimizers(model, training, plan, software),
        *unmodelled_low_precision(model, training, plan, software),
        *unmodelled_compilation(training, plan, software),
        *unmodelled_mtp(model, plan, software),
        *unmodelled_cuda_graphs(model, plan, software),
        *unmodelled_low_attention(model, cluster, training, plan, software),
    ]
    violated = [
        *model_rules(model),
        *adapter_task_rules(model, training),
        *_cluster_rules(cluster),
        *_device_count(model, cluster, plan),
        *_precision_rules(cluster, training),
        *low_precision_rules(training),
        *_batch_rules(training, plan),
        *schedule_rules(plan, software),
        *stage_rules(model, plan),
        *_size_rules(training, plan),
        *parallel_rules(model, plan, software),
        *expert_overlap_rules(training, plan, software),
        *mtp_rules(model, plan, software),
        *offload_rules(cluster, training, plan),
        *recompute_rules(model, training, plan, software),
        *cuda_graph_rules(model, cluster, plan, software),
    ]
    if violated:
        raise SpecError([*violated, *unmodelled])
    if unmodelled:
        raise NotModelledError(unmodelled)
    linear = software.state(training, plan).linear
    if linear is not None and (sizes := list(low_precision_sizes(model, plan, linear))):
        raise SpecError(sizes)


def _unmodelled_plan(plan: ParallelPlan, cluster: ClusterSpec) -> Iterator[Problem]:
    if plan.cp > 1 and plan.cp_comm == "ring" and cluster.device.kind == "cpu":
        yield _not_modelled("plan.cp_comm", "ring", "ring attention on CPU ranks", "use all_gather or a2a")
    if plan.schedule == "zb-2p-optsync":
        what = "an optimizer step for which pipeline ranks wait for each other"
        yield _not_modelled("plan.schedule", plan.schedule, what, "use zb-2p")


def _unmodelled_training(training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    kinds = software.states(training, plan)
    if training.task == "lora" and not kinds:
        yield _not_modelled("training.task", "lora", f"training adapters with {software.id}", "use pretrain or sft")
    has = {*(kinds or software.state_bytes), *software.low_precision}
    known = [p for p in ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4") if p in has]
    if training.precision not in has:
        what = f"this precision with {software.id}"
        yield _not_modelled("training.precision", training.precision, what, f"use {either(known)}")


def _unmodelled_here(cluster: ClusterSpec, software: SoftwareSpec) -> Iterator[Problem]:
    if cluster.cores_per_node is not None and not software.executable:
        what = f"other software than torch on {cluster.id}, where times are of what the executor runs,"
        yield _not_modelled("software", software.id, what, "use torch")


def _not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)


def _cluster_rules(cluster: ClusterSpec) -> Iterator[Problem]:
    if cluster.num_devices > 1 and cluster.devices_per_node > 1 and cluster.intra_link is None:
        yield Problem(
            field="cluster.intra_link",
            rule=f"is missing: the catalogue does not say what joins {cluster.device.id} devices of one node",
            fix="name a link, e.g. pcie4 (`simplan show links` lists them)",
        )
    if cluster.num_nodes > 1 and cluster.inter_link is None:
        yield Problem(
            field="cluster.inter_link_gbit_per_device",
            rule=f"is missing: {cluster.num_nodes} nodes need a network",
            fix="give the network bandwidth of a node divided by its devices, Gbit/s",
        )


def _precision_rules(cluster: ClusterSpec, training: TrainingSpec) -> Iterator[Problem]:
    if cluster.device.kind == "cpu" and training.precision not in ("fp32", "bf16", "fp8"):
        yield Problem(
            field="training.precision",
            value=training.precision,
            rule=f"must be fp32, bf16 or fp8 on a CPU ({cluster.device.id}): the others are those of accelerators",
            fix="use fp32",
        )


def _device_count(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> Iterator[Problem]:
    needed, there = plan.num_devices, cluster.num_devices
    if needed == there:
        return
    fixes = []
    for key, most in (("dp_replicate", there), ("pp", model.num_blocks)):
        others = needed // getattr(plan, key)
        if there % others == 0 and there // others <= most:
            fixes.append(f"{key} = {there // others}")
    fixes.append(f"num_devices = {needed}")
    factors = [
        f"{key} {getattr(plan, key)}"
        for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
        if getattr(plan, key) > 1 or key in ("dp_replicate", "pp")
    ]
    yield Problem(
        field="plan",
        value=" x ".join(factors),
        rule=f"the plan needs {needed} devices and the cluster has {there}",
        fix=f"use {either(fixes)}",
    )


def _batch_rules(training: TrainingSpec, plan: ParallelPlan) -> Iterator[Problem]:
    batch, unit = training.global_batch_size, plan.dp * plan.microbatch_size
    if batch % unit == 0:
        return
    below = batch // unit * unit
    nearest = [value for value in (below, below + unit) if value]
    fix = f"use {either(nearest)}"
    if batch % plan.dp == 0:
        sizes = nearest_divisors(batch // plan.dp, plan.microbatch_size)
        fix += f", or plan.microbatch_size = {either(sizes)}"
    yield Problem(
        field="training.global_batch_size",
        value=str(batch),
        rule=f"must be a multiple of dp x microbatch_size = {plan.dp} x {plan.microbatch_size} = {unit}",
        fix=fix,
    )


def _size_rules(training: TrainingSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """What would take too long to predict: a long step that cannot be truncated."""
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if plan.pp == 1 or (facts is not None and not facts.needs_times and not plan.offload_activations):
        return
    cells = num_microbatches(training, plan) * plan.pp
    if cells > MAX_PIPELINE_CELLS:
        most = MAX_PIPELINE_CELLS // plan.pp * plan.dp * plan.microbatch_size
        yield Problem(
            field="training.global_batch_size",
            value=str(training.global_batch_size),
            rule=f"gives {cells:,} microbatches x pipeline ranks, more than {MAX_PIPELINE_CELLS:,}, and schedule "
            f"{plan.schedule} differs with every number of microbatches",
            fix=f"use at most {most}, a larger microbatch_size, or 1f1b" if most else "use fewer pipeline ranks",
        )
