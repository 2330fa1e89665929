"""Executes a notebook in place: ``python docs/execute.py docs/notebooks/python-api.ipynb``.

Code cells share one namespace. A cell's outputs are what it prints and its last expression: the text form, and the
HTML form or Plotly figure where there is one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Copy of a notebook (nbformat 4) with the outputs of its code cells."""
    namespace: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _outputs("".join(cell["source"]), namespace, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, namespace: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Outputs of one cell."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"output_type": "execute_result", "metadata": {}, "execution_count": count, "data": _forms(value)}
        outputs.append(data)
    return outputs


def _forms(value: Any) -> dict[str, Any]:
    """Forms of a value by media type."""
    if hasattr(value, "to_plotly_json"):
        return {"application/vnd.plotly.v1+json": json.loads(value.to_json()), "text/plain": ["a Plotly figure"]}
    forms: dict[str, Any] = {"text/plain": repr(value).splitlines(True)}
    if hasattr(value, "_repr_html_"):
        forms["text/html"] = value._repr_html_().splitlines(True)
        if "Styler" in type(value).__name__:
            forms["text/plain"] = value.to_string().splitlines(True)
    return forms


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        done = executed(json.loads(file.read_text(encoding="utf-8")))
        file.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
