"""Compilation, with types that survive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

__all__ = ["compiled"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """The function in machine code, which is kept on disk beside it, and compiled again when it has changed."""
    return cast(_Function, njit(cache=True, nogil=True)(function))
