"""Structural comparison: actions and communication of the Program and of a measured run."""

from __future__ import annotations

from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.action import ActionKind
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import HostCopy, Program, Stream
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec

__all__ = [
    "TIMED_KINDS",
    "Issued",
    "issued_as_predicted",
    "predicted_communications",
    "ran_as_predicted",
    "reduces_between_exchanges",
]

TIMED_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.REDUCE_GRAD,
    ActionKind.OPTIM,
)
"""Kinds of actions that a measurement records as spans; communication is recorded separately."""

_COPIES = (Stream.TO_HOST.value, Stream.FROM_HOST.value)

Issued = tuple[str, tuple[int, ...], int, str]
"""Kind, ranks, bytes and action of a collective, P2P send or copy."""


def ran_as_predicted(measurement: Measurement) -> bool:
    """True if every rank ran exactly the actions of its row of the action table, in order."""
    job, table = measurement.job, measurement.job.parsed_table()
    mapping = RankMapping.of(job.plan)
    return all(
        [span.action for span in rank.actions]
        == [str(action) for action in table[mapping.place(rank.rank).pp] if action.kind in TIMED_KINDS]
        for rank in measurement.ranks
    )


def issued_as_predicted(measurement: Measurement, program: Program | None = None) -> bool:
    """True if every rank issued exactly the communication of Level 2: kind, group, bytes and order.

    Host copies are compared in a separate order, since hooks reduce gradients in the middle of a backward.

    With collectives inside layers, a DDP bucket may fill up between two of them, and FSDP reduces expert gradients
    there. Level 2 places both reductions after the layer. In that case, the order is compared only within each group
    and kind.
    """
    mixed = reduces_between_exchanges(measurement.job.plan)
    predicted = predicted_communications(measurement.job, program)

    def comparable(found: list[Issued]) -> list[Issued]:
        ordered = sorted(found, key=lambda issued: (issued[1], issued[0])) if mixed else found
        return sorted(ordered, key=lambda issued: issued[0] in _COPIES)

    return all(
        comparable([(c.kind, c.ranks, c.num_bytes, c.action) for c in rank.collectives])
        == comparable(predicted[rank.rank])
        for rank in measurement.ranks
    )


def reduces_between_exchanges(plan: ParallelPlan) -> bool:
    """True if gradients may be reduced between the collectives of a layer."""
    return plan.expert_shards > 1 or (plan.tp * plan.cp * plan.ep > 1 and not plan.shards_parameters)


def predicted_communications(job: RunSpec, program: Program | None = None) -> dict[int, list[Issued]]:
    """Communication that Level 2 of the job's Program issues, by rank, in host order.

    Args:
        job: Job of the run.
        program: Program of the job. It is lowered here if None, not fully expanded, or with optimizer offload.
    """
    if program is None or not program.all_written_out or job.plan.offload_optimizer:
        any_cluster = catalog.cluster("dgx-h100", job.plan.num_devices)  # a run has no cluster; the result is the same
        plan = job.plan.model_copy(update={"offload_optimizer": False})  # copies made by torch are not recorded
        asked = Job(job.model, any_cluster, job.training, plan, job.software)
        program = lower(asked, job.assignment, job.parsed_table(), Lowering(level=2))
    found: dict[int, list[Issued]] = {rank: [] for rank in program.ranks}
    for op in program.ops:
        if op.stream in (Stream.TO_HOST, Stream.FROM_HOST):
            moved = sum(work.num_bytes for work in op.work if isinstance(work, HostCopy))
            found[op.rank].append((op.stream.value, (op.rank,), moved, str(op.action)))
        for communication in op.communications:
            receives = op.action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
            kind = "recv" if receives else communication.kind.value
            found[op.rank].append((kind, communication.ranks, communication.num_bytes, str(op.action)))
    return found
