"""What must hold for every Program and every prediction, whatever the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict import Simulated
from simplan.prediction import Prediction
from simplan.program.action import ActionKind
from simplan.program.program import LayerWork, MemoryCategory, Op, Phase, Program, Stream
from simplan.sim import jitted, longest_path
from simplan.sim.compiled import Durations, compile_program
from simplan.sim.engine import simulate
from simplan.sim.memory import memory_peak, peak_position

_RECEIVES = {Stream.SEND_F: Stream.RECV_F, Stream.SEND_B: Stream.RECV_B}


def meetings(program: Program) -> dict[int, tuple[int, ...]]:
    """Meeting -> indices of its operations."""
    indices_of: dict[int, list[int]] = {}
    for index, meeting in enumerate(program.columns.meeting.tolist()):
        if meeting >= 0:
            indices_of.setdefault(meeting, []).append(index)
    return {meeting: tuple(indices) for meeting, indices in indices_of.items()}


def check_bytes(program: Program) -> None:
    """Members of a meeting do the same, all that are concerned take part, and what is sent is received.

    Args:
        program: With every rank written out.
    """
    for indices in meetings(program).values():
        members = [program.ops[index] for index in indices]
        ranks = sorted(member.rank for member in members)
        communications = {member.communication for member in members}
        assert len(communications) == 1, members
        [communication] = communications
        assert communication is not None, members
        assert communication.num_bytes > 0, communication
        assert ranks == sorted(communication.ranks), members
        if communication.kind is CollectiveKind.SEND:
            source, destination = sorted(members, key=lambda member: member.rank != communication.ranks[0])
            assert _RECEIVES[source.stream] is destination.stream, members
        else:
            assert len({member.stream for member in members}) == 1, members
    moved = Counter(dict.fromkeys(Stream, 0))
    for op in program.ops:
        moved[op.stream] += op.communication.num_bytes if op.communication else 0
    assert all(moved[send] == moved[receive] for send, receive in _RECEIVES.items()), moved
    alone = [op for op in program.ops if op.communication and op.meeting is None]
    assert program.level == 1 or not alone, alone  # Level 1 has the exchanges of an action in one piece on each rank


def check_reductions(
    program: Program,
    plan: ParallelPlan,
    num_microbatches: int,
    *,
    held: int = 4,
    reduced: int = 4,
    evenly: bool = False,
) -> None:
    """Every gradient that a rank holds is reduced over all ranks that must agree on it, once a step or a microbatch.

    Those of experts that other ranks do not have are reduced over the ranks that do, if there are any.

    Args:
        program: Of Level 2.
        plan: Its plan.
        num_microbatches: Of a step.
        held, reduced: Bytes of a gradient that is held and that is reduced; torch's are fp32 in every precision.
        evenly: Where optimizer states are sharded and nothing else, ranks reduce and scatter what they share evenly.
    """
    evenly &= plan.shards_optimizer_only
    kind = CollectiveKind.REDUCE_SCATTER if evenly else CollectiveKind.ALL_REDUCE
    by_default = "microbatch" if plan.zero_stage >= 2 and plan.dp_shard * plan.cp > 1 and plan.pp == 1 else "step"
    times = num_microbatches if (plan.grad_sync or by_default) == "microbatch" else 1
    num_shards = plan.dp_shard * plan.cp
    for rank in program.ranks:
        moved: Counter[tuple[Stream, CollectiveKind]] = Counter()
        for communication, stream in (
            (op.communication, op.stream)
            for op in (program.ops[index] for index in program.by_rank[rank])
            if op.communication
        ):
            moved[stream, communication.kind] += communication.num_bytes
        expert_bytes = reduced * _expert_gradients(program, rank)
        gradients = program.persistent_bytes[rank][MemoryCategory.GRADIENTS] or _dropped_bytes(program, rank)
        all_bytes = gradients // held * reduced
        held_bytes = times * (all_bytes - expert_bytes // plan.expert_shards)
        shards_experts = plan.expert_shards > 1
        alike = plan.expert_ranks > plan.ep and not shards_experts
        assert moved[Stream.EXPERT_DATA, kind] == (expert_bytes if alike else 0)
        replicated, sharded, whole = (
            moved[Stream.REPLICATE, CollectiveKind.ALL_REDUCE],
            moved[Stream.SHARD, CollectiveKind.REDUCE_SCATTER],
            moved[Stream.DATA, kind],
        )
        if plan.shards_parameters:
            experts_bytes = times * expert_bytes if shards_experts else 0
            replicas_bytes = held_bytes + experts_bytes // plan.expert_shards if plan.dp_replicate > 1 else 0
            assert (sharded, replicated, whole) == (held_bytes * num_shards + experts_bytes, replicas_bytes, 0)
        else:
            replicas_bytes = held_bytes if plan.dp * plan.cp > 1 else 0
            assert (sharded, whole) == (0, replicas_bytes)
            parts_bytes = held_bytes / num_shards if evenly and plan.dp_replicate > 1 else 0
            assert parts_bytes <= replicated < parts_bytes + 1000  # each bucket's part is rounded up
            gathered = moved[Stream.SHARD, CollectiveKind.ALL_GATHER]
            assert (gathered > 0) == evenly


def _dropped_bytes(program: Program, rank: int) -> int:
    """Gradients that are there until the update: on the host, and DDP's."""
    ops = (program.ops[index] for index in program.by_rank[rank])
    effects = [effect for op in ops if op.action.kind is ActionKind.OPTIM for effect in op.memory]
    places = (MemoryCategory.HOST, MemoryCategory.GRADIENTS)
    return -sum(effect.after_bytes for effect in effects if effect.category in places)


