"""Rules about prescribed algorithms of collectives: what links, libraries and groups can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simplan.cluster.hardware import ClusterSpec
from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.rules.rule import problem_of, rule
from simplan.units import counted

_SERVER = "parameter_server"


@rule(
    "the links, the library or a group of ranks cannot run a prescribed collective",
    reads="collectives placement tp sequence_parallel cp cp_comm ep etp pp dp_replicate dp_shard zero_stage",
    reads_cluster=True,
)
def collectives_of_groups(job: Job) -> Iterator[Problem]:
    """Every group of a collective must be able to run it; of a collective that the plan does not have there is none."""
    collectives = job.plan.collectives
    if collectives is None or job.plan.num_devices > job.cluster.num_devices:
        return
    if job.plan.expert_ranks % job.plan.ep:  # there are no such groups, as another rule says
        return
    for kind, algorithm in collectives.prescribed():
        for axis, ranks in _groups(job, kind):
            if (refusal := _refusal(algorithm, kind, ranks, job)) is not None:
                sentence, fix = refusal
                field, rule_words = f"plan.collectives.{kind}", f"{sentence} (group of {axis} ranks)"
                yield Problem(field=field, value=algorithm, rule=rule_words, fix=fix)
                break


@rule(
    "parameter servers are for data parallelism alone, with unsharded states, and are nodes",
    reads="collectives placement tp cp ep pp dp_replicate dp_shard zero_stage",
    reads_cluster=True,
)
def parameter_servers_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.collectives is None or plan.collectives.all_reduce != _SERVER:
        return
    for name in ("tp", "cp", "ep", "pp"):
        if getattr(plan, name) > 1:
            yield problem_of(
                job, f"plan.{name}", "does not go with a parameter server, which only averages gradients", "use 1"
            )
    if plan.zero_stage > 0 and plan.dp_shard > 1:
        sentence = "shards states over ranks, and parameter servers serve ranks that have all parameters"
        yield problem_of(job, "plan.zero_stage", sentence, "use 0")
    if plan.num_devices > job.cluster.num_devices:
        return
    num_nodes = len(set(map(job.node_of, range(plan.num_devices))))
    if plan.collectives.num_servers > num_nodes:
        sentence = f"is more than the {counted(num_nodes, 'node')} that could serve: gradients are added inside a node"
        yield problem_of(job, "plan.collectives.parameter_servers", sentence, f"use {num_nodes} or less")


def unused_collectives(job: Job) -> Iterator[tuple[str, str]]:
    """Yields the collectives with a prescribed algorithm that the plan does not have, each with the algorithm."""
    for kind, algorithm in () if job.plan.collectives is None else job.plan.collectives.prescribed():
        if next(_groups(job, kind), None) is None:
            yield kind, algorithm


def _groups(job: Job, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the groups of several ranks that run a collective, with their axis, for the first and the last rank."""
    plan, mapping = job.plan, RankMapping.of(job.plan)
    for rank in dict.fromkeys((0, mapping.world_size - 1)):
        groups = {
            "all_reduce": _reducing,
            "all_gather": _sharding,
            "reduce_scatter": _sharding,
            "all_to_all": _trading,
        }[kind](job, plan, mapping, rank)
        yield from ((axis, ranks) for axis, ranks in groups if len(ranks) > 1)


Groups = Iterator[tuple[str, tuple[int, ...]]]


def _reducing(job: Job, plan: ParallelPlan, mapping: RankMapping, rank: int) -> Groups:
    sharded = plan.shards_parameters or plan.shards_optimizer_only
    yield "data-parallel", mapping.group("replicate", rank) if plan.shards_parameters else mapping.group("dp", rank)
    if sharded:
        yield "shard", mapping.group("shard", rank)
        yield "replicate", mapping.group("replicate", rank)
    yield "tensor-parallel", mapping.group("tp", rank)
    if plan.ep > 1:
        yield "expert-data-parallel", mapping.group("expert", rank)
    pipeline = mapping.group("pp", rank)
    if job.training.clip_grad_norm is not None:
        yield "pipeline", pipeline
    if job.model.shared_by_ends and plan.pp > 1:
        yield "first and last pipeline", (pipeline[0], pipeline[-1])


