"""Wrapper of numba's compiler for the simulators. Importing this module imports numba, so import it lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function at its first call, without the GIL and with IEEE arithmetic (no ``fastmath``).

    The machine code is cached next to the source or in the user's cache folder (``NUMBA_CACHE_DIR`` overrides both). So
    only the first process of an installation waits for the compiler. If neither folder is writable, every process does.
    """
    try:
        kept: Callable[_P, _R] = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba: "cannot locate suitable caching directory"
        kept = njit(nogil=True)(function)
    return kept
