"""How a node waits to be let in by node 0 (``executor.waiting_room``), before a run begins or while it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from executor.checks import check_job
from executor.failure import Failure
from executor.introduction import Introduction
from simplan.errors import RunError, SimplanError
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec

__all__ = ["ANSWER_S", "NotNeededError", "wait_for_place"]

ANSWER_S = 30.0
"""Node 0 may take so long to compare and tell, and waits so long until the others know."""
_COUNT_S = 0.5  # a guest counts so often
_SOON_S = 0.02


class NotNeededError(RunError):
    """The run had no place for this node, and nothing is wrong with that."""


def wait_for_place(
    nodes: Nodes,
    store: Store,
    me: Introduction,
    leaving: threading.Event,
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """What node 0 tells this node once it is let in: its ``place`` and ``team``.

    Args:
        nodes: The request.
        store: Of all nodes.
        me: This node.
        leaving: Set when it is to wait no longer.
        on_note: Told when the run has begun and this node still has to wait.

    Raises:
        NotNeededError: The run has ended without a failure; or it began without this node, which was there, and had no
            place for it for ``join_timeout_s`` either.
        SimplanError: It has ended with a failure, or this node was sent away, or cannot run the job.
        RunError: It lets nobody in who comes later; or there was no place for ``join_timeout_s``, or until this node
            was to leave.
        torch.distributed.DistError: Node 0 has gone.
    """
    came_early = not store.check(["run"])
    number = store.add("guests", 1)
    store.set(f"guest/{number}", me.to_json())
    place, has_begun = f"place/{number}", False
    # node 0 knows within this time
    deadline_s = time.monotonic() + nodes.join_timeout_s + nodes.last_call_timeout_s + ANSWER_S
    gone: SimplanError | None = None
    while not store.check([place]):
        if store.check(["over"]):
            store.set(f"bye-guest/{number}", "")
            raise _over(nodes, store)
        if not has_begun and store.check(["run"]) and not store.check([place]):
            has_begun, deadline_s = True, time.monotonic() + nodes.join_timeout_s
            gone = _cannot_wait(nodes, store)
            if gone is None:
                without = f" without {me.host.name}, which is not needed now" if came_early else ""
                on_note(f"the run at {nodes.endpoint} has begun{without}; waiting for a place in it")
        if leaving.is_set() or time.monotonic() > deadline_s:
            gone = gone or _no_place(nodes, has_begun=has_begun, came_early=came_early)
        if gone is not None:
            if store.add(f"seat/{number}", 1) == 1:
                store.set(f"bye-guest/{number}", "")
                raise gone
            time.sleep(_SOON_S)  # node 0 has let it in, or is to find that others cannot come with it
            continue
        store.add(f"here/{number}", 1)
        leaving.wait(_COUNT_S)
    told: dict[str, Any] = json.loads(store.get(place))
    if told["error"] is not None:
        store.set(f"bye-guest/{number}", "")
        raise Failure(sentence=told["error"], exit_code=told["exit_code"]).error()
    return told


def _over(nodes: Nodes, store: Store) -> SimplanError:
    over = store.get("over")
    if over == b"null":
        return NotNeededError(f"the run at {nodes.endpoint} has ended, and did not need this node")
    return Failure.model_validate_json(over).error()


def _cannot_wait(nodes: Nodes, store: Store) -> SimplanError | None:
    """Why a node without a place has nothing to wait for when the run has begun; None when it has."""
    run = json.loads(store.get("run"))
    if not run["lets_in"]:
        return RunError(f"{nodes.num_nodes} nodes have joined {nodes.endpoint} already")
    if nodes.min_nodes is None:
        return None  # node 0 says what it was asked differently
    try:
        check_job(RunSpec.model_validate_json(run["job"]), nodes.ranks_per_node)
    except SimplanError as error:
        return error
    return None


def _no_place(nodes: Nodes, *, has_begun: bool, came_early: bool) -> SimplanError:
    if not has_begun:
        return RunError(f"node 0 at {nodes.endpoint} has not begun the run")
    if came_early:
        return NotNeededError(f"the run at {nodes.endpoint} did not need this node for {nodes.join_timeout_s:g} s")
    return RunError(
        f"the run at {nodes.endpoint} had no place for this node within {nodes.join_timeout_s:g} s; start the "
        "command again when it has lost a node, or give a longer --join-timeout"
    )
