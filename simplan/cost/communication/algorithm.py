"""One way to carry out a message, as a formula: time to start, steps, bytes over bandwidths."""

from __future__ import annotations

from typing import NamedTuple

from simplan.units import format_bytes, format_rate, format_time

__all__ = ["CommAlgorithm", "TransferTerm"]


class TransferTerm(NamedTuple):
    """Bytes over a bandwidth.

    Attributes:
        factor: Part of the message's bytes that passes the tightest place.
        bytes_per_s: Bandwidth there.
        text: The factor for people, with the sign of multiplication; ``{n}`` stands for ``size``.
        size: Of the group that the factor is about.
    """

    factor: float
    bytes_per_s: float
    text: str = ""
    size: float = 0


class CommAlgorithm(NamedTuple):
    """One way to carry out a message.

    Attributes:
        name: Algorithm and protocol, e.g. ``ring LL128``.
        start_s: Until the first byte moves.
        steps: ``(number, seconds of each)``, one after the other.
        moves: One after the other.
    """

    name: str
    start_s: float
    steps: tuple[tuple[int, float], ...]
    moves: tuple[TransferTerm, ...]

    def seconds(self, num_bytes: float) -> float:
        """Time of a message of so many bytes."""
        total_s = self.start_s
        for number, step_s in self.steps:
            total_s += number * step_s
        for move in self.moves:
            total_s += move.factor * num_bytes / move.bytes_per_s
        return total_s

    def formula(self, num_bytes: float, where: str) -> str:
        """The same with numbers filled in."""
        terms = [format_time(self.start_s)] if self.start_s else []
        terms += [f"{number} x {format_time(step_s)}" for number, step_s in self.steps if number]
        for _, bytes_per_s, text, size in self.moves:
            terms.append(f"{text.format(n=f'{size:g}')}{format_bytes(num_bytes)} / {format_rate(bytes_per_s)}")
        return f"{' + '.join(terms)} ({self.name}, {where})"
