"""Definitions of terms from simplan, as help next to numbers."""

from __future__ import annotations

from functools import cache

from simplan.cli.terminal.definitions import definitions

__all__ = ["FORMULAS", "meaning"]

FORMULAS = (
    (
        "MFU",
        r"\frac{\text{model FLOPs of a step}}{\text{step time} \times \text{devices} \times \text{dense peak}}",
        "Model FLOPs utilization: causal attention counted half, nothing that is computed again. "
        "Shown with it is the count with full attention, which most papers use (PaLM).",
    ),
    (
        "HFU",
        r"\text{MFU} \times \left(1 + \frac{\text{FLOPs computed again}}{\text{model FLOPs}}\right)",
        "Hardware FLOPs utilization.",
    ),
    (
        "Bubble fraction, GPipe and 1F1B",
        r"\frac{p-1}{m+p-1}",
        "For equal stages and free messages: p ranks, m microbatches.",
    ),
    (
        "Bubble fraction, interleaved 1F1B",
        r"\frac{p-1}{v\,m+p-1}",
        "With v stages a rank, m a multiple of p. Predictions take real stages and messages instead.",
    ),
    (
        "Split of a step",
        r"\text{step} = \text{compute} + \text{recompute} + \text{exposed communication} + \text{wait} + \text{host}"
        r" + \text{optimizer}",
        "Of each rank; the six exclude each other.",
    ),
    (
        "Overlap",
        r"\frac{\text{compute time while communicating}}{\text{communication time}}",
        "What of communication is hidden.",
    ),
    (
        "Device memory",
        r"\text{device} = \underbrace{\text{allocated} + \text{rounding and fragmentation}}_{\text{reserved}}"
        r" + \text{context}",
        "Of each rank at its own worst instant.",
    ),
    (
        "Signed error",
        r"\frac{\text{predicted} - \text{measured}}{\text{measured}}",
        "To be compared with the spread of the repeats.",
    ),
)
"""Name, formula (LaTeX) and description of each metric."""


@cache
def _definitions() -> dict[str, str]:
    return {row["name"]: row["definition"] + (f" ({row['unit']})" if row["unit"] else "") for row in definitions()}


def meaning(name: str) -> str:
    """The definition of a metric or of a word in reports, as ``simplan show metrics`` has it.

    >>> meaning("allocated")
    'memory held by tensors'
    """
    return _definitions()[name]
