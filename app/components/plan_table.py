"""Table of a search's plans with one column per setting, filters, and selection of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import state
from app.components.elements import meaning
from app.fields import remembered_choices
from app.figures.plans import settings_of, written
from simplan.search.space import OPTION_KEYS
from simplan.units import format_number_evenly

PLAN = "plan"
"""View value: row of the selected plan."""

_VERDICT = "memory_verdict"
_LABELS = {_VERDICT: "memory verdict"}
_FILTERS = "filters"
_TABLE = "plans table"
ROW_PX = 31
"""Height of a row: 2.1875 rem of Streamlit at the ``baseFontSize`` of ``app/theme.toml``."""
_BORDER_PX, _MAX_PX = 2, 622
_DIFFERENCE = "Part of the step with most of the time by which the plan is slower than the best one, in % of its step"

_FORMS = {
    "num_devices": "{:,.0f}",
    "step_time_s": format_number_evenly,
    "vs_best": "{:+.1%}",
    "device_gib": "{:,.2f}",
    "headroom_gib": "{:,.2f}",
    "tokens_per_s_per_device": "{:,.0f}",
    "cost_dollars": "{:,.0f}",
    "mfu": "{:.1%}",
    "limit_share": "{:.0%}",
    "help_share": "{:.1%}",
    "alike": "{:,.0f}",
}


def selected_row(num_rows: int) -> int:
    """Row of the selected plan; the best plan without a valid selection."""
    row = state.view(PLAN, 0)
    return row if isinstance(row, int) and not isinstance(row, bool) and 0 <= row < num_rows else 0


def select_row(row: int) -> None:
    """Selects the plan of a row."""
    state.set_view(PLAN, row or None)


def show_filters(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Filters by memory verdict and by settings that differ between plans; returns the rows that pass all of them."""
    options = {key: _values(rows, key) for key in (*_LABELS, *settings_of(rows))}
    options[_VERDICT] = [verdict for verdict in options[_VERDICT] if verdict]  # unranked plans have none
    options = {key: values for key, values in options.items() if len(values) > 1}
    active = any(state.view(f"{_FILTERS}.{key}") for key in options)
    with st.expander("Filters", icon=":material/filter_alt:", expanded=active), st.container(horizontal=True):
        wanted = {
            key: remembered_choices(_LABELS.get(key, key), f"{_FILTERS}.{key}", values, placeholder="all", width=200)
            for key, values in options.items()
        }
    passing = [
        number
        for number, row in enumerate(rows)
        if all(not values or written(row.get(key)) in values for key, values in wanted.items())
    ]
    if len(passing) < len(rows):
        st.caption(f"{len(passing)} of {len(rows)} plans pass the filters.")
    return passing


def show_table_of_plans(rows: Sequence[Mapping[str, Any]], passing: Sequence[int]) -> None:
    """Sortable table; a click on a row selects its plan.

    Args:
        rows: Rows from ``plan_rows``.
        passing: Rows to show, from ``show_filters``.
    """
    frame = pd.DataFrame([rows[number] for number in passing], columns=list(rows[0]))
    settings = settings_of(rows)
    shown = ["rank", "step_time_s", "vs_best", "main_difference", "device_gib", _VERDICT, "headroom_gib"]
    shown += ["tokens_per_s_per_device", "mfu"]
    if len({row["num_devices"] for row in rows}) > 1:
        shown.insert(1, "num_devices")
    if any(row["cost_dollars"] is not None for row in rows):
        shown.append("cost_dollars")
    shown += [*settings, "limit", "limit_share", "help", "help_share"]
    if any(row["alike"] for row in rows):
        shown += ["alike", "alike_differ_in"]
    frame = frame[shown]
    frame["rank"] = [place_words(rows[number]) for number in passing]
    for key in settings:
        frame[key] = [written(rows[number].get(key)) for number in passing]
    chosen = selected_row(len(rows))
    key = _key(chosen, passing)
    st.dataframe(
        frame.style.format({name: form for name, form in _FORMS.items() if name in shown}, na_rep=""),
        key=key,
        hide_index=True,
        placeholder="",  # pending, or not computed for plans only on the Pareto front
        height=min(ROW_PX * (len(frame) + 1) + _BORDER_PX, _MAX_PX),
        on_select=lambda: _take_row(key, passing),
        selection_mode="single-row",
        selection_default={"selection": {"rows": [passing.index(chosen)]}} if chosen in passing else None,
        column_config=_columns(settings),
    )


