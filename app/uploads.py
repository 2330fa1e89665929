"""Files that people drop, as plain data: limited in size, read by simplan's own readers, and never kept."""

from __future__ import annotations

import json
from typing import Any

from simplan.document import parse_yaml
from simplan.errors import Problem, SpecError
from simplan.interop.huggingface import model_fields_from_config
from simplan.io import MAX_YAML_BYTES

__all__ = ["config_fields", "scenario_data"]

_MAX_CONFIG_BYTES = 2 * 2**20
_MOST_CHARS = 80


def config_fields(content: bytes, name: str) -> dict[str, Any]:
    """A Hugging Face ``config.json`` as the section ``model`` of a scenario.

    Args:
        content: Of the file.
        name: Of the file, for errors.

    Raises:
        SpecError: It is too large, not JSON, or no model that simplan knows.
    """
    if len(content) > _MAX_CONFIG_BYTES:
        raise _refused(name, f"is larger than {_MAX_CONFIG_BYTES // 2**20} MiB")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        raise _refused(name, "is not JSON") from None
    if not isinstance(config, dict):
        raise _refused(name, "is no JSON object")
    title = config.get("_name_or_path")
    return model_fields_from_config(
        config, name=title[:_MOST_CHARS] if isinstance(title, str) and title else "own model"
    )


def scenario_data(content: bytes, name: str) -> dict[str, Any]:
    """A scenario as plain data; whether it is right is for simplan to say.

    Args:
        content: YAML.
        name: Of the file, for errors.

    Raises:
        SpecError: It is too large, no text, or not a YAML mapping.
    """
    if len(content) > MAX_YAML_BYTES:
        raise SpecError(Problem(field=name, rule=f"is larger than {MAX_YAML_BYTES // 2**20} MiB"))
    try:
        data = parse_yaml(content.decode("utf-8-sig"), name).data
    except UnicodeDecodeError:
        raise SpecError(Problem(field=name, rule="is not UTF-8 text", fix="save it as UTF-8")) from None
    if not isinstance(data, dict):
        raise SpecError(Problem(field=name, rule="must be a mapping (key: value)", fix="write model: {...} and so on"))
    return data


def _refused(name: str, rule: str) -> SpecError:
    return SpecError(Problem(field=name, rule=rule, fix="drop the config.json of a model"))
