"""When nodes go or come: those that are there become a team of their own, with fewer or more data-parallel ranks.

A node may be lost; it may be told to leave (``executor.departure``); and one that comes while the run goes on may be
let in (``executor.waiting_room``). torchrun's elastic agent can restart with another number of nodes, but its ranks
would find the plan of before: with other ranks everything is decided anew (table, shards, the memory that is
predicted), by node 0, which also tells who goes on. So every node ends its torchrun and starts another one; within a
team torchrun restarts ranks as ever.

Node 0 asks (``REGROUP``), each of the others answers when its ranks have ended (``ready``, or ``left``), and node 0
tells who goes on (``after``). Who has not answered by then is lost too. Keys are those of the old team: nodes that are
still there after they have been given up see them and end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from executor.checkpoint_folder import newest_checkpoint
from executor.exchange import REGROUP, Host, RegroupError
from executor.failure import Failure
from executor.team import Team
from executor.waiting_room import Guest
from simplan.errors import RunError
from simplan.program.run_spec import RunSpec
from simplan.spec.base import Spec
from simplan.units import counted

__all__ = ["Part", "first_part", "first_step", "part_of", "regroup"]

_READY_S = 30.0  # for ranks to be ended, and a node to answer
_AFTER_S = 60.0  # for node 0 to have waited, and to tell
_HEARD_S = 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one team of nodes does of a run: all of it, unless nodes go or come.

    Attributes:
        job: With the plan of these nodes.
        folder: For its files.
        team: The nodes; None for this machine alone.
        first_step: Steps that are done when it begins.
        why: What to tell a user about its beginning, where nodes went or came.
    """

    job: RunSpec
    folder: Path
    team: Team | None
    first_step: int = 0
    why: str = ""


class _After(Spec):
    """What node 0 tells.

    Attributes:
        hosts: Of the nodes that go on, by place; empty when none does.
        places: Of those that were in the team, their places there; the others of ``hosts`` are new.
        spare: Places of those that could go on, but are not needed.
        first_attempt: Of their ranks.
        first_step: Steps that are done.
        sentence: For people: why, and who goes on.
    """

    hosts: tuple[Host, ...] = ()
    places: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()
    first_attempt: int = 0
    first_step: int = 0
    sentence: str


def first_step(job: RunSpec) -> int:
    """Steps that the newest whole checkpoint of a job has done; 0 without one."""
    assert job.checkpointing is not None
    header, _ = newest_checkpoint(Path(job.checkpointing.folder))
    return 0 if header is None else header.step


def first_part(job: RunSpec, team: Team | None, out_dir: Path, first_step: int = 0) -> Part:
    """What the nodes do that a run begins with.

    Args:
        job: On all nodes.
        team: Those that are there; None for this machine alone.
        out_dir: Folder of the run.
        first_step: Steps that are done.
    """
    if team is None or not team.num_missing:
        return Part(job, out_dir, team, first_step)
    begin = "begins" if len(team.hosts) == 1 else "begin"
    who = f"{counted(len(team.hosts), 'node')} with {counted(team.num_ranks, 'rank')} {begin}"
    why = f"{who}, {team.num_missing} fewer than at most; who comes later is let in when there is a place"
    return Part(team.job_here(), out_dir, team, first_step, why)


def part_of(team: Team, out_dir: Path, first_step: int = 0, why: str = "") -> Part:
    """What a team does, that was not the first of the run; makes its folder.

    Args:
        team, first_step, why: As the attributes of ``Part``.
        out_dir: Folder of the run.
    """
    folder = out_dir / f"part-{team.number + 1}"
    folder.mkdir(exist_ok=True)
    return Part(team.job_here(), folder, team, first_step, why)


def regroup(part: Part, out_dir: Path, cause: RegroupError) -> Part | None:
    """Goes on with the nodes that are there, whose ranks have ended; to be called on all that were in the team.

    Args:
        part: What has ended.
        out_dir: Folder of the run; the part that follows gets one in it.
        cause: Who is lost, if anybody is.

    Returns:
        The part that follows; None when it does not need this node.

    Raises:
        RunError: Too few nodes are there, or this one was given up.
    """
    team = part.team
    assert team is not None
    after = _decide(part, team, cause) if team.leads else _hear(team)
    if not after.hosts:
        raise RunError(after.sentence)
    if team.node_rank in after.spare:
        return None
    if team.node_rank not in after.places:
        raise RunError(f"{team.me} did not answer for too long, and the other nodes went on without it")
    following = team.following(after.places.index(team.node_rank), after.hosts, after.first_attempt)
    return part_of(following, out_dir, after.first_step, after.sentence)