def _sharding(job: Job, plan: ParallelPlan, mapping: RankMapping, rank: int) -> Groups:
    if plan.shards_parameters or plan.shards_optimizer_only:
        yield "shard", mapping.group("shard", rank)
    if plan.ep > 1 and plan.shards_parameters:
        yield "expert-shard", mapping.group("expert_shard", rank)
    elif plan.ep > 1 and plan.shards_optimizer_only and job.software.optimizer_shards == "elements":
        yield "expert-data-parallel", mapping.group("expert", rank)
    if plan.sequence_parallel:
        yield "tensor-parallel", mapping.group("tp", rank)
    if plan.cp_comm == "all_gather":
        yield "context-parallel", mapping.group("cp", rank)
    if plan.etp > 1:
        yield "expert-tensor-parallel", mapping.group("etp", rank)


def _trading(job: Job, plan: ParallelPlan, mapping: RankMapping, rank: int) -> Groups:
    del job
    if plan.ep > 1:
        yield "expert-parallel", mapping.group("ep", rank)
    if plan.cp_comm == "a2a":
        yield "context-parallel", mapping.group("cp", rank)


def _refusal(algorithm: str, kind: str, ranks: Sequence[int], job: Job) -> tuple[str, str] | None:
    """Returns why a group cannot run an algorithm, with the fix; None if it can."""
    cluster = job.cluster
    if cluster.cores_per_node is not None:
        return "this machine runs the algorithms of gloo, which a calibration has timed", "remove it"
    nodes = Counter(map(job.node_of, ranks))
    num_ranks, num_nodes, local = len(ranks), len(nodes), min(nodes.values())
    is_even = len(set(nodes.values())) == 1
    if algorithm == _SERVER and not is_even:
        return "needs equally many ranks on each node", "use ring"
    link = cluster.intra_link or cluster.inter_link
    if link is not None and link.library != "nccl":
        return _refusal_of_library(algorithm, kind, link.library)
    if kind == "all_to_all" and job.software.expert_dispatch in ("deepep", "hybridep") and job.plan.ep > 1:
        return f"{job.software.expert_dispatch} has an all-to-all of its own", "remove it"
    match algorithm:
        case "nvls":
            return _refusal_of_nvls(kind, local, num_nodes, cluster)
        case "sharp":
            return _refusal_of_sharp(num_nodes, cluster, is_even=is_even)
        case "halving_doubling" if num_ranks & (num_ranks - 1):
            return f"halves the ranks again and again, and {num_ranks} ranks are no power of two", "use ring"
        case "halving_doubling" if not is_even:
            return "needs equally many ranks on each node", "use ring"
        case "hierarchical" if num_nodes == 1 or local == 1 or not is_even:
            where = f"{num_ranks} ranks are on {counted(num_nodes, 'node')}"
            return f"needs several nodes with equally many ranks, two or more on each, and {where}", "use another"
    return None


def _refusal_of_library(algorithm: str, kind: str, library: str) -> tuple[str, str] | None:
    if library == "gloo" and (algorithm == _SERVER or algorithm == ("pairwise" if kind == "all_to_all" else "ring")):
        return None
    return f"is not what {library}, the library of the cluster's links, runs", f"remove it: {library} has one algorithm"


def _refusal_of_nvls(kind: str, local: int, num_nodes: int, cluster: ClusterSpec) -> tuple[str, str] | None:
    link = cluster.intra_link
    if link is None or link.switch_share is None:
        name = "no link" if link is None else link.id
        return f"reduces in a switch inside the node, and {name} has none that does (switch_share)", "use ring or tree"
    if local == 1:
        return "reduces in a switch inside the node, and a node has one rank of the group", "use ring"
    if num_nodes > 1 and kind != "all_reduce":
        return f"stays inside a node, and the group spans {num_nodes} nodes", "use ring"
    return None


def _refusal_of_sharp(num_nodes: int, cluster: ClusterSpec, *, is_even: bool) -> tuple[str, str] | None:
    link = cluster.inter_link
    if num_nodes == 1:
        return "reduces in switches between nodes, and the group is inside one node", "use nvls or ring"
    if link is None or link.switch_share is None:
        name = "no link" if link is None else link.id
        fix = "use tree, or a network with switch_share, e.g. inter_link: sharp-400gbit"
        return f"reduces in switches between nodes, and {name} has none that do", fix
    if cluster.topology is not None and cluster.topology.kind in ("dragonfly", "graph"):
        return f"needs a tree of switches, and the topology is a {cluster.topology.kind}", "use tree"
    return None if is_even else ("needs equally many ranks on each node", "use tree")