def _expert_gradients(program: Program, rank: int) -> int:
    """From the layers that the rank updates some of."""
    ops = (program.ops[index] for index in program.by_rank[rank])
    work = [part for op in ops for part in op.work if isinstance(part, LayerWork) and part.phase is Phase.OPTIMIZER]
    return sum(p.num_elements for part in work for p in part.layer.parameters if p.expert)


def check_memory(program: Program) -> None:
    """Each category alone is never negative and back to its base at the end of a step."""
    for rank in program.ranks:
        held: Counter[MemoryCategory] = Counter(program.persistent_bytes[rank])
        assert all(num_bytes >= 0 for num_bytes in held.values()), held
        for op in (program.ops[index] for index in program.by_rank[rank]):
            during = held.copy()
            for effect in op.memory:
                during[effect.category] += effect.during_bytes
                held[effect.category] += effect.after_bytes
            assert all(num_bytes >= 0 for num_bytes in (*during.values(), *held.values())), (op, during, held)
        assert +held == +Counter(program.persistent_bytes[rank]), rank


def check_times(simulated: Simulated) -> None:
    """Nothing runs for a negative time, before what it waits for, beside its stream, or apart from its meeting."""
    program, start_s, end_s = simulated.program, simulated.times.start_s, simulated.times.end_s
    assert all(duration_s >= 0 for duration_s in simulated.program_costs.durations_s)
    assert all(0 <= start <= end for start, end in zip(start_s, end_s, strict=True))
    for index, op in enumerate(program.ops):
        assert all(program.ops[wait].rank == op.rank and end_s[wait] <= start_s[index] for wait in op.waits), op
    for indices in program.streams.values():
        for before, after in pairwise(indices):
            assert end_s[before] <= start_s[after], (program.ops[before], program.ops[after])
    for indices in meetings(program).values():
        assert len({(start_s[index], end_s[index]) for index in indices}) == 1, program.ops[indices[0]]


