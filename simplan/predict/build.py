"""Inputs of a simulation: cost model, stages, folding and Program of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.analytic import AnalyticCost
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration, way_of_mixing
from simplan.cost.calibration.store import refuse_other_device
from simplan.cost.communication.host_link import host_memory_rate
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.cost.known import Ground, ground_of, known_of
from simplan.cost.mixed import MixedCost
from simplan.cost.model import CostModel
from simplan.cost.program_costs import pass_time_s
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.model.layer import CollectiveKind, LayerCollective
from simplan.model.low_precision import DEFAULT_RECIPE
from simplan.optimizers import UpdateName
from simplan.plan.collectives import Collectives
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan, RankMapping, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS, stage_ranks
from simplan.predict.stragglers import slowdowns
from simplan.prediction import Prediction
from simplan.program.action import Table, format_table
from simplan.program.folding import Folding, fold, unfolded
from simplan.program.lowering.fsdp_units import shard_elements
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.lowering.script import Scripts
from simplan.program.lowering.stage import Stages
from simplan.program.program import Communication, HostWait, LayerWork, Op, Phase, Program, Stream
from simplan.program.schedules import PipelineShape, StageTimes, one_f_one_b
from simplan.program.tables.complete import complete_table
from simplan.program.tables.partition import (
    assign_stage_layers,
    balanced_assignment,
    balanced_unequal_assignment,
)
from simplan.program.tables.plan_table import plan_table
from simplan.sim.engine import CoreUse
from simplan.software.rates import FrameworkRates
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import Precision, TrainingSpec

if TYPE_CHECKING:
    from simplan.runs.run_spec import RunSpec

_MAX_OPERATIONS = 120_000  # a larger Level 2 Program expands only layers with communication; its time is the same


def build_program(prediction: Prediction, *, level: int = 2, folded: bool = True) -> Program:
    """Lower a prediction to its Program, for drawing, comparing and running.

    Args:
        prediction: A prediction.
        level: 1 for the action level, 2 for the kernel level.
        folded: True to include ranks with identical work once.
    """
    job = prediction.job
    folding = folding_of(job) if folded else unfolded(RankMapping.of(job.plan))
    num_microbatches = 1 + max(action.microbatch or 0 for row in prediction.table for action in row)
    expand_all = expands_all(job, folding, num_microbatches)
    how = Lowering(level, folding, expand_all, host_waits=job.cluster.device.kind == "cpu")
    return lower(job, prediction.assignment, prediction.table, how)


def run_spec_of(prediction: Prediction, **options: Any) -> RunSpec:
    """Make the ``RunSpec`` of a prediction, with stages and action table fixed.

    Args:
        prediction: Prediction to run.
        options: Further fields of ``RunSpec``; ``dtype`` defaults to the training precision (tf32: fp32, fp8: bf16).
    """
    from simplan.runs.run_spec import RunSpec

    job = prediction.job
    slow = slowdowns(job.cluster, job.plan)
    fields: dict[str, Any] = {
        "name": prediction.name,
        "model": job.model,
        "training": job.training,
        "plan": job.plan,
        "software": job.software,
        "boundaries": prediction.assignment.boundaries,
        "table": tuple(tuple(row) for row in format_table(prediction.table)),
        "predicted_memory_bytes": tuple(memory.measurable_bytes("device") for memory in prediction.memory),
        "dtype": run_dtype(job.training),
        "slowdowns": tuple(slow.get(rank, 1.0) for rank in range(job.plan.num_devices)) if slow else (),
    }
    return RunSpec(**(fields | options))


def run_dtype(training: TrainingSpec) -> str:
    """``RunSpec.dtype`` of a training."""
    return {"tf32": "fp32", "fp8": "bf16"}.get(training.precision, training.precision)


MAX_DEALT_RANKS = 64
"""Ranks that are simulated one by one if ZeRO-1 assigns unequal parameters to them."""


def deals_unequal_shards(job: Job) -> bool:
    """True if ranks update different numbers of parameters, as with torch's ZeroRedundancyOptimizer."""
    return job.plan.shards_optimizer_only and job.software.optimizer_shards == "parameters"


