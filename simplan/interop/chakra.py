"""``simplan export --to chakra``: execution traces of a step, one file a rank, as ASTRA-sim's feeder reads them.

Format: MLCommons Chakra 0.0.4, mlcommons/chakra at 21585d8, schema/protobuf/et_def.proto. A file is a
``GlobalMetadata`` and then ``Node`` messages, each after its length as a varint. Attributes:
src/feeder/et_feeder_node.cpp there, and astra-sim/astra-sim at 518bd51, astra-sim/workload/Workload.cc. ``comm_size``
is the buffer that a rank gives to a collective, and groups of ranks are numbered in a JSON file from 1 on. ASTRA-sim
knows devices only: with a placement, files and groups have the numbers of the ranks' devices.

Layout of protobuf messages: https://protobuf.dev/programming-guides/encoding/. The few kinds of fields are written
here, as protobuf would be a dependency for 40 lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from simplan.cost.compute.kernels import running_kernels
from simplan.cost.compute.matmul import gemm_sizes
from simplan.errors import NotModelledError, Problem
from simplan.interop.formats import Format
from simplan.interop.writing import Exported, refuse_mixed
from simplan.job import Job
from simplan.model.layer import Attention, CollectiveKind, Gemm
from simplan.plan.plan import RankMapping
from simplan.predict.background import background_steps
from simplan.predict.build import assign_layers, cost_model, folding_of, table_of
from simplan.predict.simulated import Simulated, StepContext, simulate_program
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import BucketWork, Communication, HostCalls, HostCopy, HostWait, LayerWork, Op, Phase, Work
from simplan.rules import check_job

_SCHEMA = "0.0.4"
MAX_NODES = 1_000_000
"""Nodes of all files together; beyond it, ranks with the same work share a file."""
_MAX_OPERATIONS = 1_500_000  # 36 microseconds each
_COMP, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_COLLECTIVES = {  # CollectiveCommType
    CollectiveKind.ALL_REDUCE: 0,
    CollectiveKind.ALL_GATHER: 2,
    CollectiveKind.BROADCAST: 5,
    CollectiveKind.ALL_TO_ALL: 6,
    CollectiveKind.REDUCE_SCATTER: 7,
}


@dataclass(slots=True)
class _Groups:
    """Numbers of groups of ranks, from 1 on, and the groups of ranks that are not simulated themselves.

    Attributes:
        devices: Device of every rank.
    """

    mapping: RankMapping
    devices: Sequence[int]
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, ranks: tuple[int, ...]) -> int:
        """Number of a group; ASTRA-sim takes 0 for all ranks."""
        devices = sorted(self.devices[rank] for rank in ranks)
        return self.numbers.setdefault(tuple(devices), 1 + len(self.numbers))

    def of(self, rank: int, simulated: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks with which a rank communicates as its simulated rank does with others, in the same order."""
        return ranks if rank == simulated else self.mapping.like(ranks, simulated, rank)


@dataclass(frozen=True, slots=True)
class _Part:
    """A node before its rank is known.

    Attributes:
        type: NodeType.
        deps: Numbers of the nodes that must end first.
        communication: Its communication, with the simulated rank's group; None for compute.
        tag: Number that a send and its receive share.
        fields: Encoded fields that are the same on all ranks.
    """

    type: int
    communication: Communication | None
    tag: int
    fields: bytes


def _varint(value: int) -> bytes:
    """Unsigned integer in groups of 7 bits, the lowest first."""
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(key: int, value: int) -> bytes:
    """Field with an integer."""
    return _varint(key << 3) + _varint(value)


def _bytes(key: int, value: bytes) -> bytes:
    """Field with text, a message, or packed integers."""
    return _varint(key << 3 | 2) + _varint(len(value)) + value


_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29  # AttributeProto


def _attribute(name: str, kind: int, value: int | str) -> bytes:
    """Attribute of a node."""
    content = _bytes(kind, value.encode()) if isinstance(value, str) else _number(kind, value)
    return _bytes(10, _bytes(1, name.encode()) + content)


