"""Jobs of tests, made of names and fields, with what rules say of them and the Programs that they are lowered to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, NodeGroup, slowest_link
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.action import Table
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import MemoryCategory, Program
from simplan.program.tables.partition import assign_stage_layers
from simplan.program.tables.plan_table import plan_table
from simplan.rules import check_job
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec

Plan = ParallelPlan | Mapping[str, Any]


H100, A100 = catalog.node("dgx-h100"), catalog.node("dgx-a100-80gb")


def node_group(entry: catalog.NodeEntry, num_nodes: int = 1, **device: object) -> NodeGroup:
    """Nodes of a preset, with the links of an H100 node, so that groups differ in their devices alone."""
    return NodeGroup(
        id=entry.id,
        num_nodes=num_nodes,
        device=entry.device.model_copy(update=device),
        intra_link=H100.intra_link,
        inter_link=H100.inter_link,
    )


def mixed_cluster(*groups: NodeGroup, devices_per_node: int = 8) -> ClusterSpec:
    """Nodes of some groups, in their order."""
    number = devices_per_node * sum(group.num_nodes for group in groups)
    equal = catalog.make_cluster(replace(H100, devices_per_node=devices_per_node), number)
    links = {
        "intra_link": slowest_link([group.intra_link for group in groups]),
        "inter_link": slowest_link([group.inter_link for group in groups]),
    }
    update = {"device": groups[0].device, "host_link": None, "node_groups": groups, **links}
    return equal.model_copy(update=update)


def tiny_model(family: str = "gpt", **fields: Any) -> ModelSpec:
    """Two blocks of four heads of 16, unless said otherwise."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "seq_len": 16}
    return ModelSpec.model_validate({"family": family, **sizes, **fields})


def job_of(
    model: ModelSpec | str,
    plan: Plan | None = None,
    *,
    cluster: ClusterSpec | str = "dgx-h100",
    software: SoftwareSpec | str = "torch",
    num_microbatches: int | None = None,
    **training: Any,
) -> Job:
    """A job on as many devices as the plan needs, unless the cluster is given.

    Args:
        model, cluster, software: A spec, or its name in the catalog.
        plan: A plan, or its fields.
        num_microbatches: Of a step; if None, ``global_batch_size`` decides, 24 by default.
        training: Fields of the training.
    """
    made = plan if isinstance(plan, ParallelPlan) else ParallelPlan.model_validate(plan or {})
    batch = 24 if num_microbatches is None else num_microbatches * made.dp * made.microbatch_size
    return Job(
        catalog.model(model) if isinstance(model, str) else model,
        catalog.cluster(cluster, num_devices=made.num_devices) if isinstance(cluster, str) else cluster,
        TrainingSpec.model_validate({"global_batch_size": batch, **training}),
        made,
        catalog.software(software) if isinstance(software, str) else software,
    )


def problems(model: ModelSpec | str, plan: Plan | None = None, **parts: Any) -> list[str]:
    """Sentences for which a job (see ``job_of``) is refused, by a NotModelledError where all say "is not modeled"."""
    try:
        check_job(job_of(model, plan, **parts))
    except SpecError as error:
        refusal = error
    else:
        return []
    sentences = [problem.sentence() for problem in refusal.problems]
    assert isinstance(refusal, NotModelledError) or any("is not modeled" not in sentence for sentence in sentences)
    return sentences


def lowered(
    asked: Job, how: Lowering | int = 2, stage_layers: Sequence[int] | None = None, table: Table | None = None
) -> Program:
    """The Program of a job, with layers (or blocks, where ``stage_layers`` counts them) spread evenly over stages."""
    num_layers, num_stages = len(asked.model.layers), asked.plan.num_stages
    boundaries = tuple(round(stage * num_layers / num_stages) for stage in range(num_stages + 1))
    assignment = StageAssignment(boundaries) if stage_layers is None else assign_stage_layers(stage_layers)
    actions = table or plan_table(asked.plan, asked.num_microbatches)
    return lower(asked, assignment, actions, how if isinstance(how, Lowering) else Lowering(how))


def job_to_lower(model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Job:
    """A job on whatever cluster, which lowering does not look at."""
    return Job(model, catalog.cluster("dgx-h100", num_devices=plan.num_devices), training, plan, software)


def states_at_update(program: Program, rank: int = 0) -> int:
    """Bytes of weights, gradients and states of the optimizer while it runs."""
    states = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    effects = [effect for op in program.ops if op.rank == rank for effect in op.memory]
    freed = sum(e.after_bytes for e in effects if e.category is MemoryCategory.GRADIENTS and e.after_bytes < 0)
    return sum(program.persistent_bytes[rank][category] for category in states) - freed
