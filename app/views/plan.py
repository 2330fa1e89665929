"""Plan: one plan of a model on a cluster: memory fit, step time and breakdown of the step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import result_cache, state
from app.budget import budget_of, without_budget
from app.choosing import with_size
from app.components.elements import csv_text, details, download, download_report, meaning, show_figure, show_table
from app.components.paste import show_paste
from app.components.scenario_form import show_scenario_form
from app.components.verdict import show_numbers, show_verdict
from app.fields import remembered_choice
from app.figures.plan import PlanResult, memory_bars, memory_figure, memory_rows, plan_result, waterfall_figure
from app.figures.plans import SettingEffect, setting_effects, written
from app.fitting import applied, changed, document_text, mended, section, with_value
from app.last_read import framework_words, last_read
from app.page import bullets, escaped, run_page
from app.predictions import Headline, headline_of_prediction, idle_memory_words, plan_fixes, prediction_text
from app.result_cache import awaited, begun, handed_over
from simplan.errors import SimplanError
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.prediction import Prediction, Term
from simplan.report.table import format_ranks
from simplan.report.text import (
    device_memory_words,
    links_words,
    loading_failure,
    microbatch_words,
    plan_words,
    split_parts,
)
from simplan.scenario import Scenario
from simplan.search import Fix, SearchSpace
from simplan.units import GIB, faster_or_slower, format_bytes, format_percent, format_time

_HEAD_START_S = 0.1
"""Delay of the form and figures after the verdict: browsers draw elements that arrive together at one time."""

_MAX_CHANGES = 3
_FACTORS = (2, 4, 8, 16, 32)
"""Multiples of the devices on which a job is tried that does not fit."""
_NOTICED = 0.001
"""Smallest fraction of the step time that a change is offered for."""


def show() -> None:
    """Box for pasted text; verdict, immediately if a search can evaluate the plan; form and full prediction."""
    show_paste()
    document = state.document()
    try:
        scenario = result_cache.scenario(document)
        inputs = result_cache.worker_inputs(document)
    except SimplanError:
        show_scenario_form(budget=True)
        raise
    with begun(plan_result, *inputs):
        _show_plan(document, scenario, inputs)


def _show_plan(document: dict[str, Any], scenario: Scenario, inputs: tuple[str, int]) -> None:
    budget, price = budget_of(scenario)
    try:
        quick = result_cache.headline(document)
    except SimplanError:
        show_scenario_form(budget=True)
        raise
    top, shown = st.container(), None
    if quick is not None:
        shown = _show_top(top, quick, budget, price)
        time.sleep(_HEAD_START_S)
    show_scenario_form(budget=True)
    result = awaited("predicting the step", plan_result, *inputs)
    prediction = result.prediction
    final = headline_of_prediction(prediction)
    if final != quick:
        _show_top(top, final, budget, price, _host_words(prediction), over=shown)
    if words := idle_memory_words(prediction):
        st.info(words, icon=":material/search:")
    changes_place = st.container()
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _show_memory(prediction)
    with right:
        _show_step(result)
    _show_details(prediction)
    st.subheader("Downloads")
    with st.container(horizontal=True):
        download("Scenario", scenario.name, "yaml", document_text(document), about="Input of `simplan predict`")
        text = partial(handed_over, prediction_text, document_text(document), inputs[1])
        download("Prediction", f"{scenario.name} prediction", "json", text)
        download_report(scenario.name, lambda: [json.loads(text())])
        rows = memory_rows(memory_bars(prediction.memory))
        download("Memory", f"{scenario.name} memory by rank", "csv", csv_text(rows))
        download("Terms", f"{scenario.name} terms", "csv", csv_text(list(map(_term_row, prediction.terms))))
    with changes_place:
        if prediction.fits is False:
            _show_fixes(document, inputs, prediction.job)
        elif last_read() is not None:
            _show_faster(document, inputs, prediction.job)


class _Top(NamedTuple):
    """Elements above the figures; an element that is written again keeps its place without a gap in between."""

    banner: DeltaGenerator
    numbers: list[DeltaGenerator]


def _show_top(
    place: DeltaGenerator,
    headline: Headline,
    budget: float,
    price: float | None,
    host_words: str = "",
    *,
    over: _Top | None = None,
) -> _Top:
    """Verdict and key numbers, over earlier ones or as new elements of a container."""
    if over is not None:
        show_verdict(over.banner, headline, host_words)
        show_numbers(over.numbers, headline, budget, price)
        return over
    banner = show_verdict(place, headline, host_words)
    numbers = show_numbers([place.container(horizontal=True, gap="medium")], headline, budget, price)
    job = headline.job
    model, cluster = job.model, job.cluster
    microbatches = microbatch_words(job.num_microbatches, job.plan.sizes_of_ranks, model.sample)
    place.caption(
        escaped(
            f"{model.name} on {cluster.devices_in_words}, {cluster.nodes_in_words}, "
            f"{job.software.id}: {plan_words(job.plan)}; {microbatches}"
        )
    )
    if links := links_words(cluster.links):
        place.caption(escaped(f"Links: {links}"))
    if state.current() == state.START:
        place.caption(escaped(_start_words(headline)))
    return _Top(banner, numbers)


def _start_words(start: Headline) -> str:
    """Sentence on the plan of the first page, and on a usual one."""
    usual = result_cache.headline(state.USUAL)
    assert usual is not None, "it is no scenario of this machine"
    faster = faster_or_slower(start.step_time_s, usual.step_time_s, digits=0)
    return f"Within 1 % of the best plan that Search finds for this job, {faster} than {plan_words(usual.job.plan)}."


def _show_fixes(document: dict[str, Any], inputs: tuple[str, int], job: Job) -> None:
    """Smallest changes with which the plan fits, each with a button that makes it."""
    changes = awaited("trying changes with which the plan fits", plan_fixes, *inputs)
    st.subheader("Smallest changes that fit", help="Each was predicted; changes of the same devices come first")
    for number, fix in enumerate(changes):
        words = framework_words(job, fix.job) or fix.words
        _show_change(f"fix {number}", words, _fix_numbers(fix), applied(document, fix.changes))
    if not changes:
        st.markdown("No single change of the plan fits, and no pair of changes. **Search** evaluates all plans.")
        _show_other_jobs(document, inputs[1], job)


def _fix_numbers(fix: Fix) -> str:
    return (
        f"{format_bytes(fix.device_bytes)}, {format_bytes(fix.headroom_bytes)} headroom"
        f"{f' ({fix.memory_verdict})' if fix.memory_verdict else ''}; "
        f"{format_time(fix.step_time_s)} a step ({fix.step_time_change:+.1%})"
    )


def _show_other_jobs(document: dict[str, Any], calibrated_at: int, job: Job) -> None:
    """Ways out if no plan of these devices fits: adapters instead of all weights, or more devices."""
    adapters = None
    if job.training.task == "pretrain" and "lora_rank" in FAMILIES[job.model.family].fields:
        tuned = with_value(document, ("training", "task"), "sft")
        with suppress(SimplanError):
            changes = awaited("trying adapters", plan_fixes, document_text(without_budget(tuned)), calibrated_at)
            adapters = next((fix for fix in changes if fix.job.training.task == "lora"), None)
    if adapters is not None:
        words = f"For fine-tuning: {adapters.words}"
        _show_change("fix adapters", words, _fix_numbers(adapters), applied(document, adapters.changes))
    for larger, head in _on_more_devices(document, job):
        words = f"{head.job.cluster.num_devices} devices: {plan_words(head.job.plan)}"
        numbers = f"{format_bytes(head.memory.needed_bytes)} ({head.memory_verdict}); "
        _show_change("fix devices", words, f"{numbers}{format_time(head.step_time_s)} a step", larger)


def _on_more_devices(document: dict[str, Any], job: Job) -> Iterator[tuple[dict[str, Any], Headline]]:
    """Yield the scenario on the fewest devices on which its shards fit, by doubling, if there is such a number."""
    if job.cluster.cores_per_node is not None or job.cluster.is_mixed:
        return
    sharded = document | {"plan": section(document, "plan") | {"zero_stage": 3, "microbatch_size": 1}}
    for factor in _FACTORS:
        larger, _ = mended(with_size(sharded, factor * job.cluster.num_devices, "num_devices"))
        with suppress(SimplanError):
            head = result_cache.headline(larger)
            if head is not None and head.memory.fits:
                yield larger, head
                return


def _show_faster(document: dict[str, Any], inputs: tuple[str, int], job: Job) -> None:
    """Changes of one setting that make a plan that was read most faster, each with a button that makes it."""
    limit = SearchSpace().max_memory_fraction
    effects = awaited("trying changes of one setting", setting_effects, inputs[0], limit)
    fastest = _fastest(effects)
    st.subheader("Changes that make it faster", help="One setting each, predicted; all fit in 95 % of the memory")
    if not fastest:
        st.markdown("No change of one setting of the plan is faster and fits. **Search** evaluates all plans.")
    for number, effect in enumerate(fastest):
        after = changed(document, effect.key, effect.value)
        words = framework_words(job, result_cache.scenario(after).job) or f"{effect.key}: {written(effect.value)}"
        numbers = (
            f"{format_time(effect.step_time_s)} a step ({effect.step_time_change:+.1%}); "
            f"{format_bytes(effect.device_bytes)} of device memory"
        )
        _show_change(f"faster {number}", words, numbers, after)


def _fastest(effects: Sequence[SettingEffect]) -> list[SettingEffect]:
    """The best other value of each setting with which a plan fits and is faster; the fastest settings first."""
    best: dict[str, SettingEffect] = {}
    for effect in sorted(effects, key=lambda effect: effect.step_time_s):
        if effect.fits and effect.searched and effect.step_time_change < -_NOTICED:
            best.setdefault(effect.key, effect)
    return [*best.values()][:_MAX_CHANGES]


def _show_change(key: str, words: str, numbers: str, document: dict[str, Any]) -> None:
    """One change, its numbers, and a button that makes it."""
    left, middle, right = st.columns([5, 4, 1], vertical_alignment="center")
    left.markdown(escaped(words))
    middle.markdown(numbers)
    right.button("Apply", key=key, on_click=state.set_document, args=(document,), width="stretch")


def _host_words(prediction: Prediction) -> str:
    """Message about memory that is missing on the host, or while the model is loaded; empty if it suffices."""
    if prediction.fails_to_load and prediction.worst_memory.fits is not False:
        return loading_failure(prediction)
    capacity = prediction.job.cluster.host_memory_bytes
    if prediction.host_fits is not False or capacity is None:
        return ""
    used = prediction.worst_host_bytes
    return f"a node offloads {format_bytes(used)}, and has {format_bytes(capacity)} of host memory"


def _show_memory(prediction: Prediction) -> None:
    worst = prediction.worst_memory
    st.subheader("Memory by rank", help=f"device: {meaning('device')}. Every rank at its peak")
    bars = memory_bars(prediction.memory)
    most = max(bars, key=lambda bar: bar.device_bytes)
    words = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in most.parts.items())
    alt = f"Peak memory of every rank by part; of rank {most.label}, the largest: {words}"
    show_figure(memory_figure(bars, prediction.capacity_bytes), f"{prediction.name} memory by rank", alt=alt)
    when = f"during {worst.peak_action}" if worst.peak_action else "between steps"
    reserved_bytes = worst.measurable_bytes("reserved")
    more = f". The bar has {device_memory_words(worst)}" if worst.short_bytes else ""
    st.caption(
        f"Peak-memory rank {worst.rank}: {format_bytes(worst.allocated_bytes)} allocated, "
        f"{format_bytes(reserved_bytes)} reserved, {format_bytes(worst.needed_bytes)} on the device, {when}{more}."
    )


def _show_step(result: PlanResult) -> None:
    prediction, ranks = result.prediction, list(result.steps)
    title, chooser = st.columns([3, 2], vertical_alignment="bottom")
    terms = ("wait", "exposed communication", "optimizer")
    title.subheader("Step breakdown", help=". ".join(f"{term}: {meaning(f'split: {term}')}" for term in terms))
    rank = result.busiest
    if len(ranks) > 1:
        with chooser:
            rank = remembered_choice(
                "Rank", "rank", ranks, rank, format_func="rank {}".format, label_visibility="collapsed"
            )
    parts = result.steps[rank]
    alt = f"The step of rank {rank}: {', '.join(f'{part.name} {format_time(part.seconds)}' for part in parts)}"
    figure = waterfall_figure(parts, prediction.step_time_s)
    show_figure(figure, f"{prediction.name} step of rank {rank}", alt=alt)
    longest = ", the longest compute time" if rank == result.busiest and len(ranks) > 1 else ""
    idle = format_percent(prediction.bubble_fraction)
    kinds = "all ranks are identical" if len(ranks) == 1 else f"{len(ranks)} kinds of ranks"
    st.caption(
        f"Rank {rank} of {len(prediction.memory)}{longest}; {kinds}. Compute streams idle {idle} of the time, "
        "mean over ranks."
    )


def _show_details(prediction: Prediction) -> None:
    with details(f"Cost breakdown ({len(prediction.terms)} terms)", "terms") as is_open:
        if is_open:
            terms = sorted(prediction.terms, key=lambda term: -term.seconds * term.count)
            show_table(list(map(_term_row, terms)), height=320)
    with details("Ranks", "ranks") as is_open:
        if is_open:
            show_table(_rank_rows(prediction))
    with details(f"Assumptions ({len(prediction.assumptions)})", "assumptions") as is_open:
        if is_open:
            st.markdown(bullets(prediction.assumptions))
            missing = prediction.job.software.not_modelled
            if missing:
                st.markdown(f"Not modeled of {escaped(prediction.job.software.id)}:")
                st.markdown(bullets(missing))


def _term_row(term: Term) -> dict[str, object]:
    return {
        "cost": str(term.name),
        "each": format_time(term.seconds),
        "count per rank": round(term.count, 3),
        "seconds per rank": term.seconds * term.count,
        "source": term.provenance,
        "uncertainty": f"+/- {term.relative_std:.0%}",
        "formula": term.formula,
    }


def _rank_rows(prediction: Prediction) -> list[dict[str, object]]:
    """Table rows; ranks with equal cells share a row."""
    groups: dict[tuple[tuple[str, object], ...], list[int]] = {}
    for memory, split in zip(prediction.memory, prediction.splits, strict=True):
        cells = {
            "allocated GiB": round(memory.allocated_bytes / GIB, 2),
            "reserved GiB": round(memory.reserved_bytes / GIB, 2),
            "device GiB": round(memory.device_bytes / GIB, 2),
            "peak during": memory.peak_action or "between steps",
            **{name: f"{part_s / prediction.step_time_s:.1%}" for name, part_s in split_parts(split).items()},
        }
        groups.setdefault(tuple(cells.items()), []).append(memory.rank)
    return [{"ranks": format_ranks(ranks), **dict(cells)} for cells, ranks in groups.items()]


if __name__ == "__main__":
    run_page(show)
