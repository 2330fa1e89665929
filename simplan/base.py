"""The base of everything a user can ask for: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

__all__ = ["Count", "NonNegative", "Positive", "Spec"]

Count = Annotated[int, Field(ge=1, le=10**12)]
"""A whole number of things, at least one and not absurd."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Spec(BaseModel):
    """A frozen value type. Unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    _hash: int | None = PrivateAttr(default=None)

    def __hash__(self) -> int:
        """Of the fields, mappings included; kept, because a search looks values up by it."""
        if self._hash is None:
            fields = tuple(_hashable(getattr(self, name)) for name in type(self).model_fields)
            self._hash = hash((type(self).__name__, fields))
        return self._hash

    def __eq__(self, other: object) -> bool:
        """By type and fields; what is remembered beside them does not count."""
        if type(self) is not type(other):
            return NotImplemented
        return self is other or all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __getstate__(self) -> dict[Any, Any]:
        """Without the hash: another process hashes strings in another way."""
        return {**super().__getstate__(), "__pydantic_private__": {"_hash": None}}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, validated like any other (pydantic's own would skip that and keep cached properties).

        Args:
            update: Fields to change.
            deep: Without effect: values are immutable.
        """
        del deep
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | dict(update or {})))


def _hashable(value: Any) -> Hashable:
    """A value that hashes: a mapping by its items, whatever their order."""
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(each) for each in value)
    hashed: Hashable = value
    return hashed
