"""Validation of data against a spec type, with every violation in the user's terms.

pydantic validates. This module translates its errors: the dotted field as the user wrote it, the value, the rule in
plain words, the nearest valid choice, and the location in the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from simplan.document import Path, Place, find_place
from simplan.errors import Problem, SpecError, did_you_mean

__all__ = ["MISSING", "Path", "find_place", "in_file_order", "parse_model", "render_value", "validate"]

MISSING = "is missing"
"""Rule of a problem about a required key that is not there."""

Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN = 60
_OTHER_WORDS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_MAX_PROBLEMS = 50


def parse_model(
    model: type[Model],
    data: Any,
    lines: Mapping[Path, Place] | None = None,
    file: str | None = None,
    *,
    prefix: Path = (),
) -> Model:
    """Validate data as a spec.

    Args:
        lines: Locations of keys in the file, by path from the root of the file.
        file: File name for errors.
        prefix: Path of ``data`` in the file, e.g. ``("plan",)``.

    Raises:
        SpecError: The data is invalid; lists all problems.
    """
    result, problems = validate(model, data, lines, prefix=prefix)
    if result is None:
        raise SpecError(problems, file=file)
    return result


def validate(
    model: type[Model],
    data: Any,
    lines: Mapping[Path, Place] | None = None,
    *,
    prefix: Path = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Model | None, tuple[Problem, ...]]:
    """Validate data like ``parse_model``, but return the problems: ``(spec, ())`` or ``(None, problems)``.

    ``elsewhere`` maps keys that ``model`` does not have to the text to write instead.
    """
    try:
        # JSON mode reads lists as tuples and words as enum members, and is as strict about everything else.
        return model.model_validate_json(json.dumps(data)), ()
    except RecursionError:
        return None, (Problem(field=_dotted(prefix), rule="is nested too deeply").at(*find_place(lines or {}, prefix)),)
    except ValidationError as error:
        details = _without_echoes(error.errors(include_url=False))
        problems = [
            _problem(model, dict(detail), data, lines or {}, prefix, elsewhere) for detail in details[:_MAX_PROBLEMS]
        ]
        if len(details) > _MAX_PROBLEMS:
            problems.append(Problem(field=_dotted(prefix), rule=f"has {len(details) - _MAX_PROBLEMS} more problems"))
        return None, tuple(dict.fromkeys(problems))


def _without_echoes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Errors without lists that are too short only because pydantic dropped their invalid values."""
    wrong = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in wrong]


def in_file_order(problem: Problem) -> tuple[int, int]:
    """Sort key of a problem: order in the file, problems without a location first."""
    return problem.line or 0, problem.column or 0


