"""Programs in sequence: several steps, or parts of steps, of the same ranks as one Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import STREAMS, OpColumns, Program, Stream


def in_sequence(parts: Sequence[Program], *, carried: Stream) -> Program:
    """One Program whose ranks execute several Programs one after the other; ranks do not wait for each other.

    A rank begins a part when its own operations of the parts before have ended. Operations on the carried stream may go
    on beside later parts; only the last part waits for them.

    Args:
        parts: Programs of one ``Lowerer``, whose later ones know the names and works of the earlier ones.
        carried: Stream whose operations go on.

    Returns:
        A Program with the table and the resting memory of the longest part.
    """
    columns = [each.columns for each in parts]
    first_ops = np.cumsum([0, *(len(each) for each in parts)])
    main = parts[int(np.argmax(np.diff(first_ops)))]
    on_carried = STREAMS.index(carried)
    waits: list[list[NDArray[np.int64]]] = []
    last: dict[int, dict[int, int]] = {rank: {} for rank in main.ranks}  # by rank and stream, the last operation
    for number, part in enumerate(parts):
        waits.append(_waits(part, int(first_ops[number]), last, on_carried, all_end=number == len(parts) - 1))
        for rank, indices in part.rank_indices.items():
            streams = part.columns.stream[indices]
            for stream in np.unique(streams).tolist():
                last[rank][stream] = int(indices[np.flatnonzero(streams == stream)[-1]] + first_ops[number])
    lengths = np.array([len(each) for each in (wait for part in waits for wait in part)], np.int64)
    joined = [wait for part in waits for wait in part]
    meetings = np.cumsum([0, *(1 + int(each.meeting.max(initial=-1)) for each in columns)])
    moved = [
        np.where(each.meeting < 0, -1, each.meeting + start) for each, start in zip(columns, meetings, strict=False)
    ]
    fields = {
        name: np.concatenate([getattr(each, name) for each in columns])
        for name in ("rank", "stream", "kind", "name", "stage", "action", "microbatch", "work", "memory")
    }
    joined_columns = OpColumns(
        **fields,
        meeting=np.concatenate(moved),
        wait_first=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        wait=np.concatenate(joined).astype(np.int32) if joined else np.zeros(0, np.int32),
    )
    newest = parts[-1] if len(parts[-1].works) >= len(main.works) else main
    return replace(main, columns=joined_columns, names=newest.names, works=newest.works, effects=newest.effects)


def _waits(
    part: Program, first_op: int, last: dict[int, dict[int, int]], on_carried: int, *, all_end: bool
) -> list[NDArray[np.int64]]:
    """Waits of each operation of a part; those that are the first on their stream wait for the parts before.

    Args:
        first_op: Number of operations in the parts before.
        last: By rank and stream, the last operation of the parts before.
        on_carried: Index of the carried stream.
        all_end: True if the part also waits for the carried stream.
    """
    c = part.columns
    found = [
        c.wait[start:end].astype(np.int64) + first_op
        for start, end in zip(c.wait_first, c.wait_first[1:], strict=False)
    ]
    if not first_op:
        return found
    for rank, indices in part.rank_indices.items():
        before = [index for stream, index in last[rank].items() if all_end or stream != on_carried]
        _, firsts = np.unique(c.stream[indices], return_index=True)
        for index in indices[firsts].tolist():
            found[index] = np.concatenate([found[index], before]).astype(np.int64)
    return found
