"""Exceptions that simplan raises.

::

    SimplanError                     exit code
    ├── SpecError (ValueError)         2   a file, field, plan or option is wrong
    │   └── NotModelledError           2   an option that simplan does not model yet
    ├── ProgramError (ValueError)      2   an action table is incomplete, out of order or deadlocks
    ├── NoFeasiblePlanError            3   a search found no feasible plan
    └── RunError (RuntimeError)        4   ranks failed, hung or could not start

User errors raise a ``SimplanError`` that reads as a sentence. Conditions that only a bug can cause are ``assert``
statements.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One violated rule, with the field, the value and a fix.

    Attributes:
        field: Field as the user wrote it, dotted (``plan.pp``); empty for the whole file.
        value: Given value, rendered as text; None if no value was given.
        rule: Violated rule as a clause (``must divide num_hidden_layers = 12``).
        fix: Nearest valid choice (``use 2, 3 or 4``); may be empty.
        line: 1-based line in the file; None if there is no file.
        column: 1-based column; None if unknown.
    """

    field: str
    rule: str
    value: str | None = None
    fix: str = ""
    line: int | None = None
    column: int | None = None

    def sentence(self) -> str:
        """Sentence of the problem, e.g. ``plan.pp = 5: must divide ...; use 4 or 6``."""
        subject = self.field
        if self.value is not None:
            subject = f"{subject} = {self.value}" if subject else self.value
        text = f"{subject}: {self.rule}" if subject else self.rule
        return f"{text}; {self.fix}" if self.fix else text

    def at(self, line: int | None, column: int | None = None) -> Problem:
        """Copy of the problem with a location in its file."""
        return replace(self, line=line, column=column)


class SimplanError(Exception):
    """Base of every error that a user can cause; ``exit_code`` is the exit code of the command line."""

    exit_code = 2


_MAX_LINE = 4000
"""Characters of a line of an error: names and values of a file can have millions."""
_FEWEST_ALIKE, _MAX_LIKE_IT = 5, 6
"""Problems of one rule and fix that take one line together, and fields that this line names in addition."""


class SpecError(SimplanError, ValueError):
    """Invalid input; contains every violated rule.

    Args:
        problems: All problems, at least one.
        file: File of the problems; None if there is no file.
    """

    def __init__(self, problems: Problem | Iterable[Problem], *, file: str | None = None) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.file = file
        assert self.problems, "an error needs at least one problem"
        super().__init__(self.text())

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps problems and file when an error passes between processes."""
        return partial(type(self), file=self.file), (self.problems,)

    def text(self) -> str:
        """One line per problem, prefixed by ``file:line:column:`` where known; one line for many of the same rule."""
        alike: dict[tuple[str, str], list[Problem]] = {}
        for problem in self.problems:
            alike.setdefault((problem.rule, problem.fix), []).append(problem)
        lines = []
        for group in alike.values():
            if len(group) < _FEWEST_ALIKE:
                lines += [(self.problems.index(problem), self._line(problem)) for problem in group]
            else:
                fields = list(dict.fromkeys(problem.field for problem in group[1:] if problem.field))
                named = ", ".join([*fields[:_MAX_LIKE_IT], *["..."] * (len(fields) > _MAX_LIKE_IT)])
                like_it = f" (and {len(group) - 1} like it{f': {named}' if named else ''})"
                lines.append((self.problems.index(group[0]), self._line(group[0]) + like_it))
        return "\n".join(line for _, line in sorted(lines))

    def _line(self, problem: Problem) -> str:
        parts = (self.file or "", problem.line, problem.column)
        place = ":".join(str(part) for part in parts if part is not None)
        line = f"{place}: {problem.sentence()}" if place else problem.sentence()
        return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}"

    @property
    def sentences(self) -> str:
        """The problems in one line, without their places."""
        return "; ".join(problem.sentence() for problem in self.problems)

    def in_file(self, file: str) -> SpecError:
        """Copy of the error that names its file."""
        return type(self)(self.problems, file=file)


def file_error(file: str, rule: str, fix: str = "", line: int | None = None, column: int | None = None) -> SpecError:
    """Error about a file rather than one of its fields."""
    return SpecError(Problem(field="", rule=rule, fix=fix, line=line, column=column), file=file)


class NotModelledError(SpecError):
    """A known option that is not modeled yet; the error names it, and it is never ignored."""


class ProgramError(SimplanError, ValueError):
    """An incomplete, misordered or deadlocking action table."""


class NoFeasiblePlanError(SimplanError):
    """No plan of the search space is feasible."""

    exit_code = 3


class RunError(SimplanError, RuntimeError):
    """Ranks that failed, hung or could not start."""

    exit_code = 4


_MAX_LISTED = 30


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Fix for a misspelled word: the nearest known words, else all known words if few, else an empty string.

    Order of preference: equal except for case and punctuation; begins with the word or contains it; similar letters;
    contained in the word.

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
    >>> did_you_mean("nics_per_node", ["devices_per_node", "num_nodes"])
    'known: devices_per_node, num_nodes'
    >>> did_you_mean("zigzag", ["naive", "gpipe", "1f1b"])
    'known: 1f1b, gpipe, naive'
    """
    names, small = sorted({_bare(name): name for name in sorted(known)}.values()), str(word).lower()
    bare = _bare(small)
    same = [name for name in names if _bare(name) == bare]
    begin = [name for name in names if len(bare) > 2 and _bare(name).startswith(bare)]
    whole = [name for name in begin if bare[-1].isdigit() and _bare(name.split("-")[0]) == bare]  # H20 is no H200
    hold = [name for name in names if len(bare) > 2 and bare in _bare(name)]
    held = [name for name in names if len(_bare(name)) > 4 and _bare(name) in bare]
    close = same or difflib.get_close_matches(small, whole or begin or hold, n=4, cutoff=0.0)
    similar = difflib.get_close_matches(small, names, n=3, cutoff=0.7)
    close = close or [name for name in similar if _differs_in_spelling(small, name)] or held
    if close:
        return f"did you mean {' or '.join(close)}?"
    if names and len(names) <= _MAX_LISTED:
        return f"known: {', '.join(names)}"
    return ""


def _bare(word: str) -> str:
    """Letters and digits of a word, in lowercase."""
    return "".join(filter(str.isalnum, word.lower()))


def _differs_in_spelling(word: str, name: str) -> bool:
    """False if the parts that two names do not share are different words, as in nics_per_node and devices_per_node."""
    parts, others = word.split("_"), name.lower().split("_")
    rest = "_".join(part for part in parts if part not in others)
    other = "_".join(part for part in others if part not in parts)
    return not (rest.isalpha() and other.isalpha()) or difflib.SequenceMatcher(None, rest, other).ratio() >= 0.6
