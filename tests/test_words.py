"""Words of docstrings and of strings that programs print: plain terms, not a private vocabulary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("simplan", "app", "executor")

RIDDLE = re.compile(r"(What|Whether|How|Which|Of|As of|The same|Those|That)\b")
MAX_RIDDLES = 0  # docstrings that may begin with a riddle

PRIVATE_WORDS = re.compile(
    r"\b(beside|products? of|exchang(?:e|es|ed|ing)|run(?:s|ning)? (?:\w+ )?again|to spare|too much|dealt|drawn to"
    r"|written out|anew|but for|whatever|whoever|meanwhile|nobody|known from|as (?:many|much|long) as|by name"
    r"|at once|lets? go|moment|workbench)\b",
    re.IGNORECASE,
)

ALLOWED: set[tuple[str, str]] = set()
"""(file, word) of strings that keep the word, e.g. because a page of the documentation quotes them."""


@cache
def _trees() -> dict[str, ast.Module]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _riddles(trees: dict[str, ast.Module]) -> list[str]:
    """File, line and first line of docstrings that begin with a riddle."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if RIDDLE.match(text):
                    found.append(f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def _strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """String literals with a space, without docstrings of modules, classes, functions and attributes."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and " " in node.value
        ):
            yield node


def _private_words(trees: dict[str, ast.Module]) -> dict[tuple[str, str], list[str]]:
    """(file, word in lower case) -> line and string of each literal with a word of the private vocabulary."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, tree in trees.items():
        for node in _strings(tree):
            for match in PRIVATE_WORDS.finditer(str(node.value)):
                found.setdefault((name, match[0].lower()), []).append(f"line {node.lineno}: {node.value!r}")
    return found


def test_first_lines_of_docstrings_are_no_riddles() -> None:
    riddles = _riddles(_trees())
    assert len(riddles) <= MAX_RIDDLES, "begin with a noun or a verb:\n" + "\n".join(riddles)


def test_strings_use_no_private_words() -> None:
    words = _private_words(_trees())
    new = {key: words[key] for key in sorted(words.keys() - ALLOWED)}
    assert not new, "write a plain term:\n" + "\n".join(f"{file}: {word}: {new[file, word]}" for file, word in new)


def test_allowed_words_are_in_use() -> None:
    assert not ALLOWED - _private_words(_trees()).keys(), "remove these from the list"


def test_riddles_and_private_words_are_found() -> None:
    source = '"""What is computed."""\nTEXT = f"{2} messages move beside it"\n"""Computing beside messages."""\n'
    trees = {"a.py": ast.parse(source)}
    assert _riddles(trees) == ["a.py:1: What is computed."]
    assert _private_words(trees) == {("a.py", "beside"): ["line 2: ' messages move beside it'"]}
