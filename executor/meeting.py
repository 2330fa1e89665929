"""How the nodes of a run meet: node 0 sees who comes and begins with them; the others wait to be let in.

A run of ``num_nodes`` begins when all are there. One that may change its nodes (``min_nodes``) begins with fewer, as
torchrun does: once enough are there, they wait for a last call only.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.exchange import Host
from executor.failure import Failure
from executor.guest import ANSWER_S, wait_for_place
from executor.host_clock import ClockServer, read_clock
from executor.introduction import introduction
from executor.network import place_in_network
from executor.store_line import StoreLine
from executor.team import Team
from executor.waiting_room import Guest, WaitingRoom, by_place
from simplan.errors import Problem, RunError, SimplanError, SpecError
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal
from simplan.program.run_spec import RunSpec

__all__ = ["meet", "refuse"]

_POLL_S = 0.1
_STORE_TIMEOUT_S = 60.0
_GOODBYE_S = 1.0


def meet(nodes: Nodes, job: str | None, on_note: Callable[[str], None] | None = None) -> Team:
    """On node 0, waits for those that the run begins with; on the others, for a place in it.

    Args:
        nodes: The request.
        job: On node 0, what is run, as JSON; None on the others, which get it from node 0.
        on_note: Told when the run has begun and this node still has to wait.

    Raises:
        SpecError: The nodes were not asked the same, or this one came later and cannot run the job.
        RunError: Too few came in time, or node 0 cannot be reached, or there was no place in time.
        NotNeededError: The run has, or had, no place for this node, and nothing is wrong with that.
    """
    line = StoreLine()
    if job is not None:
        return _host(nodes, job, line)
    return _join(nodes, line, on_note)


def refuse(refusal: Refusal) -> None:
    """On node 0, before nodes have met: tells those that come within half a minute why nothing is run, and returns.

    Raises:
        RunError: The port is in use.
    """
    store = _listen(refusal.nodes)
    store.set("over", Failure(sentence=refusal.sentence, exit_code=refusal.exit_code).model_dump_json())
    deadline_s = time.monotonic() + ANSWER_S
    others = range(1, refusal.nodes.num_nodes)
    while time.monotonic() < deadline_s and not all(store.check([f"bye-guest/{other}"]) for other in others):
        time.sleep(_POLL_S)


def _host(nodes: Nodes, job: str, line: StoreLine) -> Team:
    store = _listen(nodes)
    clock = ClockServer()
    room = WaitingRoom(store, introduction(nodes, nodes.host), _sizes(nodes, job))
    try:
        guests = _who_comes(nodes, room)
        seen_from = guests[0].met.host.address if guests else nodes.host
        interface, address = place_in_network(nodes, seen_from)
    except SimplanError as error:
        room.close(Failure(sentence=str(error), exit_code=error.exit_code), ANSWER_S)
        raise
    hosts = (Host(socket.gethostname(), address), *(guest.met.host for guest in guests))
    room.admit(guests, 0, hosts, 0)
    lets_in = nodes.min_nodes is not None
    room.begin(job, clock.port, lets_in=lets_in)
    return Team(nodes, 0, hosts, store, line, interface, job, clock.port, room=room if lets_in else None)


def _sizes(nodes: Nodes, job: str) -> list[int]:
    """Numbers of nodes that can run the job."""
    if nodes.min_nodes is None:
        return [nodes.num_nodes]
    return [nodes.num_nodes, *(fewer.num_nodes for fewer in RunSpec.model_validate_json(job).fewer_nodes)]


def _who_comes(nodes: Nodes, room: WaitingRoom) -> list[Guest]:
    """The other nodes that the run begins with, which have seats: all, or as many as there are after the last call.

    Raises:
        SpecError: One was not asked the same.
        RunError: Too few have come in time.
    """
    deadline_s = time.monotonic() + nodes.join_timeout_s
    enough_since_s: float | None = None
    while True:
        room.look()
        number, now_s = room.largest(1 + len(room.here)), time.monotonic()
        if number is None:
            enough_since_s = None
            if now_s > deadline_s:
                raise _too_few(nodes, room)
        else:
            enough_since_s = now_s if enough_since_s is None else enough_since_s
            if number == nodes.num_nodes or now_s >= enough_since_s + nodes.last_call_timeout_s:
                guests = room.seat(1)
                if 1 + len(guests) >= number:
                    return guests
                room.unseat(guests)
        time.sleep(_POLL_S)


def _too_few(nodes: Nodes, room: WaitingRoom) -> RunError:
    found = by_place(room.here)
    come = ", ".join(f"node {place} ({guest.met.host.name})" for place, guest in found.items()) or "no other node"
    if nodes.min_nodes is None:
        missing = " and ".join(str(place) for place in range(1, nodes.num_nodes) if place not in found)
        who = f"node {missing} of {nodes.num_nodes}"
    else:
        who = f"{nodes.min_nodes - 1 - len(found)} more of {nodes.min_nodes}:{nodes.num_nodes} nodes"
    return RunError(
        f"{who} did not join {nodes.endpoint} within {nodes.join_timeout_s:g} s ({come} did); start the same command "
        "there, or give a longer --join-timeout"
    )


def _listen(nodes: Nodes) -> Store:
    """Node 0's store."""
    try:
        # to be reached from anywhere; the host's own name may be that of the loopback (127.0.1.1 in /etc/hosts)
        return TCPStore(
            "127.0.0.1", nodes.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
        )
    except RuntimeError:
        raise RunError(f"port {nodes.port} of {nodes.host} is in use; give another one on all nodes") from None