def render_value(value: Any) -> str:
    """Render a value as the user would write it, shortened.

    >>> render_value("2"), render_value(True), render_value(2.5), render_value([1, "a"])
    ('"2"', 'true', '2.5', '[1, "a"]')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _dotted(path: Path) -> str:
    return ".".join(str(part)[:_MAX_SHOWN] for part in path)


def _problem(
    model: type[BaseModel],
    detail: dict[str, Any],
    data: Any,
    lines: Mapping[Path, Place],
    prefix: Path,
    elsewhere: Mapping[str, str],
) -> Problem:
    kind: str = detail["type"]
    is_key = detail["loc"] and detail["loc"][-1] == "[key]"
    loc: Path = tuple(detail["loc"][:-1] if is_key else detail["loc"])
    value = detail["input"]
    annotation = _annotation_at(model, loc[:-1] if is_key or kind in ("extra_forbidden", "missing") else loc)
    context = detail.get("ctx", {})
    rule, fix = _rule(kind, value, annotation, context, detail["msg"], is_key=is_key, key=loc[-1] if loc else "")
    if kind == "extra_forbidden" and len(loc) == 1 and str(loc[0]) in elsewhere:
        fix = f"write {elsewhere[str(loc[0])]}"
    if not loc and isinstance(value, str) and "preset" in model.model_fields:
        fix = f"write {{preset: {value}}}"
    shown = None if is_key or kind in ("missing", "extra_forbidden") else render_value(value)
    path = (*prefix, *_as_written(loc, data))
    return Problem(field=_dotted(path), value=shown, rule=rule, fix=fix).at(*find_place(lines, path))


def _as_written(loc: Path, data: Any) -> Path:
    """Path without list indices for single values that were written without brackets.

    >>> _as_written(("tp", 0), {"tp": "2"}), _as_written(("tp", 0), {"tp": ["2"]})
    (('tp',), ('tp', 0))
    """
    path: list[str | int] = []
    for part in loc:
        if isinstance(part, int) and isinstance(data, str | int | float):
            continue
        path.append(part)
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = None
    return tuple(path)


def _rule(
    kind: str, value: Any, annotation: Any, context: dict[str, Any], message: str, *, is_key: bool, key: str | int
) -> tuple[str, str]:
    """Rule and fix of one pydantic error."""
    if kind == "missing":
        return MISSING, f"add {key}: ..."
    if kind == "extra_forbidden":
        names = _field_names(annotation)
        name, colon, given = str(key).partition(":")
        if colon and name in names:
            return "is not a known key", f"write {name}: {given}, with a space after the colon"
        return "is not a known key", did_you_mean(str(key), names) or f"known: {', '.join(names)}" * bool(names)
    if kind == "literal_error":
        choices = _choices(annotation, key=is_key)
        rule = "is not a known key" if is_key else "is not a known choice"
        word = _OTHER_WORDS.get(str(value), str(value)) if not is_key else str(key)
        return rule, did_you_mean(word, choices) or f"one of {', '.join(choices)}"
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"must be {word} {_number(context[name])}", ""
    if kind == "too_long":
        return f"must have at most {_number(context['max_length'])} values", ""
    if kind == "too_short" and context["min_length"] > 1:
        return f"must have at least {_number(context['min_length'])} values", ""
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", message)), ""
    rule = _TYPES.get(kind, message[:1].lower() + message[1:])
    return rule, _type_fix(kind, value, str(key))


_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}

_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
}


def _type_fix(kind: str, value: Any, key: str) -> str:
    """Fix for a value of the wrong type."""
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        plain = value.strip().replace("_", "")
        return f"write {plain}, as YAML has no _ in numbers" if "_" in value else f"write {plain} without quotes"
    if kind == "int_type" and isinstance(value, str) and key.endswith("bytes") and (plain := _in_bytes(value)):
        return f"write {plain}: it is a number of bytes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return f"write {'true' if str(value).lower() in ('yes', 'on', '1') else 'false'}"
    if kind == "string_type" and isinstance(value, int | float):
        return f'write "{render_value(value)}"'
    return "give a value or remove the key" if value is None else ""


_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _in_bytes(text: str) -> str:
    """Convert text like ``80GB`` to a number of bytes, as text; empty for other text."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]i?b)\s*", text, re.IGNORECASE)
    return f"{float(match[1]) * _BYTES[match[2].lower()]:.0f}" if match and _is_number(match[1]) else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:g}"


def _annotation_at(model: type[BaseModel], loc: Path) -> Any:
    """Declared type of the value at a path inside ``model``; None for an undeclared path."""
    annotation: Any = model
    for part in loc:
        annotation = _step(_bare(annotation), part)
    return _bare(annotation)


def _step(annotation: Any, part: str | int) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = next((f for name, f in annotation.model_fields.items() if (f.alias or name) == part), None)
        return field.annotation if field is not None else None
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return annotation if part == "[key]" else arguments[1]
    if get_origin(annotation) in (tuple, list):
        return arguments[0]
    return None


def _bare(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None`` from a type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            rest = [part for part in get_args(annotation) if part is not type(None)]
            annotation = rest[0]
        else:
            return annotation


def _field_names(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [field.alias or name for name, field in annotation.model_fields.items()]
    return []


def _choices(annotation: Any, *, key: bool) -> list[str]:
    """Values of a ``Literal``; for an invalid key, those of the enclosing dict's key type."""
    if key:
        annotation = _bare(get_args(annotation)[0]) if get_origin(annotation) is dict else annotation
    return [str(choice) for choice in get_args(annotation)] if get_origin(annotation) is Literal else []


def setting_words(value: Any) -> str:
    """Value of a setting inside of a sentence: text without quotes, anything else as in a file."""
    return value if isinstance(value, str) else render_value(value)
