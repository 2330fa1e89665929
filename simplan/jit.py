"""numba's compiler as the engines use it. Importing this module imports numba; nothing does so before it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

__all__ = ["jit"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiled at its first call, without the interpreter's lock and with IEEE arithmetic (no ``fastmath``).

    The machine code is kept beside the source or in the user's cache folder (``NUMBA_CACHE_DIR`` overrides both), so
    that only the first process of an installation waits for the compiler; where neither can be written to, every
    process does.
    """
    try:
        kept: Callable[_P, _R] = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba: "cannot locate suitable caching directory"
        kept = njit(nogil=True)(function)
    return kept
