"""How the nodes of a run meet: each says who it is and what it was asked, node 0 compares; all start or none does.

A node that comes when the run goes on already, and may change its nodes, waits for a place (``executor.waiting_room``).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.checks import check_job
from executor.exchange import Host
from executor.host_clock import ClockServer, read_clock
from executor.introduction import Introduction, disagreement, introduction
from executor.network import address_of, address_towards, interface_with, interfaces
from executor.store_line import StoreLine
from executor.team import Team
from executor.waiting_room import WaitingRoom, wait_for_place
from simplan.errors import Problem, RunError, SpecError, did_you_mean
from simplan.program.job import Job
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal

__all__ = ["meet", "refuse"]

_POLL_S = 0.1
_STORE_TIMEOUT_S = 60.0
_GOODBYE_S = 1.0
_ANSWER_S = 30.0  # node 0 may take so long to compare and tell, and waits so long until the others know


def meet(nodes: Nodes, job: str | None, on_note: Callable[[str], None] | None = None) -> Team:
    """Waits for all nodes, and for node 0's verdict; where these have met already, for a place.

    Args:
        nodes: The request.
        job: On node 0, what is run, as JSON; None on the others, which get it from node 0.
        on_note: Told when this node has to wait for a place.

    Raises:
        SpecError: The nodes were not asked the same, or this one came later and cannot run the job.
        RunError: Some node did not come in time, or node 0 cannot be reached, or there was no place in time.
        OverError: The run was over before there was a place.
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
    _set_verdict(store, error=refusal.sentence, exit_code=refusal.exit_code)
    _wait_until_heard(store, list(range(1, refusal.nodes.num_nodes)))


def _host(nodes: Nodes, job: str, line: StoreLine) -> Team:
    store = _listen(nodes)
    clock = ClockServer()
    try:
        found = _who_comes(nodes, store)
    except SpecError as stranger:
        _set_verdict(store, error=str(stranger), exit_code=stranger.exit_code)
        _wait_until_heard(store, list(range(1, nodes.num_nodes)))
        raise
    seen_from = next((found[node].host.address for node in sorted(found)), None)
    interface, address = _place(nodes, seen_from or nodes.host)
    me = introduction(nodes, address)
    missing = [str(node) for node in range(1, nodes.num_nodes) if node not in found]
    said = disagreement([me, *(found[node] for node in sorted(found))]) if not missing else None
    error: SpecError | RunError | None = None
    if missing:
        come = ", ".join(f"node {node} ({found[node].host.name})" for node in sorted(found)) or "no other node"
        error = RunError(
            f"node {' and '.join(missing)} of {nodes.num_nodes} did not join {nodes.endpoint} within "
            f"{nodes.join_timeout_s:g} s ({come} did); start the same command there, or give a longer --join-timeout"
        )
    elif said is not None:
        error = SpecError(Problem(field="", rule=said))
    hosts = (me.host, *(found[node].host for node in sorted(found)))
    if error is not None:
        _set_verdict(store, error=str(error), exit_code=error.exit_code)
        _wait_until_heard(store, sorted(found))
        raise error
    _set_verdict(store, error=None, job=job, clock_port=clock.port, hosts=[asdict(host) for host in hosts])
    return Team(nodes, 0, hosts, store, line, interface, job, clock.port, room=_waiting_room(nodes, job, store, me))


def _who_comes(nodes: Nodes, store: Store) -> dict[int, Introduction]:
    """What the others say of themselves, by place; without those that do not come in time.

    Raises:
        SpecError: One has another version of simplan.
    """
    found: dict[int, Introduction] = {}
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while len(found) < nodes.num_nodes - 1 and time.monotonic() < deadline_s:
        for node in set(range(1, nodes.num_nodes)) - set(found):
            if store.check([f"node/{node}"]):
                found[node] = Introduction.from_json(store.get(f"node/{node}"), f"node {node}", "node 0")
        time.sleep(_POLL_S)
    return found


def _waiting_room(nodes: Nodes, job: str, store: Store, me: Introduction) -> WaitingRoom | None:
    """For nodes that come later, where the run goes on with other nodes."""
    if nodes.min_nodes is None:
        return None
    fewer = Job.model_validate_json(job).fewer_nodes
    return WaitingRoom(store, me, [nodes.num_nodes, *(other.num_nodes for other in fewer)])


def _listen(nodes: Nodes) -> Store:
    """Node 0's store."""
    try:
        # to be reached from anywhere; the host's own name may be that of the loopback (127.0.1.1 in /etc/hosts)
        return TCPStore(
            "127.0.0.1", nodes.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
        )
    except RuntimeError:
        raise RunError(f"port {nodes.port} of {nodes.host} is in use; give another one on all nodes") from None


