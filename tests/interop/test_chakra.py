"""Execution traces against the schema of MLCommons Chakra, an unfolded Program, and a replay of the files alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from simplan.cost.program_costs import estimate_program
from simplan.errors import NotModelledError
from simplan.interop import chakra
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import RankMapping
from simplan.predict.build import assign_layers, cost_model, folding_of, table_of
from simplan.program.folding import unfolded
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import Communication
from simplan.scenario.source import make_job
from simplan.sim.engine import simulate
from tests.support.problems import refuses

# Fields of the messages: mlcommons/chakra at 21585d8, schema/protobuf/et_def.proto, read 2026-11-26; types by their
# number in descriptor.proto, repeated fields with a star.
_MESSAGES = {
    "AttributeProto": {
        "name": (1, "string"), "double_val": (3, "double"), "float_val": (5, "float"), "int32_val": (7, "int32"),
        "int64_val": (9, "int64"), "uint32_val": (11, "uint32"), "uint64_val": (13, "uint64"), "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "AttributeProto*")},
    "Node": {
        "id": (1, "uint64"), "name": (2, "string"), "type": (3, "int32"), "ctrl_deps": (4, "uint64*"),
        "data_deps": (5, "uint64*"), "start_time_micros": (6, "uint64"), "duration_micros": (7, "uint64"),
        "attr": (10, "AttributeProto*"),
    },
}  # fmt: skip
_COMP, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_COLLECTIVES = {0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter"}
_JOBS: dict[str, dict[str, Any]] = {
    "ddp": {"num_devices": 4, "dp_replicate": 4},
    "3d": {"num_devices": 16, "software": "megatron-core", "tp": 2, "pp": 2, "cp": 2, "dp_shard": 2, "zero_stage": 1},
    "interleaved": {
        "num_devices": 16, "software": "megatron-lm-2022", "tp": 2, "pp": 4, "virtual_stages": 2, "dp_replicate": 2,
        "sequence_parallel": False, "num_hidden_layers": 8,
    },
    "hsdp": {"num_devices": 16, "dp_shard": 8, "dp_replicate": 2},
    "experts": {
        "model": "mixtral-8x7b", "num_devices": 16, "software": "megatron-core", "tp": 2, "pp": 2, "dp_shard": 4,
        "ep": 4, "etp": 1, "zero_stage": 1, "num_hidden_layers": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """One file: its nodes, and their attributes by name."""

    nodes: list[Any]
    attributes: list[dict[str, Any]]

    def of(self, kind: int) -> list[tuple[Any, dict[str, Any]]]:
        return [(n, a) for n, a in zip(self.nodes, self.attributes, strict=True) if n.type == kind]


@pytest.fixture(scope="module")
def messages() -> dict[str, Any]:
    """Classes of protobuf's own runtime for the schema."""
    descriptor_pb2, descriptor_pool, message_factory = (
        pytest.importorskip(f"google.protobuf.{name}")
        for name in ("descriptor_pb2", "descriptor_pool", "message_factory")
    )

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        added_type = file.message_type.add(name=message)
        if message == "AttributeProto":
            added_type.oneof_decl.add(name="value")
        for name, (number, kind) in fields.items():
            plain = kind.removesuffix("*")
            added = added_type.field.add(name=name, number=number, label=3 if kind.endswith("*") else 1)
            if plain in _MESSAGES:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".ChakraProtoMsg.{plain}"
            else:
                added.type = getattr(field_type, f"TYPE_{plain.upper()}")
            if name.endswith("_val"):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{n}")) for n in _MESSAGES}


def job_of(name: str) -> Job:
    keys = dict(_JOBS[name])
    model = keys.pop("model", "gpt2-124m")
    keys = {"cluster": "dgx-h100", "seq_len": 512, "num_hidden_layers": 4, "num_microbatches": 3, **keys}
    if keys.get("pp", 1) > 1:
        keys["num_microbatches"] = 4
    return make_job(model, **keys)


def sized(data: bytes) -> Iterator[bytes]:
    """Messages of a file: a length as a varint, then so many bytes."""
    position = 0
    while position < len(data):
        size = shift = 0
        while True:
            byte = data[position]
            position += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield data[position : position + size]
        position += size


