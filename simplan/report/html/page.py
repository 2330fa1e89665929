"""One HTML page for several JSON documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import PurePath
from typing import Any, TypeVar

from simplan.errors import Problem, SpecError
from simplan.goodput.result import GOODPUT_SCHEMA_VERSION
from simplan.prediction import PREDICTION_SCHEMA_VERSION
from simplan.report.html.goodput import goodput_section
from simplan.report.html.sections import (
    comparison_section,
    difference_section,
    explanation_section,
    prediction_section,
    predictions_section,
    search_section,
    sweep_section,
)
from simplan.report.predictions import compared_predictions

_T = TypeVar("_T")

_SECTIONS: Mapping[str, tuple[int, str, Callable[[Mapping[str, Any]], str]]] = {
    "prediction": (PREDICTION_SCHEMA_VERSION, "Prediction", prediction_section),
    "predictions": (1, "Comparison", predictions_section),
    "search": (1, "Search", search_section),
    "explanation": (1, "Explanation", explanation_section),
    "goodput": (GOODPUT_SCHEMA_VERSION, "Whole run", goodput_section),
    "sweep": (1, "Sweep", sweep_section),
    "difference": (1, "Difference", difference_section),
    "comparison": (1, "Comparison with a run", comparison_section),
    "logged_comparison": (1, "Comparison with a log", comparison_section),
}
"""By kind of document: the schema version that is read, a title, and the section."""
KINDS = tuple(_SECTIONS)
"""Kinds of documents that a report shows."""
_PREDICT = "write one with `simplan predict SCENARIO -o prediction.json`"
_OF_RUN = "give prediction.json and comparison.json from the folder of the run"
_OTHER_FIXES: Mapping[str, str] = {
    "run": _OF_RUN,
    "demo": _OF_RUN,
    "largest": "write a search with `simplan search SCENARIO -o search.json`",
    "largest_by_hardware": "write a search with `simplan search SCENARIO -o search.json`",
}
"""By kind of a document that a report does not show: how to get one that it shows, unless it is ``_PREDICT``."""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2128;--soft:#57606a;--line:#d0d7de;--band:#f4f6f8;
--link:#0b5fbd}
@media screen and (prefers-color-scheme:dark){:root{
--paper:#0d1117;--ink:#e6edf3;--soft:#9da7b3;--line:#30363d;--band:#161b22;--link:#6cb0ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;border-bottom:1px solid var(--line)}
a{color:var(--link)}
nav{margin:.5rem 0}
nav a{display:inline-block;margin-right:1rem}
p.soft,figcaption,caption,dt{color:var(--soft)}
.verdict{font-weight:600}
.figures{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}
.figures div{background:var(--band);border:1px solid var(--line);border-radius:6px;padding:.5rem .9rem}
dt{font-size:.85rem}
dd{margin:0;font-size:1.1rem;font-weight:600}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}
caption{text-align:left;padding:.25rem 0}
th,td{text-align:left;vertical-align:top;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line)}
.number{text-align:right;white-space:nowrap}
figure{margin:1.25rem 0}
.bar div{display:flex;height:1.4rem;background:var(--band);border:1px solid var(--line);border-radius:4px;
overflow:hidden}
.bar ul{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;padding:0;margin:.35rem 0 0;font-size:.85rem}
.bar i{display:inline-block;width:.75rem;height:.75rem;margin-right:.35rem;border-radius:2px}
.bars table{width:100%;margin:.35rem 0}
.bars th{font-weight:400;text-align:right;white-space:nowrap;width:1%;border:0;padding:.1rem .9rem .1rem 0}
.bars td{border:0;padding:.1rem 0;white-space:nowrap}
.bars i{display:inline-block;height:.9rem;max-width:75%;margin-right:.5rem;border-radius:2px;vertical-align:middle}
.picture{overflow-x:auto}
.picture svg{max-width:100%;height:auto}
details{margin:1rem 0}
summary{cursor:pointer;color:var(--link)}
@media screen and (max-width:60rem){.picture svg{max-width:none}}
@media screen and (max-width:40rem){td.long:nth-child(n+3){min-width:18rem}}
@media print{html{font-size:10px}
body{max-width:none;padding:0;font-size:1rem;print-color-adjust:exact}
nav,details{display:none}
.wide,.picture{overflow:visible}
h2,figcaption,caption,thead{break-after:avoid}
figure,tr,.figures{break-inside:avoid}}
"""


