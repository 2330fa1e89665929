"""The base of everything a user can ask for: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "NonNegative", "Positive", "Spec"]

Count = Annotated[int, Field(ge=1, le=10**12)]
"""A whole number of things, at least one and not absurd."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Spec(BaseModel):
    """A frozen value type. Unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, validated like any other (pydantic's own would skip that and keep cached properties).

        Args:
            update: Fields to change.
            deep: Without effect: values are immutable.
        """
        del deep
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | dict(update or {})))