def export(job: Job, name: str) -> Exported:
    """Execution traces of the job's step.

    Raises:
        SpecError: The plan violates rules; ``NotModelledError`` if the step has too many operations to write.
    """
    check_job(job)
    refuse_mixed(job, "Chakra")
    cost = cost_model(job, None)
    assignment = assign_layers(job, cost)
    table = table_of(job, assignment, cost, job.num_microbatches)
    actions = sum(len(row) for row in table) * len(job.padded_model.layers_of(job.plan.shard)) // job.plan.num_stages
    if actions > _MAX_OPERATIONS:
        _refuse(job, actions)
    host_waits = job.cluster.device.kind == "cpu"
    program = lower(job, assignment, table, Lowering(2, folding_of(job), True, host_waits=host_waits))
    if len(program) > _MAX_OPERATIONS:
        _refuse(job, len(program))
    simulated = simulate_program(program, cost, StepContext.of(job, background_steps(job.cluster)))
    mapping = RankMapping.of(job.plan)
    width = int(job.software.state(job.training, job.plan).activation)
    parts = {rank: _parts_of_rank(simulated, rank, width) for rank in program.ranks}
    num_nodes = sum(len(parts[stands]) for stands in program.stands_for)
    whole = num_nodes <= MAX_NODES
    ranks = range(mapping.world_size) if whole else program.ranks
    placement, stands_for = job.placement, program.stands_for
    devices = range(mapping.world_size) if placement is None else placement.devices
    groups, prefix = _Groups(mapping, devices), re.sub(r"[^\w.-]+", "-", name)
    metadata = _metadata(job, simulated)
    files: dict[str, str | bytes] = {
        f"{prefix}.{devices[rank]}.et": _file(metadata, parts[stands_for[rank]], rank, stands_for[rank], groups)
        for rank in ranks
    }
    numbered = {str(number): list(ranks) for ranks, number in groups.numbers.items()}
    files["comm_groups.json"] = json.dumps(numbered, indent=1) + "\n"
    simulated_on = {str(devices[rank]): devices[of] for rank, of in enumerate(stands_for)}
    files["ranks.json"] = json.dumps(simulated_on, indent=1) + "\n"
    options = {
        "workload": prefix,
        "comm-group": "comm_groups.json",
        "system": "SYSTEM.json",
        "network": "NETWORK.yml",
        "remote-memory": "MEMORY.json",
    }
    written = " ".join(f"--{option}-configuration={value}" for option, value in options.items())
    return Exported(
        files,
        f"AstraSim_Analytical_Congestion_Aware {written}",
        (
            *_notes(mapping.world_size, num_nodes, len(program.ranks), prefix, whole=whole),
            *(["all numbers are those of devices, on which the placement puts the ranks"] if placement else []),
        ),
    )


def _refuse(job: Job, number: int) -> None:
    rule = f"makes a step of {job.num_microbatches:,} microbatches with at least {number:,} operations per pipeline"
    size = job.plan.dp * job.plan.microbatch_size
    fix = f"use a smaller one, such as {size * min(job.num_microbatches, 4 * job.plan.pp)}"
    raise NotModelledError(
        Problem(field="training.global_batch_size", value=str(job.training.global_batch_size), rule=rule, fix=fix)
    )


def _notes(world: int, num_nodes: int, num_simulated: int, prefix: str, *, whole: bool) -> Iterator[str]:
    if whole:
        yield f"{num_nodes:,} nodes of {world:,} ranks; ranks.json says which rank is simulated for each"
    else:
        yield (
            f"{num_nodes:,} nodes of {world:,} ranks are more than {MAX_NODES:,}, so the files are those of the "
            f"{num_simulated:,} simulated ranks; ranks.json says whose file is each rank's. The feeder needs "
            f"{prefix}.RANK.et of every rank, with its own groups: export fewer microbatches or devices for it"
        )
    yield "durations of compute are without the slowdown by overlapping communication; communication has bytes"
    yield "SYSTEM, NETWORK and MEMORY are ASTRA-sim's own files; it issues one communication of a rank at a time"