def html_report(documents: Iterable[tuple[str, Mapping[str, Any]]], *, written: str) -> str:
    """Returns an HTML page with a section for each document. It loads nothing and runs nothing.

    Predictions are in one section each, below a table of all if there are several.

    Args:
        documents: File, for errors and to tell equal names apart, and content of JSON documents of ``KINDS``.
        written: Sentence on who wrote the page and when.

    Raises:
        SpecError: A document is of no kind that a report shows, was written by another version, or lacks a part.
    """
    named = _with_distinct_names([pair for file, document in documents for pair in _single(file, document)])
    predictions = [document for _, document in named if document["kind"] == "prediction"]
    if len(predictions) > 1:
        file = next(file for file, document in named if document["kind"] == "prediction")
        named.insert(0, (file, _read(file, "predictions", lambda: compared_predictions(predictions))))
    sections, links = [], []
    for place, (file, document) in enumerate(named):
        title, body = _section(file, document)
        links.append(f'<a href="#s{place}">{escape(title)}</a>')
        sections.append(f'<section id="s{place}"><h2>{escape(title)}</h2>{body}</section>')
    heading = escape("simplan report")
    nav = f"<nav>{''.join(links)}</nav>" if len(links) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{heading}</title><style>{_STYLE}</style></head>\n<body><header><h1>{heading}</h1>"
        f'<p class="soft">{escape(written)}</p>{nav}</header>\n<main>{"".join(sections)}</main></body></html>\n'
    )


def _single(file: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A document, or each of its predictions.

    Raises:
        SpecError: A report does not show the document.
    """
    kind, version = str(document.get("kind")), document.get("schema_version")
    if kind not in _SECTIONS:
        fix = _OTHER_FIXES.get(kind, _PREDICT)
        raise SpecError(Problem(field="kind", value=kind, rule="is not shown in a report", fix=fix), file=file)
    known = _SECTIONS[kind][0]
    if version != known:
        rule, fix = f"is of another version of simplan; this one reads {known}", "write the file again"
        raise SpecError(Problem(field="schema_version", value=str(version), rule=rule, fix=fix), file=file)
    if kind != "predictions":
        yield file, document
        return
    for prediction in _read(file, kind, lambda: [*document["predictions"]]):
        yield from _single(file, prediction)


def _with_distinct_names(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Documents; those of one kind that share a name have that of their file, or a number if they share that too."""
    groups: dict[tuple[str, str], list[int]] = {}
    named = [*documents]
    for place, (_, document) in enumerate(named):
        if "name" in document:
            groups.setdefault((document["kind"], document["name"]), []).append(place)
    for (_, name), places in groups.items():
        if len(places) == 1:
            continue
        files = [named[place][0] for place in places]
        numbered = [f"{name} {number + 1}" for number in range(len(places))]
        choices = ([PurePath(file).stem for file in files], files, numbered)
        names = next(choice for choice in choices if len(set(choice)) == len(choice))
        for place, new in zip(places, names, strict=True):
            named[place] = (named[place][0], {**named[place][1], "name": new})
    return named


def _section(file: str, document: Mapping[str, Any]) -> tuple[str, str]:
    kind = str(document["kind"])
    _, title, section = _SECTIONS[kind]
    body = _read(file, kind, lambda: section(document))
    if kind == "predictions":
        names = [prediction["name"] for prediction in document["predictions"]]
    elif "name" in document:
        names = [document["name"]]
    else:
        names = [document[key]["name"] for key in ("first", "second") if key in document]
    return f"{title}: {' and '.join(names)}" if names else title, body


def _read(file: str, kind: str, read: Callable[[], _T]) -> _T:
    """Result of a function that reads a document.

    Raises:
        SpecError: The document lacks a part.
    """
    try:
        return read()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration) as error:
        rule = f"lacks a part of a {kind}, or has another one ({type(error).__name__}: {error})"
        raise SpecError(Problem(field="file", rule=rule, fix="write the file again"), file=file) from None
