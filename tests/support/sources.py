"""Sources of the project as syntax trees, which several tests read: parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from simplan.program.program import gc_paused

ROOT = Path(__file__).resolve().parents[2]


@cache
def python_files(*packages: str) -> tuple[Path, ...]:
    """Modules below folders of the project."""
    return tuple(sorted(path for package in packages for path in (ROOT / package).rglob("*.py")))


@cache
@gc_paused()  # collections would take three times as long as parsing
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a module, the module first, as ``ast.walk`` yields them."""
    return tuple(ast.walk(ast.parse(source)))


def docstrings(source: str) -> list[tuple[int, ast.Constant]]:
    """Docstrings of a module and of its classes and functions, each with the line of what it documents."""
    return [
        (getattr(node, "lineno", 1), node.body[0].value)
        for node in nodes(source)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    ]
