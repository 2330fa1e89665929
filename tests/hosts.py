"""Hosts on one machine: network namespaces that a bridge joins, each link shaped to a bandwidth by ``tc tbf``.

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
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BURST_BYTES = 64 * 1024  # one segment that the kernel hands on whole, so that it is not cut
_LATENCY = "50ms"  # longer in the queue, and a packet is dropped
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

    def sent_bytes(self) -> int:
        """Bytes that have left its interface, headers included."""
        text = _run(["ip", "netns", "exec", self.name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"])
        return int(text)


def unavailable() -> str | None:
    """Why no hosts can be made here; None when they can."""
    missing = [tool for tool in ("ip", "tc", "taskset", "unshare") if shutil.which(tool) is None]
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


@contextmanager
def hosts(
    number: int, mbit_per_s: float | None = None, *, cores: Sequence[Sequence[int]] = (), own_clocks: bool = False
) -> Iterator[list[Host]]:
    """Makes hosts, and removes them whatever happens, with all processes that are left on them.

    Args:
        number: How many, at most 200.
        mbit_per_s: Of every host's link, in each direction; None for as fast as the machine is.
        cores: Cores of each host; empty for all.
        own_clocks: Host k's monotonic clock is 1000 k seconds ahead.
    """
    made = f"sp{os.getpid()}n{next(_NUMBER)}"  # an interface's name has at most 15 characters
    bridge, net = f"{made}br", f"10.{os.getpid() % 50 + 200}.{os.getpid() % 250}"
    found = [
        Host(f"{made}h{k}", f"{net}.{k + 1}", tuple(cores[k]) if cores else (), 1000 * k * own_clocks)
        for k in range(number)
    ]
    try:
        _run(["ip", "link", "add", bridge, "type", "bridge"])
        _run(["ip", "link", "set", bridge, "up"])
        for k, host in enumerate(found):
            _connect(host, bridge, f"{made}v{k}", mbit_per_s)
        yield found
    finally:
        for host in found:
            _remove(host)
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(["ip", "link", "del", bridge])


def _connect(host: Host, bridge: str, port: str, mbit_per_s: float | None) -> None:
    inside = ["ip", "-n", host.name]
    _run(["ip", "netns", "add", host.name])
    _run(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name])
    _run(["ip", "link", "set", port, "master", bridge, "up"])
    _run([*inside, "addr", "add", f"{host.address}/24", "dev", "eth0"])
    _run([*inside, "link", "set", "eth0", "up"])
    _run([*inside, "link", "set", "lo", "up"])
    if mbit_per_s is not None:  # what it sends; what it receives is what the others send
        _run(["ip", "netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", "root", *_shape(mbit_per_s)])


def _shape(mbit_per_s: float) -> list[str]:
    return ["tbf", "rate", f"{mbit_per_s}mbit", "burst", f"{BURST_BYTES}b", "latency", _LATENCY]


def _remove(host: Host) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        host.kill_all()
        _run(["ip", "netns", "del", host.name])  # its end of the pair goes with it, and so does the other


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