def folding_of(job: Job, *, dealt_alike: bool = False) -> Folding:
    """Folding of ranks with identical work; ranks that share cores are not folded, since they slow each other down.

    Nor are workers that do not wait for each other, ranks with jitter, those of a topology without symmetry, where
    hashes, positions or other jobs decide about links, and those with backup workers, unless all replicas are alike:
    then none of them is slower.

    Args:
        job: The job.
        dealt_alike: True to fold ranks to which ZeRO-1 assigns unequal parameters. The first rank, which has the
            largest parameter, then represents them. Jobs of more than ``MAX_DEALT_RANKS`` are always folded so.
    """
    plan, cluster = job.plan, job.cluster
    mapping = RankMapping.of(plan)
    has_workers = plan.replication is not None and plan.replication.has_workers
    if cluster.cores_per_node is not None or cluster.jitter is not None or has_workers:
        return unfolded(mapping)
    if job.training.backup_workers:
        training = job.training.model_copy(update={"backup_workers": 0})
        folding = folding_of(replace(job, training=training), dealt_alike=dealt_alike)
        by_replica = np.array(folding.stands_for).reshape(plan.pp, plan.dp_replicate, -1)
        return folding if (by_replica == by_replica[:, :1]).all() else unfolded(mapping)
    deals = deals_unequal_shards(job) and not dealt_alike and plan.num_devices <= MAX_DEALT_RANKS
    contended = None if is_static(cluster) else cluster
    shards = _shard_classes(job)
    if deals or (shards and contended is not None):  # shards of one class load links at different times
        shards = tuple(range(plan.dp_shard * plan.cp))
    placement = job.placement
    if contended is not None and placement is not None and isinstance(placement.order[0], int):
        return unfolded(mapping)
    slow = tuple(slowdowns(cluster, plan).items()) if cluster.stragglers else ()
    nodes = tuple(group.num_nodes for group in cluster.node_groups)
    return _kept_folding(mapping, placement, cluster.devices_per_node, shards, contended, slow, nodes, _sizes(plan))


def _shard_classes(job: Job) -> tuple[int, ...]:
    """By index in a shard group, a number that is equal for shards with equal work; empty if all are equal.

    FSDP shards differ in what they sum over tensor-parallel ranks: if the rows of a parameter with partial gradients do
    not divide evenly, its last shards have fewer or none of them.
    """
    plan = job.plan
    if not plan.shards_parameters:
        return ()
    parameters = (p for layer in set(job.software.layers_of(job.model, plan, job.training)) for p in layer.parameters)
    shapes = frozenset(p.shape for p in parameters if p.partial_gradient and not p.expert)
    return _classes_of_shards(shapes, plan.dp_shard * plan.cp)


@lru_cache(maxsize=128)
def _classes_of_shards(shapes: frozenset[tuple[int, ...]], num_shards: int) -> tuple[int, ...]:
    """See ``_shard_classes``; for shapes of the parameters that make shards differ."""
    sizes = np.array([[shard_elements(shape, num_shards, shard) for shard in range(num_shards)] for shape in shapes])
    if not sizes.size or (sizes == sizes[:, :1]).all():
        return ()
    return tuple(np.unique(sizes, axis=1, return_inverse=True)[1].reshape(-1).tolist())


def _sizes(plan: ParallelPlan) -> tuple[int, ...] | None:
    """Microbatch sizes of the data-parallel ranks; None if they are equal."""
    return None if plan.microbatch_sizes is None else plan.sizes_of_ranks


