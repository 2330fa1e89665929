"""Term-by-term comparison of two plans: ranked plans of a search, pinned plans, or scenarios."""

from __future__ import annotations

from functools import lru_cache

import streamlit as st

from app import pinned_plans, result_cache, state
from app.awaited import awaited
from app.components.elements import csv_text, download, show_figure, show_table
from app.fields import remembered_choice
from app.figures.plans import difference_figure, difference_rows, difference_words
from app.page import escaped, show_problems
from app.pinned_plans import PinnedPlan
from app.results.plan import predicted_step
from simplan.errors import SpecError
from simplan.explain import Difference, Explanation, difference, explain
from simplan.report.search import search_plan_words
from simplan.search import SearchResult
from simplan.units import format_bytes, format_time


def show_comparison(result: object) -> None:
    """Select boxes for two plans, and the terms of their difference.

    Args:
        result: Result of the search so far; other types count as no result.
    """
    st.subheader("Plan comparison", help="Terms of both predictions, as `simplan explain` prints them")
    plans = _plans(result)
    if len(plans) < 2:
        st.caption("Search, or pin two plans, to compare them term by term.")
        return
    _show_pinned()
    names = list(plans)
    left, right, go = st.columns([3, 3, 1], vertical_alignment="bottom")
    with left:
        one = remembered_choice("First plan", "one", names, names[0])
    with right:
        two = remembered_choice("Second plan", "two", names, names[1])
    key = f"compare {one} {two}"
    if go.button("Compare", key="compare plans", width="stretch", type="primary"):
        state.set_view("compare", True)
    if not state.view("compare"):
        st.caption("Both plans are predicted in full, which takes seconds for many microbatches.")
        return
    if one == two:
        st.caption("These are the same plan; choose another one.")
        return
    try:
        found = difference(_explained(plans[one]), _explained(plans[two]))
    except SpecError as error:
        show_problems(error)
        return
    st.markdown(difference_sentence(found))
    show_difference(found, key)


def _plans(result: object) -> dict[str, PinnedPlan]:
    ranked = result.ranked if isinstance(result, SearchResult) else ()
    found = [PinnedPlan(one.plan, one.software) for one in ranked]
    return {search_plan_words(*one): one for one in found} | pinned_plans.pinned()


def _show_pinned() -> None:
    pinned = pinned_plans.pinned()
    with st.container(horizontal=True):  # even if empty, so that the elements below keep their position
        if pinned:
            st.caption("Pinned:")
        for number, name in enumerate(pinned):
            if st.button(name, icon=":material/keep_off:", key=f"unpin {number}", help="Unpin", type="tertiary"):
                pinned_plans.unpin(name)
                st.rerun()


def _explained(plan: PinnedPlan) -> Explanation:
    document = pinned_plans.with_plan(state.document(), plan)
    return awaited("explaining both plans", explained, *result_cache.worker_inputs(document))


def difference_sentence(found: Difference, first: str = "The first", second: str = "The second") -> str:
    """Difference of step time and memory in Markdown, with the groups that make it.

    Args:
        found: Difference of two explanations.
        first, second: Subjects of the sentence, e.g. names of the plans.
    """
    one, two = found.first, found.second
    slower_s, more_bytes = two.step_time_s - one.step_time_s, two.device_bytes - one.device_bytes
    longer, larger = ("longer" if slower_s >= 0 else "shorter"), ("more" if more_bytes >= 0 else "less")
    than = "" if first == "The first" else f" than {escaped(first)}"
    time, memory = (
        escaped(", ".join(difference_words(rows)) or "nothing differs") for rows in (found.time, found.memory)
    )
    return (
        f"{escaped(second)} takes **{format_time(abs(slower_s))} {longer}** a step{than} "
        f"({slower_s / one.step_time_s:+.1%}): {time}. "
        f"It uses **{format_bytes(abs(more_bytes))} {larger}** memory on its peak-memory rank: {memory}."
    )


def show_difference(found: Difference, key: str, names: tuple[str, str] = ("first plan", "second plan")) -> None:
    """Figures and a table of the terms of both predictions.

    Args:
        found: Difference of two explanations.
        key: Widget key, unique on the page.
        names: Short names of both.
    """
    one, two = found.first, found.second
    panels = (
        ("Time", f"{format_time(one.step_time_s)} and {format_time(two.step_time_s)}", found.time),
        ("Memory", f"{format_bytes(one.device_bytes)} and {format_bytes(two.device_bytes)}", found.memory),
    )
    for column, (name, values, terms) in zip(st.columns(2, gap="medium"), panels, strict=True):
        with column:
            st.caption(f"{name}: {values}")
            figure = difference_figure(terms, names)
            show_figure(
                figure, f"{name.lower()} of two plans", alt=f"{name} of both plans by part", key=f"{key} {name}"
            )
    rows = difference_rows([*found.time, *found.memory])
    with st.expander(f"All {len(rows)} terms with their formulas"):
        show_table(rows)
    download("Terms", "difference of two plans", "csv", csv_text(rows))


@lru_cache(maxsize=8)
def explained(text: str, calibrated_at: int) -> Explanation:
    """Explanation of the plan of a scenario, term by term.

    Args:
        text, calibrated_at: See ``worker_inputs``.

    Raises:
        SpecError: As ``predict``.
    """
    return explain(*predicted_step(text, calibrated_at))
