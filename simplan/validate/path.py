"""Critical path of a step: the chain of pieces over all ranks whose durations sum to the step time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from simplan.validate.activity import ActivityShare, Piece

__all__ = ["critical_pieces"]


def critical_pieces(rows: Mapping[int, Sequence[Piece]], step_time_s: float) -> tuple[Piece, ...]:
    """Follow the critical path backward from the rank that ends last.

    At a wait or the start of a transfer, the path continues on the rank that arrived last. A wait without a known cause
    stays on the path.

    Args:
        rows: By rank, pieces of its step from 0 to ``step_time_s``.
        step_time_s: Step time in seconds.

    Returns:
        Pieces on the path, last first, cut to their part on the path; they sum to ``step_time_s``.
    """
    ends = {rank: [piece.end_s for piece in row] for rank, row in rows.items()}

    def at(rank: int, time_s: float) -> tuple[int, Piece]:
        """Index and piece just before a time."""
        index = min(bisect_left(ends[rank], time_s), len(ends[rank]) - 1)
        return index, rows[rank][index]

    rank = min(rows, key=lambda r: _idle_tail_s(rows[r]))
    now_s, jumps, path = step_time_s, 0, []
    while now_s > 0.0:
        index, piece = at(rank, now_s)
        if piece.share is ActivityShare.WAIT and jumps <= len(rows):
            following = rows[rank][index + 1] if index + 1 < len(rows[rank]) else None
            cause = None if following is None or following.transfer is None else following.transfer.last_rank
            if cause is not None and cause != rank and cause in rows:
                rank, jumps = cause, jumps + 1
                continue
        start_s = max(0.0, piece.start_s)
        path.append(Piece(start_s, now_s, piece.share, piece.part, piece.transfer))
        now_s, jumps = start_s, 0
        transfer = piece.transfer
        if transfer is not None and transfer.start_s == start_s and transfer.last_rank in rows:
            assert transfer.last_rank is not None
            rank = transfer.last_rank
    return tuple(path)


def _idle_tail_s(row: Sequence[Piece]) -> float:
    """Seconds of wait or unexplained time at the end of a rank's step."""
    tail_s = 0.0
    for piece in reversed(row):
        if piece.share not in (ActivityShare.WAIT, ActivityShare.UNEXPLAINED):
            break
        tail_s += piece.duration_s
    return tail_s
