"""Definitions of terms: formulas for the page Learn, and help texts next to numbers."""

from __future__ import annotations

from functools import cache

from simplan.cli.terminal.definitions import definitions

FORMULAS = (
    (
        "MFU",
        r"\frac{\text{model FLOPs of a step}}{\text{step time} \times \text{devices} \times \text{dense peak}}",
        "Model FLOPs utilization: causal attention counted half, without recomputation. "
        "Most papers count full attention (PaLM); predictions show both.",
    ),
    (
        "HFU",
        r"\text{MFU} \times \left(1 + \frac{\text{recomputed FLOPs}}{\text{model FLOPs}}\right)",
        "Hardware FLOPs utilization.",
    ),
    (
        "Bubble fraction, GPipe and 1F1B",
        r"\frac{p-1}{m+p-1}",
        "For equal stages and zero-cost communication: p ranks, m microbatches.",
    ),
    (
        "Bubble fraction, interleaved 1F1B",
        r"\frac{p-1}{v\,m+p-1}",
        "v stages per rank, m a multiple of p. Predictions use the actual stages and communication.",
    ),
    (
        "Split of a step",
        r"\text{step} = \text{compute} + \text{recompute} + \text{exposed communication} + \text{wait} + \text{host}"
        r" + \text{optimizer}",
        "Per rank; the six parts are exclusive.",
    ),
    (
        "Overlap",
        r"\frac{\text{compute time while communicating}}{\text{communication time}}",
        "Fraction of communication that compute hides.",
    ),
    (
        "Device memory",
        r"\text{device} = \underbrace{\text{allocated} + \text{rounding and fragmentation}}_{\text{reserved}}"
        r" + \text{context}",
        "Per rank, at the peak of the rank.",
    ),
    (
        "Signed error",
        r"\frac{\text{predicted} - \text{measured}}{\text{measured}}",
        "Compare with the spread of the repeats.",
    ),
)
"""Name, formula (LaTeX) and description of each metric."""


@cache
def _definitions() -> dict[str, str]:
    return {row["name"]: row["definition"] + (f" ({row['unit']})" if row["unit"] else "") for row in definitions()}


def meaning(name: str) -> str:
    """Definition of a metric or of a term in reports, as ``simplan show metrics`` prints it.

    >>> meaning("allocated")
    'memory held by tensors'
    """
    return _definitions()[name]
