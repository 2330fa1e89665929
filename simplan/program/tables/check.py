"""Checks of a complete action table before simulation or execution."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from simplan.errors import ProgramError
from simplan.program.action import Action, ActionKind, Table
from simplan.program.tables.complete import input_of, last_backwards, stage_to_rank

_K = ActionKind
_SENT_BY = {_K.SEND_F: (_K.FORWARD,), _K.SEND_B: (_K.BACKWARD, _K.BACKWARD_INPUT)}
_SHARDING = (_K.UNSHARD, _K.RESHARD)


def check_table(table: Table, num_stages: int, num_microbatches: int) -> None:
    """Checks that every row of an action table is complete, ordered and free of deadlock.

    Complete: every stage has each microbatch's forward and backward (B, or I and W) exactly once, and one REDUCE_GRAD.
    Every tensor that crosses ranks has a SEND and a RECV, every rank one OPTIM. Ordered: in each row an action comes
    after what it needs; a stage that has an UNSHARD computes only between an UNSHARD and the RESHARD after it. Free of
    deadlock: the rows run to their ends if CPUs block on the inputs of compute. P2P transfers between two ranks run in
    issue order, each once both ends have issued it (rendezvous, as in NCCL).

    Raises:
        ProgramError: Lists the violations of the first check that fails: complete, ordered, UNSHARD windows, deadlock.
    """
    placement = stage_to_rank(table)
    for check in (_incomplete, _unordered, _outside_windows, _stuck):
        violations = check(table, num_stages, num_microbatches, placement)
        if violations:
            shown = violations[:10]
            if len(violations) > len(shown):
                shown.append(f"... and {len(violations) - len(shown)} more")
            raise ProgramError("\n".join(shown))


def _incomplete(table: Table, num_stages: int, num_microbatches: int, placement: dict[int, int]) -> list[str]:
    found = Counter(action for row in table for action in row)
    violations = [
        f"action {a} occurs {n} times; once is right" for a, n in found.items() if n > 1 and a.kind not in _SHARDING
    ]
    violations += [f"stage {stage} is on no rank" for stage in range(num_stages) if stage not in placement]
    expected: set[Action] = set()
    for stage in range(num_stages):
        expected.add(Action(stage, _K.REDUCE_GRAD))
        for microbatch in range(num_microbatches):
            split = Action(stage, _K.BACKWARD_INPUT, microbatch) in found
            expected.add(Action(stage, _K.FORWARD, microbatch))
            for kind in (_K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT) if split else (_K.BACKWARD,):
                expected.add(Action(stage, kind, microbatch))
            for send in (Action(stage, kind, microbatch) for kind in _SENT_BY):
                receive = send.other_end
                if receive and 0 <= receive.stage < num_stages and placement.get(receive.stage) != placement.get(stage):
                    expected |= {send, receive}
    for rank, row in enumerate(table):
        optim = [action for action in row if action.kind is _K.OPTIM]
        if len(optim) != 1:
            violations.append(f"rank {rank} has {len(optim)} OPTIM actions; one at its end is right")
        expected.update(optim)
    violations += [f"action {action} is missing" for action in sorted(expected - found.keys(), key=str)]
    allowed = expected | {a for a in found if a.kind in _SHARDING and a.stage < num_stages}
    violations += [
        f"action {action} does not belong: there are {num_stages} stages and {num_microbatches} microbatches"
        for action in sorted(found.keys() - allowed, key=str)
    ]
    return violations


def _unordered(table: Table, num_stages: int, num_microbatches: int, placement: dict[int, int]) -> list[str]:
    del num_microbatches
    violations: list[str] = []
    last = last_backwards(table)
    for rank, row in enumerate(table):
        seen: set[Action] = set()
        for index, action in enumerate(row):
            missing = [need for need in _needs(action, num_stages, placement, last) if not seen & set(need)]
            violations += [f"rank {rank}: {action} comes before {' or '.join(map(str, need))}" for need in missing]
            if action.kind is _K.OPTIM and index != len(row) - 1:
                violations.append(f"rank {rank}: {action} is not the last action of its list")
            seen.add(action)
    return violations


def _needs(
    action: Action, num_stages: int, placement: dict[int, int], last: dict[int, Action]
) -> list[tuple[Action, ...]]:
    """Returns groups of alternatives on the same rank; one action of each group must precede the action."""
    stage, kind, microbatch = action
    needs: list[tuple[Action, ...]] = []
    if kind in (_K.BACKWARD, _K.BACKWARD_INPUT):
        needs.append((Action(stage, _K.FORWARD, microbatch),))
    if kind is _K.BACKWARD_WEIGHT:
        needs.append((Action(stage, _K.BACKWARD_INPUT, microbatch),))
    if kind in _SENT_BY:
        needs.append(tuple(Action(stage, maker, microbatch) for maker in _SENT_BY[kind]))
    if kind is _K.REDUCE_GRAD:
        needs.append((last[stage],))
    source, receive = input_of(action, num_stages), _awaited(action, num_stages, placement)
    if receive is not None:
        needs.append((receive,))
    elif source is not None:
        makers = (_K.FORWARD,) if source[1] is _K.FORWARD else (_K.BACKWARD, _K.BACKWARD_INPUT)
        needs.append(tuple(Action(source[0], maker, microbatch) for maker in makers))
    return needs


def _outside_windows(table: Table, num_stages: int, num_microbatches: int, placement: dict[int, int]) -> list[str]:
    """Returns UNSHARD errors that torch raises only during a step: windows opened twice, unused or missing."""
    del num_stages, num_microbatches, placement
    violations: list[str] = []
    sharded = {action.stage for row in table for action in row if action.kind in _SHARDING}
    for rank, row in enumerate(table):
        used: dict[int, bool] = {}  # unsharded stage -> True once a compute action has used it
        for action in row:
            stage = action.stage
            if action.kind is _K.UNSHARD:
                if stage in used:
                    violations.append(f"rank {rank}: {action} comes twice without a RESHARD between")
                used[stage] = False
            elif action.kind is _K.RESHARD:
                if not used.pop(stage, False):
                    violations.append(f"rank {rank}: {action} without an UNSHARD and a computation before it")
            elif action.kind.is_compute and stage in sharded:
                if stage not in used:
                    violations.append(f"rank {rank}: {action} is outside of an UNSHARD and a RESHARD of its stage")
                used[stage] = True
        violations += [f"rank {rank}: stage {stage} has no RESHARD after its last UNSHARD" for stage in used]
    return violations


def _stuck(table: Table, num_stages: int, num_microbatches: int, placement: dict[int, int]) -> list[str]:
    """Simulates the rows: CPUs block on received data, and each pair of ranks runs its transfers in issue order."""
    del num_microbatches
    position = [0] * len(table)
    queues: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # (rank, peer) -> issued, not yet matched
    received: set[Action] = set()
    waiting: dict[Action, int] = {}
    runnable = deque(range(len(table)))

    def deliver(rank: int, peer: int) -> None:
        mine, theirs = queues[rank, peer], queues[peer, rank]
        while mine and theirs and mine[0].other_end == theirs[0]:
            for action in (mine.popleft(), theirs.popleft()):
                if action.kind in (_K.RECV_F, _K.RECV_B):
                    received.add(action)
                    if action in waiting:
                        runnable.append(waiting.pop(action))

    while runnable:
        rank = runnable.popleft()
        row = table[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            if action.other_end is not None:
                peer = placement[action.other_end.stage]
                queues[rank, peer].append(action)
                deliver(rank, peer)
            receive = _awaited(action, num_stages, placement)
            if receive is not None and receive not in received:
                waiting[receive] = rank
                break
            position[rank] += 1

    def source(action: Action) -> str:
        receive = _awaited(action, num_stages, placement)
        send = receive.other_end if receive is not None else None
        return f" for {send} on rank {placement[send.stage]}" if send is not None else ""

    return [
        f"deadlock: rank {rank} waits at {row[position[rank]]}{source(row[position[rank]])}"
        + "".join(f"; its next transfer with rank {b} is {q[0]}" for (a, b), q in queues.items() if a == rank and q)
        for rank, row in enumerate(table)
        if position[rank] < len(row)
    ] or [f"deadlock: {queue[0]} is never matched" for queue in queues.values() if queue]


def _awaited(action: Action, num_stages: int, placement: dict[int, int]) -> Action | None:
    """Returns the RECV whose data a compute action blocks on; None for none."""
    source = input_of(action, num_stages)
    if source is None or placement[source[0]] == placement[action.stage]:
        return None
    return action.receive