@lru_cache(maxsize=128)
def _kept_folding(
    mapping: RankMapping,
    placement: Placement | None,
    devices_per_node: int,
    shard_classes: tuple[int, ...],
    contended: ClusterSpec | None,
    slow: tuple[tuple[int, float], ...],
    node_groups: tuple[int, ...],
    microbatch_sizes: tuple[int, ...] | None,
) -> Folding:
    """Cached folding: plans of a search have few meshes.

    Args:
        mapping: Mesh of the ranks.
        placement: Devices of the ranks; None if they are the devices of their own numbers.
        devices_per_node: Devices of a node.
        shard_classes: By index in a shard group, a number that is equal for shards with equal work; empty if all are.
        contended: Cluster on whose links communications slow each other down; None for none.
        slow: Ranks that compute more slowly than the others, with their slowdowns.
        node_groups: Nodes of each node group; empty for equal nodes.
        microbatch_sizes: See ``ParallelPlan``.
    """
    ranks = np.arange(mapping.world_size)
    devices = ranks if placement is None else np.array(placement.devices)
    nodes = devices // devices_per_node
    domains: list[NDArray[np.integer]] = [nodes]
    if contended is not None:
        from simplan.network.build import fabric_of

        fabric = fabric_of(contended)
        if not fabric.is_symmetric or contended.background or contended.slow_links:
            return unfolded(mapping)
        domains += [of_level[devices] for name, of_level in fabric.levels if name != "node"]
    slowdown = np.ones(mapping.world_size)
    slowdown[[rank for rank, _ in slow]] = [factor for _, factor in slow]
    owns = [slowdown, np.searchsorted(np.cumsum(node_groups), nodes, side="right")]
    if shard_classes:
        owns.append(np.array(shard_classes)[ranks // mapping.tp % len(shard_classes)])
    if microbatch_sizes is not None:
        owns.append(np.array(microbatch_sizes)[ranks // (mapping.cp * mapping.tp) % len(microbatch_sizes)])
    return fold(mapping, domains, owns)


def is_static(cluster: ClusterSpec) -> bool:
    """True if communications take as long as alone, so that no link is simulated: the cluster has no topology."""
    return cluster.topology is None


def cost_model(job: Job, calibration: Calibration | None) -> CostModel:
    """Make the cost model of a job: calibrated if a calibration is given, else from datasheets.

    Raises:
        SpecError: The cluster is this machine and there is no calibration, the calibration is for another device or
            lacks required timings, or a datasheet lacks a value.
    """
    cluster, training, plan, software = job.cluster, job.training, job.plan, job.software
    if calibration is None and cluster.cores_per_node is not None:
        raise SpecError(
            Problem(
                field="cluster.preset",
                value=cluster.id,
                rule="needs a calibration, because there is no public data on this machine's speed",
                fix="run `simplan calibrate SCENARIO` first (`simplan run` does it by itself)",
            )
        )
    if cluster.is_mixed:
        if calibration is not None:
            rule = "is a cluster of different nodes, and a calibration has timings of one device"
            fix = "predict without a calibration"
            raise SpecError(Problem(field="cluster.nodes", value=cluster.devices_in_words, rule=rule, fix=fix))
        return MixedCost(cluster, lambda nodes: _datasheet_cost(replace(job, cluster=nodes)), job.placement)
    if calibration is None:
        return _datasheet_cost(job).placed(job.placement)
    refuse_other_device(calibration, cluster)
    if plan.collectives is not None:
        rule = f"{plan.collectives.words}: a calibration has the time of the algorithm that the library chose"
        raise SpecError(Problem(field="plan.collectives", rule=rule, fix="remove it, or predict without a calibration"))
    return CalibratedCost(
        calibration,
        dtype=training.precision,
        optimizer=training.update,
        num_ranks=cluster.ranks_per_node,
        fp8_recipe=training.fp8_recipe or DEFAULT_RECIPE,
        mixed=way_of_mixing(training.precision, sharded=plan.shards_parameters or training.pure_bf16),
        cluster=cluster,
        otherwise=None if cluster.cores_per_node is not None else _datasheet_cost(job),
        traffic=software.timed_traffic,
        update_fraction=software.state(training, plan).update_fraction,
        placement=job.placement,
    )


def _datasheet_cost(job: Job) -> AnalyticCost:
    training, plan = job.training, job.plan
    software = _of_convolutions(job.software) if job.model.depths else job.software
    state = software.state(training, plan)
    # weight casts done once per step are spread over its microbatches
    num_microbatches = job.num_microbatches if state.linear is not None else 1
    precision, update = training.precision, training.update
    return _kept_cost(
        job.cluster,
        precision,
        state,
        update,
        software,
        plan.shards_parameters,
        num_microbatches,
        plan.collectives,
        job.server_shares,
        ground_of(job),
        updates_on_host=plan.offload_optimizer,
        updated_by_servers=plan.replication is not None and plan.replication.has_servers,
    )


@lru_cache(maxsize=16)
def _of_convolutions(software: SoftwareSpec) -> SoftwareSpec:
    """Profile with prior rates: all published runs that rates are fitted on train transformers."""
    return software.model_copy(update={"rates": FrameworkRates()})


@lru_cache(maxsize=16)
def _kept_cost(
    cluster: ClusterSpec,
    precision: Precision,
    state: StateBytes,
    update: UpdateName,
    software: SoftwareSpec,
    shards_parameters: bool,
    num_microbatches: int,
    collectives: Collectives | None,
    server_shares: tuple[float, ...],
    ground: Ground,
    *,
    updates_on_host: bool,
    updated_by_servers: bool,
) -> AnalyticCost:
    """Cached cost model with its estimates: plans of a search share most of them."""
    known = known_of(ground)
    kernels = kernel_cost(
        cluster.device,
        precision,
        state,
        update,
        software,
        num_devices=cluster.num_devices,
        shards_parameters=shards_parameters,
        num_microbatches=num_microbatches,
        host_bytes_per_s=host_memory_rate(cluster, whole_node=updated_by_servers)
        if updates_on_host or updated_by_servers
        else None,
        known=known,
    )
    between_std = known.std("communication")
    return AnalyticCost(cluster, kernels, software.rates, collectives, server_shares, between_std)


def sharing_of(program: Program, cluster: ClusterSpec, cost: CostModel) -> CoreUse | None:
    """Cores that operations share; None if every rank has its own device.

    Ranks of a CPU machine share its cores. A rank computes on t = ``max(1, cores // ranks)`` threads. Communication
    keeps d cores busy on each member, so that compute on C cores with N ranks slows down by (N t + N d) / C. The
    measured slowdown gives d, limited to 0 to 1; without a measurement d is 1.

    Communication between nodes waits for the network and keeps no core busy. The two directions between a pair of ranks
    are serialized (``simplan.cost.communication.gloo``).
    """
    core_use = cores_of_ranks(cluster, cost)
    if core_use is None:
        return None
    cores, threads, communication_cores = core_use
    placement = cost.placement if isinstance(cost, CalibratedCost) else None
    devices = range(cluster.num_devices) if placement is None else placement.devices
    node_of = [cluster.node_of(device) for device in devices]

    def demand(op: Op) -> float:
        if op.communication is not None and len({node_of[rank] for rank in op.communication.ranks}) > 1:
            return 0.0
        return float(threads) if op.stream is Stream.COMPUTE else communication_cores

    nodes = [node_of[op.rank] for op in program.ops]
    return CoreUse(cores, nodes, [demand(op) for op in program.ops], [_connection(op) for op in program.ops])


def cores_of_ranks(cluster: ClusterSpec, cost: CostModel) -> tuple[int, int, float] | None:
    """Cores of a node, cores on which a rank computes, and those that its communication keeps busy.

    None if every rank has its own device; see ``sharing_of``.
    """
    slowdown = cost.compute_slowdown if isinstance(cost, CalibratedCost) else None
    cores = cluster.cores_per_node
    if cores is None:
        return None
    ranks = cluster.ranks_per_node
    threads = max(1, cores // ranks)
    communication_cores = 1.0 if slowdown is None else min(1.0, max(0.0, slowdown * cores / ranks - threads))
    return cores, threads, communication_cores


def _connection(op: Op) -> frozenset[int] | None:
    """Sender and receiver of a P2P send; None for other operations."""
    communication = op.communication
    return (
        frozenset(communication.ranks)
        if communication is not None and communication.kind is CollectiveKind.SEND
        else None
    )


def assign_layers(job: Job, cost: CostModel, max_blocks: Sequence[int] | None = None) -> StageAssignment:
    """Assign layers to stages: ``plan.stage_layers``, else equal blocks if the software requires it, else balanced.

    Args:
        job, cost: The job, and its cost model.
        max_blocks: ``(num_stages,)`` Most blocks of each stage, for pipeline ranks on unequal devices; None: no limit.
    """
    model, plan = job.model, job.plan
    if plan.num_stages == 1:
        return StageAssignment((0, 1 + model.num_blocks + model.num_last_layers))
    fixed = given_stage_layers(job)
    if fixed is not None:
        return assign_stage_layers(fixed, model.num_last_layers)
    ranks = stage_ranks(plan.schedule, plan.pp, plan.num_stages) if plan.pp > 1 else None
    if len(set(job.stage_groups)) > 1:
        times_s = [_slowest_times_s(job, cost, groups) for groups in job.stage_groups]
        of_stages = ranks or range(plan.num_stages)
        return balanced_unequal_assignment(times_s, of_stages, model.num_last_layers, max_blocks)
    return balanced_assignment(_layer_times_s(job, cost), plan.num_stages, model.num_last_layers, ranks)


def given_stage_layers(job: Job) -> Sequence[int] | None:
    """Blocks of each stage that the plan or the software prescribes; None for stages that simplan balances."""
    plan = job.plan
    return plan.stage_layers or job.software.equal_stage_layers(job.model.num_blocks, plan.num_stages)


def balances_unequal_stages(job: Job) -> bool:
    """True if the numbers of blocks of stages follow from the speed and memory of unequal devices."""
    return len(set(job.stage_groups)) > 1 and given_stage_layers(job) is None


def _slowest_times_s(job: Job, cost: CostModel, groups: Sequence[int]) -> list[float]:
    """Time of every layer on the slowest of some node groups, which the pipelines of a stage share."""
    by_group = [_layer_times_s(job, cost, group) for group in groups]
    return max(by_group, key=sum)


def _layer_times_s(job: Job, cost: CostModel, group: int | None = None) -> list[float]:
    """Forward plus backward seconds of every layer for one microbatch.

    Args:
        group: Node group of the device; None for a cluster of equal nodes.
    """
    size = job.plan_in_sequences.microbatch_size if group is None else microbatch_size_in(job, group)
    return layer_times_s(job, cost, size, group)


def layer_times_s(job: Job, cost: CostModel, size: int, group: int | None) -> list[float]:
    """Forward plus backward seconds of every layer for a microbatch of ``size`` sequences on a node group."""
    plan, seconds = job.plan, dict[str, float]()
    for layer in (layers := job.software.layers_of(job.model, plan, job.training)):
        if layer.key not in seconds:
            seconds[layer.key] = sum(
                cost.compute(LayerWork(layer, phase, size, layer.num_parameters, group=group)).seconds
                for phase in (Phase.FORWARD, Phase.BACKWARD)
            )
    return [seconds[layer.key] for layer in layers]


def microbatch_size_in(job: Job, group: int) -> int:
    """Largest microbatch of the ranks of a node group, in sequences."""
    sizes, mapping = job.plan.sizes_of_ranks, RankMapping.of(job.plan)
    return max(sizes[mapping.dp_rank(rank)] for rank in range(mapping.world_size) if job.group_of(rank) == group)


def table_of(job: Job, assignment: StageAssignment, cost: CostModel, num_microbatches: int) -> Table:
    """Make the action table of a step; the cost model is for schedules that depend on stage times."""
    facts = SCHEDULE_FACTS.get(job.plan.schedule)
    timed = facts is not None and facts.needs_times
    stage_times = _stage_times(job, assignment, cost) if timed else ()
    return plan_table(job.plan, num_microbatches, *stage_times)


def _stage_times(job: Job, assignment: StageAssignment, cost: CostModel) -> tuple[StageTimes, float]:
    """Stage times of one microbatch, and the activations that survive dgrad; for a job with one stage per rank.

    Times include collectives inside stages. All P2P sends take the time of the longest. The second value is the largest
    fraction, over stages, of a microbatch's saved activations that are kept from dgrad (I) to wgrad (W); at most 1.
    """
    plan = job.plan
    table = complete_table(one_f_one_b(PipelineShape(plan.pp, 1)))  # any: only its placement matters
    stages = Stages(job, assignment, table)
    scripts = Scripts(stages)
    groups = {"tp": stages.mapping.group("tp", 0), "cp": stages.mapping.group("cp", 0)}

    def seconds(stage: int, phase: Phase) -> float:
        script = scripts.merged(stage, phase)
        return pass_time_s(
            script,
            groups,
            lambda work: cost.compute(work).seconds,
            lambda communication: cost.communication(communication).seconds,
        )

    later = range(1, plan.num_stages)  # the first stage has no gradient of an input
    next_rank = stages.mapping.rank(stages.mapping.place(0)._replace(pp=1))
    largest = max(stages.boundary_bytes[:-1])
    batch_s = cost.host_wait(HostWait("batch")).seconds
    times = StageTimes(
        forward_s=tuple(
            seconds(stage, Phase.FORWARD) + (batch_s if stages.software.waits_for_batch else 0.0)
            for stage in range(plan.num_stages)
        ),
        backward_input_s=(0.0, *(seconds(stage, Phase.BACKWARD_INPUT) for stage in later)),
        backward_weight_s=(seconds(0, Phase.BACKWARD), *(seconds(stage, Phase.BACKWARD_WEIGHT) for stage in later)),
        send_s=cost.communication(Communication(CollectiveKind.SEND, largest, (0, next_rank))).seconds,
    )
    return times, max(_kept_for_weight(stages, stage) for stage in later)


def _kept_for_weight(stages: Stages, stage: int) -> float:
    """Bytes saved from dgrad (I) to wgrad (W) over bytes saved from forward to dgrad, at most 1.

    Gradients that wait for wgrad can push the ratio above 1. The cap keeps a memory limit equivalent to a limit on
    microbatches.
    """
    splits = [stages.facts(stage, position).split() for position in range(len(stages.layers[stage]))]
    between = sum(split.between_activations + split.between_logits for split in splits)
    return min(1.0, between / sum(split.activations + split.logits for split in splits))


def expands_for_links(job: Job) -> bool:
    """True if collectives inside layers leave a node of a topology: they load links when their layer runs."""
    return not is_static(job.cluster) and collectives_of_layers_leave_nodes(job)


def collectives_of_layers_leave_nodes(job: Job) -> bool:
    """True if ranks of several nodes communicate inside layers."""
    plan = job.plan
    groups = RankMapping.of(plan).layer_collective_groups(plan.num_devices - 1).values()
    return any(len({*map(job.node_of, group)}) > 1 for group in groups)


def expands_all(job: Job, folding: Folding, num_microbatches: int) -> bool:
    """True if the Level 2 Program is small enough to expand every layer, or must for the load of links."""
    if expands_for_links(job):
        return True
    model, plan = job.padded_model, job.plan
    columns = len(folding.ranks) // plan.pp
    pieces = max(
        1 + 2 * sum(isinstance(k, LayerCollective) for k in layer.kernels) for layer in model.layers_of(plan.shard)
    )
    return 2 * len(model.layers) * pieces * num_microbatches * columns <= _MAX_OPERATIONS
