"""Pages of the documentation: their snippets, run as a reader would run them, and the outputs that they show.

    python -m tests.support.pages [PAGE ...]

writes the outputs anew where the program prints others (``make outputs``); what changed is reviewed as a diff.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from docs.figures import Snippet
from docs.figures import snippets as snippets_of
from simplan.scenario import load_scenario
from simplan.scenario.search import load_search
from simplan.validate.logged_run import LoggedRun, parse_measured
from tests.cli.conftest import server

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
APART = ("how-to/custom-schedule.md",)
"""Pages whose snippets go together in a test of their own."""
BOOK = tuple(sorted(path.stem for path in (DOCS / "book").glob("*.md")))
"""Chapters of the book, and its first page."""
BEGINNINGS = ("output: begins", "search-output", "predict-output")
"""Comments above the first lines of an output."""
BASE = {
    "model": {"preset": "gpt2-124m"},
    "cluster": {"preset": "dgx-h100"},
    "training": {"global_batch_size": 8, "precision": "fp32"},
    "plan": {"dp_replicate": 8},
}
"""A scenario that fragments of YAML are put into."""


def hand_written() -> list[str]:
    """Pages that are not written by the program, as paths in docs/; notebooks keep the state of their day."""
    files = (path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md")))
    return ["../README.md", *(file for file in files if not file.startswith("notebooks/"))]


def snippets(page: str) -> Iterator[Snippet]:
    return snippets_of((DOCS / page).read_text())


def has_code(snippet: Snippet) -> bool:
    return snippet.is_run and snippet.language in ("sh", "python", "yaml")


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Snippet, str]]:
    """Files are written, then commands and Python run; yields each output that is shown, with all that was printed.

    Python blocks of a page share their names with its checks, which see the last output as ``printed``. A block that
    draws a figure must write it.
    """
    (folder / "bin").mkdir()
    command = folder / "bin" / "simplan"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m simplan "$@"\n')
    command.chmod(0o755)
    (folder / "scenarios").symlink_to(ROOT / "scenarios")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(folder)  # where a script of the page lies
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    listed = list(snippets(page))
    for number, snippet in enumerate(listed):
        if snippet.note.startswith("file: "):
            (folder / snippet.note.removeprefix("file: ")).write_text(snippet.text)
        elif snippet.language == "yaml" and snippet.is_run:
            _read_yaml(snippet.text, folder, number)
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for snippet in listed:
        if snippet.language == "sh" and snippet.is_run:
            whole = "<<'END'" in snippet.text  # a here-document needs its lines
            for line in [snippet.text] if whole else snippet.text.splitlines():
                if whole or line.startswith("simplan "):
                    code, printed, said = _run_line(line, folder)
                    assert code == 0, f"{line}: {said}"
        elif snippet.language == "python":
            shown = io.StringIO()
            names["printed"] = printed
            with contextlib.redirect_stdout(shown):
                exec(_compiled(snippet.text, f"block {listed.index(snippet)} of {page}"), names)
            printed = printed if snippet.note == "check" else shown.getvalue()
        if snippet.figure[0]:
            assert ElementTree.parse(folder / snippet.figure[0]).getroot().tag.endswith("svg"), snippet.note
        if snippet.note in ("output", "output: ends", *BEGINNINGS):
            yield snippet, printed


def _compiled(text: str, name: str) -> CodeType:
    """Code whose errors show their line."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec")


def shown_part(snippet: Snippet, printed: str) -> str:
    """Part of what was printed that a snippet shows: all, or as many lines as it has."""
    lines, number = printed.splitlines(keepends=True), snippet.text.count("\n")
    if snippet.note in BEGINNINGS:
        lines = lines[:number]
    elif snippet.note == "output: ends":
        lines = lines[-number:]
    return "".join(lines)


def _run_line(line: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, output and messages of a line of shell; a plain command is forked, as tests/cli does it."""
    if re.search(r"[|<>$&;*]", line):
        done = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr
    out, err = folder / "bin" / "out", folder / "bin" / "err"
    files = {"folder": str(folder), "out": str(out), "err": str(err)}
    code = server().ask({"args": shlex.split(line)[1:], "environment": dict(os.environ), "limit_s": 600, **files})
    return code, out.read_text(), err.read_text()


def _read_yaml(text: str, folder: Path, number: int) -> None:
    """Writes a file where its first line names one, and loads it."""
    named = re.match(r"# (\S+\.yaml)\n", text)
    file = folder / (named.group(1) if named else f"unnamed-{number}.yaml")
    file.parent.mkdir(exist_ok=True)
    data = yaml.safe_load(text)
    if "plan" in data:
        file.write_text(text)
        load_scenario(file)
    elif "search" in data:
        file.write_text(text)
        load_search(file)
    elif data.keys() <= {*BASE, "software"}:
        file.write_text(yaml.safe_dump(BASE | data))
        load_scenario(file)
    else:
        file.write_text(text)
        assert isinstance(parse_measured(text, file.name), LoggedRun)


def main(pages: list[str]) -> None:
    for page in pages or [page for page in hand_written() if page not in APART and any(map(has_code, snippets(page)))]:
        file = (DOCS / page).resolve()
        text, start = file.read_text(), 0
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            for snippet, printed in run_page(page, Path(folder), monkeypatch):
                old, new = (
                    f"```{snippet.language}\n{part}```" for part in (snippet.text, shown_part(snippet, printed))
                )
                place = text.index(old, start)
                text, start = text[:place] + new + text[place + len(old) :], place + len(new)
        if text != file.read_text():
            file.write_text(text)
            sys.stdout.write(f"wrote {page}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
