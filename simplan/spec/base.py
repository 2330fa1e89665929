"""The base of everything a user can ask for: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "NonNegative", "Positive", "Spec"]

Count = Annotated[int, Field(ge=1, le=10**12)]
"""A whole number of things, at least one and not absurd."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Spec(BaseModel):
    """A frozen value type. Unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
