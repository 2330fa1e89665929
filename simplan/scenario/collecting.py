"""Reads parts of a scenario file and collects what is wrong with them, to be told all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from simplan.document import Document
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.problems import Path, find_place, in_file_order, render_value, validate
from simplan.scenario.elsewhere import where_keys_belong

__all__ = ["Sections"]

_Model = TypeVar("_Model", bound=BaseModel)
_Found = TypeVar("_Found")
_MAX_NAME = 1000


class Sections:
    """Reads parts of one document and collects what is wrong with them.

    Args:
        document: The file's data and places.
        file: Its name.
    """

    def __init__(self, document: Document, file: str) -> None:
        self.file = file
        self._lines = document.lines
        self._searches = isinstance(document.data, dict) and "search" in document.data
        self._problems: list[Problem] = []
        self._all_unmodelled = True

    def read(self, model: type[_Model], data: Any, path: Path) -> _Model | None:
        """Data as a spec; None, with the problems kept, when it is not one."""
        is_section = len(path) <= 1
        elsewhere = where_keys_belong(str(path[0]) if path else "", searches=self._searches) if is_section else {}
        result, problems = validate(model, data, self._lines, prefix=path, elsewhere=elsewhere)
        self._keep(_without_consequences(problems, data, path) if isinstance(data, dict) else problems, modelled=True)
        return result

    def refuse(self, path: Path, rule: str, *, value: Any = None, fix: str = "") -> None:
        """Keeps one problem."""
        shown = None if value is None else render_value(value)
        problem = Problem(field=_dotted(path), value=shown, rule=rule, fix=fix).at(*find_place(self._lines, path))
        self._keep([problem], modelled=True)

    def look_up(self, path: Path, find: Callable[[Any], _Found], name: Any) -> _Found | None:
        """``find(name)``; None, with its problems kept under ``path``, when it raises."""
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            self.refuse(path, "must be a name", value=name, fix="write one word")
            return None
        try:
            return find(name)
        except SpecError as error:
            self.keep(error, path)
            return None

    def keep(self, error: SpecError, path: Path) -> None:
        """Keeps the problems of an error, as problems of the field at ``path``."""
        field, place = _dotted(path), find_place(self._lines, path)
        problems = [replace(problem, field=field).at(*place) for problem in error.problems]
        self._keep(problems, modelled=not isinstance(error, NotModelledError))

    def is_mapping(self, data: Any, path: Path, example: str) -> bool:
        """Whether the data is a mapping; if not, says what to write: a word may be a name in the catalogue."""
        if not isinstance(data, dict):
            preset = data if isinstance(data, str) and data.strip() and len(data) < 40 else example
            self.refuse(path, "must be a mapping (key: value)", value=data, fix=f"write {{preset: {preset}}}")
        return isinstance(data, dict)

    def raise_problems(self) -> None:
        """Raises what was kept, in the order of the file.

        Raises:
            SpecError: There were problems; a NotModelledError when all are options that are not modelled yet.
        """
        if self._problems:
            ordered = sorted(dict.fromkeys(self._problems), key=in_file_order)
            raise (NotModelledError if self._all_unmodelled else SpecError)(ordered, file=self.file)

    def _keep(self, problems: tuple[Problem, ...] | list[Problem], *, modelled: bool) -> None:
        self._problems.extend(problems)
        if problems and modelled:
            self._all_unmodelled = False


def _without_consequences(problems: Sequence[Problem], data: dict[str, Any], path: Path) -> list[Problem]:
    """Without fields that nobody wrote, where one that somebody wrote is wrong: these are made from the others."""

    def key(problem: Problem) -> str:
        return problem.field.removeprefix(f"{_dotted(path)}.").partition(".")[0]

    written = [problem for problem in problems if problem.value is None or key(problem) in data]
    return written if any(problem.value is not None for problem in written) else list(problems)


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)
