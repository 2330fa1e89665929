"""Rules about replicas that do not reduce whole gradients in every step."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.optimizers import LAYERWISE
from simplan.plan.replication import Replication
from simplan.rules.rule import experts_apart, not_modelled, problem_of, rule, unmodelled
from simplan.units import counted

_FIELD = "plan.replication"


def _refused(job: Job, sentence: str, fix: str) -> Problem:
    return problem_of(job, _FIELD, sentence, fix, value=_replication(job).kind)


def _replication(job: Job) -> Replication:
    assert job.plan.replication is not None
    return job.plan.replication


@rule("replication is about replicas, and there is one", reads="replication dp_replicate")
def replication_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    replication = plan.replication
    if replication is not None and plan.dp_replicate == 1 and replication.min_replicas != 1:
        fix = f"use dp_replicate = {plan.dp_shard} and dp_shard = 1; or remove it" if plan.dp_shard > 1 else "remove it"
        yield _refused(job, "is about the replicas of dp_replicate, and there is one", fix)


@rule("fewest replicas are some of the replicas", reads="replication dp_replicate")
def min_replicas_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None or (least := plan.replication.min_replicas) is None:
        return
    if least > plan.dp_replicate:
        sentence = f"must be at most dp_replicate = {plan.dp_replicate}, the replicas that there are"
        yield problem_of(job, f"{_FIELD}.min_replicas", sentence, f"use {plan.dp_replicate} or less")


@rule(
    "replication and another way to reduce gradients between replicas do not go together",
    reads="replication compression collectives",
)
def replication_alone(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None:
        return
    if plan.compression is not None and plan.num_averaging == 1:
        sentence = "leaves no gradients to reduce in every step, and plan.compression is about those"
        fix = "remove one of them; replication.outer.dtype sends pseudo-gradients in fewer bits"
        yield _refused(job, sentence, fix if plan.replication.has_rounds else "remove one of them")
    if plan.collectives is not None and plan.collectives.num_servers:
        yield _refused(job, "does not send gradients to synchronous parameter servers", "remove one of them")
    if job.training.backup_workers:
        yield _refused(job, "has no step in which all replicas wait for gradients", "use training.backup_workers = 0")


@rule("the first steps of post-local SGD need whole gradients on every rank (DDP)", reads="replication dp_shard tp pp")
def start_step_of_ddp(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None or not plan.replication.start_step:
        return
    split = [f"{key} = {getattr(plan, key)}" for key in ("dp_shard", "cp", "tp", "pp") if getattr(plan, key) > 1]
    if split:
        sentence = f"starts with steps of torch's DDP over all ranks, and {', '.join(split)}"
        yield problem_of(job, f"{_FIELD}.start_step", sentence, "use 0, or dp_replicate alone")


@unmodelled(
    "replication is modeled for torch's data parallelism with FP32 parameters of equal ranks",
    reads="replication ep etp tp microbatch_sizes compression",
)
def replication_modelled(job: Job) -> Iterator[Problem]:
    plan, training = job.plan, job.training
    if plan.replication is None:
        return
    refused = [f"software.id = {job.software.id}"] if job.software.runtime != "torch" else []
    if job.model.num_experts and experts_apart(plan):
        refused.append(f"plan.ep = {plan.ep}" if plan.ep > 1 else f"plan.etp = {plan.etp}")
    refused += ["plan.microbatch_sizes"] if plan.microbatch_sizes is not None else []
    refused += ["plan.compression inside of replicas"] if plan.compression and plan.num_averaging > 1 else []
    refused += ["plan.offload_optimizer"] if plan.offload_optimizer else []
    refused += ["training.pure_bf16"] if training.pure_bf16 else []
    if refused:
        fix = "use software torch and dp_replicate alone, or remove it"
        yield not_modelled(job, f"{_FIELD}.kind", f"replication with {', '.join(refused)}", fix)


@unmodelled(
    "workers that do not wait for each other are one device each, without anything sharded",
    reads="replication dp_shard tp cp pp ep zero_stage",
)
def workers_of_one_device(job: Job) -> Iterator[Problem]:
    plan, replication = job.plan, job.plan.replication
    if replication is None or not replication.has_workers:
        return
    split = [f"{key} = {getattr(plan, key)}" for key in ("dp_shard", "tp", "cp", "pp", "ep") if getattr(plan, key) > 1]
    if split:
        workers = "asynchronous parameter servers" if replication.has_servers else "hogwild"
        what = f"{workers} with {', '.join(split)} inside a worker"
        yield not_modelled(job, f"{_FIELD}.kind", what, "use dp_replicate alone, or kind: diloco")
    if job.model.num_experts:
        yield not_modelled(job, f"{_FIELD}.kind", "asynchronous training of experts", "use a model without experts")
    if job.training.optimizer in LAYERWISE:
        what = f"asynchronous training with {job.training.optimizer}, which takes norms of whole tensors,"
        yield not_modelled(job, f"{_FIELD}.kind", what, "use training.optimizer = sgd, sgd_momentum or adamw")


@rule(
    "parameter servers are nodes; hogwild is for the processes of one node of CPUs",
    reads="replication placement tp cp ep pp dp_replicate dp_shard",
    reads_cluster=True,
)
def workers_on_nodes(job: Job) -> Iterator[Problem]:
    plan, cluster, replication = job.plan, job.cluster, job.plan.replication
    if replication is None or not replication.has_workers or plan.num_devices > cluster.num_devices:
        return
    num_nodes = len(set(map(job.node_of, range(plan.num_devices))))
    if replication.kind == "hogwild":
        if cluster.device.kind != "cpu":
            sentence = f"shares parameters in the memory of a host, and {cluster.device.id} has its own"
            yield _refused(job, sentence, "use kind: parameter_server with staleness: unbounded, or a cluster of CPUs")
        elif num_nodes > 1:
            sentence = f"shares parameters in the memory of a host, and there are {num_nodes} nodes"
            yield _refused(job, sentence, "use kind: parameter_server with staleness: unbounded, or one node")
        return
    if replication.server_nodes == "workers" and replication.servers > num_nodes:
        sentence = f"is more than the {counted(num_nodes, 'node')} that could serve"
        fix = f"use {num_nodes} or less" + (", or server_nodes: apart" if num_nodes > 1 else "")
        yield problem_of(job, f"{_FIELD}.servers", sentence, fix)
    if replication.server_nodes == "apart" and num_nodes == 1:
        sentence = "needs the link between nodes, and the workers are on one node"
        yield problem_of(job, f"{_FIELD}.server_nodes", sentence, "use workers, or two nodes or more")
    if cluster.device.kind != "cpu" and cluster.host_link is None:
        yield Problem(
            field="cluster.device.host_link",
            rule="is needed, because parameter servers are on the host, where gradients are copied",
            fix="name a link, e.g. {preset: " + cluster.device.id + ", host_link: pcie4} (`simplan show links`)",
        )


@unmodelled(
    "workers that do not wait for each other are modeled on equal nodes, whose links no other job uses",
    reads="replication",
    reads_cluster=True,
)
def workers_alone_on_links(job: Job) -> Iterator[Problem]:
    cluster, replication = job.cluster, job.plan.replication
    if replication is None or not replication.has_workers:
        return
    refused = ["cluster.nodes of several kinds"] if cluster.is_mixed else []
    refused += ["cluster.background"] if cluster.background else []
    refused += ["flapping cluster.slow_links"] if any(each.period_s is not None for each in cluster.slow_links) else []
    if replication.server_nodes == "apart" and cluster.topology is not None:
        refused.append("servers apart in a cluster.topology")
    if refused:
        what = f"asynchronous training with {', '.join(refused)}"
        yield not_modelled(job, f"{_FIELD}.kind", what, "remove it, or replication")
