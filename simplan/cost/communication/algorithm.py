"""A communication algorithm as a formula: start time, steps, bytes over bandwidths."""

from __future__ import annotations

from typing import NamedTuple

from simplan.units import format_bytes, format_rate, format_time


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


class CommAlgorithm(NamedTuple):
    """One communication algorithm (and protocol) for one collective or P2P transfer.

    Attributes:
        name: Algorithm and protocol, e.g. ``ring LL128``.
        start_s: Seconds until the first byte is transferred.
        steps: ``(number, seconds of each)``, executed sequentially.
        moves: Transfers, executed sequentially.
    """

    name: str
    start_s: float
    steps: tuple[tuple[int, float], ...]
    moves: tuple[TransferTerm, ...]

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds for ``num_bytes`` bytes."""
        total_s = self.start_s
        for number, step_s in self.steps:
            total_s += number * step_s
        return total_s + self.transfer_s(num_bytes)

    def transfer_s(self, num_bytes: float) -> float:
        """Returns the seconds of the transfers alone, without latencies."""
        total_s = 0.0
        for move in self.moves:
            total_s += move.factor * num_bytes / move.bytes_per_s
        return total_s

    def formula(self, num_bytes: float, where: str) -> str:
        """Returns the formula for ``num_bytes`` bytes with numbers filled in."""
        terms = [format_time(self.start_s)] if self.start_s else []
        terms += [f"{number} x {format_time(step_s)}" for number, step_s in self.steps if number]
        for _, bytes_per_s, text, size in self.moves:
            terms.append(f"{text.format(n=f'{size:g}')}{format_bytes(num_bytes)} / {format_rate(bytes_per_s)}")
        return f"{' + '.join(terms)} ({self.name}, {where})"
