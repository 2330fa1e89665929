"""Two plans term by term: by default the best of a search and the runner-up, else any that are pinned."""

from __future__ import annotations

from functools import lru_cache

import pandas as pd
import streamlit as st

from app import answers, basket, state
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped, show_problems
from app.fields import remembered_choice
from app.figures.difference import difference_figure, difference_rows, difference_words
from app.results.plan import predicted_step
from app.work import awaited
from simplan.errors import SpecError
from simplan.explain import Difference, Explanation, difference, explain
from simplan.plan.plan import ParallelPlan
from simplan.scenario import SearchScenario
from simplan.search import SearchResult
from simplan.units import GIB, format_bytes, format_time

__all__ = ["explained", "show_comparison"]


def show_comparison(asked: SearchScenario, result: object) -> None:
    """Lets the user choose two plans, and shows the terms of their difference.

    Args:
        asked: Scenario of the search.
        result: Result of the search so far; other types count as no result.
    """
    st.subheader("Why one plan beats another", help="Both predicted and taken apart, as `simplan explain` does")
    plans = _plans(result)
    if len(plans) < 2:
        st.caption("Search, or pin two plans: they are compared here term by term.")
        return
    _show_basket()
    names = list(plans)
    left, right, go = st.columns([3, 3, 1], vertical_alignment="bottom")
    with left:
        one = remembered_choice("This plan", "one", names, names[0])
    with right:
        two = remembered_choice("against", "two", names, names[1])
    key = f"compare {one} {two}"
    if go.button("Compare", key="compare plans", width="stretch", type="primary"):
        state.set_view("compare", True)
    if not state.view("compare"):
        st.caption("Both are predicted in full, which takes seconds for many microbatches.")
        return
    if one == two:
        st.caption("These are the same plan; choose another one.")
        return
    try:
        found = difference(_explained(plans[one]), _explained(plans[two]))
    except SpecError as error:
        show_problems(error)
        return
    _show(found, key)


def _plans(result: object) -> dict[str, ParallelPlan]:
    ranked = result.ranked if isinstance(result, SearchResult) else ()
    found = {basket.key_of(plan.plan): plan.plan for plan in ranked}
    return found | basket.pinned()


def _show_basket() -> None:
    pinned = basket.pinned()
    with st.container(horizontal=True):  # even if empty, so that the elements below keep their position
        if pinned:
            st.caption("Pinned:")
        for number, name in enumerate(pinned):
            if st.button(name, icon=":material/keep_off:", key=f"unpin {number}", help="Unpin", type="tertiary"):
                basket.unpin(name)
                st.rerun()


def _explained(plan: ParallelPlan) -> Explanation:
    document = basket.with_plan(state.document(), plan)
    at = answers.calibrated_at(answers.scenario(document))
    return awaited("taking both plans apart", explained, answers.text(document), at)


def _show(found: Difference, key: str) -> None:
    one, two = found.first, found.second
    slower_s, more_bytes = two.step_time_s - one.step_time_s, two.device_bytes - one.device_bytes
    longer, larger = ("longer" if slower_s >= 0 else "shorter"), ("more" if more_bytes >= 0 else "less")
    st.markdown(
        f"The second takes **{format_time(abs(slower_s))} {longer}** a step ({slower_s / one.step_time_s:+.1%}): "
        f"{escaped(', '.join(difference_words(found.time)) or 'nothing differs')}. It needs "
        f"**{format_bytes(abs(more_bytes))} {larger}** on its worst device: "
        f"{escaped(', '.join(difference_words(found.memory)) or 'nothing differs')}."
    )
    left, right = st.columns(2, gap="medium")
    names = ("this plan", "the other")
    with left:
        st.caption(f"Time: {format_time(one.step_time_s)} and {format_time(two.step_time_s)}")
        show_figure(
            difference_figure(found.time, names), "time of two plans", alt="Parts of both steps", key=f"{key} t"
        )
    with right:
        st.caption(f"Memory: {one.device_bytes / GIB:,.2f} GiB and {two.device_bytes / GIB:,.2f} GiB")
        figure = difference_figure(found.memory, names)
        show_figure(figure, "memory of two plans", alt="Parts of both memories", key=f"{key} memory")
    rows = difference_rows([*found.time, *found.memory])
    with st.expander(f"All {len(rows)} terms with their formulas"):
        st.dataframe(pd.DataFrame(rows), hide_index=True)
    download("Terms", "difference of two plans", "csv", csv_text(rows))


@lru_cache(maxsize=8)
def explained(text: str, calibrated_at: int) -> Explanation:
    """Explanation of the plan of a scenario, term by term.

    Args:
        text: The scenario's YAML.
        calibrated_at: Modification time of this machine's calibration, a cache key.

    Raises:
        SpecError: As ``predict``.
    """
    return explain(*predicted_step(text, calibrated_at))
