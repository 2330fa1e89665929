"""Rules about the cluster: links, number of devices, and supported frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simplan.cluster.hardware import BackgroundFlow, BackgroundJob, ClusterSpec
from simplan.cluster.topology import Torus, topology_problems
from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.placement import DEFAULT_ORDER, Placement, axes_of, placed_order
from simplan.rules.rule import nearest_multiples, problem_of, rule, unmodelled
from simplan.units import counted
from simplan.wording import divisors, either


@rule("devices of one node need a link", reads_cluster=True)
def link_within_nodes(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    if cluster.num_devices > 1 and cluster.devices_per_node > 1 and cluster.intra_link is None:
        yield Problem(
            field="cluster.intra_link",
            rule=f"is missing: the catalog does not say what joins {cluster.device.id} devices of one node",
            fix="name a link, e.g. pcie4 (`simplan show links` lists them)",
        )


@rule("several nodes need a network", reads_cluster=True)
def network_between_nodes(job: Job) -> Iterator[Problem]:
    if job.cluster.num_nodes > 1 and job.cluster.inter_link is None:
        yield Problem(
            field="cluster.inter_link_gbit_per_node",
            rule=f"is missing: {job.cluster.num_nodes} nodes need a network",
            fix="give the Gbit/s of a node with InfiniBand or RoCE (--gbit-per-node), e.g. 3200 for eight cards of "
            "400; or inter_link: tcp-10gbit for one Ethernet card per node",
        )


@rule("background traffic is between two nodes of a topology", reads_cluster=True)
def background_traffic(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    if cluster.background and cluster.topology is None:
        fix = "give cluster.topology, or remove it"
        yield Problem(field="cluster.background", rule="needs links to share, and the cluster has no topology", fix=fix)
        return
    for index, flow in enumerate(cluster.background):
        if not isinstance(flow, BackgroundFlow):
            continue
        field = f"cluster.background.{index}"
        for key, name, node in zip(("from", "to"), (flow.source, flow.destination), flow.nodes, strict=True):
            if node >= cluster.num_fabric_nodes:
                rule_words = f"is not in the cluster, whose nodes are {_nodes_of(cluster)}"
                yield Problem(field=f"{field}.{key}", value=f'"{name}"', rule=rule_words, fix="name one of these")
        if flow.source == flow.destination:
            words = "sends from a node to itself"
            yield Problem(field=field, value=f'"{flow.source}"', rule=words, fix="name two nodes")


def _nodes_of(cluster: ClusterSpec) -> str:
    last = cluster.num_fabric_nodes - 1
    return f"node0 to node{last}" if last else "node0"


@rule("background jobs have nodes of their own in the topology", reads_cluster=True)
def background_jobs(job: Job) -> Iterator[Problem]:
    cluster, taken = job.cluster, dict[int, str]()
    if cluster.topology is None or not cluster.background_jobs:
        return
    if cluster.num_nodes == 1:
        rule_words = "has jobs on other nodes, and this job has one node, so that they share no link"
        yield Problem(field="cluster.background", rule=rule_words, fix="remove them")
        return
    problems = [
        problem
        for index, other in enumerate(cluster.background)
        if isinstance(other, BackgroundJob)
        for problem in _problems_of_nodes(other, f"cluster.background.{index}", cluster, taken)
    ]
    yield from problems
    if problems or topology_problems(cluster):
        return
    for problem in topology_problems(cluster.fabric_cluster):
        words = f"makes {counted(cluster.num_fabric_nodes, 'node')} of all jobs, which the topology cannot have: "
        words += f"{problem.field} {problem.rule}"
        yield Problem(field="cluster.background", rule=words, fix="use fewer nodes, or another topology")


def _problems_of_nodes(
    other: BackgroundJob, field: str, cluster: ClusterSpec, taken: dict[int, str]
) -> Iterator[Problem]:
    """Problems of the nodes of a background job, which are added to ``taken``."""
    total, needed = cluster.num_fabric_nodes, -(-other.plan.num_devices // cluster.devices_per_node)
    nodes, value = counted(len(other.nodes), "node"), _list(other.nodes)
    for node in other.nodes:
        if node in taken:
            words = f"names node {node}, which {taken[node]} names already"
            yield Problem(field=f"{field}.nodes", value=value, rule=words, fix="give each node to one job")
        taken[node] = f"{field}.nodes"
        if node >= total:
            words = f"names node {node}, and the {total} nodes of all jobs are node 0 to {total - 1}"
            fix = f"name {nodes} of these; this job has those that no other job names"
            yield Problem(field=f"{field}.nodes", value=value, rule=words, fix=fix)
    if needed != len(other.nodes):
        devices = counted(other.plan.num_devices, "device")
        words = f"names {nodes}, and the plan of the job needs {devices}, {cluster.devices_per_node} a node"
        yield Problem(field=f"{field}.nodes", value=value, rule=words, fix=f"name {counted(needed, 'node')}")


def _list(nodes: Sequence[int]) -> str:
    return f"[{', '.join(map(str, nodes[:16]))}{', ...' if len(nodes) > 16 else ''}]"


@unmodelled("background jobs need nodes with devices of their own, and links that jobs share", reads_cluster=True)
def background_jobs_modelled(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    if not cluster.background_jobs:
        return
    if cluster.cores_per_node is not None:
        words = "has jobs, whose time to compute on this machine is not known: not modeled yet"
        yield Problem(
            field="cluster.background", rule=words, fix="use constant traffic: {from: node0, to: node1, gbit: 1}"
        )
    if cluster.is_mixed:
        words = "has jobs, and several jobs on different nodes are not modeled yet"
        yield Problem(field="cluster.background", rule=words, fix="use constant traffic, or equal nodes")
    if isinstance(cluster.topology, Torus):
        words = "has jobs, and several jobs on one torus are not modeled yet"
        yield Problem(
            field="cluster.background", rule=words, fix="remove them: jobs have slices with links of their own"
        )
    for index, other in enumerate(cluster.background):
        if isinstance(other, BackgroundJob) and other.training.backup_workers:
            words = "is not modeled yet for a background job"
            field = f"cluster.background.{index}.job.training.backup_workers"
            yield Problem(field=field, value=str(other.training.backup_workers), rule=words, fix="remove it")


@rule("stragglers are ranks or nodes of the cluster", reads_cluster=True)
def stragglers_of_cluster(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    for index, straggler in enumerate(cluster.stragglers):
        field = f"cluster.stragglers.{index}"
        if (straggler.rank is None) == (straggler.node is None):
            yield Problem(field=field, rule="must name a rank or a node", fix="give rank: 17, or node: node2")
        elif straggler.rank is not None and straggler.rank >= cluster.num_devices:
            last = cluster.num_devices - 1
            yield Problem(
                field=f"{field}.rank",
                value=str(straggler.rank),
                rule=f"is not in the job, whose ranks are 0 to {last}",
                fix="name one of these",
            )
        elif straggler.node is not None and int(straggler.node.removeprefix("node")) not in cluster.fabric_nodes:
            words = f"is not in the cluster, whose last node is node{cluster.fabric_nodes[-1]}"
            if cluster.background_jobs:
                words = f"is no node of this job, which has nodes {_list(cluster.fabric_nodes)}"
            yield Problem(field=f"{field}.node", value=f'"{straggler.node}"', rule=words, fix="name a node of it")


@rule("slow links are links of a topology", reads_cluster=True)
def slow_links_of_topology(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    if cluster.slow_links and cluster.topology is None:
        rule_words = "names links, and the cluster has no topology"
        yield Problem(field="cluster.slow_links", rule=rule_words, fix="give cluster.topology, e.g. {kind: switch}")
    for index, slow in enumerate(cluster.slow_links):
        field = f"cluster.slow_links.{index}"
        if (slow.slow_s is None) != (slow.period_s is None) or (slow.first_s and slow.period_s is None):
            rule_words = "must have both slow_s and period_s, or neither"
            yield Problem(field=field, rule=rule_words, fix="add the other, or remove both and first_s")
        elif slow.slow_s is not None and slow.period_s is not None and slow.slow_s >= slow.period_s:
            rule_words = f"must be shorter than period_s = {slow.period_s:g}"
            fix = "use less, or remove slow_s and period_s for a link that is always slow"
            yield Problem(field=f"{field}.slow_s", value=f"{slow.slow_s:g}", rule=rule_words, fix=fix)


_MAX_NORMAL_STD = 0.25
"""Relative standard deviation at which a normal factor is negative in 1 of 30,000 cases; negative ones become 0."""


@rule("normal jitter has a relative standard deviation of at most 0.25", reads_cluster=True)
def jitter_of_cluster(job: Job) -> Iterator[Problem]:
    jitter = job.cluster.jitter
    if jitter is None or jitter.distribution != "normal":
        return
    for name in ("compute_relative_std", "communication_relative_std"):
        value = getattr(jitter, name)
        if value > _MAX_NORMAL_STD:
            yield Problem(
                field=f"cluster.jitter.{name}",
                value=f"{value:g}",
                rule="is too large for a normal distribution, which would have negative durations",
                fix=f"use distribution: lognormal, or {_MAX_NORMAL_STD} at most",
            )


@rule("a topology must hold the devices of the job", reads_cluster=True)
def topology_of_cluster(job: Job) -> Iterator[Problem]:
    yield from topology_problems(job.cluster)


@rule("dp_replicate x dp_shard x tp x cp x pp must be the number of devices", reads="dp tp cp pp", reads_cluster=True)
def devices(job: Job) -> Iterator[Problem]:
    plan = job.plan
    needed, there = plan.num_devices, job.cluster.num_devices
    if needed == there:
        return
    fixes = [*_fitting_degrees(job)] or [*_smaller_degree(job)]
    fixes.append(f"num_devices = {needed} without num_nodes")
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


def _fitting_degrees(job: Job) -> Iterator[str]:
    """Changes of one degree with which a plan has the devices of the cluster."""
    plan, there = job.plan, job.cluster.num_devices
    degrees = (("dp_shard", there if _may_shard(job) else 0), ("dp_replicate", there), ("pp", job.model.num_blocks))
    for key, most in degrees:
        others = plan.num_devices // getattr(plan, key)
        if there % others == 0 and there // others <= most:
            batch = [] if key == "pp" else _batch_of(job, there // (plan.tp * plan.cp * plan.pp))
            yield " with ".join((f"{key} = {there // others}", *batch))


def _smaller_degree(job: Job) -> Iterator[str]:
    """The largest smaller degree that divides the devices, with the data parallelism that the others leave."""
    plan, there = job.plan, job.cluster.num_devices
    if plan.dp_shard > 1 and plan.dp_replicate > 1:
        return
    for key in ("tp", "cp", "pp"):
        others = plan.tp * plan.cp * plan.pp // getattr(plan, key)
        for size in reversed(divisors(getattr(plan, key))[:-1]):
            dp, rest = divmod(there, others * size)
            if not rest:
                data = f"{'dp_shard' if _may_shard(job) else 'dp_replicate'} = {dp}"
                yield f"{key} = {size} with {' and '.join((data, *_batch_of(job, dp)))}"
                return


def _may_shard(job: Job) -> bool:
    plan = job.plan
    return plan.dp_shard > 1 or (plan.dp_replicate == 1 and 3 in job.software.zero_stages)


def _batch_of(job: Job, dp: int) -> Iterator[str]:
    """The nearest batch for a number of data-parallel ranks, where that of the job cannot be divided among them."""
    batch, unit = job.training.global_batch_size, dp * job.plan.microbatch_size
    if batch % unit and not isinstance(job.plan.microbatch_sizes, tuple):
        nearest = min(nearest_multiples(batch, unit), key=lambda each: abs(each - batch))
        yield f"training.global_batch_size = {nearest}"


@rule("tensor-parallel groups stay inside a node (search.tp_across_nodes lifts it)", reads="tp", reads_cluster=True)
def tp_in_node(job: Job) -> Iterator[Problem]:
    """A rule of searches alone."""
    cluster, tp = job.cluster, job.plan.tp
    if cluster.num_nodes > 1 and cluster.devices_per_node % tp:
        sentence = f"must divide the {cluster.devices_per_node} devices of a node, unless search.tp_across_nodes is set"
        yield problem_of(job, "plan.tp", sentence, "use a smaller tp, or search.tp_across_nodes")


_MESH = "placement tp cp pp dp"


@rule("tensor-parallel groups stay inside a node, also with a placement", reads=_MESH, reads_cluster=True)
def placed_tp_in_node(job: Job) -> Iterator[Problem]:
    """A rule of searches alone."""
    placement, tp, per_node = job.placement, job.plan.tp, job.cluster.devices_per_node
    if placement is None or job.cluster.num_nodes == 1:
        return
    nodes = [device // per_node for device in placement.devices]
    if any(len(set(nodes[first : first + tp])) > 1 for first in range(0, len(nodes), tp)):
        sentence = f"puts tensor-parallel groups of {tp} on several nodes"
        yield problem_of(job, "plan.placement", sentence, "put tp first, or set search.tp_across_nodes")


@rule("placement must name every axis of several ranks", reads=_MESH)
def placement_of_all_axes(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.placement is None or isinstance(plan.placement[0], int):
        return
    named = axes_of(map(str, plan.placement))
    missing = [axis for axis in DEFAULT_ORDER if axis not in named and getattr(plan, axis) > 1]
    if missing:
        sizes = " and ".join(f"{axis} = {getattr(plan, axis)}" for axis in missing)
        sentence = f"must name every axis of several ranks, and {sizes}"
        yield problem_of(job, "plan.placement", sentence, f"add {' and '.join(missing)} where it belongs")


@rule("a list of devices must have one for every rank", reads=_MESH)
def placement_of_all_ranks(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.placement is None or not isinstance(plan.placement[0], int):
        return
    if len(plan.placement) != plan.num_devices:
        sentence = f"has {len(plan.placement)} devices and the plan has {plan.num_devices} ranks"
        value = f"[{', '.join(map(str, plan.placement[:16]))}{', ...' if len(plan.placement) > 16 else ''}]"
        yield problem_of(job, "plan.placement", sentence, "list the device of every rank", value=value)


@rule("ep in a placement must be where the mesh has it: between cp and dp", reads=f"{_MESH} ep")
def placement_of_experts(job: Job) -> Iterator[Problem]:
    plan = job.plan
    placement = plan.placement or ()
    if plan.ep == 1 or "ep" not in placement:
        return
    inside = axes_of(map(str, placement[: placement.index("ep")]))
    sizes = {axis: getattr(plan, axis) for axis in DEFAULT_ORDER}
    order = placed_order(map(str, placement), sizes)
    wanted = [axis for axis in order if axis in ("tp", "cp")]
    if [axis for axis in order if axis in inside] != wanted or Placement.of(plan) is not None:
        sentence = (
            "has ep at another place than the mesh: expert-parallel groups are neighboring ranks inside dp x cp x tp, "
            "and follow the placement of these axes"
        )
        yield problem_of(job, "plan.placement", sentence, "write [tp, cp, ep, dp, pp], or leave ep out")


@rule("CPUs compute in fp32, bf16 or fp8", reads_cluster=True)
def precision_of_cpus(job: Job) -> Iterator[Problem]:
    device, precision = job.cluster.device, job.training.precision
    if device.kind == "cpu" and precision not in ("fp32", "bf16", "fp8"):
        sentence = f"must be fp32, bf16 or fp8 on a CPU ({device.id}): the others are those of accelerators"
        yield problem_of(job, "training.precision", sentence, "use fp32")


@unmodelled("other software than torch on this machine is not modeled", reads_cluster=True)
def software_of_this_machine(job: Job) -> Iterator[Problem]:
    if job.cluster.cores_per_node is not None and not job.software.executable:
        sentence = f"other software than torch on {job.cluster.id}, where times are of what the executor runs, "
        sentence += "is not modeled yet"
        memory = f"cluster: {{preset: dgx-h100, num_devices: {job.cluster.num_devices}}} for the memory of its tensors"
        yield Problem(field="software", value=job.software.id, rule=sentence, fix=f"use torch, or {memory}")
