"""Inputs of a simulation: cost model, stages, folding and Program of a plan."""

from __future__ import annotations

from functools import lru_cache

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.analytic import AnalyticCost
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration, way_of_mixing
from simplan.cost.calibration.store import refuse_other_device
from simplan.cost.communication.host_link import host_memory_rate
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.cost.model import CostModel
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.model.layer import CollectiveKind, LayerCollective
from simplan.model.low_precision import DEFAULT_RECIPE
from simplan.plan.plan import RankMapping, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.stage_times import stage_times
from simplan.prediction import Prediction
from simplan.program.action import Table
from simplan.program.folding import Folding, fold, unfolded
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import LayerWork, Op, Phase, Program, Stream
from simplan.program.tables.partition import assign_stage_layers, balanced_assignment
from simplan.program.tables.table import plan_table
from simplan.sim.engine import CoreUse
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training.optimizer import UpdateName
from simplan.training.training import Precision

__all__ = [
    "assign_layers",
    "build_program",
    "cost_model",
    "expands_all",
    "folding_of",
    "sharing_of",
    "table_of",
]

_MOST_OPERATIONS = 120_000  # a larger Level 2 Program expands only layers with communication; its time is the same


def build_program(prediction: Prediction, *, level: int = 2, folded: bool = True) -> Program:
    """Lower a prediction to its Program, for drawing, comparing and running.

    Args:
        prediction: A prediction.
        level: 1 for the action level, 2 for the kernel level.
        folded: Include ranks with identical work once.
    """
    job = prediction.job
    folding = folding_of(job) if folded else unfolded(RankMapping.of(job.plan))
    num_microbatches = 1 + max(action.microbatch or 0 for row in prediction.table for action in row)
    expand_all = expands_all(job, folding, num_microbatches)
    how = Lowering(level, folding, expand_all, host_waits=job.cluster.device.kind == "cpu")
    return lower(job, prediction.assignment, prediction.table, how)


def folding_of(job: Job, *, dealt_alike: bool = False) -> Folding:
    """Folding of ranks with identical work; ranks that share cores are not folded, since they slow each other down.

    Args:
        job: The job.
        dealt_alike: Fold ranks to which ZeRO-1 assigns unequal parameters. The first rank, which has the largest
            parameter, then represents them.
    """
    plan, cluster = job.plan, job.cluster
    mapping = RankMapping.of(plan)
    if cluster.cores_per_node is not None:
        return unfolded(mapping)

    num_shards = plan.dp_shard * plan.cp
    partial = [
        p for layer in set(job.software.layers_of(job.model, plan)) for p in layer.parameters if p.partial_gradient
    ]
    uneven = plan.shards_parameters and any(parameter.shape[0] % num_shards for parameter in partial)
    deals = plan.shards_optimizer_only and job.software.optimizer_shards == "parameters" and not dealt_alike

    return _kept_folding(mapping, cluster.devices_per_node, deals or uneven)