def _join(nodes: Nodes, line: StoreLine, on_note: Callable[[str], None] | None) -> Team:
    interface, address = place_in_network(nodes, nodes.host)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    _wait_for_listener(nodes, deadline_s)
    try:
        patience_s = 2 * nodes.join_timeout_s + nodes.last_call_timeout_s + 2 * ANSWER_S
        leaving = threading.Event()
        met = line.submit(lambda: _introduce(nodes, line, interface, address, on_note, leaving))
        try:
            return met.result(patience_s)
        except (KeyboardInterrupt, SystemExit):  # a node that waits says goodbye, one that was let in just now leaves
            leaving.set()
            wait([met], _GOODBYE_S)
            if met.done() and met.exception() is None:
                met.result().leave()
            raise
    except (OSError, DistError):
        raise RunError(f"node 0 at {nodes.endpoint} went away before this node had begun") from None


def _introduce(
    nodes: Nodes,
    line: StoreLine,
    interface: str,
    address: str,
    on_note: Callable[[str], None] | None,
    leaving: threading.Event,
) -> Team:
    store = TCPStore(
        nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
    )
    told = wait_for_place(nodes, store, introduction(nodes, address), leaving, on_note or (lambda note: None))
    run, team = json.loads(store.get("run")), json.loads(store.get(f"team/{told['team']}"))
    return Team(
        nodes,
        told["place"],
        tuple(Host(**host) for host in team["hosts"]),
        store,
        line,
        interface,
        run["job"],
        run["clock_port"],
        [read_clock(nodes.host, run["clock_port"])],
        team["first_attempt"],
        told["team"],
    )


def _wait_for_listener(nodes: Nodes, deadline_s: float) -> None:
    """Until somebody listens at the endpoint: torch's own wait prints a warning for every attempt."""
    while True:
        try:
            with socket.create_connection((nodes.host, nodes.port), timeout=5):
                return
        except socket.gaierror:
            fix = "give a name or an address that all nodes know"
            raise SpecError(Problem(field="--rdzv", value=nodes.host, rule="is no known host", fix=fix)) from None
        except OSError:
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"node 0 did not answer at {nodes.endpoint} within {nodes.join_timeout_s:g} s; start the same "
                    "command there, see that no firewall closes the port, or give a longer --join-timeout"
                ) from None
            time.sleep(_POLL_S)