def _metadata(job: Job, simulated: Simulated) -> bytes:
    """First message of a file."""
    texts = {"schema": _SCHEMA, "source": "simplan", "job": repr(job)}
    attributes = b"".join(_attribute_of_metadata(name, text) for name, text in texts.items())
    step_us = round(simulated.times.step_time_s * 1e6)
    content = _bytes(1, _SCHEMA.encode()) + attributes
    content += _bytes(2, _bytes(1, b"predicted_step_time_micros") + _number(_UINT64, step_us))
    return _varint(len(content)) + content


def _attribute_of_metadata(name: str, text: str) -> bytes:
    return _bytes(2, _bytes(1, name.encode()) + _bytes(_STRING, text.encode()))


def _parts_of_rank(simulated: Simulated, rank: int, width: int) -> list[_Part]:
    """Nodes of a simulated rank, in host issue order; numbers of nodes are from 1 on."""
    program, starts = simulated.program, simulated.times.start_s
    parts: list[_Part] = []
    ends: dict[int, tuple[int, ...]] = {}  # operation -> its last nodes
    before: dict[str, int] = {}  # stream -> its last operation
    rest_us = 0.0
    for index in program.by_rank[rank]:
        op = program.op(index)
        waits = [before[op.stream]] if op.stream in before else []
        deps = sorted({node for producer in (*waits, *op.waits) for node in ends[producer]})
        start_us = max(0, round(float(starts[index]) * 1e6))
        for work in _pieces(op):
            nodes = []
            for piece in work:
                seconds = sum(simulated.alone.by_work[item].cost_estimate.seconds for item in piece)
                exact_us = seconds * 1e6 + rest_us
                duration_us = max(0, round(exact_us))
                if not isinstance(piece[0] if piece else None, Communication):
                    rest_us = exact_us - duration_us  # rounded times add up
                part = _part(op, rank, piece, tuple(deps), (start_us, duration_us), width)
                for created in part:
                    parts.append(created)
                    nodes.append(len(parts))
            deps = nodes
        ends[index], before[op.stream] = tuple(deps), index
    return parts


def _pieces(op: Op) -> list[tuple[tuple[Work, ...], ...]]:
    """Work of an operation in steps: runs of compute, and single communications."""
    if not op.work:
        return [((),)]
    steps: list[list[Work]] = []
    for work in op.work:
        alone = isinstance(work, Communication)
        if steps and not alone and not isinstance(steps[-1][0], Communication):
            steps[-1].append(work)
        else:
            steps.append([work])
    return [(tuple(step),) for step in steps]


def _part(
    op: Op, rank: int, work: Sequence[Work], deps: tuple[int, ...], times_us: tuple[int, int], width: int
) -> Iterator[_Part]:
    """Nodes of one piece of work: one, or the send and the receive of a ring."""
    communication = work[0] if work and isinstance(work[0], Communication) else None
    fields = b"".join(
        (
            _bytes(5, b"".join(map(_varint, deps))) if deps else b"",
            *(_number(key, value) for key, value in zip((6, 7), times_us, strict=True) if value),
        )
    )
    tag = op.meeting % 2**31 if isinstance(op.meeting, int) else 0
    if communication is None:
        on_host = bool(work) and all(
            isinstance(item, HostCopy | HostCalls | HostWait) or (isinstance(item, LayerWork) and item.on_host)
            for item in work
        )
        num_ops, num_bytes = map(sum, zip((0, 0), *(_size(item, width) for item in work), strict=True))
        fields += _bytes(2, op.name.encode()) + _attribute("is_cpu_op", _BOOL, int(on_host))
        fields += _attribute("num_ops", _INT64, num_ops) + _attribute("tensor_size", _UINT64, num_bytes)
        yield _Part(_COMP, None, tag, fields)
        return
    fields += _attribute("is_cpu_op", _BOOL, 0)
    fields += _attribute("comm_size", _INT64, _given_bytes(communication))
    kind, title = communication.kind, f"{communication.kind} {op.name}".encode()
    if kind is CollectiveKind.SEND:
        yield _Part(_SEND if rank == communication.ranks[0] else _RECV, communication, tag, fields + _bytes(2, title))
    elif kind is CollectiveKind.RING:
        for type_ in (_SEND, _RECV):
            yield _Part(type_, communication, tag, fields + _bytes(2, title))
    else:
        fields += _bytes(2, title) + _attribute("comm_type", _INT64, _COLLECTIVES[kind])
        yield _Part(_COLLECTIVE, communication, tag, fields)