@lru_cache(maxsize=128)
def _kept_folding(mapping: RankMapping, devices_per_node: int, unequal_shards: bool) -> Folding:
    """Cached folding: plans of a search have few meshes."""

    def owns(rank: int) -> int:
        """Rank's index in its shard group if shards are unequal, else 0.

        torch's ZeRO-1 assigns unsharded parameters to ranks. And if rows do not divide evenly, the last shards of a
        parameter have fewer rows to sum over tensor-parallel ranks.
        """
        return mapping.shard_group(rank).index(rank) if unequal_shards else 0

    return fold(mapping, lambda rank: rank // devices_per_node, owns)


def cost_model(job: Job, calibration: Calibration | None) -> CostModel:
    """Make the cost model of a job: calibrated if a calibration is given, else from datasheets.

    Args:
        job: The job.
        calibration: Timings of the cluster's device; None if not calibrated.

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
                rule="needs a calibration, because nobody published this machine's speed",
                fix="run `simplan calibrate SCENARIO` first (`simplan run` does it by itself)",
            )
        )
    if calibration is None:
        return _datasheet_cost(job)
    refuse_other_device(calibration, cluster)
    return CalibratedCost(
        calibration,
        dtype=training.precision,
        optimizer=training.update,
        num_ranks=cluster.ranks_per_node,
        fp8_recipe=training.fp8_recipe or DEFAULT_RECIPE,
        mixed=way_of_mixing(training.precision, sharded=plan.shards_parameters),
        cluster=cluster,
        otherwise=None if cluster.cores_per_node is not None else _datasheet_cost(job),
        traffic=software.traffic,
    )


def _datasheet_cost(job: Job) -> AnalyticCost:
    training, plan, software = job.training, job.plan, job.software
    state = software.state(training, plan)
    in_step = state.linear is not None  # weight casts done once per step are spread over its microbatches
    num_microbatches = job.num_microbatches if in_step else 1
    precision, update = training.precision, training.update
    return _kept_cost(job.cluster, precision, state, update, software, plan.shards_parameters, num_microbatches)


@lru_cache(maxsize=16)
def _kept_cost(
    cluster: ClusterSpec,
    precision: Precision,
    state: StateBytes,
    update: UpdateName,
    software: SoftwareSpec,
    shards_parameters: bool,
    num_microbatches: int,
) -> AnalyticCost:
    """Cached cost model with its estimates: plans of a search share most of them."""
    kernels = kernel_cost(
        cluster.device,
        precision,
        state,
        update,
        software,
        num_devices=cluster.num_devices,
        shards_parameters=shards_parameters,
        num_microbatches=num_microbatches,
        host_bytes_per_s=host_memory_rate(cluster),
    )
    return AnalyticCost(cluster, kernels, software.rates)


def sharing_of(program: Program, cluster: ClusterSpec, cost: CostModel) -> CoreUse | None:
    """Cores that operations share; None if every rank has its own device.

    Ranks of a CPU machine share its cores. A rank computes on t = ``max(1, cores // ranks)`` threads. Communication
    keeps d cores busy on each member, so that compute on C cores with N ranks slows down by (N t + N d) / C. The
    measured slowdown gives d, limited to 0 to 1; without a measurement d is 1.

    Communication between nodes waits for the network and keeps no core busy. The two directions between a pair of ranks
    are serialized (``simplan.cost.communication.gloo``).
    """
    slowdown = cost.compute_slowdown if isinstance(cost, CalibratedCost) else None
    cores = cluster.cores_per_node
    if cores is None:
        return None
    ranks = cluster.ranks_per_node
    threads = max(1, cores // ranks)
    of_communication = 1.0 if slowdown is None else min(1.0, max(0.0, slowdown * cores / ranks - threads))

    def demand(op: Op) -> float:
        if op.communication is not None and len({cluster.node_of(rank) for rank in op.communication.ranks}) > 1:
            return 0.0
        return float(threads) if op.stream is Stream.COMPUTE else of_communication

    nodes = [cluster.node_of(op.rank) for op in program.ops]
    return CoreUse(cores, nodes, [demand(op) for op in program.ops], [_connection(op) for op in program.ops])


def _connection(op: Op) -> frozenset[int] | None:
    """Sender and receiver of a P2P send; None for other operations."""
    communication = op.communication
    return (
        frozenset(communication.ranks)
        if communication is not None and communication.kind is CollectiveKind.SEND
        else None
    )


def assign_layers(job: Job, cost: CostModel) -> StageAssignment:
    """Assign layers to stages: ``plan.stage_layers``, else equal blocks if the software requires it, else balanced."""
    model, plan, software = job.model, job.plan, job.software
    given = plan.stage_layers or software.equal_stage_layers(model.num_blocks, plan.num_stages)
    if given is not None:
        return assign_stage_layers(given, model.num_last_layers)
    seconds: dict[str, float] = {}
    for layer in (layers := software.layers_of(model, plan)):
        if layer.key not in seconds:
            seconds[layer.key] = sum(
                cost.compute(LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters)).seconds
                for phase in (Phase.FORWARD, Phase.BACKWARD)
            )
    return balanced_assignment([seconds[layer.key] for layer in layers], plan.num_stages, model.num_last_layers)


def table_of(job: Job, assignment: StageAssignment, cost: CostModel, num_microbatches: int) -> Table:
    """Make the action table of a step.

    Args:
        job: The job.
        assignment: Layers of each stage.
        cost: Cost model, for schedules that depend on stage times.
        num_microbatches: Microbatches of the step.
    """
    facts = SCHEDULE_FACTS.get(job.plan.schedule)
    timed = facts is not None and facts.needs_times
    found = stage_times(job, assignment, cost) if timed else ()
    return plan_table(job.plan, num_microbatches, *found)


def expands_all(job: Job, folding: Folding, num_microbatches: int) -> bool:
    """True if the Level 2 Program is small enough to expand every layer."""
    model, plan = job.padded_model, job.plan
    columns = len(folding.ranks) // plan.pp
    pieces = max(
        1 + 2 * sum(isinstance(k, LayerCollective) for k in layer.kernels) for layer in model.layers_of(plan.shard)
    )
    return 2 * len(model.layers) * pieces * num_microbatches * columns <= _MOST_OPERATIONS
