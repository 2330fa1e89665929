"""Rules about unequal devices in one job, and unequal shares of its batch."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.cluster.hardware import NodeGroup
from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.plan import RankMapping
from simplan.rules.rule import problem_of, rule, unmodelled

_CLUSTER = "cluster.nodes"
_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "etp": "tensor"}


def _library(group: NodeGroup) -> str:
    """Communication library of a node group: processes with different ones cannot form a group."""
    links = [link for link in (group.intra_link, group.inter_link) if link is not None]
    library = links[0].library if links else group.device.kind
    return "rccl" if library == "nccl" and group.device.architecture == "cdna" else library


@rule("nodes of one job must use one communication library", reads_cluster=True)
def libraries_of_nodes(job: Job) -> Iterator[Problem]:
    groups = job.cluster.node_groups
    names = [_library(group) for group in groups]
    for place, (group, name) in enumerate(zip(groups, names, strict=True)):
        if name != names[0]:
            words = f"communicates with {name}, and {groups[0].device.id} with {names[0]}; they cannot form a group"
            fix = "use devices of one vendor"
            yield Problem(field=f"{_CLUSTER}.{place}", value=group.device.id, rule=words, fix=fix)


@unmodelled(
    "tensor-, context- and expert-parallel groups over unequal devices are not modeled",
    reads="placement tp cp pp dp ep etp",
    reads_cluster=True,
)
def groups_of_equal_devices(job: Job) -> Iterator[Problem]:
    """Such ranks meet in every layer, so the fast ones would wait in every layer."""
    plan, groups = job.plan, job.cluster.node_groups
    if not groups or plan.num_devices != job.cluster.num_devices:
        return
    mapping = RankMapping.of(plan)
    if plan.ep > 1 and (plan.expert_ranks % plan.ep or plan.num_devices % (plan.ep * plan.etp)):
        return
    for axis, name in _AXES.items():
        if getattr(plan, axis) == 1:
            continue
        for rank in range(plan.num_devices):
            members = mapping.layer_collective_groups(rank)[axis]
            kinds = sorted({job.group_of(member) or 0 for member in members})
            if len({groups[kind].device for kind in kinds}) > 1:
                first, second = (groups[kind].device.id for kind in kinds[:2])
                sentence = (
                    f"makes {name}-parallel groups with {first} and {second}, such as ranks {members[0]} to "
                    f"{members[-1]}, which is not modeled yet"
                )
                fix = f"use a {axis} that divides the devices of every group of nodes, or another plan.placement"
                yield problem_of(job, f"plan.{axis}", sentence, fix)
                return


@unmodelled("microbatch_sizes with expert parallelism are not modeled", reads="microbatch_sizes ep")
def microbatch_sizes_of_experts(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.microbatch_sizes is not None and plan.ep > 1:
        sentence = f"with plan.ep = {plan.ep} is not modeled yet: their all-to-all would have unequal parts"
        yield problem_of(job, "plan.microbatch_sizes", sentence, "use ep = 1, or equal sizes")


@unmodelled("microbatch_sizes of images or in JAX are not modeled", reads="microbatch_sizes")
def microbatch_sizes_modelled(job: Job) -> Iterator[Problem]:
    if job.plan.microbatch_sizes is not None and job.software.runtime == "xla":
        sentence = f"is not modeled yet for {job.software.id}, in which all devices run one program on equal batches"
        yield problem_of(job, "plan.microbatch_sizes", sentence, "use microbatch_size")
