"""When a node is lost: those that are left become a team of their own and go on with fewer data-parallel ranks.

torchrun's elastic agent can restart with another number of nodes, but its ranks would find the plan of before: with
other ranks everything is decided anew (table, shards, the memory that is predicted), by node 0, which also tells who is
lost. So every node ends its torchrun and starts another one; within a team torchrun restarts ranks as ever.

Node 0 asks (``REGROUP``), each of the others answers when its ranks have ended (``ready``), and node 0 tells who goes
on (``after``). Who has not answered by then is lost too. Keys are those of the old team: nodes that are still there
after they have been given up see them and end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from executor.checkpoint_folder import newest_checkpoint
from executor.exchange import REGROUP, RegroupError
from executor.team import Team
from simplan.errors import RunError
from simplan.program.job import Job
from simplan.spec.base import Spec

__all__ = ["Part", "first_step", "regroup"]

_READY_S = 30.0  # for ranks to be ended, and a node to answer
_AFTER_S = 60.0  # for node 0 to have waited, and to tell
_HEARD_S = 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one number of nodes does of a run: all of it, unless a node is lost.

    Attributes:
        job: With the plan of these nodes.
        folder: For its files.
        team: The nodes; None for this machine alone.
        first_step: Steps that are done when it begins.
        why: What to tell a user about its beginning, where nodes were lost.
    """

    job: Job
    folder: Path
    team: Team | None
    first_step: int = 0
    why: str = ""


class _After(Spec):
    """What node 0 tells.

    Attributes:
        places: Of the nodes that go on, in the team that was; empty when none does.
        spare: Of those that could, but are not needed.
        first_attempt: Of their ranks.
        first_step: Steps that are done.
        sentence: For people: why, and who goes on.
    """

    places: tuple[int, ...]
    spare: tuple[int, ...] = ()
    first_attempt: int = 0
    first_step: int = 0
    sentence: str


def first_step(job: Job) -> int:
    """Steps that the newest whole checkpoint of a job has done; 0 without one."""
    assert job.checkpointing is not None
    header, _ = newest_checkpoint(Path(job.checkpointing.folder))
    return 0 if header is None else header.step


def regroup(part: Part, out_dir: Path, lost: RegroupError) -> Part | None:
    """Goes on with the nodes that are left, whose ranks have ended; to be called on all of them.

    Args:
        part: What has ended.
        out_dir: Folder of the run; the part that follows gets one in it.
        lost: Who is lost.

    Returns:
        The part that follows; None when it does not need this node.

    Raises:
        RunError: Too few nodes are left, or this one was given up.
    """
    team = part.team
    assert team is not None
    after = _decide(part, team, lost) if team.leads else _hear(team)
    if not after.places:
        raise RunError(after.sentence)
    if team.node_rank in after.spare:
        return None
    if team.node_rank not in after.places:
        raise RunError(f"{team.me} did not answer for too long, and the other nodes went on without it")
    smaller = team.only(after.places, after.first_attempt)
    number = len(after.places)
    job = next(part.job.on_nodes(fewer) for fewer in part.job.fewer_nodes if fewer.num_nodes == number)
    folder = out_dir / f"{number}-nodes"
    folder.mkdir(exist_ok=True)
    return Part(job, folder, smaller, after.first_step, after.sentence)


def _decide(part: Part, team: Team, lost: RegroupError) -> _After:
    """Node 0: sees who is left, and tells them who goes on."""
    team.tell(REGROUP)
    deadline_s = time.monotonic() + _READY_S
    others = [node for node in range(1, len(team.hosts)) if node not in team.exchange.lost]
    ready = [node for node in others if team.hear(f"ready/{node}", deadline_s) is not None]
    after = _after(part, team, [0, *ready], lost)
    team.tell("after", after.model_dump_json())
    deadline_s = time.monotonic() + _HEARD_S
    for node in ready:
        team.hear(f"heard/{node}", deadline_s)
    return after


def _after(part: Part, team: Team, left: list[int], lost: RegroupError) -> _After:
    job, lost_too = part.job, [node for node in range(len(team.hosts)) if node not in {*left, *team.exchange.lost}]
    why = "; ".join([str(lost), *(f"{team.name(node)} did not answer either" for node in lost_too)])
    fewer = next((fewer for fewer in job.fewer_nodes if fewer.num_nodes <= len(left)), None)
    if fewer is None:
        return _After(places=(), sentence=f"{why}; too few nodes are left to go on")
    assert job.checkpointing is not None
    places, spare = left[: fewer.num_nodes], left[fewer.num_nodes :]
    attempt, step = lost.num_restarts + 1, first_step(job)
    who = f"{_counted(fewer.num_nodes, 'node')} with {_counted(fewer.plan.num_devices, 'rank')}"
    goes = f"{who} {'goes' if fewer.num_nodes == 1 else 'go'} on {f'after step {step}' if step else 'at step 1'}"
    without = f" without {' and '.join(map(team.name, spare))}" if spare else ""
    restart = f"restart {attempt} of {job.checkpointing.max_restarts}"
    sentence = f"{why}; {goes}{without}; {restart}"
    return _After(places=tuple(places), spare=tuple(spare), first_attempt=attempt, first_step=step, sentence=sentence)


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


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
