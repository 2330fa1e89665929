"""Plans of a search: the search itself, table rows, scatter plot, step breakdown, importance of settings, outcomes."""

from __future__ import annotations

import math
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

from app.figures.style import (
    CATEGORIES,
    MUTED,
    PLANS,
    SPLIT,
    Figure,
    empty,
    figure,
    labeled_bars,
    scatter,
    stack,
    upright,
)
from app.fitting import changed, degrees_of, document_text, microbatch_sizes, valid_values
from app.jobs.job import Report, Update
from app.predictions import calibration_of, predicted
from simplan.document import parse_yaml
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.step_summary import evaluate_step
from simplan.report.search import RESOURCES, alike_words, main_difference_words, search_plan_words, space_rows
from simplan.scenario import parse_scenario, parse_search
from simplan.search import RankedPlan, SearchProgress, SearchResult, SearchSpace, SpaceCount, search
from simplan.search.enumeration import Enumeration
from simplan.search.evaluation.evaluator import Evaluator
from simplan.search.explain import explain_plan
from simplan.search.space import OPTION_RANGES, capacity_bytes, option_of, that_it_has, with_options
from simplan.units import GIB, format_bytes, format_number, format_time

SEARCHING = "searching"
"""``SearchProgress.doing`` until all plans are evaluated; then the search explains the best plans."""

_PAUSE_S = 0.25
_PACE_S = 8.0


class Pace:
    """Recent pace of a search.

    A search rejects most plans by rules in the first second, then times the others one by one, the most promising
    first, and prunes the rest together. So the pace of the last seconds gives an upper estimate of the time left.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def left_s(self, now_s: float, done: int, total: int) -> float | None:
        """Upper estimate of the remaining seconds; None in the first seconds and while no plan is done."""
        self._seen.append((now_s, done))
        while self._seen[0][0] < now_s - _PACE_S:
            self._seen.popleft()
        begun_s, before = self._seen[0]
        if now_s - begun_s < _PACE_S / 2 or done == before:
            return None
        return (total - done) * (now_s - begun_s) / (done - before)


def search_plans(text: str, report: Report) -> SearchResult:
    """The best plans of a scenario with a search; reports intermediate results."""
    asked = parse_search(text)
    told_s, had, pace = 0.0, False, Pace()

    def on_progress(progress: SearchProgress) -> None:
        nonlocal told_s, had
        left_s = pace.left_s(time.monotonic(), progress.done, progress.total)
        has_plan = progress.best_step_time_s is not None
        if time.monotonic() - told_s >= _PAUSE_S or (has_plan and not had) or progress.doing != SEARCHING:
            told_s, had = time.monotonic(), has_plan
            known = _known(progress) if has_plan else None
            report(Update(progress.done, progress.total, progress.doing, known, left_s))

    result = search(asked.job, asked.space, name=asked.name, on_progress=on_progress)
    for plan in result.pareto:
        if plan.explanation is None and not result.interrupted:
            total = result.space.total
            report(Update(total, total, f"Pareto front: {search_plan_words(plan.plan, plan.software)}", result))
            job = with_options(asked.job.with_num_devices(plan.num_devices), tuple(plan.software.items()))
            why = explain_plan(Evaluator(job), plan.plan, (), capacity_bytes(job, asked.space))
            front = [replace(other, explanation=why) if other is plan else other for other in result.pareto]
            result = replace(result, pareto=tuple(front))
    return result


def current_plan(text: str, calibrated_at: int, max_memory_fraction: float, options: tuple[str, ...]) -> RankedPlan:
    """Plan of a scenario as a search shows its plans.

    Args:
        text, calibrated_at: See ``predicted_step``.
        max_memory_fraction: Fraction of the device memory that a plan of the search may use.
        options: Options of the software that the search varies.
    """
    prediction, scenario = predicted(text, calibrated_at), parse_scenario(text)
    job = prediction.job
    capacity = capacity_bytes(job, SearchSpace(max_memory_fraction=max_memory_fraction))
    needed_bytes, devices = prediction.worst_memory.needed_bytes, job.cluster.num_devices
    samples = 1 if job.model.sample != "sequence" else job.model.seq_len
    return RankedPlan(
        plan=job.plan,
        num_devices=devices,
        step_time_s=prediction.step_time_s,
        device_bytes=needed_bytes,
        headroom_bytes=None if capacity is None else capacity - needed_bytes,
        tokens_per_s_per_device=job.sequences_per_step * samples / prediction.step_time_s / devices,
        explanation=explain_plan(Evaluator(job, calibration_of(scenario)), job.plan, (), capacity),
        software={name: option_of(job, name) for name in options},
    )


def _known(progress: SearchProgress) -> SearchResult:
    """Search result so far; after all plans are evaluated the result is complete except for explanations."""
    return replace(progress.so_far(), interrupted=progress.doing == SEARCHING)


@dataclass(frozen=True, slots=True)
class PlanQuantity:
    """A number of a plan that can be drawn.

    Attributes:
        label: Name with unit.
        form: Number format for tooltips, in d3 syntax.
        less_is_better: True when smaller is better; None when neither direction is better.
    """

    label: str
    form: str = ",.4~g"
    less_is_better: bool | None = None


AXES: Mapping[str, PlanQuantity] = MappingProxyType(
    {
        "step_time_s": PlanQuantity("step time, s", less_is_better=True),
        "device_gib": PlanQuantity("device memory, GiB", ",.2f", less_is_better=True),
        "headroom_gib": PlanQuantity("memory headroom, GiB", ",.2f", less_is_better=False),
        "tokens_per_s_per_device": PlanQuantity("throughput per device, 1/s", ",.0f", less_is_better=False),
        "mfu": PlanQuantity("MFU", ".1%", less_is_better=False),
        "num_devices": PlanQuantity("devices", ",d", less_is_better=True),
        "cost_dollars": PlanQuantity("cost of the token budget, dollars", ",.0f", less_is_better=True),
        **{
            key: PlanQuantity(key, ",d")
            for key in ("tp", "cp", "ep", "pp", "virtual_stages", "dp_replicate", "dp_shard")
        },
        "microbatch_size": PlanQuantity("microbatch_size", ",d"),
    }
)
"""Quantities for the axes, by key of a row."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        **{key: key for key in ("schedule", "recompute", "zero_stage", "tp", "pp", *OPTION_RANGES)},
        "limit": "bottleneck",
    }
)
"""Fields for the color of points, by key of a row."""

