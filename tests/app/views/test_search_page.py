"""The page Search: nothing starts by itself, plans appear, and no combination of inputs shows an exception."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from app.figures.plans import AXES, COLOURS, search_plans
from app.fitting import with_plan
from app.jobs.job import Jobs, JobState, StartedJob, TaskRequest, Update, searches
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.scenario import parse_scenario
from simplan.search import search
from simplan.search.result import NearestMiss, RankedPlan
from simplan.search.space import OBJECTIVES
from simplan.units import format_time
from tests.app.questions import TINY
from tests.app.views.pages import MAIN, complaints, opened_in_session

TWO = {**TINY, "cluster": {"preset": "dgx-h100", "num_devices": 2}, "plan": {"dp_shard": 2}}
"""Search space of few plans."""
PLANS = [ParallelPlan(dp_replicate=4), ParallelPlan(dp_replicate=2, pp=2, schedule="1f1b"), ParallelPlan(tp=4)]


@pytest.fixture(autouse=True)
def no_jobs_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("app.jobs.job.Jobs.warm", lambda _: None)
    yield
    searches().close()
    searches.cache_clear()


def opened(view: dict[str, Any] | None = None) -> AppTest:
    return opened_in_session("search", TWO, view or {})


def button(page: AppTest, label: str) -> Any:
    return next(button for button in page.button if button.label == label)


def test_a_link_starts_no_search() -> None:
    page = AppTest.from_file(str(MAIN), default_timeout=600)
    page.query_params.update({"v.start": "true", "v.by": "step_time"})
    page.switch_page("views/search.py")
    page.run()
    assert complaints(page) == []
    assert button(page, "Search")
    assert not searches().busy()


def test_plans_are_found_filtered_pinned_and_opened() -> None:
    page = button(opened(), "Search").click().run(timeout=600)  # the page is drawn anew until the search is done
    assert complaints(page) == []
    assert "Best of" in page.success[0].value
    table = page.dataframe[0].value
    rows = len(table)
    assert {"dp_shard", "tp", "microbatch_size", "zero_stage"} <= set(table.columns)
    assert "plan" not in table.columns, "settings are columns"
    replicas = sorted(set(table["dp_replicate"]), key=int)[-1]
    page.multiselect(key="view:filters.dp_replicate").set_value([replicas]).run()
    assert set(page.dataframe[0].value["dp_replicate"]) == {replicas}
    page.multiselect(key="view:filters.dp_replicate").set_value([]).run()
    assert len(page.dataframe[0].value) == rows
    page.selectbox(key="view:plan").set_value(rows - 1).run()
    assert complaints(page) == []
    button(page, "Pin").click().run()
    assert complaints(page) == []
    [pinned] = page.session_state["simplan view"]["scenarios"]
    assert [link.proto.label for link in page.get("page_link")] == ["Compare 1 pinned scenario"]
    assert any("pinned" in chart.proto.spec for chart in page.get("plotly_chart")), "its point has a ring"
    button(page, "Unpin").click().run()
    assert "scenarios" not in page.session_state["simplan view"]
    button(page, "Open as the plan").click().run()
    assert complaints(page) == []
    assert page.session_state["simplan document"] == pinned


def test_current_plan_is_shown_beside_the_best() -> None:
    """Its numbers are those of ``predict``; where it differs is the split of the rank that waits least."""
    document = {**TWO, "plan": {"dp_shard": 2, "recompute": "full"}}
    page = opened_in_session("search", document, {})
    page = button(page, "Search").click().run(timeout=600)
    assert complaints(page) == []
    table = page.dataframe[0].value.set_index("rank")
    job = parse_scenario(yaml.safe_dump(document)).job
    best_plan = search(job, {"top": 1}, explain=False).best
    assert best_plan is not None
    prediction, of_best = (predict(job.with_plan(plan)) for plan in (job.plan, best_plan.plan))
    mine, its = (asdict(min(shown.splits, key=lambda split: split.wait_s)) for shown in (prediction, of_best))
    name = max((name for name in mine if name.endswith("_s")), key=lambda name: mine[name] - its[name])
    more = f"{100 * (mine[name] - its[name]) / of_best.step_time_s:+.1f} % {name.removesuffix('_s').replace('_', ' ')}"
    current, best = table.loc["current"], table.loc["1"]
    assert current["step_time_s"] == pytest.approx(prediction.step_time_s)
    assert current["memory_verdict"] == prediction.memory_verdict
    assert current["vs_best"] == pytest.approx(prediction.step_time_s / best["step_time_s"] - 1)
    assert current["main_difference"] == more
    [told] = [caption.value for caption in page.caption if "current plan" in caption.value]
    assert f"{100 * current['vs_best']:.1f} % slower than the best" in told
    assert best["main_difference"] == ""
    unexplained = [column for column in ("mfu", "memory_verdict", "limit") if table[column].isna().any()]
    assert unexplained == [], "plans of the front have them, too"
    assert any("current plan" in chart.proto.spec for chart in page.get("plotly_chart")), "its point has a ring"
    page.selectbox(key="view:plan").set_value(len(table) - 1).run()
    [words] = [text.value for text in page.markdown if "Compared with the best plan" in text.value]
    assert f"mainly {more}" in words


@pytest.mark.slow
def test_current_plan_that_is_ranked_is_one_row() -> None:
    page = button(opened(), "Search").click().run(timeout=600)
    ranks = list(page.dataframe[0].value["rank"])
    page.selectbox(key="view:plan").set_value(0).run()
    button(page, "Open as the plan").click().run()
    again = opened_in_session("search", page.session_state["simplan document"], {})
    assert [*again.dataframe[0].value["rank"]] == ["1, current", *(rank for rank in ranks[1:] if rank != "current")]


@pytest.mark.slow
@pytest.mark.slow
def test_compiled_plans_are_searched_pinned_and_opened() -> None:
    page = button(opened({"compiled": True}), "Search").click().run(timeout=600)
    assert complaints(page) == []
    table = page.dataframe[0].value
    assert set(table["compiled"][table["rank"] != "current"]) == {"true"}, "faster, and it needs less memory"
    assert any("With compiled false" in markdown.value for markdown in page.markdown)
    button(page, "Pin").click().run()
    [pinned] = page.session_state["simplan view"]["scenarios"]
    assert pinned["software"] == {"preset": "torch", "compiled": True}
    button(page, "Open as the plan").click().run()
    assert complaints(page) == []
    assert page.session_state["simplan document"] == pinned


def test_the_ranking_is_final_before_its_plans_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"objectives": ["step_time", "memory"], "top": 3}
    text = yaml.safe_dump({**{key: TWO[key] for key in TWO if key != "plan"}, "search": section})
    told: list[Update] = []
    whole = search_plans(text, told.append)
    later = [update for update in told if update.doing.startswith("explaining")]
    assert [sum(plan.explanation is not None for plan in update.value.ranked) for update in later] == [0, 1, 2]
    assert all(not update.value.interrupted and update.value.space == whole.space for update in later)
    assert [plan.plan for plan in later[0].value.ranked] == [plan.plan for plan in whole.ranked]
    job = StartedJob(TaskRequest(search_plans, (text,)))
    job.state, job.update, job.value = JobState.RUNNING, later[1], later[1].value
    monkeypatch.setattr(Jobs, "find", lambda *_: job)
    monkeypatch.setattr("app.components.progress.follow", lambda *_: None)
    page = opened()
    assert complaints(page) == []
    assert "Best of" in page.success[0].value
    assert button(page, "Open as the plan")
    best = told[-1].value.ranked[0]
    shown = [str(markdown.value) for markdown in page.markdown]
    [why] = [text for text in shown if "**Bottleneck**" in text]
    low_s, high_s = best.explanation.step_time_interval_s
    assert f"90 % interval of the step time: {format_time(low_s)} to {format_time(high_s)}." in why
    assert f"of the step of rank {best.explanation.busiest_rank}, the rank that waits least." in why
    assert not any("Near misses" in str(header.value) for header in page.subheader)
    job.value = replace(later[1].value, space=replace(whole.space, in_headroom=3))
    shown = [str(markdown.value) for markdown in opened().markdown]
    [why] = [text for text in shown if "**Bottleneck**" in text]
    assert "up to 3 rejected plans fit without it (memory limit 100 %)" in why, "no option of the command line"
    missed = NearestMiss(plan=PLANS[0], num_devices=4, device_bytes=3 * 2**30, lacking_bytes=2**30)
    job.value = replace(later[1].value, nearest_misses=(missed,))
    page = opened()
    assert any("Near misses" in str(header.value) for header in page.subheader)
    assert any("1.00 GiB over, needs 3.00 GiB" in str(markdown.value) for markdown in page.markdown)
    job.value = replace(later[1].value, interrupted=True)  # the update comes a moment before its value
    assert not opened().success


@pytest.mark.parametrize("plan", PLANS)
def test_the_removed_parts_are_the_plan(plan: ParallelPlan) -> None:
    numbers: dict[str, Any] = {"num_devices": 4, "step_time_s": 1.0, "device_bytes": 1, "headroom_bytes": None}
    ranked = RankedPlan(plan=plan, tokens_per_s_per_device=1.0, **numbers)
    document = with_plan({**TINY, "cluster": {"preset": "dgx-h100", "num_nodes": 1}}, ranked)
    assert parse_scenario(yaml.safe_dump(document)).job.plan == plan


def numbers(least: float, greatest: float) -> st.SearchStrategy[Any]:
    return st.one_of(st.floats(least, greatest), st.integers(-5, 5), st.text(max_size=3), st.none())


views = st.fixed_dictionaries(
    {},
    optional={
        "by": st.sampled_from([*OBJECTIVES, "nonsense"]),
        "share": numbers(-10, 200),
        "deadline": numbers(-1, 100),
        "filters.tp": st.sampled_from([["4"], "4", ["99"], [1], {"tp": ["4"]}]),
        "x": st.sampled_from([*AXES, "y"]),
        "y": st.sampled_from([*AXES, 3]),
        "colour": st.sampled_from([*COLOURS, None]),
        "scenarios": st.lists(st.sampled_from([TWO, {**TWO, "plan": {"tp": 2}}, {}, 7, None]), max_size=8),
        "plan": st.integers(-2, 12),
    },
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(views)
def test_no_view_shows_an_exception(view: dict[str, Any]) -> None:
    assert complaints(opened(view)) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(views)
def test_no_view_of_many_shows_an_exception(view: dict[str, Any]) -> None:
    assert complaints(opened(view)) == []
