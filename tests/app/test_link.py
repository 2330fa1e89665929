"""The address of a page and tables as CSV: whatever is said survives them, and any address becomes something."""

from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from app.components.elements import csv_text
from app.state import MAX_CHARS, decode, encode
from simplan.goodput.sections import SECTIONS

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=12)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
words = st.text("abc_0.xyz", min_size=1, max_size=8)
sections = st.one_of(values, st.dictionaries(words, values, max_size=4))
names = st.sampled_from(["name", "model", "cluster", "training", "software", "plan", "search", "expect", *SECTIONS])


@given(st.dictionaries(names, sections, max_size=6), st.dictionaries(words, values, max_size=4))
def test_a_link_says_what_was_asked(document: dict[str, object], view: dict[str, object]) -> None:
    assert decode(encode(document, view)) == (document, view)


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=10))
def test_any_query_becomes_a_document(query: dict[str, str]) -> None:
    document, view = decode(query)
    assert decode(encode(document, view))[0] == document or any("." not in key for key in query)


def test_a_scenario_reads_well() -> None:
    document = {"model": {"preset": "llama3-8b", "seq_len": 8192}, "software": "torch", "plan": {"dp_shard": 8}}
    assert encode(document, {"price": 2.5}) == {
        "model.preset": "llama3-8b",
        "model.seq_len": "8192",
        "software": "torch",
        "plan.dp_shard": "8",
        "v.price": "2.5",
    }


def test_absurd_queries_say_nothing() -> None:
    assert decode({"model.preset": "x" * (5 * MAX_CHARS)}) == ({}, {})
    assert decode({f"plan.k{n}": "1" for n in range(1000)}) == ({}, {})
    assert decode({"plan": "[" * 5000})[0] == {"plan": "[" * 5000}
    assert decode({"plan.tp": "NaN"})[0] == {"plan": {"tp": "NaN"}}


# the writer quotes no lone carriage return, which nothing that simplan shows has
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
CELLS = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False))
ROWS = st.lists(st.fixed_dictionaries({"plan": CELLS, "step time, s": CELLS}), max_size=4)


@given(rows=ROWS)
def test_a_table_comes_back_from_its_csv(rows: list[dict[str, object]]) -> None:
    read = list(csv.DictReader(io.StringIO(csv_text(rows), newline="")))
    assert read == [{key: str(value) for key, value in row.items()} for row in rows]
