"""Checks of the catalog's files, to which users add entries and profiles: what is wrong in one is a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from simplan.document import Path, parse_yaml
from simplan.errors import Problem, SpecError, file_error
from simplan.problems import MISSING, render_value, validate

_FOLDER = "simplan/catalog"
_TYPES: dict[type, str] = {
    dict: "must be a mapping (key: value)",
    list: "must be a list",
    str: "must be text",
    int: "must be a number",
}
_NEEDED: dict[str, dict[str, type]] = {
    "devices": {"sources": dict},
    "links": {"sources": dict},
    "clusters": {
        "device": str,
        "devices_per_node": int,
        "nics_per_node": int,
        "nic_gbit": int,
        "host_memory_bytes": int,
        "host_memory_bandwidth_bytes_per_s": int,
        "source": str,
    },
    "topologies": {"kind": str, "source": str},
    "models": {"published_parameters": int, "source": str},
    "reliability": {"description": str, "fitted_on": str, "causes": list, "sources": dict},
    "spot_zones": {"source": str},
}
"""Kind -> keys that the catalog itself reads of an entry, with their types; specs validate all others."""

Model = TypeVar("Model", bound=BaseModel)


def file_of(name: str) -> str:
    """Name of a file of the catalog in errors."""
    return f"{_FOLDER}/{name}.yaml"


def yaml_error(text: str, name: str) -> SpecError:
    """Error about a file of the catalog that is not YAML."""
    try:
        parse_yaml(text, file_of(name))  # says where
    except SpecError as error:
        return error
    return file_error(file_of(name), "this is not YAML", "check quotes, indentation and colons")


def check_file(data: Any, name: str) -> None:
    """Check that a file of the catalog holds mappings.

    Raises:
        SpecError: It holds something else.
    """
    sections = mapping(data, name)
    for key in (key for key in (name, "references") if key in sections):
        mapping(sections[key], name, key)


def mapping(data: Any, name: str, *path: str) -> dict[str, Any]:
    """The data, which must be a mapping with keys of text; ``path`` is that of its key in the file.

    Raises:
        SpecError: It is something else.
    """
    if not isinstance(data, dict):
        fix = "give a value or remove the key" if data is None and path else ""
        problem = Problem(field=".".join(path), value=render_value(data), rule=_TYPES[dict], fix=fix)
        raise SpecError(problem, file=file_of(name))
    if (wrong := next((key for key in data if not isinstance(key, str)), None)) is not None and len(path) != 1:
        raise SpecError(Problem(field=".".join((*path, str(wrong))), rule="is not a known key"), file=file_of(name))
    return data


def texts(data: Any, name: str, *path: str) -> dict[str, str]:
    """The data, which must be a mapping to text.

    Raises:
        SpecError: It is something else.
    """
    values = mapping(data, name, *path)
    for key, value in values.items():
        if not isinstance(value, str):
            field = ".".join((*path, str(key)))
            raise SpecError(Problem(field=field, value=render_value(value), rule=_TYPES[str]), file=file_of(name))
    return {str(key): value for key, value in values.items()}


def check_entry(kind: str, name: str, entry: Any) -> dict[str, Any]:
    """An entry of a kind, with what the catalog itself reads of it.

    Raises:
        SpecError: A key is missing, or of another type.
    """
    fields = mapping(entry, kind, kind, name)
    problems = []
    for key, needed in _NEEDED[kind].items():
        field = f"{kind}.{name}.{key}"
        if key not in fields:
            problems.append(Problem(field=field, rule=MISSING, fix=f"add {key}: ..."))
        elif not isinstance(fields[key], (int, float) if needed is int else needed) or isinstance(fields[key], bool):
            problems.append(Problem(field=field, value=render_value(fields[key]), rule=_TYPES[needed]))
    for number, cause in enumerate(fields["causes"] if kind == "reliability" and not problems else ()):
        if not _is_cause(cause):
            field, fix = f"{kind}.{name}.causes.{number}", "give name, per (device, node, link or job) and mtbf_h"
            problems.append(Problem(field=field, value=render_value(cause), rule="is no cause of failures", fix=fix))
    if problems:
        raise SpecError(problems, file=file_of(kind))
    if _NEEDED[kind].get("sources"):
        said, field = texts(fields["sources"], kind, kind, name, "sources"), f"{kind}.{name}.sources"
        if kind == "reliability":
            asked = ("scope", *(f"causes.{cause['name']}" for cause in fields["causes"]))
            missing = (key for key in asked if key not in said)
            problems += [Problem(field=f"{field}.{key}", rule=MISSING, fix=f"add {key}: ...") for key in missing]
    if problems:
        raise SpecError(problems, file=file_of(kind))
    return fields


def _is_cause(cause: Any) -> bool:
    if not isinstance(cause, dict) or not isinstance(cause.get("name"), str) or not isinstance(cause.get("per"), str):
        return False
    hours = cause.get("mtbf_h")
    return isinstance(hours, int | float) and hours > 0


def validated(model: type[Model], fields: Mapping[str, Any], name: str, path: Path = ()) -> Model:
    """Spec of an entry.

    Args:
        name: File of the catalog.
        path: Path of the entry in its file.

    Raises:
        SpecError: A key is unknown, or has a wrong value; lists all of them.
    """
    try:
        return model.model_validate(fields)
    except ValidationError:
        result, problems = validate(model, to_jsonable_python(fields), prefix=path)
        if result is None:
            raise SpecError(problems, file=file_of(name)) from None
        return result


@contextmanager
def entry_of(name: str, *path: str) -> Iterator[None]:
    """Let errors about values of an entry name its file and the path of the entry, where they name no file."""
    try:
        yield
    except SpecError as error:
        if error.file is not None:
            raise
        problems = [
            replace(problem, field=".".join(filter(None, (*path, problem.field)))) for problem in error.problems
        ]
        raise type(error)(problems, file=file_of(name)) from None
