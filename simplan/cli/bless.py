"""``simplan check --bless``: writes today's prediction into the expectations that are regression values.

Only an expectation with a ``value`` whose ``why`` begins with ``blessed`` is touched: a value that comes from a closed
form or a publication is not ours to change. The number is replaced in place, so comments and layout stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from simplan.io import write_text
from simplan.scenario import METRICS, Expectation, evaluate, load_scenario

__all__ = ["bless"]

_MARK = "blessed"


def bless(file: Path, prediction: Mapping[str, Any]) -> list[str]:
    """Rewrites the blessed values of a scenario file that no longer hold.

    Args:
        file: A valid scenario file.
        prediction: ``Prediction.to_json()`` of it.

    Returns:
        One line per change: file, metric, old and new value.
    """
    with file.open(encoding="utf-8", newline="") as stream:  # newline="": line ends stay as they are
        text = stream.read()
    changes, edits = [], []
    for expectation, node in zip(load_scenario(file).expect, _value_nodes(text), strict=True):
        if node is None or not expectation.why.startswith(_MARK) or evaluate(expectation, prediction).passed:
            continue
        actual = METRICS[expectation.metric].read(prediction)
        if actual is None:
            continue
        new = _written(expectation, actual, prediction)
        edits.append((node.start_mark.index, node.end_mark.index, new))
        changes.append(f"{file}:{node.start_mark.line + 1}: {expectation.metric}: {node.value} -> {new}")
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    if edits:
        write_text(file, text)
    return changes


def _written(expectation: Expectation, actual: float | bool, prediction: Mapping[str, Any]) -> str:
    """With 12 digits, or with as many as the tolerance asks for."""
    if isinstance(actual, bool):
        return str(actual).lower()
    short = f"{actual:.12g}"
    holds = evaluate(expectation.model_copy(update={"value": float(short)}), prediction).passed
    return short if holds else repr(actual)


def _value_nodes(text: str) -> Iterator[yaml.ScalarNode | None]:
    """The scalar after ``value:`` of each expectation, None where there is none."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    expectations = _child(root, "expect")
    for item in expectations.value if isinstance(expectations, yaml.SequenceNode) else ():
        value = _child(item, "value")
        yield value if isinstance(value, yaml.ScalarNode) else None


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
