"""What ranks must do and issue, by the Program, beside what they did and issued."""

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
    "predicted_messages",
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
"""Kinds of actions that a measurement has spans of; messages are recorded apart."""

_COPIES = (Stream.TO_HOST.value, Stream.FROM_HOST.value)

Issued = tuple[str, tuple[int, ...], int, str]
"""Kind, ranks, bytes and action of a collective or message."""


def ran_as_predicted(measurement: Measurement) -> bool:
    """Whether every rank ran exactly the actions of its row of the table, in order."""
    job, table = measurement.job, measurement.job.parsed_table()
    mapping = RankMapping.of(job.plan)
    return all(
        [span.action for span in rank.actions]
        == [str(action) for action in table[mapping.place(rank.rank).pp] if action.kind in TIMED_KINDS]
        for rank in measurement.ranks
    )


def issued_as_predicted(measurement: Measurement, program: Program | None = None) -> bool:
    """Whether every rank issued exactly the collectives, messages and copies of Level 2: kind, group, bytes, order.

    Copies are compared in an order of their own: gradients are reduced by hooks in the middle of a backward.

    Where layers exchange activations and DDP reduces gradients, a bucket may be full between two exchanges of one
    layer, and FSDP reduces experts of their own there; Level 2 has both after the layer. There the order is compared
    within each group and kind.

    Args:
        measurement: What ran.
        program: As of ``predicted_messages``.
    """
    mixed = reduces_between_exchanges(measurement.job.plan)
    predicted = predicted_messages(measurement.job, program)

    def comparable(found: list[Issued]) -> list[Issued]:
        ordered = sorted(found, key=lambda issued: (issued[1], issued[0])) if mixed else found
        return sorted(ordered, key=lambda issued: issued[0] in _COPIES)

    return all(
        comparable([(c.kind, c.ranks, c.num_bytes, c.action) for c in rank.collectives])
        == comparable(predicted[rank.rank])
        for rank in measurement.ranks
    )


def reduces_between_exchanges(plan: ParallelPlan) -> bool:
    """Whether gradients are reduced in the middle of layers that exchange something."""
    return plan.expert_shards > 1 or (plan.tp * plan.cp * plan.ep > 1 and not plan.shards_parameters)


def predicted_messages(job: RunSpec, program: Program | None = None) -> dict[int, list[Issued]]:
    """By rank, what Level 2 of the job's Program issues, in host order.

    Args:
        job: What was run.
        program: Its Program, where it is at hand; it is lowered here unless it is all written out.
    """
    if program is None or not program.all_written_out or job.plan.offload_optimizer:
        any_cluster = catalog.cluster("dgx-h100", job.plan.num_devices)  # a run does not say which; it is the same
        plan = job.plan.model_copy(update={"offload_optimizer": False})  # copies that torch makes are not recorded
        asked = Job(job.model, any_cluster, job.training, plan, job.software)
        program = lower(asked, job.assignment, job.parsed_table(), Lowering(level=2))
    found: dict[int, list[Issued]] = {rank: [] for rank in program.ranks}
    for op in program.ops:
        if op.stream in (Stream.TO_HOST, Stream.FROM_HOST):
            moved = sum(work.num_bytes for work in op.work if isinstance(work, HostCopy))
            found[op.rank].append((op.stream.value, (op.rank,), moved, str(op.action)))
        for message in op.messages:
            receives = op.action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
            kind = "recv" if receives else message.kind.value
            found[op.rank].append((kind, message.ranks, message.num_bytes, str(op.action)))
    return found
