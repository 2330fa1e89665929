"""Words of docstrings, of strings that programs print and of Markdown: plain terms, not a private vocabulary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.sources import ROOT, docstrings, nodes, python_files

PACKAGES = ("simplan", "app", "executor")

RIDDLE = re.compile(r"(What|Whether|How|Which|Of|As of|The same|Those|That)\b")
MAX_RIDDLES = 0  # docstrings that may begin with a riddle

PRIVATE_WORDS = re.compile(
    r"\b(beside|products? of|exchang(?:e|es|ed|ing)|run(?:s|ning)? (?:\w+ )?again|to spare|too much|dealt|drawn to"
    r"|written out|anew|but for|whatever|whoever|meanwhile|nobody|known from|as (?:many|much|long) as|by name"
    r"|at once|lets? go|moment|workbench)\b",
    re.IGNORECASE,
)


def _sources() -> dict[str, str]:
    return {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for package in PACKAGES
        for file in python_files(package)
    }


def _pages() -> list[Path]:
    """Markdown of the repository that describes its present state."""
    folders = (ROOT / "docs", ROOT / "scenarios", ROOT / "benchmarks")
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in sorted(folder.rglob("*.md")))]
    return [file for file in files if file.name != "CHANGELOG.md" and "notebooks" not in file.parts]


def _riddles(sources: Mapping[str, str]) -> list[str]:
    """File, line and first line of docstrings that begin with a riddle."""
    return [
        f"{name}:{line}: {docstring.value.splitlines()[0]}"
        for name, source in sources.items()
        for line, docstring in docstrings(source)
        if isinstance(docstring.value, str) and RIDDLE.match(docstring.value)
    ]


def _strings(source: str) -> Iterator[ast.Constant]:
    """String literals with a space, without docstrings of modules, classes, functions and attributes."""
    alone = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in alone
            and " " in node.value
        ):
            yield node


def _private_words(sources: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """(file, word in lower case) -> line and string of each literal with a word of the private vocabulary."""
    lines_of: dict[tuple[str, str], list[str]] = {}
    for name, source in sources.items():
        for node in _strings(source):
            for match in PRIVATE_WORDS.finditer(str(node.value)):
                lines_of.setdefault((name, match[0].lower()), []).append(f"line {node.lineno}: {node.value!r}")
    return lines_of


def test_first_lines_of_docstrings_are_no_riddles() -> None:
    riddles = _riddles(_sources())
    assert len(riddles) <= MAX_RIDDLES, "begin with a noun or a verb:\n" + "\n".join(riddles)


def test_strings_use_no_private_words() -> None:
    words = _private_words(_sources())
    assert not words, "write a plain term:\n" + "\n".join(
        f"{file}: {word}: {words[file, word]}" for file, word in words
    )


def test_markdown_uses_no_private_words() -> None:
    """Except the changelog and dated notebooks, and Adam's moments."""
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]}: {line.strip()}"
        for file in _pages()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in PRIVATE_WORDS.finditer(line.replace("`moment`", ""))
    ]
    assert not lines, "write a plain term:\n" + "\n".join(lines)


def test_riddles_and_private_words_are_found() -> None:
    source = '"""What is computed."""\nTEXT = f"{2} messages move beside it"\n"""Computing beside messages."""\n'
    sources = {"a.py": source}
    assert _riddles(sources) == ["a.py:1: What is computed."]
    assert _private_words(sources) == {("a.py", "beside"): ["line 2: ' messages move beside it'"]}
