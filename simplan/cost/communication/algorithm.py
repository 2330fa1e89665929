"""A communication algorithm as a formula: start time, steps, bytes over bandwidths."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from simplan.cost.model import CostPart, Limit
from simplan.units import format_bytes, format_number, format_rate, format_time


class TransferTerm(NamedTuple):
    """Transfer time in a communication algorithm: bytes over a bandwidth.

    Attributes:
        factor: Bytes that cross the bottleneck link, as a multiple of ``num_bytes``.
        bytes_per_s: Bandwidth of the bottleneck link, in bytes per second.
        text: The factor in formulas, with the multiplication sign; ``{n}`` stands for ``size``.
        size: Size of the group that determines the factor.
    """

    factor: float
    bytes_per_s: float
    text: str = ""
    size: float = 0


class Pattern(StrEnum):
    """Patterns of communication between ranks, which decide the flows of an algorithm (``simplan.network.flows``)."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    PAIRWISE = "pairwise"
    ONCE_PER_NODE = "once_per_node"
    """All-to-all that sends a token to a node once and forwards it inside the node."""
    HOP = "hop"
    """P2P send, or a step of ring attention, whose hops are P2P sends."""
    TORUS = "torus"
    GLOO_RING = "gloo_ring"
    """Ring in the order of ranks, which leaves a node over one connection."""
    BINOMIAL_TREE = "binomial_tree"
    HALVING_DOUBLING = "halving_doubling"
    HIERARCHICAL = "hierarchical"
    HIERARCHICAL_ALL_TO_ALL = "hierarchical_all_to_all"
    SHARP = "sharp"
    PARAMETER_SERVER = "parameter_server"


class PipelineFill(NamedTuple):
    """Filling of a pipeline of chunks: its stages work on different chunks, so the first chunk takes longer.

    Attributes:
        passes: Stages that a chunk goes through before the slowest one.
        chunk_bytes: Bytes in flight of one stage, ascending.
        least_bytes: Bytes of a communication from which on each of them is used.
        bytes_per_s: Rate of a stage.
    """

    passes: int
    chunk_bytes: tuple[float, ...]
    least_bytes: tuple[float, ...]
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds until the last stage works, for ``num_bytes`` bytes."""
        used = max(
            (chunk for chunk, least in zip(self.chunk_bytes, self.least_bytes, strict=True) if num_bytes >= least)
        )
        return self.passes * min(used, num_bytes) / self.bytes_per_s


class CommAlgorithm(NamedTuple):
    """One communication algorithm (and protocol) for one collective or P2P transfer.

    Attributes:
        name: Algorithm and protocol, e.g. ``ring LL128``.
        start_s: Seconds until the first byte is transferred.
        steps: ``(number, seconds of each)``, executed sequentially.
        moves: Transfers, executed sequentially.
        pattern: Ranks that send to each other.
        inside: Fraction of the datasheet bandwidth of links inside nodes that the algorithm achieves. The bytes that
            cross the busiest link, divided by this bandwidth, take the time of the transfers.
        between: As ``inside``, for links between nodes.
        server_shares: Fraction of the bytes on each parameter server; empty for other algorithms.
        fill: Filling of its pipeline; None where it takes no time.
    """

    name: str
    start_s: float
    steps: tuple[tuple[int, float], ...]
    moves: tuple[TransferTerm, ...]
    pattern: Pattern
    inside: float = 1.0
    between: float = 1.0
    server_shares: tuple[float, ...] = ()
    fill: PipelineFill | None = None

    def transfer_s(self, num_bytes: float) -> float:
        """Returns the seconds of the transfers of ``num_bytes`` bytes, without start and steps."""
        return sum(move.factor * num_bytes / move.bytes_per_s for move in self.moves)

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds for ``num_bytes`` bytes."""
        total_s = self.start_s
        for number, step_s in self.steps:
            total_s += number * step_s
        if self.fill is not None:
            total_s += self.fill.seconds(num_bytes)
        return total_s + self.transfer_s(num_bytes)

    def part(self, num_bytes: float, where: str) -> CostPart:
        """Returns the transfer of ``num_bytes`` bytes between ranks that are ``where``."""
        seconds, transfer_s = self.seconds(num_bytes), self.transfer_s(num_bytes)
        limit = Limit.BANDWIDTH if 2 * transfer_s > seconds else Limit.LATENCY
        return CostPart(f"{self.name}, {where}", seconds, limit, _words, (self, num_bytes, where))


def _words(way: CommAlgorithm, num_bytes: float, where: str) -> str:
    terms = [format_time(way.start_s, digits=4)] if way.start_s else []
    terms += [f"{number} x {format_time(step_s, digits=4)}" for number, step_s in way.steps if number]
    if way.fill is not None:
        fill = way.fill
        chunk_bytes = fill.seconds(num_bytes) * fill.bytes_per_s / fill.passes
        terms.append(
            f"{fill.passes} x {format_bytes(chunk_bytes, digits=4)} / {format_rate(fill.bytes_per_s, digits=4)}"
        )
    for _, bytes_per_s, text, size in way.moves:
        times = text.format(n=format_number(size))
        terms.append(f"{times}{format_bytes(num_bytes, digits=4)} / {format_rate(bytes_per_s, digits=4)}")
    return f"{' + '.join(terms)} ({way.name}, {where})"
