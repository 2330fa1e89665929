"""Payload of the TCP connections of a host, read from the headers of the packets that leave it.

A connection numbers its bytes, so that each counts once, also if it is sent again. Nothing is assumed about the size
of frames or of their headers.
"""

from __future__ import annotations

import json
import math
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simplan.model.layer import CollectiveKind
from simplan.units import MIB
from tests.hosts import Host

_PREAMBLE_BYTES = 48
_MESSAGES = 3  # the sender announces a segment, the receiver its buffer, and the segment follows
_SEGMENT_BYTES = MIB
_IPV4 = 0x0800
_TCP = 6
_HEADERS = 120  # longest of IP and TCP
_QUEUE_BYTES = 64 * 1024**2
_SEQUENCE = 2**32


def gloo_header_bytes(kind: CollectiveKind, num_bytes: int, num_ranks: int) -> int:
    """Bytes of gloo's own headers that a rank sends in a collective in addition to its share of the data.

    A rank of a symmetric collective receives as many segments as it sends. A segment has three messages, which begin
    with the same 48 bytes: two announcements, one from each side, and the data. Rings of all-reduces cut a rank's part
    in two segments at least, of 1 MiB at most; all-gathers in two.

    Source: pytorch/gloo, gloo/transport/tcp/pair.cc (``Op``, ``send``, ``recv``), allreduce.cc, allgather.cc,
    alltoall.cc.

    Raises:
        ValueError: The kind is not counted.
    """
    match kind:
        case _ if num_ranks == 1 or not num_bytes:
            segments = 0
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            of_part = max(2, math.ceil(math.ceil(num_bytes / _SEGMENT_BYTES) / num_ranks))
            segments = 2 * (num_ranks - 1) * of_part
        case CollectiveKind.ALL_GATHER:
            segments = 2 * (num_ranks - 1)
        case CollectiveKind.ALL_TO_ALL:
            segments = num_ranks - 1
        case _:
            raise ValueError(f"headers of {kind} are not counted")
    return segments * _MESSAGES * _PREAMBLE_BYTES


class Payload:
    """Payload that has left a host, by the ports of both ends; complete after ``counted_payload``.

    Attributes:
        by_ports: Bytes by the port of the host and the port of its peer.
    """

    def __init__(self) -> None:
        self.by_ports: dict[tuple[int, int], int] = {}

    def without_port(self, port: int) -> int:
        """Bytes of all connections that have this port at neither end."""
        return sum(count for ports, count in self.by_ports.items() if port not in ports)


@contextmanager
def counted_payload(host: Host) -> Iterator[Payload]:
    """Counts the payload that leaves a host during the block."""
    payload = Payload()
    command = host.command([sys.executable, "-m", __spec__.name])
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
        yield payload
        counts = json.loads(process.communicate()[0])
    payload.by_ports = {(source, destination): count for source, destination, count in counts}


def main() -> None:
    """Counts until standard input ends, and prints ``[port, port of the peer, bytes]`` of every connection."""
    first: dict[tuple[bytes, int, int], int] = {}
    count: dict[tuple[bytes, int, int], int] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003)) as packets:
        packets.setsockopt(socket.SOL_SOCKET, 33, _QUEUE_BYTES)  # SO_RCVBUFFORCE of Linux
        packets.bind(("eth0", 0x0003))
        print("listening", flush=True)
        while sys.stdin not in (ready := select.select([packets, sys.stdin], [], [])[0]) or packets in ready:
            header, (_, protocol, direction, *_) = packets.recvfrom(_HEADERS)
            if direction != socket.PACKET_OUTGOING or protocol != _IPV4 or header[9] != _TCP:
                continue
            tcp = 4 * (header[0] & 15)
            size = int.from_bytes(header[2:4]) - tcp - 4 * (header[tcp + 12] >> 4)
            if size > 0:
                ports = int.from_bytes(header[tcp : tcp + 2]), int.from_bytes(header[tcp + 2 : tcp + 4])
                connection, number = (header[16:20], *ports), int.from_bytes(header[tcp + 4 : tcp + 8])
                end = (number + size - first.setdefault(connection, number)) % _SEQUENCE
                count[connection] = max(count.get(connection, 0), end)
    print(json.dumps([[source, destination, sent] for (_, source, destination), sent in count.items()]))


if __name__ == "__main__":
    main()
