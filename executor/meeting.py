"""How the nodes of a run meet: each says who it is and what it was asked, node 0 compares; all start or none does."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.exchange import Host
from executor.host_clock import ClockServer, read_clock
from executor.network import address_of, address_towards, interface_with, interfaces
from executor.store_line import StoreLine
from executor.team import Team
from simplan.errors import Problem, RunError, SpecError, did_you_mean
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal

__all__ = ["Introduction", "disagreement", "meet", "refuse"]

_POLL_S = 0.1
_STORE_TIMEOUT_S = 60.0
_ANSWER_S = 30.0  # node 0 may take so long to compare and tell, and waits so long until the others know


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node says of itself.

    Attributes:
        host: Where it is.
        num_nodes: Nodes it was told of.
        torch: Its version.
        asked: ``Nodes.asked``.
    """

    host: Host
    num_nodes: int
    torch: str
    asked: dict[str, str]


def meet(nodes: Nodes, job: str | None) -> Team:
    """Waits for all nodes, and for node 0's verdict.

    Args:
        nodes: The request.
        job: On node 0, what is run, as JSON; None on the others, which get it from node 0.

    Raises:
        SpecError: The nodes were not asked the same.
        RunError: Some node did not come in time, or node 0 cannot be reached.
    """
    line = StoreLine()
    if job is not None:
        return _host(nodes, job, line)
    return _join(nodes, line)


def refuse(refusal: Refusal) -> None:
    """On node 0, before nodes have met: tells those that come within half a minute why nothing is run, and returns.

    Raises:
        RunError: The port is in use.
    """
    store = _listen(refusal.nodes)
    _set_verdict(store, error=refusal.sentence, exit_code=refusal.exit_code)
    _wait_until_heard(store, list(range(1, refusal.nodes.num_nodes)))


def disagreement(introductions: list[Introduction]) -> str | None:
    """The sentence about nodes that were not asked the same; None when all were.

    Args:
        introductions: By node; node 0 is right.
    """
    first, *others = introductions
    for node, other in enumerate(others, 1):
        who, leader = f"node {node} ({other.host.name})", f"node 0 ({first.host.name})"
        if other.num_nodes != first.num_nodes:
            return (
                f"--nodes: {other.num_nodes} on {who}, but {first.num_nodes} on {leader}; use one number on all nodes"
            )
        for section in first.asked | other.asked:
            if first.asked.get(section) != other.asked.get(section):
                rule = (
                    f"differs between {leader} and {who}; copy the scenario of one to the other and use equal options"
                )
                return f"{section}: {rule}"
        if other.torch != first.torch:
            return f"torch is {other.torch} on {who}, but {first.torch} on {leader}; install one version on all nodes"
    return None


def _host(nodes: Nodes, job: str, line: StoreLine) -> Team:
    store = _listen(nodes)
    clock = ClockServer()
    found: dict[int, Introduction] = {}
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while len(found) < nodes.num_nodes - 1 and time.monotonic() < deadline_s:
        for node in set(range(1, nodes.num_nodes)) - set(found):
            if store.check([f"node/{node}"]):
                told = json.loads(store.get(f"node/{node}"))
                found[node] = Introduction(**{**told, "host": Host(**told["host"])})
        time.sleep(_POLL_S)
    seen_from = next((found[node].host.address for node in sorted(found)), None)
    interface, address = _place(nodes, seen_from or nodes.host)
    me = _introduction(nodes, address)
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
    return Team(nodes, 0, hosts, store, line, interface, job, clock.port)


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


def _join(nodes: Nodes, line: StoreLine) -> Team:
    interface, address = _place(nodes, nodes.host)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    _wait_for_listener(nodes, deadline_s)
    try:
        return line.ask(lambda: _introduce(nodes, line, interface, address), 2 * nodes.join_timeout_s + _ANSWER_S)
    except (OSError, DistError):
        raise RunError(f"node 0 at {nodes.endpoint} went away before all nodes had joined") from None


def _introduce(nodes: Nodes, line: StoreLine, interface: str, address: str) -> Team:
    store = TCPStore(
        nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
    )
    node_rank = _claim(nodes, store)
    store.set(f"node/{node_rank}", json.dumps(asdict(_introduction(nodes, address))))
    deadline_s = time.monotonic() + nodes.join_timeout_s + _ANSWER_S
    while not store.check(["verdict"]):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(_POLL_S)
    verdict = json.loads(store.get("verdict"))
    store.set(f"heard/{node_rank}", "")
    if verdict["error"] is not None:
        if verdict["exit_code"] == SpecError.exit_code:
            raise SpecError(Problem(field="", rule=verdict["error"]))
        raise RunError(verdict["error"])
    hosts = tuple(Host(**host) for host in verdict["hosts"])
    clock_port = verdict["clock_port"]
    reading = read_clock(nodes.host, clock_port)
    return Team(nodes, node_rank, hosts, store, line, interface, verdict["job"], clock_port, [reading])


def _claim(nodes: Nodes, store: Store) -> int:
    """A place that nobody else has."""
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


def _introduction(nodes: Nodes, address: str) -> Introduction:
    return Introduction(Host(socket.gethostname(), address), nodes.num_nodes, torch.__version__, nodes.asked)


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
