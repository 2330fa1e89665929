"""OPTIM of a worker of parameter servers: its gradients are pushed, applied by the servers, and parameters pulled.

Kernels, transfers and buffers are those of the executor (executor/train/parameter_server.py), whose servers are
processes on the CPU of a node. A worker joins its gradients in one flat buffer, to which the servers also reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simplan.model.layer import CollectiveKind
from simplan.plan.plan import RankGroup
from simplan.plan.replication import Replication
from simplan.program.action import Action
from simplan.program.lowering.optimizer_step import clip_gradients
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import BucketWork, Communication, LayerWork, MemoryEffect, Phase, Stream, Work
from simplan.program.timeline import SpanKind

FP32_BYTES = 4
HEADER_BYTES = 16
"""Bytes of a message besides gradients or parameters: four numbers (executor/train/parameter_server.py)."""
PULL = "pull parameters"
"""Name of the transfer of parameters from a server."""
_PASS = 8  # bytes that the division of an FP32 gradient reads and writes


def exchange_with_servers(
    action: Action, states: RankStates, writer: RankWriter, release: Sequence[MemoryEffect], *, on_host: bool
) -> None:
    """Writes push, update and pull of a worker that meets nobody else.

    Transfers have the seconds that they take alone, and the update those of the server with the most parameters; what
    workers wait for each other is simulated beside the Program (``simplan.sim.workers``).

    Args:
        release: Memory that the end of the step frees.
        on_host: True if servers have a memory that is not the worker's, to which gradients are copied.
    """
    stages = states.stages
    assert stages.plan.replication is not None
    replication: Replication = stages.plan.replication
    served = [sum(end - begin for _, begin, end in own) for own in replication.server_slices(states.tensor_sizes)]
    sizes = [FP32_BYTES * elements + HEADER_BYTES for elements in served]
    servers = [
        replication.server_rank(server, stages.plan.dp_replicate, writer.rank) for server in range(replication.servers)
    ]
    clip_gradients(action, states, writer)
    writer.compute(action, "join gradients", _copies(states, "join gradients"), (), SpanKind.OPTIMIZER)
    if on_host:
        joined = (writer.last_compute,)
        writer.block_on(writer.host_copy(action, "gradients to host", sum(sizes), joined, (), to_host=True))
    ready = (writer.last_compute, *writer.blocking)
    for num_bytes, server in zip(sizes, servers, strict=True):
        communication = _transfer(num_bytes, writer.rank, server)
        writer.block_on(writer.apart(action, Stream.REPLICATE, "push gradients", communication, ready))
    update = tuple(_updates(states, max(served), on_host=on_host))
    writer.compute(action, "server update", update, (), SpanKind.OPTIMIZER)
    pulls = []
    for num_bytes, server in zip(sizes, servers, strict=True):
        communication = _transfer(num_bytes, server, writer.rank)
        pulls.append(writer.apart(action, Stream.REPLICATE, PULL, communication, (writer.last_compute,)))
    writer.block_on(*pulls)
    if on_host:
        index = writer.host_copy(action, "parameters from host", sum(sizes), tuple(writer.blocking), (), to_host=False)
        writer.block_on(index)
    writer.compute(action, "{action}", _copies(states, "set parameters"), release, SpanKind.OPTIMIZER)


def _transfer(num_bytes: int, source: int, destination: int) -> Communication:
    return Communication(CollectiveKind.SEND, num_bytes, RankGroup.of("send", (source, destination)))


def _copies(states: RankStates, name: str) -> tuple[Work, ...]:
    """Copies of all trained parameters, or their gradients, from or to the flat buffer."""
    stages, elements = states.stages, states.elements.trained
    layer = stages.layers[0][0]
    streamed = LayerWork(layer, Phase.SCALE, stages.plan.microbatch_size, 2 * FP32_BYTES * elements // _PASS)
    return (BucketWork(f"worker: {name}", streamed, states.num_updated_tensors),)


def _updates(states: RankStates, elements: int, *, on_host: bool) -> Iterator[LayerWork]:
    """Update of so many elements, as equal parts of all layers."""
    works = states.updates(0)
    total, before = sum(work.num_parameters for work in works), 0
    for work in works:
        until = before + work.num_parameters
        number = until * elements // total - before * elements // total
        before = until
        if number:
            yield work._replace(num_parameters=number, on_host=on_host)