def check_engines(program: Program, durations_s: Durations) -> None:
    """Compiled and interpreted are as simulated: the times of all operations to the last bit, and peaks of memory.

    Args:
        program: A static one.
        durations_s: Of its operations.
    """
    times = simulate(program, durations_s)
    for loops in (jitted, longest_path):
        compiled = replace(compile_program(program), loops=loops)
        compiled_times = compiled.times(durations_s)
        assert (compiled_times.start_s == times.start_s).all()
        assert (compiled_times.end_s == times.end_s).all()
        assert compiled.step_times_s([durations_s, durations_s]) == [times.step_time_s] * 2
        through_s = compiled_times.start_s + compiled.tails_s(durations_s)
        assert through_s.max(initial=0.0) == pytest.approx(times.step_time_s, rel=1e-12)
    for rank in program.ranks:
        _check_peak(program, rank)


def _check_peak(program: Program, rank: int) -> None:
    """The peak is where a plain walk over the operations of a rank finds it, and of as many bytes."""
    held = {
        c: n for c, n in program.persistent_bytes[rank].items() if program.one_memory or c is not MemoryCategory.HOST
    }
    worst, most_bytes = -1, sum(held.values()) + program.rebuild_bytes[rank]
    counted = set(MemoryCategory) if program.one_memory else set(MemoryCategory) - {MemoryCategory.HOST}
    now = sum(held.values())
    for position, index in enumerate(program.by_rank[rank]):
        effects = [effect for effect in program.ops[index].memory if effect.category in counted]
        if now + sum(effect.during_bytes for effect in effects) > most_bytes:
            worst, most_bytes = position, now + sum(effect.during_bytes for effect in effects)
        now += sum(effect.after_bytes for effect in effects)
    assert peak_position(program, rank) == worst
    assert memory_peak(program, rank).total_bytes == most_bytes


def check_prediction(prediction: Prediction) -> None:
    """Shares sum to the step, categories to the peak, and no figure is negative or beyond what is possible."""
    step_time_s = prediction.step_time_s
    low_s, high_s = prediction.step_time_interval_s
    assert 0 <= low_s <= step_time_s <= high_s
    assert step_time_s > 0
    assert prediction.action_level_step_time_s > 0
    assert -1e-9 <= prediction.bubble_fraction < 1
    assert len(prediction.splits) == len(prediction.memory) == prediction.job.plan.num_devices
    for split in prediction.splits:
        shares = (split.compute_s, split.recompute_s, split.exposed_communication_s, split.wait_s, split.host_s)
        assert min(*shares, split.optimizer_s) >= 0, split
        assert split.total_s == pytest.approx(step_time_s, rel=1e-9), split
    for memory in prediction.memory:
        assert min(memory.by_category.values()) >= 0, memory
        context_bytes = memory.by_category[MemoryCategory.CONTEXT]
        assert sum(memory.by_category.values()) - context_bytes == memory.allocated_bytes
        assert memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes
    if prediction.mfu is not None:
        assert prediction.mfu_full_attention is not None
        assert prediction.hfu is not None
        assert 0 < prediction.mfu <= min(1, prediction.mfu_full_attention, prediction.hfu)


def check_same(first: Simulated, other: Simulated) -> None:
    """A folded Program and the unfolded one: what stands for a rank does what the rank does, at the same times."""
    assert first.times.step_time_s == pytest.approx(other.times.step_time_s, rel=1e-9)
    for rank, leader in enumerate(first.program.stands_for):
        ours, theirs = first.program.by_rank[leader], other.program.by_rank[rank]
        assert len(ours) == len(theirs)
        for mine, its in zip(ours, theirs, strict=True):
            assert _deed(first.program.ops[mine]) == _deed(other.program.ops[its])
            assert first.times.start_s[mine] == pytest.approx(other.times.start_s[its], rel=1e-9, abs=1e-15)
            assert first.times.end_s[mine] == pytest.approx(other.times.end_s[its], rel=1e-9, abs=1e-15)


def _deed(op: Op) -> object:
    work = op.communication._replace(ranks=()) if op.communication else op.work
    return (
        op.stream,
        op.name,
        op.action,
        op.kind,
        op.memory,
        work if op.stream is Stream.COMPUTE or op.communication else (),
    )
