"""Clocks of several nodes on one: by asking node 0 for its time, and keeping the quickest answers (Cristian 1989).

Every node's monotonic clock has an origin of its own and runs at a slightly different rate. A node asks node 0 for the
time before its ranks start and after they have ended, when the network is quiet. An answer that took ``r`` seconds was
written within them, so taking it for the middle is off by at most ``r / 2``. Between the two readings the offset is
taken as linear.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence

from simplan.spec.base import NonNegative, Spec

__all__ = ["ClockReading", "ClockServer", "common_time_s", "read_clock"]

_TIME = struct.Struct("!d")
_QUESTIONS = 200
_PATIENCE_S = 10.0


class ClockReading(Spec):
    """What to add to a node's clock to have node 0's.

    Attributes:
        at_s: When, on the node's own clock.
        offset_s: Node 0's clock minus this one's.
        error_s: By how much that is off at most.
    """

    at_s: float
    offset_s: float
    error_s: NonNegative


class ClockServer:
    """Answers every byte with the time, on a port of its own, for as long as the process lives."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="clock", daemon=True).start()

    def close(self) -> None:
        """No more answers to new askers."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(connection,), name="clock", daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            connection.sendall(_TIME.pack(time.perf_counter()))


def read_clock(host: str, port: int) -> ClockReading:
    """Asks a ``ClockServer`` many times; the quickest answer counts.

    Raises:
        OSError: It cannot be reached, or fell silent.
    """
    best: ClockReading | None = None
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_QUESTIONS):
            asked_s = time.perf_counter()
            connection.sendall(b"?")
            answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
            heard_s = time.perf_counter()
            if len(answer) < _TIME.size:
                raise OSError("the clock of node 0 has gone")
            middle_s, error_s = (asked_s + heard_s) / 2, (heard_s - asked_s) / 2
            if best is None or error_s < best.error_s:
                best = ClockReading(at_s=middle_s, offset_s=_TIME.unpack(answer)[0] - middle_s, error_s=error_s)
    assert best is not None
    return best


def common_time_s(readings: Sequence[ClockReading], local_s: float) -> float:
    """A time of a node on node 0's clock.

    Args:
        readings: Of that node, in order of time; none for node 0 itself.
        local_s: On the node's own clock.
    """
    if not readings:
        return local_s
    first, last = readings[0], readings[-1]
    if last.at_s <= first.at_s:
        return local_s + first.offset_s
    drift = (last.offset_s - first.offset_s) / (last.at_s - first.at_s)
    return local_s + first.offset_s + drift * (local_s - first.at_s)
