"""What is taken away as CSV says what the table says, whatever stands in it."""

from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from app.components.elements import csv_text

# the writer quotes no lone carriage return, which nothing that simplan shows has
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
CELLS = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False))
ROWS = st.lists(st.fixed_dictionaries({"plan": CELLS, "step time, s": CELLS}), max_size=4)


@given(rows=ROWS)
def test_a_table_comes_back_from_its_csv(rows: list[dict[str, object]]) -> None:
    read = list(csv.DictReader(io.StringIO(csv_text(rows), newline="")))
    assert read == [{key: str(value) for key, value in row.items()} for row in rows]
