"""Figures of the documentation, drawn when the site is built: blocks of code with the note ``figure: NAME.svg: words``.

mkdocs runs this file as a hook (``mkdocs.yml``). A block draws the file that its note names, from the YAML files of its
page. The picture is kept in ``.cache/figures`` under the hash of the block, these files and all of simplan, so that a
second build draws nothing. Pages show it in a light and in a dark form.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "figures"
_BLOCK = r"(?:<!-- ([^>]*) -->\n+)?```(\w*)\n(.*?)```|<!-- check\n(.*?)-->"
_FIGURE = "figure: "
_NIGHT = re.compile(r"<style>@media \(prefers-color-scheme: dark\) \{(.*)\}</style>")


@dataclass(frozen=True)
class Snippet:
    """A block of code: its language and text, and the comment above it.

    A comment that begins with ``check`` is Python with the note ``check``: claims of the text, which a test holds.
    """

    language: str
    text: str
    note: str

    @property
    def is_run(self) -> bool:
        """True unless the note says why not."""
        return not self.note.startswith("not run: ")

    @property
    def figure(self) -> tuple[str, str]:
        """File name and words of the figure that the block draws; empty for none."""
        if not self.note.startswith(_FIGURE):
            return "", ""
        name, _, words = self.note.removeprefix(_FIGURE).partition(": ")
        return name, words


def snippets(text: str) -> Iterator[Snippet]:
    """Blocks of code of a page, in order."""
    for note, language, body, check in re.findall(_BLOCK, text, re.DOTALL):
        yield Snippet("python", check, "check") if check else Snippet(language, body, note)


def yaml_files(text: str) -> dict[str, str]:
    """YAML blocks whose first line names a file, by that name."""
    named = (re.match(r"# (\S+\.yaml)\n", snippet.text) for snippet in snippets(text) if snippet.language == "yaml")
    return {match.group(1): match.string for match in named if match}


def figures_of(text: str) -> dict[str, str]:
    """SVG of every figure of a page by its file name; from the cache where nothing has changed."""
    return {snippet.figure[0]: _figure(snippet, yaml_files(text)) for snippet in snippets(text) if snippet.figure[0]}


def _figure(snippet: Snippet, files: dict[str, str]) -> str:
    parts = [snippet.note, snippet.text, *(f"{name}\n{text}" for name, text in files.items()), _program()]
    parts += [(ROOT / name).read_text() for name in re.findall(r"scenarios/[\w./-]+\.yaml", snippet.text)]
    kept = CACHE / f"{sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.svg"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(draw(snippet, files))
    return kept.read_text()


@cache
def _program() -> str:
    """Hash of every file of simplan that a figure may depend on."""
    digest = sha256()
    for path in sorted((ROOT / "simplan").rglob("*")):
        if path.suffix in (".py", ".yaml", ".json", ".csv"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def draw(snippet: Snippet, files: dict[str, str]) -> str:
    """SVG that a block writes, when it runs next to the YAML files of its page."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scenarios").symlink_to(ROOT / "scenarios")
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        words = [sys.executable, "-m", "simplan"]
        commands = [[sys.executable, "-c", snippet.text]]
        if snippet.language == "sh":
            lines = snippet.text.replace("\\\n", " ").splitlines()
            commands = [[*words, *line.split()[1:]] for line in lines if line.startswith("simplan ")]
        for command in commands:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{snippet.figure[0]}: {done.stderr}")
        return (Path(folder) / snippet.figure[0]).read_text()


def light_and_dark(svg: str) -> tuple[str, str]:
    """The picture without, and only with, its colors for dark pages: readers switch a page, not their system."""
    return _NIGHT.sub("", svg), _NIGHT.sub(r"<style>\1</style>", svg)


def on_files(files: Any, config: Any) -> Any:
    """Adds the figures of all pages to the site; mkdocs calls it."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        if page.generated_by is None:
            folder = Path(page.src_uri).parent
            for name, svg in figures_of(page.content_string).items():
                for stem, form in zip((Path(name).stem, f"{Path(name).stem}-dark"), light_and_dark(svg), strict=True):
                    files.append(File.generated(config, (folder / f"{stem}.svg").as_posix(), content=form))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Shows each figure above its block, and drops checks; mkdocs calls it."""
    for snippet in snippets(markdown):
        name, words = snippet.figure
        if name:
            stem = Path(name).stem
            images = f"![{words}]({stem}.svg#only-light)\n![{words}]({stem}-dark.svg#only-dark)"
            shown = f'<div class="drawing" markdown>\n{images}\n</div>\n'
            markdown = markdown.replace(f"<!-- {snippet.note} -->\n", shown, 1)
    return re.sub(r"<!-- check\n.*?-->\n?", "", markdown, flags=re.DOTALL)
