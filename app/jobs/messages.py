"""What a worker tells the server: pickled one after the other. Both are ours and of one version."""

from __future__ import annotations

from typing import Any, NamedTuple

from simplan.errors import Problem

__all__ = ["Done", "Failed", "Update"]


class Update(NamedTuple):
    """How far the work is.

    Attributes:
        done, total: Parts of the work.
        doing: What is done at present, in words.
        value: What is known so far; None for nothing.
    """

    done: int
    total: int
    doing: str
    value: Any = None


class Done(NamedTuple):
    """The end, with what came of it."""

    value: Any


class Failed(NamedTuple):
    """The end, with the reason.

    Attributes:
        problems: What was wrong with the question.
        not_modelled: Whether simplan does not model it, rather than that it is wrong.
        bug: What happened where the question was right.
    """

    problems: tuple[Problem, ...] = ()
    not_modelled: bool = False
    bug: str = ""
