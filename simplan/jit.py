"""Wrapper of numba's compiler for the simulators. Importing this module imports numba, so import it lazily."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

from numba import njit
from numba.core.dispatcher import Dispatcher

_P = ParamSpec("_P")
_R = TypeVar("_R")


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function at its first call, without the GIL and with IEEE arithmetic (no ``fastmath``).

    The machine code is cached next to the source or in the user's cache folder (``NUMBA_CACHE_DIR`` overrides both). So
    only the first process of an installation waits for the compiler. If neither folder is writable, every process does.
    Who waits is told so once. A change of a function or constant that a module imports by its name, or of the module,
    makes the cached code of all functions of the module outdated.
    """
    return _compiled(function, nogil=True)


def jit_uncounted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function like ``jit`` that allocates nothing, without counting references to its arguments.

    A short function of many arrays counts references for most of its time.
    """
    return _compiled(function, nogil=True, _nrt=False)  # numba's runtime, which counts and allocates


def jit_inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function like ``jit`` that only compiled functions call, without its entry for Python.

    With many arguments, or tuples of many members, the entry takes most of the compilation.
    """
    return _compiled(function, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[_P, _R], **options: Any) -> Callable[_P, _R]:
    kept: Any
    try:
        kept = njit(**options, cache=True)(function)
    except RuntimeError:  # numba: "cannot locate suitable caching directory"
        kept = njit(**options)(function)
        _announce("in every process: no folder for machine code is writable, and NUMBA_CACHE_DIR names none")
    else:
        _stamp_imports(kept)
        _announce_at_compilation(kept)
    compiled: Callable[_P, _R] = kept
    return compiled


def _announce_at_compilation(kept: Any) -> None:
    """Announce the compilation of a function when it begins: its machine code was in no cache.

    Many functions that are decorated are never called in a process, and some of an installation never are.
    """
    run = kept._compiler.compile

    def compile_announced(*args: Any) -> Any:
        _announce("once per installation")
        return run(*args)

    kept._compiler.compile = compile_announced


def _stamp_imports(kept: Any) -> None:
    """Let the stamp of cached code cover compiled functions and constants that its module has imported.

    Machine code contains both, but numba's stamp is of the function's file alone: a hash, or time and size before 0.68.
    """
    stamp = sha256(repr(_index(kept)._source_stamp).encode())
    for name, value in sorted(kept.py_func.__globals__.items()):
        if isinstance(value, Dispatcher):
            if value.py_func.__module__ != kept.py_func.__module__ and value.stats.cache_path:
                stamp.update(repr(_index(value)._source_stamp).encode())
        elif _is_constant(value) and not name.startswith("__"):
            stamp.update(f"{name} = {value!r}\n".encode())
    _index(kept)._source_stamp = stamp.digest()
    _outdate_renames(kept)


def _outdate_renames(kept: Any) -> None:
    """Let cached code of a class that was renamed since count as outdated; numba fails before it compares stamps."""
    load = _index(kept)._load_index

    def load_known() -> Any:
        try:
            return load()
        except (AttributeError, ImportError):  # of a pickled type
            return {}

    _index(kept)._load_index = load_known


def _index(compiled: Any) -> Any:
    return compiled._cache._cache_file


def _is_constant(value: object) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_is_constant, value)))


@cache
def _announce(how_often: str) -> None:
    """Logs the compilation; without a logging configuration that is a line on stderr."""
    logging.getLogger(__name__).warning("compiling the simulator, %s (5 to 20 s)", how_often)
