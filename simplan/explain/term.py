"""Terms of an explanation, and the exposed part of communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ExplainedTerm:
    """A term of a sum, or a figure.

    Attributes:
        group: Group of the term, e.g. ``compute`` or ``activations``.
        name: Name of the term.
        value: Value in ``unit``.
        unit: ``s``, ``bytes``, or empty.
        formula: The formula with numbers filled in.
        provenance: Source of the cost estimate; None if the term has none.
        relative_std: Relative standard deviation of the cost estimate; None if the term has none.
    """

    group: str
    name: str
    value: float
    unit: str
    formula: str
    provenance: str | None = None
    relative_std: float | None = None


def exposed_s(
    computing_s: NDArray[np.float64], moving_s: NDArray[np.float64], labels: NDArray[np.integer], num_labels: int
) -> NDArray[np.float64]:
    """``(num_labels,)`` Exposed seconds by label; concurrent communication shares exposed time equally.

    Args:
        computing_s: ``(2, intervals)`` Starts and ends of what the rank computes.
        moving_s: ``(2, communications)`` Starts and ends of collectives and P2P sends.
        labels: ``(communications,)`` Label of each communication, 0 to ``num_labels - 1``.
    """
    times_s = np.concatenate([*computing_s, *moving_s])
    num_computing, num_moving = computing_s.shape[1], moving_s.shape[1]
    change = np.repeat([1, -1, 1, -1], [num_computing, num_computing, num_moving, num_moving])
    label = np.concatenate([np.full(2 * num_computing, -1), labels, labels])
    order = np.argsort(times_s, kind="stable")
    change, label, lengths_s = change[order], label[order], np.diff(times_s[order])

    def active(counts: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.cumsum(change * counts)[:-1]

    moving = active(label >= 0)
    exposed = (moving > 0) & (active(label < 0) == 0)
    each_s = lengths_s[exposed] / moving[exposed]
    return np.array([active(label == one)[exposed] @ each_s for one in range(num_labels)])
