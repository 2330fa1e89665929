"""How a run ended, the same on all its nodes: node 0 hears what every other has to say, decides, and tells."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping

from executor.exchange import REGROUP, RegroupError
from executor.failure import Failure, first_cause
from executor.host_clock import ClockReading
from executor.team import ANSWER_S, Team
from simplan.spec.base import Spec

__all__ = ["NodeResult", "settle"]

_FAREWELL_S = 10.0


class NodeResult(Spec):
    """What a node has to say at the end.

    Attributes:
        failure: Why its part ended early; None when it did not.
        steps: What its ranks measured, by rank (``RankFiles.steps``).
        readings: Of its clock.
    """

    failure: Failure | None
    steps: dict[int, str]
    readings: tuple[ClockReading, ...]


def settle(team: Team, failure: Failure | None, steps: Mapping[int, str]) -> tuple[Failure | None, list[NodeResult]]:
    """The end of the run on all nodes.

    Args:
        team: The nodes.
        failure: Why it ended early here; None when it did not.
        steps: What this node's ranks measured.

    Returns:
        Why the run ended early, the same on all nodes that can still talk; and on node 0 the results of the others.

    Raises:
        RegroupError: Others than these nodes are to go on, which node 0 told when this one had ended its part.
    """
    if 0 in team.exchange.lost:
        return failure, []
    result = NodeResult(failure=failure, steps=dict(steps), readings=team.readings)
    try:
        if failure is not None:
            team.tell("failed", str(team.node_rank))
        return _decide(team, result) if team.leads else (_hear_decision(team, result), [])
    except RegroupError:
        raise
    except (RuntimeError, TimeoutError):
        lost = Failure(sentence=f"{team.me} lost its connection with {team.name(0)}", consequence=True)
        return failure or lost, []


def _decide(team: Team, mine: NodeResult) -> tuple[Failure | None, list[NodeResult]]:
    """Node 0: waits for the results of the others, finds the first cause, and tells."""
    failures = [mine.failure]
    results = []
    deadline_s = time.monotonic() + ANSWER_S
    others = [node for node in range(1, len(team.hosts)) if node not in team.exchange.lost]
    told = []
    for node in others:
        found_key = team.hear_first((f"result/{node}", f"left/{node}"), deadline_s)
        if found_key == f"left/{node}":
            left = f"{team.name(node)} has left, as it was told to"
            failures.append(Failure(sentence=left, consequence=mine.failure is not None))
            continue
        if found_key is None:
            lost = f"{team.name(node)} has not been heard of for {ANSWER_S:g} s"
            failures.append(Failure(sentence=lost, consequence=mine.failure is not None))
            continue
        told.append(node)
        results.append(NodeResult.model_validate_json(zlib.decompress(team.value(found_key))))
        failures.append(results[-1].failure)
    found = first_cause([failure for failure in failures if failure is not None])
    team.tell("end", "null" if found is None else found.model_dump_json())
    deadline_s = time.monotonic() + _FAREWELL_S
    for node in told:
        team.hear(f"bye/{node}", deadline_s)
    if (room := team.room) is not None:
        team.ask(lambda: room.close(found))
    return found, results


def _hear_decision(team: Team, mine: NodeResult) -> Failure | None:
    """Another node: sends its result and waits for what node 0 says."""
    team.tell(f"result/{team.node_rank}", zlib.compress(mine.model_dump_json().encode()))
    # with a failure of its own this node ends, whatever the others do
    keys = ("end", REGROUP) if mine.failure is None else ("end",)
    found = team.hear_first(keys, time.monotonic() + 2 * ANSWER_S)
    if found is None:
        raise TimeoutError
    if found == REGROUP:
        raise RegroupError("other nodes are to go on")
    end = team.value("end")
    team.tell(f"bye/{team.node_rank}")
    return None if end == b"null" else Failure.model_validate_json(end)