def read(data: bytes, messages: dict[str, Any]) -> Trace:
    first, *rest = sized(data)
    metadata = messages["GlobalMetadata"].FromString(first)
    assert metadata.version == "0.0.4"
    nodes = [messages["Node"].FromString(node) for node in rest]
    for node, text in zip(nodes, rest, strict=True):
        assert not list(node.FindInitializationErrors())
        assert node.ByteSize() == len(text), "a field is not in the schema, or has another type"
    kinds = {
        "comm_size": "int64_val", "comm_type": "int64_val", "num_ops": "int64_val", "tensor_size": "uint64_val",
        "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val", "pg_name": "string_val",
        "is_cpu_op": "bool_val",
    }  # fmt: skip
    attributes = []
    for node in nodes:
        for attribute in node.attr:  # the feeder reads each attribute from one field (src/feeder/et_feeder_node.cpp)
            assert attribute.WhichOneof("value") == kinds[attribute.name]
        attributes.append({attribute.name: getattr(attribute, kinds[attribute.name]) for attribute in node.attr})
    return Trace(nodes, attributes)


@pytest.fixture(scope="module", params=_JOBS)
def exported(
    request: pytest.FixtureRequest, messages: dict[str, Any]
) -> tuple[Job, dict[int, Trace], dict[int, list[int]]]:
    """A job, the files of its ranks, and the groups of ranks."""
    job = job_of(request.param)
    files = chakra.export(job, "step").files
    traces = {}
    for rank in range(job.plan.num_devices):
        data = files[f"step.{rank}.et"]
        assert isinstance(data, bytes)
        traces[rank] = read(data, messages)
    groups = {int(number): ranks for number, ranks in json.loads(files["comm_groups.json"]).items()}
    return job, traces, groups


def test_dependencies_are_earlier_nodes(exported: Any) -> None:
    _, traces, _ = exported
    for trace in traces.values():
        assert [node.id for node in trace.nodes] == list(range(1, 1 + len(trace.nodes)))
        assert all(1 <= dep < node.id for node in trace.nodes for dep in node.data_deps)


def test_sends_pair_with_receives(exported: Any) -> None:
    job, traces, _ = exported
    keys = ("comm_src", "comm_dst", "comm_tag", "comm_size")
    sent: Counter[Any] = Counter()
    received: Counter[Any] = Counter()
    for rank, trace in traces.items():
        for _, attributes in trace.of(_SEND):
            assert attributes["comm_src"] == rank != attributes["comm_dst"]
            sent[tuple(attributes[key] for key in keys)] += 1
        for _, attributes in trace.of(_RECV):
            assert attributes["comm_dst"] == rank
            received[tuple(attributes[key] for key in keys)] += 1
    assert sent == received
    assert bool(sent) == (job.plan.pp > 1 or (job.plan.cp > 1 and job.plan.cp_comm == "ring"))


def test_groups_issue_the_same_collectives_in_order(exported: Any) -> None:
    _, traces, groups = exported
    for number, ranks in groups.items():
        issued = [
            [(a["comm_type"], a["comm_size"]) for _, a in traces[rank].of(_COLLECTIVE) if a["pg_name"] == str(number)]
            for rank in ranks
        ]
        assert issued[0]
        assert all(collectives == issued[0] for collectives in issued)


def test_communication_is_that_of_an_unfolded_program(exported: Any) -> None:
    """Every rank lowered by itself: the same collectives over the same ranks, with the same bytes."""
    job, traces, groups = exported
    cost = cost_model(job, None)
    assignment = assign_layers(job, cost)
    table = table_of(job, assignment, cost, job.num_microbatches)
    program = lower(job, assignment, table, Lowering(2, unfolded(RankMapping.of(job.plan))))
    expected: dict[int, Counter[Any]] = defaultdict(Counter)
    for op in program.ops:
        for work in op.work:
            if isinstance(work, Communication) and work.kind is not CollectiveKind.RING:
                ranks = work.ranks if work.kind is CollectiveKind.SEND else tuple(sorted(work.ranks))
                expected[op.rank][str(work.kind), ranks, work.num_bytes] += 1
            elif isinstance(work, Communication):
                place = work.ranks.index(op.rank)
                for pair in ((place, place + 1), (place - 1, place)):
                    ranks = tuple(work.ranks[place % len(work.ranks)] for place in pair)
                    expected[op.rank]["send", ranks, work.num_bytes] += 1
    for rank, trace in traces.items():
        counts: Counter[Any] = Counter()
        for kind in (_SEND, _RECV):
            for _, attributes in trace.of(kind):
                counts["send", (attributes["comm_src"], attributes["comm_dst"]), attributes["comm_size"]] += 1
        for _, attributes in trace.of(_COLLECTIVE):
            name, ranks = _COLLECTIVES[attributes["comm_type"]], tuple(groups[int(attributes["pg_name"])])
            # nccl-tests count the result of an all-gather, ASTRA-sim (Ring.cc: final_data_size) what a rank gives
            times = len(ranks) if name == "all_gather" else 1
            counts[name, ranks, attributes["comm_size"] * times] += 1
        assert counts == expected[rank]


