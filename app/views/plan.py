"""Plan: one plan of a model on a cluster: memory fit, step time and breakdown of the step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app import answers, state
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.components.question import show_question
from app.components.verdict import kept_budget, show_budget, show_numbers, show_verdict
from app.fields import remembered_choice
from app.figures.memory import memory_bars, memory_figure, memory_rows
from app.figures.waterfall import waterfall_figure
from app.page import run_page
from app.results.headline import Headline, headline_of_prediction, headline_of_quick
from app.results.plan import PlanResult
from app.words import meaning
from simplan.errors import SimplanError
from simplan.prediction import Prediction, Term
from simplan.report.table import format_ranks
from simplan.report.text import microbatch_words, plan_words
from simplan.scenario import Scenario
from simplan.units import GIB, format_bytes, format_percent, format_time

_HEAD_START_S = 0.1
"""Delay of the form and figures after the verdict: browsers draw elements that arrive together at one time."""


def show() -> None:
    """Verdict, immediately if a search has evaluated the plan; then the form and the full prediction."""
    document = state.document()
    try:
        asked = answers.scenario(document)
        images = asked.job.model.sample == "image"
        budget, price = kept_budget(images=images)
        top, quick = st.empty(), None
        numbers = answers.quick_numbers(document)
        if numbers is not None:
            quick = headline_of_quick(asked, numbers)
            _show_top(top, asked, quick, budget, price)
            time.sleep(_HEAD_START_S)
    except SimplanError:
        show_question()
        raise
    show_question()
    show_budget(images=images)
    result = answers.plan(document)
    prediction = result.prediction
    final = headline_of_prediction(prediction)
    if final != quick:
        _show_top(top, asked, final, budget, price, _host_words(prediction))
    _show_figures(result)
    _show_details(result)
    st.subheader("Take it away")
    with st.container(horizontal=True):
        text = state.document_text(document)
        download("Scenario", asked.name, "yaml", text, about="`simplan predict` gives the same numbers for it")
        download("Prediction", f"{asked.name} prediction", "json", lambda: answers.prediction_text(document))
        rows = memory_rows(memory_bars(prediction.memory))
        download("Memory", f"{asked.name} memory by rank", "csv", csv_text(rows))
        download("Terms", f"{asked.name} terms", "csv", csv_text([_term_row(term) for term in prediction.terms]))


def _show_top(
    place: st.delta_generator.DeltaGenerator,
    asked: Scenario,
    headline: Headline,
    budget: float,
    price: float | None,
    host_words: str = "",
) -> None:
    with place.container():
        show_verdict(headline, host_words)
        show_numbers(asked, headline, budget, price)
        model, cluster = asked.job.model, asked.job.cluster
        st.caption(
            escaped(
                f"{model.name} on {cluster.num_devices} x {cluster.device.id}, {cluster.num_nodes} "
                f"node{'s' if cluster.num_nodes > 1 else ''}, {asked.job.software.id}: {plan_words(asked.job.plan)}; "
                f"{microbatch_words(asked.job.num_microbatches, asked.job.plan.microbatch_size, model.sample)}"
            )
        )


def _host_words(prediction: Prediction) -> str:
    """Message about insufficient host memory; empty if host memory suffices or is unknown."""
    capacity = prediction.job.cluster.host_memory_bytes
    if prediction.host_fits is not False or capacity is None:
        return ""
    used = prediction.worst_host_bytes
    return f"a node offloads {format_bytes(used)} to its host, which has {format_bytes(capacity)}"


def _show_figures(result: PlanResult) -> None:
    prediction = result.prediction
    left, right = st.columns([3, 2], gap="medium")
    with left:
        worst = prediction.worst_memory
        st.subheader("Memory by rank", help=f"device: {meaning('device')}. Every rank at its own worst instant")
        bars = memory_bars(prediction.memory)
        figure = memory_figure(bars, prediction.capacity_bytes)
        most = max(bars, key=lambda bar: bar.device_bytes)
        words = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in most.parts.items())
        alt = f"Memory of every rank at its worst instant, by part; of rank {most.label}, the largest: {words}"
        show_figure(figure, f"{prediction.name} memory by rank", alt=alt)
        when = f"during {worst.peak_action}" if worst.peak_action else "between steps"
        st.caption(
            f"Rank {worst.rank} is the worst: {format_bytes(worst.allocated_bytes)} allocated, "
            f"{format_bytes(worst.reserved_bytes)} reserved, {format_bytes(worst.device_bytes)} on the device, {when}."
        )
    with right:
        title, chooser = st.columns([3, 2], vertical_alignment="bottom")
        title.subheader(
            "Where the step goes",
            help=f"wait: {meaning('split: wait')}. exposed communication: {meaning('split: exposed communication')}. "
            f"{meaning('split: optimizer')}",
        )
        with chooser:
            ranks = list(result.steps)
            rank = result.busiest
            if len(ranks) > 1:
                rank = remembered_choice(
                    "Rank", "rank", ranks, result.busiest, format_func="rank {}".format, label_visibility="collapsed"
                )
        parts = result.steps[rank]
        figure = waterfall_figure(parts, prediction.step_time_s)
        alt = f"The step of rank {rank}: {', '.join(f'{part.name} {format_time(part.seconds)}' for part in parts)}"
        show_figure(figure, f"{prediction.name} step of rank {rank}", alt=alt)
        st.caption(_step_words(result, rank))


def _step_words(result: PlanResult, rank: int) -> str:
    whole, written = len(result.prediction.memory), len(result.steps)
    like = "" if written == whole else " All ranks do the same." if written == 1 else f" Ranks are of {written} kinds."
    busiest = ", which computes longest" if rank == result.busiest and written > 1 else ""
    idle = format_percent(result.prediction.bubble_fraction)
    return f"Rank {rank} of {whole}{busiest}. Compute streams idle {idle} of the time, mean over ranks.{like}"


def _show_details(result: PlanResult) -> None:
    prediction = result.prediction
    with st.expander(f"What it is made of: {len(prediction.terms)} prices, with their formulas"):
        terms = sorted(prediction.terms, key=lambda term: -term.seconds * term.count)
        st.dataframe(pd.DataFrame([_term_row(term) for term in terms]), hide_index=True, height=320)
    with st.expander("Ranks"):
        st.dataframe(pd.DataFrame(_rank_rows(prediction)), hide_index=True)
    with st.expander(f"What is assumed ({len(prediction.assumptions)}), and what is not modelled"):
        st.markdown("\n".join(f"- {escaped(text)}" for text in prediction.assumptions))
        missing = prediction.job.software.not_modelled
        if missing:
            st.markdown(f"{escaped(prediction.job.software.id)} does, and simplan does not model:")
            st.markdown("\n".join(f"- {escaped(text)}" for text in missing))


def _term_row(term: Term) -> dict[str, object]:
    return {
        "cost": str(term.name),
        "each": format_time(term.seconds),
        "times per rank": round(term.count, 3),
        "seconds per rank": term.seconds * term.count,
        "source": term.provenance,
        "sure to": f"+/- {term.relative_std:.0%}",
        "formula": term.formula,
    }


def _rank_rows(prediction: Prediction) -> list[dict[str, object]]:
    """Ranks that are alike in a line."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for memory, split in zip(prediction.memory, prediction.splits, strict=True):
        cells: Sequence[object] = (
            *(round(value / GIB, 2) for value in (memory.allocated_bytes, memory.reserved_bytes, memory.device_bytes)),
            memory.peak_action or "between steps",
            *(
                f"{value / prediction.step_time_s:.1%}"
                for value in (
                    split.compute_s,
                    split.recompute_s,
                    split.exposed_communication_s,
                    split.wait_s,
                    split.host_s,
                    split.optimizer_s,
                )
            ),
        )
        groups.setdefault(tuple(cells), []).append(memory.rank)
    names = (
        "allocated GiB",
        "reserved GiB",
        "device GiB",
        "peak during",
        "compute",
        "recompute",
        "exposed communication",
        "wait",
        "host",
        "optimizer",
    )
    return [{"ranks": format_ranks(ranks), **dict(zip(names, cells, strict=True))} for cells, ranks in groups.items()]


if __name__ == "__main__":
    run_page(show)
