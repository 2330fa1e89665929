"""Base class of everything that a user can specify: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import to_jsonable_python

from simplan.problems import parse_model

MAX_COUNT = 10**12
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A number of things, from 1 to 10**12."""
Natural = Annotated[int, Field(ge=0, le=2**60)]
"""A number that may be zero, of bytes for example; sums of several are counted in 64 bits."""
MAX_DEVICES = 2**18
NumDevices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
"""A number of devices or nodes; no cluster has more."""
Rate = Annotated[float, Field(ge=1, le=1e21, allow_inf_nan=False)]
"""Bytes or FLOPs per second, from 1 to a thousand times what the fastest rack does."""
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
"""Duration of one operation, up to an hour."""
MIN_GBIT, MAX_GBIT = 1e-3, 1e6
Gbit = Annotated[float, Field(ge=MIN_GBIT, le=MAX_GBIT, allow_inf_nan=False)]
"""Bandwidth in Gbit/s, from 1 Mbit/s to 1 Pbit/s."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _in_one_line(value: object) -> object:
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    if any(unicodedata.category(character) == "Cc" for character in line):
        raise ValueError("must not have control characters")
    return line


Line = Annotated[str, BeforeValidator(_in_one_line), Field(max_length=10_000)]
"""A text that is printed in one line: line ends become spaces, and other control characters are refused."""


class Spec(BaseModel):
    """A frozen value type. Unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @cached_property
    def _hash(self) -> int:
        """Hash of the fields, mappings included; cached, because a search looks values up by it."""
        fields = tuple(_hashable(getattr(self, name)) for name in type(self).model_fields)
        return hash((type(self).__name__, fields))

    def __hash__(self) -> int:
        """See ``_hash``."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Equality of type and fields; cached attributes do not count."""
        if type(self) is not type(other):
            return NotImplemented
        return self is other or all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __getstate__(self) -> dict[Any, Any]:
        """State without the hash: another process hashes strings differently."""
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "_hash"}}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, validated like any other (pydantic's own would skip that and keep cached properties).

        Args:
            deep: Without effect: values are immutable.

        Raises:
            SpecError: There is no such field, or a value is wrong; lists all problems.
        """
        del deep
        return self.from_fields({name: getattr(self, name) for name in type(self).model_fields} | dict(update or {}))

    def with_changes(self, **changes: Any) -> Self:
        """Copy with other values of some fields.

        Raises:
            SpecError: There is no such field, or a value is wrong; lists all problems.
        """
        return self.from_fields(
            self._without_defaults() | {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Value with these fields, which may be derived from what a user wrote.

        Raises:
            SpecError: There is no such field, or a value is wrong; lists all problems.
        """
        try:
            return cls(**fields)
        except ValidationError:
            return parse_model(cls, to_jsonable_python(fields))

    def _without_defaults(self) -> dict[str, Any]:
        """Values of the fields, except those with a default that depends on other fields."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def _hashable(value: Any) -> Hashable:
    """A hashable form of a value: a mapping becomes the set of its items."""
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(each) for each in value)
    hashed: Hashable = value
    return hashed


class SpecOfKind(Spec):
    """A section whose keys depend on its ``kind``. Keys of other kinds are errors, and are not written."""

    keys_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]]
    """Keys of each kind besides ``kind``."""

    kind: Any

    @property
    def _own_keys(self) -> tuple[str, ...]:
        return self.keys_of_kinds[self.kind]

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Self:
        wrong = [key for key in self.model_fields_set if key not in ("kind", *self._own_keys)]
        if wrong:
            known = ", ".join(self._own_keys) or "no other key"
            raise ValueError(f"has {', '.join(sorted(wrong))}, and {self.kind} has {known}; remove it")
        return self

    @model_serializer(mode="wrap")
    def _of_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only keys of the kind, so that what is written can be read."""
        return {key: value for key, value in write(self).items() if key in ("kind", *self._own_keys)}

    def _without_defaults(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("kind", *self._own_keys)}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Fields of the short form: those of the kind."""
        yield from self._without_defaults().items()


def named_kind(data: Any) -> Any:
    """The mapping of a section that is given as the name of its kind, such as ``compression: fp16``."""
    return {"kind": data} if isinstance(data, str) else data