def test_replay_of_the_files_takes_the_simulated_time(exported: Any) -> None:
    """Longest path through the nodes of all files, whose collectives and transfers start together."""
    job, traces, groups = exported
    members: dict[Any, int] = {}
    ends: dict[tuple[int, int], float] = {}
    meeting: dict[tuple[int, int], Any] = {}
    for rank, trace in traces.items():
        seen: Counter[Any] = Counter()
        for node, attributes in zip(trace.nodes, trace.attributes, strict=True):
            if node.type == _COMP:
                continue
            collective = node.type == _COLLECTIVE
            base: Any = (
                attributes["pg_name"]
                if collective
                else (attributes["comm_src"], attributes["comm_dst"], attributes["comm_tag"])
            )
            key = meeting[rank, node.id] = (base, seen[base, node.type])
            seen[base, node.type] += 1
            members[key] = len(groups[int(base)]) if collective else 2
    ready: dict[Any, list[tuple[float, int, int, float]]] = defaultdict(list)
    pending = {rank: list(trace.nodes) for rank, trace in traces.items()}
    progress = True
    while progress and any(pending.values()):
        progress = False
        for rank, nodes in pending.items():
            left = []
            for node in nodes:
                if any((rank, dep) not in ends for dep in node.data_deps):
                    left.append(node)
                    continue
                start = max((ends[rank, dep] for dep in node.data_deps), default=0.0)
                progress = True
                if (rank, node.id) not in meeting:
                    ends[rank, node.id] = start + node.duration_micros
                    continue
                key = meeting[rank, node.id]
                ready[key].append((start, rank, node.id, node.duration_micros))
                if len(ready[key]) == members[key]:
                    end = max(event[0] for event in ready[key]) + max(event[3] for event in ready[key])
                    ends.update({(event[1], event[2]): end for event in ready[key]})
            pending[rank] = left
    assert not any(pending.values()), "ranks wait for each other"
    cost = cost_model(job, None)
    assignment = assign_layers(job, cost)
    program = lower(
        job, assignment, table_of(job, assignment, cost, job.num_microbatches), Lowering(2, folding_of(job))
    )
    expected_us = simulate(program, estimate_program(program, cost).durations_s).step_time_s * 1e6
    most_nodes = max(len(trace.nodes) for trace in traces.values())
    assert max(ends.values()) == pytest.approx(expected_us, abs=0.5 * most_nodes, rel=0.01)


def test_more_nodes_than_the_limit_are_written_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("hsdp")
    whole = chakra.export(job, "step")
    monkeypatch.setattr(chakra, "MAX_NODES", 100)
    exported = chakra.export(job, "step")
    stands_for = json.loads(str(exported.files["ranks.json"]))
    names = {f"step.{rank}.et" for rank in stands_for.values()}
    assert {name for name in exported.files if name.endswith(".et")} == names
    assert len(names) < len([name for name in whole.files if name.endswith(".et")])
    assert all(exported.files[name] for name in names)
    assert "simulated ranks" in exported.notes[0]


@pytest.mark.slow
def test_step_with_millions_of_operations_is_refused() -> None:
    with refuses("training.global_batch_size", fix="use a smaller one, such", kind=NotModelledError):
        chakra.export(make_job("llama3-70b", cluster="dgx-h100", num_nodes=1, tp=8, global_batch_size=100_000), "step")