def _decide(part: Part, team: Team, cause: RegroupError) -> _After:
    """Node 0: sees who is there, and tells them who goes on."""
    team.tell(REGROUP)
    deadline_s = time.monotonic() + _READY_S
    exchange, ready = team.exchange, []
    for node in range(1, len(team.hosts)):
        if node in exchange.lost | exchange.left:
            continue
        answer = team.hear_first((f"left/{node}", f"ready/{node}"), deadline_s)
        if answer == f"left/{node}":
            exchange.left.add(node)
        elif answer is not None:
            ready.append(node)
    room = team.room
    assert room is not None, "node 0 of a run that goes on with other nodes has one"
    joining = team.ask(lambda: room.seat(1 + len(ready)))
    if joining:
        team.face(joining[0].met.host.address)
    after = _after(part, team, [0, *ready], joining, cause)
    if len(team.hosts) == len(after.places) == len(after.hosts) or exchange.lost - exchange.begun:
        room.pause()
    team.tell("after", after.model_dump_json())
    if after.hosts:
        team.ask(lambda: room.admit(joining, team.number + 1, after.hosts, after.first_attempt))
    deadline_s = time.monotonic() + _HEARD_S
    for node in ready:
        team.hear(f"heard/{node}", deadline_s)
    if not after.hosts:
        team.ask(lambda: room.close(Failure(sentence=after.sentence)))
    return after


def _after(part: Part, team: Team, there: list[int], joining: list[Guest], cause: RegroupError) -> _After:
    exchange, asked, room = team.exchange, part.job.checkpointing, team.room
    assert asked is not None
    assert room is not None
    silent = [node for node in range(len(team.hosts)) if node not in {*there, *exchange.lost, *exchange.left}]
    number = room.largest(len(there) + len(joining))
    places, spare = there[:number], there[number:]
    why = [str(cause)] if exchange.lost else []
    why += [f"{team.name(node)} did not answer{' either' if why else ''}" for node in silent]
    why += [f"{team.name(node)} was told to leave" for node in sorted(exchange.left)]
    why += [f"{guest.name} joins" for guest in joining]
    why = why or ["a node that wanted to join has gone"]
    if number is None:
        return _After(sentence=f"{'; '.join(why)}; too few nodes are left to go on")
    is_restart = not exchange.begun.isdisjoint({*exchange.lost, *silent})
    attempt, step = cause.num_restarts + is_restart, first_step(part.job)
    if attempt > asked.max_restarts:
        return _After(sentence=f"{'; '.join(why)}; no restart is left of {asked.max_restarts}")
    who = f"{counted(number, 'node')} with {counted(team.num_ranks // len(team.hosts) * number, 'rank')}"
    goes = f"{who} {'goes' if number == 1 else 'go'} on {f'after step {step}' if step else 'at step 1'}"
    without = f" without {' and '.join(map(team.name, spare))}" if spare else ""
    restart = [f"restart {attempt} of {asked.max_restarts}"] if is_restart else []
    return _After(
        hosts=(*(team.hosts[place] for place in places), *(guest.met.host for guest in joining)),
        places=tuple(places),
        spare=tuple(spare),
        first_attempt=attempt,
        first_step=step,
        sentence="; ".join([*why, f"{goes}{without}", *restart]),
    )


def _hear(team: Team) -> _After:
    """Another node: says that its ranks have ended, and hears what follows."""
    try:
        team.tell(f"ready/{team.node_rank}")
        told = team.hear("after", time.monotonic() + _AFTER_S)
        if told is None:
            raise TimeoutError
        team.tell(f"heard/{team.node_rank}")
    except (RuntimeError, TimeoutError):
        raise RunError(f"{team.me} lost its connection with {team.name(0)}") from None
    return _After.model_validate_json(told)
