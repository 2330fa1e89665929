"""Hosts on one machine: network namespaces that bridges join, each link shaped to a bandwidth by ``tc tbf``.

A host has a network of its own, and with ``own_clock`` a monotonic clock of its own (a time namespace), so that nothing
but the network joins its processes to those of others. Its cores and its file system are the machine's. Making hosts
takes root and iproute2; ``unavailable`` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

BURST_BYTES = 64 * 1024  # most that a link lets through at once after a pause: one segment that is not cut
_LEAST_BURST_BYTES = 16 * 1024
_BURST_S = 1e-3
_LATENCY = "1s"  # longer in the queue, and a packet is dropped: rarely, as on a fabric that marks or pauses instead
_COUNTED = 1514 / 1538  # tbf counts an Ethernet frame without preamble, checksum and gap: so payload is as on Ethernet
_CONGESTION_CONTROL = "reno"  # every kernel allows it, so that results do not depend on the default of a machine
_NUMBER = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Of its network namespace.
        address: IPv4.
        cores: Cores its processes may use; empty for all.
        clock_offset_s: Its monotonic clock minus the machine's, whole seconds.
    """

    name: str
    address: str
    cores: tuple[int, ...] = ()
    clock_offset_s: int = 0

    def command(self, command: Sequence[str]) -> list[str]:
        """The command as to be started to run on this host; signals reach it as if it were started directly."""
        prefix = ["ip", "netns", "exec", self.name]
        if self.cores:
            prefix += ["taskset", "-c", ",".join(map(str, self.cores))]
        if self.clock_offset_s:
            prefix += ["unshare", "-T", "--monotonic", str(self.clock_offset_s), "--fork", "--kill-child"]
        return [*prefix, *command]

    def cut(self) -> None:
        """Takes its link down: nobody is told, packets only get lost."""
        _run(["ip", "-n", self.name, "link", "set", "eth0", "down"])

    def join(self) -> None:
        """Takes it up again."""
        _run(["ip", "-n", self.name, "link", "set", "eth0", "up"])

    def kill_all(self) -> None:
        """Kills all its processes, as when its power is cut."""
        self.signal_all(signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to all its processes."""
        for pid in _run(["ip", "netns", "pids", self.name]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)


def unavailable() -> str | None:
    """Why no hosts can be made here; None when they can."""
    missing = [tool for tool in ("ip", "tc", "bridge", "sysctl", "taskset", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"sp{os.getpid()}probe"
    try:
        _run(["ip", "netns", "add", name])
        _run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *_shape(100.0)])
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with tc tbf here: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(["ip", "netns", "del", name])
    return None


class Wire(NamedTuple):
    """Cable between two hosts or switches.

    Attributes:
        ends: Names of both: ``node0``, ``node1`` ... are hosts, all others are switches.
        mbit_per_s: Ethernet line rate of each direction; None for as fast as the machine is.
    """

    ends: tuple[str, str]
    mbit_per_s: float | None = None


def hosts(
    number: int, mbit_per_s: float | None = None, *, cores: Sequence[Sequence[int]] = (), own_clocks: bool = False
) -> AbstractContextManager[list[Host]]:
    """Makes hosts on one switch.

    Args:
        number: How many, at most 200.
        mbit_per_s: Of every host's link, in each direction; None for as fast as the machine is.
        cores, own_clocks: As in ``wired_hosts``.
    """
    wires = [Wire((f"node{k}", "switch"), mbit_per_s) for k in range(number)]
    return wired_hosts(wires, cores=cores, own_clocks=own_clocks)


@contextmanager
def wired_hosts(
    wires: Sequence[Wire], *, cores: Sequence[Sequence[int]] = (), own_clocks: bool = False
) -> Iterator[list[Host]]:
    """Makes hosts and switches, and removes them whatever happens, with all processes that are left on them.

    A switch is a bridge without limits of its own: each cable is a veth pair, with both ends shaped. Frames take the
    path of the fewest cables, so that cables may form rings.

    Args:
        wires: Cables. Each host has one; hosts are ``node0`` and so on without a gap.
        cores: Cores of each host; empty for all.
        own_clocks: Host k's monotonic clock is 1000 k seconds ahead.
    """
    made = f"sp{os.getpid()}n{next(_NUMBER)}"  # an interface's name has at most 15 characters
    net = f"10.{os.getpid() % 50 + 200}.{os.getpid() % 250}"
    ends = {end for wire in wires for end in wire.ends}
    number = sum(end.startswith("node") for end in ends)
    hosts = [
        Host(f"{made}h{k}", f"{net}.{k + 1}", tuple(cores[k]) if cores else (), 1000 * k * own_clocks)
        for k in range(number)
    ]
    host_of = {f"node{k}": host for k, host in enumerate(hosts)}
    bridges = {name: f"{made}b{k}" for k, name in enumerate(sorted(ends - host_of.keys()))}
    try:
        for host in hosts:
            _run(["ip", "netns", "add", host.name])
        for bridge in bridges.values():
            _run(["ip", "link", "add", bridge, "type", "bridge"])
            _run(["ip", "link", "set", bridge, "up"])
        ports: dict[tuple[str, str], str] = {}
        for k, wire in enumerate(wires):
            pair = f"{made}v{k}a", f"{made}v{k}b"
            _lay(wire, pair, host_of, bridges)
            ports |= {wire.ends: pair[0], wire.ends[::-1]: pair[1]}
        if len(wires) >= len(ends):
            _set_routes(hosts, bridges, ports)
        yield hosts
    finally:
        for host in hosts:
            _remove(host)
        for bridge in bridges.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(["ip", "link", "del", bridge])
        for k in range(len(wires)):  # those between bridges; others went with their host
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(["ip", "link", "del", f"{made}v{k}a"])


def _lay(wire: Wire, pair: tuple[str, str], host_of: dict[str, Host], bridges: dict[str, str]) -> None:
    """Connects both ends of a cable, and shapes them."""
    _run(["ip", "link", "add", pair[0], "type", "veth", "peer", "name", pair[1]])
    for end, port in zip(wire.ends, pair, strict=True):
        inside: list[str] = []
        if end in bridges:
            _run(["ip", "link", "set", port, "master", bridges[end], "up"])
        else:
            host = host_of[end]
            inside = ["ip", "netns", "exec", host.name]
            _run(["ip", "link", "set", port, "netns", host.name, "name", "eth0"])
            _run([*inside, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0"])
            _run([*inside, "ip", "link", "set", "eth0", "up"])
            _run([*inside, "ip", "link", "set", "lo", "up"])
            _run([*inside, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={_CONGESTION_CONTROL}"])
        if wire.mbit_per_s is not None:
            device = port if end in bridges else "eth0"
            _run([*inside, "tc", "qdisc", "add", "dev", device, "root", *_shape(wire.mbit_per_s)])


def _set_routes(hosts: Sequence[Host], bridges: dict[str, str], ports: dict[tuple[str, str], str]) -> None:
    """Sets the port of every switch towards every host, and the neighbors of hosts: nothing is flooded or learned."""
    for end, _ in ports:
        if end in bridges:
            quiet = ["learning", "off", "flood", "off", "mcast_flood", "off", "bcast_flood", "off"]
            _run(["bridge", "link", "set", "dev", ports[end, _], *quiet])
    for k, host in enumerate(hosts):
        address = _run(["ip", "netns", "exec", host.name, "cat", "/sys/class/net/eth0/address"]).strip()
        for other in hosts:
            if other is not host:
                neighbor = [host.address, "lladdr", address, "dev", "eth0", "nud", "permanent"]
                _run(["ip", "-n", other.name, "neigh", "replace", *neighbor])
        reached, border = {f"node{k}"}, [f"node{k}"]
        while border:
            nearer = border.pop(0)
            for end, other_end in ports:
                if other_end == nearer and end not in reached:
                    reached.add(end)
                    border.append(end)
                    if end in bridges:
                        _run(["bridge", "fdb", "replace", address, "dev", ports[end, nearer], "master", "static"])


def _shape(mbit_per_s: float) -> list[str]:
    burst_bytes = min(max(_LEAST_BURST_BYTES, int(_BURST_S * mbit_per_s * 1e6 / 8)), BURST_BYTES)
    return ["tbf", "rate", f"{_COUNTED * mbit_per_s:.3f}mbit", "burst", f"{burst_bytes}b", "latency", _LATENCY]


def _remove(host: Host) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        host.kill_all()
        _run(["ip", "netns", "del", host.name])  # its end of the pair goes with it, and so does the other


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
