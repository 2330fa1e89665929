"""Documents of many lengths in the section ``model``, drawn and packed.

::

    document_lengths: {distribution: lognormal, median: 300, sigma: 1.0, max: 4096}
    document_lengths: {histogram: {128: 10, 512: 30, 2048: 5}, packing: first_fit_decreasing}
    document_lengths: {file: lengths.csv, seed: 1}    # one length a line, beside the scenario
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from simplan.errors import Problem, SpecError
from simplan.io import folder_of, read_text
from simplan.model.packing import DocumentOptions, DocumentSource, Histogram, Lognormal, represent
from simplan.problems import render_value
from simplan.scenario.collecting import Sections

__all__ = ["draw_documents"]

_PATH = ("model", "document_lengths")
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_DIGITS = 12


class _LengthsFile(DocumentOptions):
    """Lengths of documents, of which as many as are wanted are drawn evenly."""

    file: Annotated[str, Field(min_length=1, max_length=1000)]


def draw_documents(sections: Sections, data: dict[str, Any], seq_len: Any) -> dict[str, Any] | None:
    """Fields of the model that a distribution of lengths stands for.

    Args:
        sections: Keeps what is wrong.
        data: The distribution as written.
        seq_len: Of the model, as written.

    Returns:
        ``document_lengths`` and ``packs``; None when something is wrong.
    """
    source = _source(sections, data)
    if source is None:
        return None
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        sections.refuse(("model", "seq_len"), "is needed to pack documents", value=seq_len, fix="give a whole number")
        return None
    try:
        lengths, packs = represent(source, seq_len)
    except SpecError as error:
        sections.keep(error, ("model", "seq_len"))
        return None
    return {"document_lengths": list(lengths), "packs": packs.model_dump(mode="json")}


def _source(sections: Sections, data: dict[str, Any]) -> DocumentSource | None:
    kinds = [key for key in ("distribution", "histogram", "file") if key in data]
    if len(kinds) != 1:
        rule = "is a list of lengths, or has one of the keys distribution, histogram and file"
        fix = "write [512, 1024], or {distribution: lognormal, median: 300, sigma: 1.0}"
        sections.refuse(_PATH, rule, value=data, fix=fix)
        return None
    if "distribution" in data:
        return sections.read(Lognormal, data, _PATH)
    if "histogram" in data:
        return sections.read(Histogram, data, _PATH)
    asked = sections.read(_LengthsFile, data, _PATH)
    if asked is None:
        return None
    options = asked.model_dump(exclude={"file"})
    counts = sections.look_up((*_PATH, "file"), lambda name: _counted(folder_of(sections.file) / name), asked.file)
    return None if counts is None else Histogram(histogram=counts, **options)


def _counted(path: Path) -> dict[int, float]:
    """Documents of a file by their length."""

    def refuse(rule: str, fix: str = "") -> SpecError:
        return SpecError(Problem(field="", value=render_value(path.name), rule=rule, fix=fix))

    try:
        lines = read_text(path, _MAX_FILE_BYTES).splitlines()
    except SpecError as error:
        (problem,) = error.problems
        raise refuse(problem.rule, problem.fix) from None
    counts: Counter[int] = Counter()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text)):
            raise refuse(f"line {number} holds {render_value(text)}", "write one whole number of tokens a line")
        counts[int(text)] += 1
    if not counts:
        raise refuse("holds no lengths", "write one whole number of tokens a line")
    return {length: float(count) for length, count in counts.items()}