def _given_bytes(communication: Communication) -> int:
    """Bytes of the buffer that each rank gives to a communication."""
    if communication.kind is CollectiveKind.ALL_GATHER:
        return -(-communication.num_bytes // len(communication.ranks))
    return communication.num_bytes


def _size(work: Work, width: int) -> tuple[int, int]:
    """FLOPs, and bytes of the operands and results of GEMMs, or of parameters."""
    if isinstance(work, BucketWork):
        return work.flops, _size(work.streamed, width)[1]
    if not isinstance(work, LayerWork):
        return 0, work.num_bytes if isinstance(work, HostCopy) else 0
    if work.num_parameters and work.phase in _OF_PARAMETERS:
        return 0, work.num_parameters * 4
    num_ops, num_bytes = 0.0, 0.0
    for kernel in running_kernels(work):
        if isinstance(kernel, Gemm):
            for rows, columns, depth in gemm_sizes(kernel, work.microbatch_size, work.phase).values():
                num_ops += 2 * rows * columns * depth * kernel.num_groups
                num_bytes += (rows * depth + depth * columns + rows * columns) * kernel.num_groups * width
        elif isinstance(kernel, Attention):
            passes = 1 if work.phase in (Phase.FORWARD, Phase.RECOMPUTE) else 2
            num_ops += kernel.computed_flops * work.microbatch_size * passes
    return round(num_ops), round(num_bytes)


_OF_PARAMETERS = (
    Phase.GATHER_COPY, Phase.REDUCE_COPY, Phase.ACCUMULATE, Phase.SCALE, Phase.NORM, Phase.OPTIMIZER,
)  # fmt: skip


def _file(metadata: bytes, parts: Iterable[_Part], rank: int, simulated: int, groups: _Groups) -> bytes:
    """File of a rank: the nodes of its simulated rank, with its own groups and peers."""
    pieces = [metadata]
    for number, part in enumerate(parts, 1):
        node = _number(1, number) + _number(3, part.type) + part.fields
        if part.communication is not None:
            ranks = groups.of(rank, simulated, part.communication.ranks)
            if part.type == _COLLECTIVE:
                node += _attribute("pg_name", _STRING, str(groups.number(ranks)))
            else:
                source, destination = (groups.devices[end] for end in _pair(part, rank, ranks))
                peers: Mapping[str, int] = {"comm_src": source, "comm_dst": destination, "comm_tag": part.tag}
                node += b"".join(_attribute(name, _INT32, value) for name, value in peers.items())
        pieces += (_varint(len(node)), node)
    return b"".join(pieces)


def _pair(part: _Part, rank: int, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Source and destination of a transfer; in a ring, each rank sends to the next one of its group."""
    assert part.communication is not None
    if part.communication.kind is CollectiveKind.SEND:
        return ranks[0], ranks[1]
    place = ranks.index(rank)
    return (rank, ranks[(place + 1) % len(ranks)]) if part.type == _SEND else (ranks[place - 1], rank)


FORMAT = Format("chakra", "Chakra execution traces", export=export)