def place_words(row: Mapping[str, Any]) -> str:
    """``1``, ``3, current``, ``Pareto`` or ``current``."""
    words = [str(row["rank"])] if row["rank"] else ["Pareto"] if row["on_front"] else []
    return ", ".join([*words, *(["current"] if row["is_current"] else [])])


def _columns(settings: Sequence[str]) -> dict[str, Any]:
    column = st.column_config
    about = "Pareto: not ranked, but Pareto-optimal. current: the plan of the scenario"
    return {
        "rank": column.TextColumn("#", width=110, help=about, pinned=True),
        "num_devices": column.NumberColumn("devices"),
        "step_time_s": column.NumberColumn("step time, s", help=meaning("step_time_s")),
        "vs_best": column.NumberColumn("vs best", help="Step time / step time of the best plan - 1"),
        "main_difference": column.TextColumn("main difference", width=210, help=_DIFFERENCE),
        "device_gib": column.NumberColumn("device GiB", help=meaning("device")),
        _VERDICT: column.TextColumn("memory verdict", help=meaning("memory verdict")),
        "headroom_gib": column.NumberColumn("headroom GiB", help="Below the memory limit of plans"),
        "tokens_per_s_per_device": column.NumberColumn("throughput", help="Tokens or images per second and device"),
        "cost_dollars": column.NumberColumn("cost"),
        "mfu": column.NumberColumn("MFU", help=meaning("mfu")),
        **{key: column.TextColumn(key, help=f"{_section(key)}.{key}") for key in settings},
        "limit": column.TextColumn("bottleneck", help="Largest part of the step of the rank that waits least"),
        "limit_share": column.NumberColumn("bottleneck share", help="Fraction of the step"),
        "help": column.TextColumn("top sensitivity", help="Resource of which 10 % more saves most step time"),
        "help_share": column.NumberColumn("saving", help="Fraction of the step saved by 10 % more"),
        "alike": column.NumberColumn("equivalent", help="Plans with the same degrees and step time within 0.1 %"),
        "alike_differ_in": column.TextColumn("differ in", help="Options of the equivalent plans"),
    }


def _section(key: str) -> str:
    """Section of a scenario file with a setting."""
    return OPTION_KEYS[key].partition(".")[0] if key in OPTION_KEYS else "plan"


def _key(chosen: int, passing: Sequence[int]) -> str:
    """Widget key, another one after a selection elsewhere on the page: the browser keeps the selection of a table."""
    version, shown = st.session_state.get(_TABLE, (0, None))
    if shown != (chosen, tuple(passing)):
        version += 1
        st.session_state[_TABLE] = version, (chosen, tuple(passing))
    return f"{_TABLE} {version}"


def _take_row(key: str, passing: Sequence[int]) -> None:
    rows = st.session_state[key].selection.rows
    version, _ = st.session_state[_TABLE]
    if rows and rows[0] < len(passing):
        select_row(passing[rows[0]])
        st.session_state[_TABLE] = version, (passing[rows[0]], tuple(passing))
    elif not rows:
        st.session_state[_TABLE] = version, None  # the plan in detail stays selected: a new table shows it so


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    values = {row.get(key) for row in rows if not isinstance(row.get(key), list)}
    numbers = sorted(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    others = sorted(written(value) for value in values - set(numbers))
    return [*map(str, numbers), *others]
