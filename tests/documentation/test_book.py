"""The book: its chapters have all their parts, links open the dashboard, and figures are drawn once."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit
from xml.etree import ElementTree

import pytest
import yaml

from app.state import decode
from docs import figures
from docs.figures import Snippet, figures_of, light_and_dark, on_page_markdown, snippets, yaml_files
from simplan.scenario import make_job
from tests.support.pages import BOOK, DOCS

CHAPTERS = [name for name in BOOK if name != "index"]
PAGES = ("", "timeline", "compare", "network", "scale", "run", "learn")
"""Addresses of pages of the dashboard that a chapter may open."""


def text_of(chapter: str) -> str:
    return (DOCS / "book" / f"{chapter}.md").read_text()


def sentences_of(text: str) -> list[list[str]]:
    """Words of the prose: no code, tables, headings and comments."""
    prose = re.sub(r"```.*?```|<!--.*?-->|</?(details|summary)[^>]*>", "", text, flags=re.DOTALL)
    prose = re.sub(r"^([|#]| {4}).*?$", "", prose, flags=re.MULTILINE)
    parts = re.split(r"(?<=[.!?:])\s+|\n\n|\n- ", re.sub(r"\]\([^)]*\)", "]", prose))
    return [words for part in parts if len(words := part.split()) > 1]


def test_there_are_ten_chapters_in_the_order_of_their_numbers() -> None:
    listed = re.findall(r"^\| \[(\d+)\. [^\]]*\]\(([\w-]+)\.md\)", text_of("index"), re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, 11))
    assert {chapter for _, chapter in listed} == set(CHAPTERS)
    for number, chapter in listed:
        assert text_of(chapter).startswith(f"# {number}. ")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_all_its_parts(chapter: str) -> None:
    """Arithmetic, a command, a figure, measured runs, three answers that run, and sentences of a readable length."""
    text = text_of(chapter)
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert any(head.startswith("By hand") for head in heads)
    assert any(head.startswith("The command") for head in heads)
    assert heads[-3:] == ["What real runs measured", "Exercises", "Go on"]
    assert any(snippet.figure[0] for snippet in snippets(text))
    assert "simplan accuracy scenarios/" in text or "benchmarks/" in text
    answers = re.findall(r"<details markdown=\"1\">\n<summary>Answer</summary>\n(.*?)</details>", text, re.DOTALL)
    assert len(answers) == 3
    assert all("assert" in snippet.text for answer in answers for snippet in snippets(answer))
    assert all(list(snippets(answer)) for answer in answers)
    sentences = sentences_of(text)
    number = sum(map(len, sentences))
    assert 700 <= number <= 1500
    assert number / len(sentences) <= 15


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_link_of_a_chapter_opens_its_job_in_the_dashboard(chapter: str) -> None:
    text = text_of(chapter)
    [link] = re.findall(r"\]\((http://localhost:8501/[^)]*)\)", text)
    parts = urlsplit(link)
    assert parts.path.strip("/") in PAGES
    document, view = decode(dict(parse_qsl(parts.query)))
    first = next(iter(yaml_files(text).values()))
    assert (document, view) == (yaml.safe_load(first), {})
    assert make_job(document)


def test_a_figure_is_drawn_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of its block, of a file of its page, or of simplan."""
    drawn: list[str] = []

    def draw(snippet: Snippet, files: dict[str, str]) -> str:
        drawn.append(snippet.figure[0])
        return f"<svg>{len(drawn)}</svg>"

    monkeypatch.setattr(figures, "CACHE", tmp_path)
    monkeypatch.setattr(figures, "draw", draw)
    page = "```yaml\n# a.yaml\nb: 1\n```\n\n<!-- figure: one.svg: A line -->\n```python\ndraw()\n```\n"
    assert figures_of(page) == figures_of(page) == {"one.svg": "<svg>1</svg>"}
    assert figures_of(page.replace("b: 1", "b: 2")) == {"one.svg": "<svg>2</svg>"}
    assert figures_of(page.replace("draw()", "draw(2)")) == {"one.svg": "<svg>3</svg>"}
    monkeypatch.setattr(figures, "_program", lambda: "another version")
    assert figures_of(page) == {"one.svg": "<svg>4</svg>"}


def test_a_block_draws_next_to_the_files_of_its_page() -> None:
    block = Snippet("python", "open('one.svg', 'w').write(open('a.yaml').read())", "figure: one.svg: A line")
    assert figures.draw(block, {"a.yaml": "<svg/>"}) == "<svg/>"
    with pytest.raises(RuntimeError, match=r"(?s)one\.svg: .*ZeroDivisionError"):
        figures.draw(Snippet("python", "1 / 0", block.note), {})


def test_a_page_shows_a_figure_above_its_block_and_no_checks() -> None:
    page = "<!-- figure: one.svg: A line -->\n```python\ndraw()\n```\n\n<!-- check\nassert 1 > 0\n-->\nEnd.\n"
    shown = on_page_markdown(page)
    assert "![A line](one.svg#only-light)\n![A line](one-dark.svg#only-dark)\n" in shown
    assert shown.index("only-dark") < shown.index("draw()")
    assert "assert" not in shown
    assert shown.endswith("End.\n")


def test_a_dark_figure_has_the_colors_of_dark_pages() -> None:
    style = "<style>@media (prefers-color-scheme: dark) {.ink:not([fill=none]){fill:#fff}}</style>"
    light, dark = light_and_dark(f"<svg>{style}<text/></svg>")
    assert light == "<svg><text/></svg>"
    assert ElementTree.fromstring(dark).findtext("style") == ".ink:not([fill=none]){fill:#fff}"