SETTINGS = tuple(dict.fromkeys((*ParallelPlan.model_fields, *OPTION_RANGES)))
"""Settings of a plan and searched options, by key of a row."""

_LABEL_CHARS, _CHARS_ACROSS = 44, 120
_LEAST_RANGE, _MAX_RANGE, _MARGIN = 0.02, 1.0, 0.03
"""Smallest and largest change at the end of the axis of importance, and the room beyond for half a point."""
_UNSEARCHED = "fits, not searched"
_REASONS = {"memory": "needs more memory than a device has"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")


def shown_plans(result: SearchResult, current: RankedPlan | None = None) -> list[RankedPlan]:
    """Plans of a search: ranked ones, the others of the Pareto front, and the current plan unless it is among them."""
    plans = [*result.ranked, *(plan for plan in result.pareto if plan not in result.ranked)]
    plans = [plan for place, plan in enumerate(plans) if not any(_is_same(plan, other) for other in plans[:place])]
    return plans if current is None or any(_is_same(plan, current) for plan in plans) else [*plans, current]


def _is_same(plan: RankedPlan, other: RankedPlan) -> bool:
    """True for one plan with the same options of the software; a ranked plan has an explanation before the front."""
    return plan.plan == other.plan and plan.software == other.software


def plan_rows(result: SearchResult, current: RankedPlan | None = None) -> list[dict[str, Any]]:
    """One row per plan of ``shown_plans``.

    All rows have the same columns. Plan fields that no plan sets are left out.
    """
    rows = []
    for place, plan in enumerate(shown_plans(result, current)):
        rank = place + 1 if place < len(result.ranked) else None
        on_front = any(_is_same(plan, other) for other in result.pareto)
        rows.append(
            _row(rank, plan, result, on_front) | {"is_current": current is not None and _is_same(plan, current)}
        )
    unset = [key for key in ParallelPlan.model_fields if all(row[key] is None for row in rows)]
    return [{key: value for key, value in row.items() if key not in unset} for row in rows]


def settings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of ``SETTINGS`` in which a plan differs from the defaults, always with dp_shard, tp and microbatch size."""
    always = ("dp_shard", "tp", "microbatch_size")

    def is_set(key: str) -> bool:
        if key not in ParallelPlan.model_fields:
            return any(key in row for row in rows)
        default = ParallelPlan.model_fields[key].default
        return any(row.get(key, default) != default for row in rows)

    return [key for key in SETTINGS if key in always or is_set(key)]


def _row(rank: int | None, plan: RankedPlan, result: SearchResult, on_front: bool) -> dict[str, Any]:
    why, best = plan.explanation, result.ranked[0]
    return {
        "rank": rank,
        "plan": search_plan_words(plan.plan, plan.software),
        "step_time_s": plan.step_time_s,
        "vs_best": plan.step_time_s / best.step_time_s - 1,
        "main_difference": main_difference_words(plan, best),
        "device_gib": plan.device_bytes / GIB,
        "memory_verdict": why.memory_verdict if why else None,
        "headroom_gib": None if plan.headroom_bytes is None else plan.headroom_bytes / GIB,
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": why.mfu if why else None,
        "limit": why.limit.replace("_", " ") if why else None,
        "limit_share": why.shares[why.limit] if why else None,
        "help": RESOURCES[why.help] if why and why.help else None,
        "help_share": why.saved[why.help] if why and why.saved and why.help else None,
        "num_devices": plan.num_devices,
        "cost_dollars": plan.cost_dollars,
        "on_front": on_front,
        "alike": plan.alike.num_plans or None,
        "alike_differ_in": alike_words(plan.alike) or None,
        **plan.plan.model_dump(mode="json"),
        **plan.software,
    }


def plans_figure(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    colour: str,
    pinned: Iterable[str] = (),
    selected: str | None = None,
) -> Figure:
    """Plans as points, with the Pareto front of the two axes as a line; current, pinned and selected plans have a ring.

    Args:
        rows: Rows from ``plan_rows``.
        x, y: Keys of ``AXES``.
        colour: Key of ``COLOURS``.
        pinned: Texts of pinned plans.
        selected: Text of the selected plan; None for none.

    The second value of a point's ``customdata`` is the text of its plan.
    """
    shown = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    if not shown:
        return empty("No plan has both numbers yet.")

    def trace(rows: Sequence[Mapping[str, Any]], **look: Any) -> dict[str, Any]:
        return scatter(x=[row[x] for row in rows], y=[row[y] for row in rows], **look)

    traces = []
    front = _front([row for row in shown if row["rank"] is not None or row["on_front"]], x, y)
    if len(front) > 1:
        line = {"color": MUTED, "dash": "dot", "width": 1.5, "shape": "hv"}
        traces.append(trace(front, mode="lines", line=line, name="Pareto front", hoverinfo="skip"))
    for number, value in enumerate(dict.fromkeys(_colour(row, colour) for row in shown)):
        points = [row for row in shown if _colour(row, colour) == value]
        marker = {
            "color": PLANS[number % len(PLANS)],
            "symbol": _SYMBOLS[number % len(_SYMBOLS)],
            "size": [13 if row["rank"] == 1 else 9 for row in points],
            "line": {"width": 1, "color": "rgba(255,255,255,0.6)"},
        }
        name, hovers = f"{COLOURS[colour]}: {value}", [[_hover(row), row["plan"]] for row in points]
        hover = {"customdata": hovers, "hovertemplate": "%{customdata[0]}<extra></extra>"}
        traces.append(trace(points, mode="markers", name=name, marker=marker, **hover))
    current = {row["plan"] for row in shown if row["is_current"]}
    rings = (("current plan", current, "diamond-open"), ("pinned", {*pinned}, "square-open"))
    for name, plans, ring in (*rings, ("selected", {selected}, "circle-open")):
        ringed = [row for row in shown if row["plan"] in plans]
        if ringed:
            around = {"symbol": ring, "size": 18, "color": MUTED, "line": {"width": 2}}
            traces.append(trace(ringed, mode="markers", name=name, marker=around, hoverinfo="skip"))
    return figure(traces, height=430, xaxis=_drawn_axis(x), yaxis=_drawn_axis(y))


def _drawn_axis(name: str) -> dict[str, Any]:
    return {"title": AXES[name].label} | ({"tickformat": AXES[name].form} if name == "mfu" else {})


def _front(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[Mapping[str, Any]]:
    """Pareto front of the points; empty when an axis has no better direction."""
    less_x, less_y = AXES[x].less_is_better, AXES[y].less_is_better
    if less_x is None or less_y is None or x == y:
        return []
    sign_x, sign_y = (1 if less_x else -1), (1 if less_y else -1)
    front: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (sign_x * row[x], sign_y * row[y])):
        if not front or sign_y * row[y] < sign_y * front[-1][y]:
            front.append(row)
    return front


def _colour(row: Mapping[str, Any], colour: str) -> str:
    value = row.get(colour)
    return "pending" if value is None else str(value)


def _hover(row: Mapping[str, Any]) -> str:
    """Known numbers and options of a plan."""
    name = f"{row['rank']}. " if row["rank"] else "Current plan: " if row["is_current"] else ""
    title = f"<b>{name}{row['plan']}</b>"
    lines = [title.replace(", ", ",<br>", 2)]
    for name, axis in AXES.items():
        value = row.get(name)
        if value is not None:
            lines.append(f"{axis.label.partition(',')[0]}: {_number(value, name)}")
    others = [key for key in ("schedule", "zero_stage", "recompute", "sequence_parallel") if row.get(key) is not None]
    lines += [f"{key}: {row[key]}" for key in others]
    if row["limit"]:
        lines.append(f"bottleneck: {row['limit']}, {row['limit_share']:.0%} of the step")
    if row["help"]:
        lines.append(f"10 % more {row['help']} saves {row['help_share']:.1%}")
    return "<br>".join(lines)


def _number(value: float, name: str) -> str:
    if name == "mfu":
        return f"{value:.1%}"
    unit = AXES[name].label.partition(", ")[2]
    text = f"{value:,.2f}" if name.endswith("gib") else format_number(value)
    return f"{text} {unit}".strip()


_DEGREES = ("tp", "cp", "pp", "ep", "dp_replicate")
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "schedule": tuple(SCHEDULE_FACTS),
    "recompute": get_args(Recompute),
    "grad_sync": ("step", "microbatch"),
    "sequence_parallel": (False, True),
    "reshard_after_forward": (False, True),
    "offload_optimizer": (False, True),
    "offload_activations": (False, True),
}


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """Step time and memory of a plan with another value of one setting; data parallelism follows the devices.

    Attributes:
        key: Key of the plan.
        value: The other value.
        step_time_s: Step time in seconds.
        step_time_change: Relative change of the step time.
        device_bytes: Device memory of the peak-memory rank, in bytes.
        fits: True when the memory is within the limit of the search; None when the capacity is unknown.
        searched: True when a search with its default ranges evaluates such plans.
    """

    key: str
    value: Any
    step_time_s: float
    step_time_change: float
    device_bytes: int
    fits: bool | None
    searched: bool


def setting_effects(text: str, max_memory_fraction: float) -> tuple[SettingEffect, ...]:
    """Effect of every other valid value of each setting, by the cost model of a search; calibrated costs have none.

    Args:
        text: The scenario's YAML.
        max_memory_fraction: Fraction of the device memory that a plan of the search may use.
    """
    document = parse_yaml(text, "scenario").data
    job = parse_scenario(text).job
    if job.cluster.cores_per_node is not None:
        return ()
    _, base_s = evaluate_step(job)
    assert base_s is not None, "there is no limit"
    space = that_it_has(job.software, SearchSpace(max_memory_fraction=max_memory_fraction))
    capacity, enumeration = capacity_bytes(job, space), Enumeration(space, job.with_plan(ParallelPlan()))
    values = {key: degrees_of(document, key) for key in _DEGREES}
    values["microbatch_size"] = microbatch_sizes(document)
    values |= {key: valid_values(document, key, options) for key, options in _OPTIONS.items()}
    if job.plan.pp == 1:
        del values["schedule"]
    effects = []
    for key, others in values.items():
        for value in others:
            other = parse_scenario(document_text(changed(document, key, value))).job
            if value == getattr(job.plan, key) or other.plan == job.plan:
                continue
            device_bytes, step_time_s = evaluate_step(other)
            assert step_time_s is not None, "there is no limit"
            fits = None if capacity is None else device_bytes <= capacity
            change, searched = step_time_s / base_s - 1, enumeration.has(other.plan)
            effects.append(SettingEffect(key, value, step_time_s, change, device_bytes, fits, searched))
    return tuple(effects)


def importance_figure(effects: Sequence[SettingEffect]) -> Figure:
    """One row per setting with a point for each other value, at the change of the step time; most important first.

    Args:
        effects: From ``setting_effects``.
    """
    if not effects:
        return empty("No other value of a setting is valid.")
    spread = {effect.key: 0.0 for effect in effects}
    for effect in effects:
        spread[effect.key] = max(spread[effect.key], abs(effect.step_time_change))
    ordered = sorted(spread, key=lambda key: -spread[key])
    least, most = _drawn_range(effects)
    labels = _apart(effects, least, most)
    traces = []
    kinds = (("fits", "circle"), (_UNSEARCHED, "circle-open"), ("does not fit", "x"))
    for (name, symbol), colour in zip(kinds, (PLANS[0], PLANS[0], PLANS[1]), strict=True):
        shown = [effect for effect in effects if _kind(effect) == name]
        if not shown:
            continue
        trace = scatter(
            name=name,
            mode="markers+text",
            x=[100 * min(effect.step_time_change, most) for effect in shown],
            y=[effect.key for effect in shown],
            text=[labels[effect] for effect in shown],
            textposition=["top center" if effect.step_time_change <= most else "top left" for effect in shown],
            textfont={"size": 10},
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=[
                [
                    format_time(effect.step_time_s),
                    format_bytes(effect.device_bytes),
                    f"{effect.step_time_change:+.1%}",
                    written(effect.value),
                ]
                for effect in shown
            ],
            hovertemplate="%{y}: %{customdata[3]}<br>step time %{customdata[0]} (%{customdata[2]})<br>"
            "device memory %{customdata[1]}<extra></extra>",
        )
        traces.append(trace)
    return figure(
        traces,
        height=110 + 40 * len(ordered),
        shapes=[upright(0, {"color": MUTED, "dash": "dot"})],
        xaxis={"title": "change of the step time, %", "range": [100 * least, 100 * (most + _MARGIN)]},
        yaxis=CATEGORIES | {"categoryorder": "array", "categoryarray": ordered},
    )


def _drawn_range(effects: Sequence[SettingEffect]) -> tuple[float, float]:
    """Ends of the axis, around zero: values that are several times as slow would leave no room for the others."""
    changes = [effect.step_time_change for effect in effects]
    most = min(max(*changes, _LEAST_RANGE), _MAX_RANGE)
    return min(*changes, 0.0) - 0.1 * most, most


def _kind(effect: SettingEffect) -> str:
    """Entry of the legend."""
    return "does not fit" if effect.fits is False else "fits" if effect.searched else _UNSEARCHED


def _apart(effects: Sequence[SettingEffect], least: float, most: float) -> dict[SettingEffect, str]:
    """Labels of the points of each row; empty where a label would cover the one before it.

    Points at the end of the axis share the label of the slowest, which ends there and names its change.

    Args:
        effects: All points.
        least, most: Ends of the axis, as changes of the step time.
    """
    per_char = (most + _MARGIN - least) / _CHARS_ACROSS
    labels, ends = dict.fromkeys(effects, ""), dict.fromkeys((effect.key for effect in effects), -math.inf)
    rooms: dict[str, float] = {}
    for effect in sorted(effects, key=lambda effect: -effect.step_time_change):
        if effect.step_time_change > most and effect.key not in rooms:
            labels[effect] = f"{written(effect.value)} {effect.step_time_change:+.0%}"
            rooms[effect.key] = most - per_char * (len(labels[effect]) + 1)
    for effect in sorted(effects, key=lambda effect: effect.step_time_change):
        text = written(effect.value)
        half = per_char * (len(text) + 1) / 2
        room = rooms.get(effect.key, math.inf)
        if ends[effect.key] <= effect.step_time_change - half and effect.step_time_change + half <= room:
            labels[effect], ends[effect.key] = text, effect.step_time_change + half
    return labels


def written(value: Any) -> str:
    """Value of a setting as in a scenario file; empty for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def shares_figure(plans: Sequence[tuple[str, RankedPlan]]) -> Figure:
    """Step breakdown of each plan's critical rank, as stacked bars of the length of the step.

    Args:
        plans: Short names, and plans with explanations.
    """
    explained = [(name, plan, plan.explanation) for name, plan in plans if plan.explanation is not None]
    if not explained:
        return empty("No plan is explained yet.")
    shares = {part: [why.shares.get(part.replace(" ", "_"), 0.0) for _, _, why in explained] for part in SPLIT}
    parts_s, tooltips = {}, {}
    for part, fractions in shares.items():
        parts_s[part] = [share * plan.step_time_s for share, (_, plan, _) in zip(fractions, explained, strict=True)]
        tooltips[part] = [
            f"{format_time(part_s)}, {share:.1%} of the step of rank {why.busiest_rank}"
            for part_s, share, (_, _, why) in zip(parts_s[part], fractions, explained, strict=True)
        ]
    return figure(
        stack([name for name, _, _ in explained], parts_s, tooltips, horizontal=True),
        height=90 + 26 * len(explained),
        barmode="stack",
        bargap=0.25,
        xaxis={"title": "step time, s"},
        yaxis=CATEGORIES,
    )


def space_table(space: SpaceCount) -> list[dict[str, Any]]:
    """Plans of the space by outcome, as table rows; the largest numbers of rejected plans first."""
    rows = [
        {"plans": number, "outcome": "rejected" if name in space.rejected else name, "reason": _REASONS.get(name, why)}
        for number, name, why in space_rows(space)
    ]
    return sorted(rows, key=lambda row: row["outcome"] != "rejected")


def space_figure(space: SpaceCount) -> Figure:
    """Search space by rejection reason as bars, on a logarithmic scale: one plan is visible next to a million."""
    rows = [row for row in space_table(space) if row["plans"]]
    if not rows:
        return empty("No plan was evaluated yet.")
    labels = ["<br>".join(textwrap.wrap(row["reason"], _LABEL_CHARS)) for row in rows]
    plans = [row["plans"] for row in rows]
    return labeled_bars(
        labels,
        plans,
        [f"{number:,}" for number in plans],
        [f"{row['plans']:,} plans: {row['outcome']}" for row in rows],
        "plans",
        color=[MUTED if row["outcome"] == "rejected" else PLANS[0] for row in rows],
        height=80 + sum(14 + 16 * (label.count("<br>") + 1) for label in labels),
        bargap=0.35,
        xaxis={"type": "log", "title": "plans", "dtick": 1, "range": [-0.2, math.log10(max(plans)) + 1.3]},
    )
