"""Optimizers: one table (``table``), and what an entry says (``facts``)."""

from __future__ import annotations

from simplan.optimizers.facts import OptimizerFacts, Situation, StateFormat, StoredTensor, Widths
from simplan.optimizers.table import (
    LAYERWISE,
    OPTIMIZERS,
    REFUSED_WORDS,
    UPDATES,
    OptimizerName,
    UpdateName,
    newton_schulz_products,
    projection_products,
)

__all__ = [
    "LAYERWISE", "OPTIMIZERS", "REFUSED_WORDS", "UPDATES", "OptimizerFacts", "OptimizerName", "Situation",
    "StateFormat", "StoredTensor", "UpdateName", "Widths", "newton_schulz_products",
    "projection_products",
]  # fmt: skip