def _set_verdict(store: Store, **verdict: Any) -> None:
    """What all others wait for: ``error`` with ``exit_code``, or what a team is made of."""
    store.set("verdict", json.dumps(verdict))


def _wait_until_heard(store: Store, others: list[int]) -> None:
    """Node 0 stays until the others know why nothing starts."""
    deadline_s = time.monotonic() + _ANSWER_S
    while others and time.monotonic() < deadline_s:
        others = [node for node in others if not store.check([f"heard/{node}"])]
        time.sleep(_POLL_S)


def _join(nodes: Nodes, line: StoreLine, on_note: Callable[[str], None] | None) -> Team:
    interface, address = _place(nodes, nodes.host)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    _wait_for_listener(nodes, deadline_s)
    try:
        patience_s = 2 * nodes.join_timeout_s + _ANSWER_S
        leaving = threading.Event()
        met = line.submit(lambda: _introduce(nodes, line, interface, address, on_note, leaving))
        try:
            return met.result(patience_s)
        except (KeyboardInterrupt, SystemExit):  # a node that waits says goodbye
            leaving.set()
            wait([met], _GOODBYE_S)
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
    me = introduction(nodes, address)
    place = None if _goes_on(nodes, store) else _claim(nodes, store)
    if place is not None:
        store.set(f"node/{place}", me.to_json())
    verdict = {"place": place, **_verdict(nodes, store)}
    if place is not None:
        store.set(f"heard/{place}", "")
    elif verdict["error"] is None:
        check_job(Job.model_validate_json(verdict["job"]), nodes.ranks_per_node)
        if on_note is not None:
            on_note(f"the run at {nodes.endpoint} has begun; waiting for a place in it")
        verdict = wait_for_place(nodes, store, me, leaving)
    if verdict["error"] is not None:
        if verdict["exit_code"] == SpecError.exit_code:
            raise SpecError(Problem(field="", rule=verdict["error"]))
        raise RunError(verdict["error"])
    hosts = tuple(Host(**host) for host in verdict["hosts"])
    clock_port = verdict["clock_port"]
    reading = read_clock(nodes.host, clock_port)
    return Team(
        nodes,
        verdict["place"],
        hosts,
        store,
        line,
        interface,
        verdict["job"],
        clock_port,
        [reading],
        verdict.get("first_attempt", 0),
        verdict.get("team", 0),
    )


def _goes_on(nodes: Nodes, store: Store) -> bool:
    """Whether a run that may change its nodes has begun."""
    if nodes.min_nodes is None or not store.check(["verdict"]):
        return False
    return bool(json.loads(store.get("verdict"))["error"] is None)


def _verdict(nodes: Nodes, store: Store) -> dict[str, Any]:
    """What node 0 tells all that have met."""
    deadline_s = time.monotonic() + nodes.join_timeout_s + _ANSWER_S
    while not store.check(["verdict"]):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(_POLL_S)
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    return verdict


def _claim(nodes: Nodes, store: Store) -> int | None:
    """A place that nobody else has; None where there is none, and one may become free."""
    if nodes.node_rank is not None:
        if store.add(f"claim/{nodes.node_rank}", 1) > 1:
            rule = f"is taken by another node of {nodes.endpoint}"
            raise SpecError(
                Problem(field="--node-rank", value=str(nodes.node_rank), rule=rule, fix="give each its own")
            )
        return nodes.node_rank
    for place in range(1, nodes.num_nodes):
        if store.add(f"claim/{place}", 1) == 1:
            return place
    if nodes.min_nodes is not None:
        return None
    raise RunError(f"{nodes.num_nodes} nodes have joined {nodes.endpoint} already")


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


def _place(nodes: Nodes, towards: str) -> tuple[str, str]:
    """The network interface that ranks talk over, and this node's address on it.

    Raises:
        SpecError: None is found, or there is none of the given name.
    """
    if nodes.interface is not None:
        address = address_of(nodes.interface)
        if address is None:
            rule = "is no network interface with an IPv4 address here"
            fix = did_you_mean(nodes.interface, [name for name in interfaces() if address_of(name)])
            raise SpecError(Problem(field="--interface", value=nodes.interface, rule=rule, fix=fix))
        return nodes.interface, address
    try:
        address = address_towards(towards)
        interface = interface_with(address)
    except OSError as error:
        rule = f"cannot be reached from here: {error.strerror}"
        raise SpecError(Problem(field="--rdzv", value=nodes.host, rule=rule)) from None
    if interface is None:
        rule = f"no network interface here has the address {address}, which the route to it starts from"
        raise SpecError(Problem(field="--rdzv", value=nodes.host, rule=rule, fix="give --interface"))
    return interface, address
