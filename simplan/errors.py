"""The errors simplan raises, and nothing else.

::

    SimplanError                     exit code
    ├── SpecError (ValueError)         2   a file, field, plan or option is wrong
    │   └── NotModelledError           2   an option that simplan does not model yet, refused by name
    ├── ProgramError (ValueError)      2   an action table is incomplete, out of order or deadlocks
    ├── NoFeasiblePlanError            3   a search found nothing that fits
    └── RunError (RuntimeError)        4   ranks failed, hung or could not start

What a user can cause is a ``SimplanError`` and reads as a sentence; what only a bug can cause is an ``assert``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "NoFeasiblePlanError",
    "NotModelledError",
    "Problem",
    "ProgramError",
    "RunError",
    "SimplanError",
    "SpecError",
    "did_you_mean",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One violated rule, as the user can act on it.

    Attributes:
        field: The field as the user wrote it, dotted (``plan.pp``); empty when the whole file is meant.
        value: What was given, already rendered; None when nothing was.
        rule: What must hold, as a clause (``must divide num_hidden_layers = 12``).
        fix: The nearest thing that would work (``use 2, 3 or 4``); may be empty.
        line: 1-based line in the file; None when there is no file.
        column: 1-based column; None when unknown.
    """

    field: str
    rule: str
    value: str | None = None
    fix: str = ""
    line: int | None = None
    column: int | None = None

    def sentence(self) -> str:
        """``plan.pp = 5: must divide ...; use 4 or 6``."""
        subject = self.field
        if self.value is not None:
            subject = f"{subject} = {self.value}" if subject else self.value
        text = f"{subject}: {self.rule}" if subject else self.rule
        return f"{text}; {self.fix}" if self.fix else text

    def at(self, line: int | None, column: int | None = None) -> Problem:
        """The same problem with its place in a file."""
        return replace(self, line=line, column=column)


class SimplanError(Exception):
    """Base of every error a user can cause. ``exit_code`` is what the command line returns."""

    exit_code = 2


class SpecError(SimplanError, ValueError):
    """What was asked is wrong; carries every violated rule at once.

    Args:
        problems: All problems found (at least one).
        file: The file they are in, when there is one.
    """

    def __init__(self, problems: Problem | Iterable[Problem], *, file: str | None = None) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.file = file
        assert self.problems, "an error needs at least one problem"
        super().__init__(self.text())

    def text(self) -> str:
        """One line per problem, each led by ``file:line:column:`` where known."""
        lines = []
        for problem in self.problems:
            place = self.file or ""
            if problem.line is not None:
                place += f":{problem.line}"
                if problem.column is not None:
                    place += f":{problem.column}"
            lines.append(f"{place}: {problem.sentence()}" if place else problem.sentence())
        return "\n".join(lines)

    def in_file(self, file: str) -> SpecError:
        """The same error, naming the file it came from."""
        return type(self)(self.problems, file=file)


class NotModelledError(SpecError):
    """An option that is known but not modelled yet: refused by name, never ignored."""


class ProgramError(SimplanError, ValueError):
    """An action table that is incomplete, out of order or would deadlock."""


class NoFeasiblePlanError(SimplanError):
    """No plan in the space fits."""

    exit_code = 3


class RunError(SimplanError, RuntimeError):
    """Ranks failed, hung or could not be started."""

    exit_code = 4


_MOST_LISTED = 24


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The fix for a misspelt word: the nearest known ones, or all when few, or an empty string.

    What is written the same but for case and punctuation counts first, then what begins with the word or has it inside,
    then what has similar letters, then what the word has inside.

    >>> did_you_mean("gpip", ["naive", "gpipe", "1f1b"])
    'did you mean gpipe?'
    >>> did_you_mean("H100", ["a100-sxm-80gb", "h100-pcie-80gb", "h100-sxm-80gb"])
    'did you mean h100-sxm-80gb or h100-pcie-80gb?'
    >>> did_you_mean("H20", ["h200-sxm", "h20-sxm-96gb"])
    'did you mean h20-sxm-96gb?'
    >>> did_you_mean("meta-llama/Meta-Llama-3-8B", ["llama3-8b", "llama3-70b"])
    'did you mean llama3-8b?'
    >>> did_you_mean("h200-sxm-80gb", ["h100-sxm-80gb", "a100-sxm-80gb"])
    'did you mean h100-sxm-80gb or a100-sxm-80gb?'
    >>> did_you_mean("zigzag", ["naive", "gpipe", "1f1b"])
    'known: 1f1b, gpipe, naive'
    """
    names, small = sorted(set(known)), str(word).lower()
    bare = _bare(small)
    same = [name for name in names if _bare(name) == bare]
    begin = [name for name in names if len(bare) > 2 and _bare(name).startswith(bare)]
    whole = [name for name in begin if bare[-1].isdigit() and _bare(name.split("-")[0]) == bare]  # H20 is no H200
    hold = [name for name in names if len(bare) > 2 and bare in _bare(name)]
    held = [name for name in names if len(_bare(name)) > 4 and _bare(name) in bare]
    close = same or difflib.get_close_matches(small, whole or begin or hold, n=4, cutoff=0.0)
    close = close or difflib.get_close_matches(small, names, n=3, cutoff=0.7) or held
    if close:
        return f"did you mean {' or '.join(close)}?"
    if names and len(names) <= _MOST_LISTED:
        return f"known: {', '.join(names)}"
    return ""


def _bare(word: str) -> str:
    """Letters and digits only, in small letters."""
    return "".join(filter(str.isalnum, word.lower()))
