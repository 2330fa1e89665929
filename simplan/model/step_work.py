"""Work of a step: steps of unequal work are compared by time per sample or token, not by their time alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TOKENS = 1000
"""Tokens of the unit of steps whose sequences have different lengths."""
_MOST_NAMES = 3
"""Steps that a sentence names for one value."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one optimizer step, and the devices that do it.

    Attributes:
        model: Name of the model.
        sample: ``sequence`` or ``image``.
        num_samples: Samples whose gradients the step uses.
        seq_len: Tokens of a sequence, or patches of an image.
        devices: Number and name of the devices.
        num_devices: Number of the devices.
    """

    model: str
    sample: str
    num_samples: int
    seq_len: int
    devices: str
    num_devices: int


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Unit of work in which several steps are compared.

    Attributes:
        name: ``step`` if all steps do equal work, or have nothing in common; otherwise what is counted.
        amounts: Units in each step.
    """

    name: str
    amounts: tuple[float, ...]


def work_unit(works: Sequence[StepWork]) -> WorkUnit:
    """Unit in which the time of steps is compared.

    >>> a = StepWork("m", "sequence", 16, 4096, "8 x d", 8)
    >>> work_unit([a, a]).name, work_unit([a, StepWork("m", "sequence", 8, 4096, "8 x d", 8)])
    ('step', WorkUnit(name='sequence', amounts=(16.0, 8.0)))
    """
    samples = {work.sample for work in works}
    lengths, numbers = {work.seq_len for work in works}, {work.num_samples for work in works}
    if len(samples) > 1 or len(numbers) == len(lengths) == 1:
        return WorkUnit("step", (1.0,) * len(works))
    if len(lengths) == 1 or samples == {"image"}:
        return WorkUnit(works[0].sample, tuple(float(work.num_samples) for work in works))
    return WorkUnit(f"{_TOKENS:,} tokens", tuple(work.num_samples * work.seq_len / _TOKENS for work in works))


def work_differences(names: Sequence[str], works: Sequence[StepWork]) -> tuple[str, ...]:
    """Sentences on what differs between steps besides their plans; empty if nothing does.

    >>> a, b = (StepWork("m", "sequence", size, 4096, "8 x d", 8) for size in (16, 8))
    >>> work_differences("AB", [a, b])
    ('Batches differ: 16 sequences (A), 8 sequences (B).',)
    """
    described = {
        "Models": [work.model for work in works],
        "Batches": [f"{work.num_samples:,} {work.sample}{'s' if work.num_samples > 1 else ''}" for work in works],
        "Sequence lengths": [f"{work.seq_len:,} tokens" for work in works],
        "Devices": [work.devices for work in works],
    }
    sentences = []
    for what, values in described.items():
        owners: dict[str, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            owners.setdefault(value, []).append(name)
        if len(owners) > 1:
            parts = (f"{value} ({_listed(members)})" for value, members in owners.items())
            sentences.append(f"{what} differ: {', '.join(parts)}.")
    return tuple(sentences)


def _listed(names: Sequence[str]) -> str:
    hidden = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
