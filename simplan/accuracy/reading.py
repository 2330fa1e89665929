"""Reader of files of published runs, with checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from simplan.accuracy.recipe import Recipe, Recipes
from simplan.accuracy.schema import Framework, PublishedRun, identity_problems
from simplan.base import Spec
from simplan.document import Document, parse_yaml
from simplan.errors import Problem, SpecError
from simplan.io import read_yaml
from simplan.problems import find_place, parse_model

_SUFFIXES = (".yaml", ".yml")


class RunFile(Spec):
    """Schema of a file of published runs.

    Attributes:
        meta: Origin of the runs, as free-form data of their collector.
        recipes: By framework, settings of the runs beyond the published fields.
    """

    meta: dict[str, Any]
    recipes: dict[Framework, tuple[Recipe, ...]] = Field(default_factory=dict)
    runs: tuple[PublishedRun, ...]


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file and its runs.

    Attributes:
        file: Path as given, or path within a given folder.
        runs: Published runs; None if the file contains other data.
    """

    file: str
    runs: tuple[PublishedRun, ...] | None
    recipes: Recipes = field(default_factory=dict)


def read_published(paths: Iterable[Path]) -> list[ReadFile]:
    """Read files, and all ``*.yaml`` and ``*.yml`` files below folders.

    Raises:
        SpecError: A file cannot be read, a run violates the schema or is inconsistent, or two runs have one id.
    """
    read = [_checked(read_yaml(file), str(file)) for file in _files(paths)]
    seen: dict[str, str] = {}
    for found in read:
        for index, run in enumerate(found.runs or ()):
            if run.id in seen:
                rule = f"is the id of a run of {seen[run.id]} as well"
                problem = Problem(field=f"runs.{index}.id", value=run.id, rule=rule, fix="leave one of the two out")
                raise SpecError(problem, file=found.file)
            seen[run.id] = found.file
    return read


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)  # a missing file is reported when it is read
            continue
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not found:
            problem = Problem(field="", rule="holds no file of runs (*.yaml)", fix="name another folder")
            raise SpecError(problem, file=str(path))
        files += found
    return list(dict.fromkeys(files))


def parse_published(text: str, name: str) -> ReadFile:
    """Parse a file of runs from YAML text; ``name`` is for errors and tables.

    Raises:
        SpecError: See ``read_published``.
    """
    return _checked(parse_yaml(text, name), name)


def _checked(document: Document, file: str) -> ReadFile:
    if not isinstance(document.data, dict) or "runs" not in document.data:
        return ReadFile(file, None)
    whole = parse_model(RunFile, document.data, document.lines, file)
    problems = [problem for index, run in enumerate(whole.runs) for problem in _placed(run, index, document)]
    if problems:
        raise SpecError(problems, file=file)
    return ReadFile(file, whole.runs, whole.recipes)


def _placed(run: PublishedRun, index: int, document: Document) -> Iterable[Problem]:
    for problem in identity_problems(run):
        place = find_place(document.lines, ("runs", index, *problem.field.split(".")))
        yield replace(problem, field=f"{run.id}: {problem.field}").at(*place)
