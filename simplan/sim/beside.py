"""Computing beside messages: for how long, and what it takes then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplan.program.program import Program, Stream
from simplan.program.timeline import COMPUTING, SpanKind

__all__ = ["Beside"]

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_TAKING = (Stream.DATA, Stream.SHARD, Stream.REPLICATE, Stream.EXPERT_DATA, Stream.CONTEXT)
"""Streams of messages that are meant to hide. Exchanges of tensor-parallel ranks beside parts of a product are made by
copy engines or on few multiprocessors; what these cost is in the price of cutting it (``KernelRates.split_s``). Of
exchanges for experts ``Excess`` knows what they take."""


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """What of a Program may run beside messages of its own rank.

    Attributes:
        num_ops: All operations of the Program.
        of_rank: By rank that has both, indices into ``Program.ops`` of what computes, and of messages.
    """

    num_ops: int
    of_rank: Sequence[tuple[_Indices, _Indices]]

    @classmethod
    def of(cls, program: Program) -> Beside:
        """Of a Program."""
        computing, moving = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for index, op in enumerate(program.ops):
            if op.stream is Stream.COMPUTE:
                if op.kind in COMPUTING:
                    computing[op.rank].append(index)
            elif op.kind is SpanKind.COMMUNICATION and op.stream in _TAKING:
                moving[op.rank].append(index)
        both = computing.keys() & moving.keys()
        return cls(len(program.ops), [(np.array(computing[rank]), np.array(moving[rank])) for rank in sorted(both)])

    def seconds(self, start_s: _Floats, end_s: _Floats) -> _Floats:
        """For how long each operation computes while messages of its rank move; 0 for all that does not compute.

        Args:
            start_s, end_s: (num_ops,) When operations run.
        """
        found = np.zeros(self.num_ops)
        for computing, moving in self.of_rank:
            first_s, last_s = _joined(start_s[moving], end_s[moving])
            if len(first_s):
                moved_s = [_moved_until(now_s[computing], first_s, last_s) for now_s in (start_s, end_s)]
                found[computing] = moved_s[1] - moved_s[0]
        return found


def _joined(start_s: _Floats, end_s: _Floats) -> tuple[_Floats, _Floats]:
    """Intervals in order, those that overlap as one, without those of no length."""
    order = np.argsort(start_s, kind="stable")
    order = order[end_s[order] > start_s[order]]
    if not len(order):
        return start_s[:0], end_s[:0]
    start_s, latest_s = start_s[order], np.maximum.accumulate(end_s[order])
    begins = np.concatenate([[True], start_s[1:] > latest_s[:-1]])
    return start_s[begins], latest_s[np.concatenate([begins[1:], [True]])]


def _moved_until(now_s: _Floats, first_s: _Floats, last_s: _Floats) -> _Floats:
    """Seconds of separate intervals before each of some times."""
    whole_s = np.concatenate([[0.0], np.cumsum(last_s - first_s)])
    place = np.searchsorted(first_s, now_s, side="right")
    latest = np.maximum(place - 1, 0)
    part_s = np.clip(now_s - first_s[latest], 0.0, last_s[latest] - first_s[latest])
    return np.where(place > 0, whole_s[latest] + part_s, 0.0)
