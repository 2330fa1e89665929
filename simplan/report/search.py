"""Search result as text: the best plan, the other ranked plans, and the reasons for excluding the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from simplan.plan.placement import listed_words
from simplan.plan.plan import ParallelPlan
from simplan.problems import setting_words
from simplan.report.table import format_table_text
from simplan.report.text import links_words, memory_interval, plan_words, suggestions
from simplan.search.incumbents import NOISE
from simplan.search.result import (
    EquivalentPlans,
    NearestMiss,
    OtherSoftware,
    RankedPlan,
    SearchedWay,
    SearchResult,
    SpaceCount,
)
from simplan.search.space import Objective
from simplan.search.switch import ChangedSetting, PlanSwitch
from simplan.units import counted, format_bytes, format_percent, format_time

GOALS: Mapping[Objective, str] = MappingProxyType(
    {
        "step_time": "step time",
        "tokens_per_s_per_device": "throughput per device",
        "num_devices": "number of devices",
        "memory": "device memory",
        "cost": "cost of the token budget",
    }
)
"""Objectives in words."""

RESOURCES: Mapping[str, str] = MappingProxyType(
    {
        "flop_per_s": "FLOP/s",
        "memory_bandwidth": "memory bandwidth",
        "intra_link": "bandwidth within nodes",
        "inter_link": "bandwidth between nodes",
        "memory": "device memory",
    }
)
"""Resources that can limit a plan, in words."""

_MAX_POINTS = 20
_MAX_VALUES = 6


def search_verdict(result: SearchResult) -> str:
    """The best plan's step time, or that there is none, in one line."""
    total = result.space.total
    best = result.best
    if best is None:
        if result.interrupted:
            return f"stopped before any plan was found that fits; {counted_plans(total)} ruled out"
        return f"none of {counted_plans(total)} is feasible"
    of = f"best of {counted_plans(total)} by {GOALS[result.objectives[0]]}"
    if result.interrupted:
        of = f"stopped; {of.replace('best of', 'best of the first')} so far"
    return f"{of}: {format_time(best.step_time_s)} a step on {counted(best.num_devices, 'device')}"


def besides(space: SpaceCount) -> str:
    """Number of timed plans outside of the space."""
    verb = "recomputes" if space.some_blocks == 1 else "recompute"
    return f"and {counted_plans(space.some_blocks)} that {verb} the fewest blocks that fit"


def unsearched_words(result: SearchResult) -> str:
    """``not searched: cp; add --set 'search.cp=[1, 2]'``."""
    ranges = (f"--set 'search.{name}=[{_values(values, ', ')}]'" for name, values in result.unsearched.items())
    return f"not searched: {', '.join(result.unsearched)}; add {' '.join(ranges)}"


def assumed_text(assumptions: Sequence[str]) -> str:
    """Paragraph with sentences about values that were not given."""
    return "\n".join(["Assumptions", *(f"  - {text}" for text in assumptions)])


def counted_plans(number: int) -> str:
    """``1 plan``, ``1,024 plans``."""
    return f"{number:,} plan{'' if number == 1 else 's'}"


def search_plan_words(plan: ParallelPlan, software: Mapping[str, object] = MappingProxyType({})) -> str:
    """The plan with its microbatch size, and with the options of the software that a search varies."""
    outside = {name: value for name, value in software.items() if name not in ParallelPlan.model_fields}
    options = [f", {name} {_values([value])}" for name, value in outside.items()]
    return f"{plan_words(plan)}, microbatch size {plan.microbatch_size}{''.join(options)}"


def alike_words(alike: EquivalentPlans) -> str:
    """``7 more within 0.1 %: virtual_stages 8 10, zero_stage 0``; empty for none."""
    if not alike.num_plans:
        return ""
    differ = ", ".join(f"{key} {_values(values)}" for key, values in alike.differ_in.items())
    return f"{alike.num_plans:,} more within {format_percent(NOISE)}: {differ}"


def _values(values: Sequence[object], separator: str = " ") -> str:
    words = [str(value).lower() if isinstance(value, bool) else _value(value) for value in values]
    return separator.join(words) if len(words) <= _MAX_VALUES else f"{words[0]} to {words[-1]}"


def _value(value: object) -> str:
    return listed_words(value) if isinstance(value, tuple) and isinstance(value[0], int) else str(value)


def headroom_words(result: SearchResult, limit: str = "--max-memory-fraction 1") -> str:
    """Memory that the search kept free, and the number of plans rejected for it; empty if none was kept free.

    Args:
        result: Result of the search.
        limit: Setting with which it keeps none free, as its user writes it.
    """
    free = 1 - result.max_memory_fraction
    if free <= 0:
        return ""
    left_out = "no plan is rejected for it"
    if number := result.space.in_headroom:
        plans = f"up to {number:,} rejected plans fit" if number > 1 else "1 rejected plan may fit"
        left_out = f"{plans} without it ({limit})"
    return f"{100 * free:.3g} % of the device memory is kept free; {left_out}"


def switch_text(switch: PlanSwitch, reason: str = "") -> str:
    """Change from the plan that runs today to the best one: settings, gain, certainty and cost.

    Args:
        reason: Sentence on the main reason of the difference; empty if it is unknown.
    """
    before, after = switch.current, switch.best
    if not switch.changes:
        return f"T{switch.current_words[1:]} is the best one"
    change = switch.step_time_change
    fraction, pairs = switch.right_order
    has_options = any(setting.key.startswith("software.") for setting in switch.changes)
    of_plans = "; they differ in the plan alone, not in software" if has_options else ""
    faster = f"{abs(change):.1%} {'less' if change < 0 else 'more'}".replace("%", " %")
    low, high = (" to ".join(map(format_time, plan.step_time_interval_s)) for plan in (before, after))
    lines = [
        f"From {switch.current_words} to the best one: {faster} time a step",
        *([f"  why          {reason}"] if reason else []),
        f"  step time    {format_time(before.step_time_s)} ({low}) -> {format_time(after.step_time_s)} ({high})",
        f"  memory       {format_bytes(before.worst_memory.needed_bytes)} ({before.memory_verdict}) -> "
        f"{format_bytes(after.worst_memory.needed_bytes)} ({after.memory_verdict})",
        f"  certainty    of {pairs} published pairs of plans predicted so far apart, "
        f"{100 * fraction:.0f} % were measured in this order{of_plans}",
    ]
    for number, setting in enumerate(switch.changes):
        place = f"  (line {setting.line})" if setting.line is not None else ""
        lines.append(f"  {'' if number else 'change':11}  {change_words(setting)}{place}")
    lines += [f"  {'' if number else 'cost':11}  {cost}" for number, cost in enumerate(switch.costs)]
    return "\n".join(lines)


def change_words(change: ChangedSetting) -> str:
    """``plan.tp 8 -> 4``, ``add --sequence-parallel``."""
    if change.before is None or change.after is None:
        value = change.after if change.before is None else change.before
        shown = "" if value is True else f" {setting_words(value)}"  # a flag has no value
        return f"{'add' if change.before is None else 'remove'} {change.key}{shown}"
    return f"{change.key} {setting_words(change.before)} -> {setting_words(change.after)}"


def search_text(
    result: SearchResult, next_steps: Iterable[str] = (), switch: PlanSwitch | None = None, reason: str = ""
) -> str:
    """Full search report as text.

    Args:
        result: Result of the search.
        next_steps: Commands to suggest at the end.
        switch: Comparison with the plan that runs today; None for none.
        reason: Main reason of the difference of the two plans, as for ``switch_text``.
    """
    parts = [f"{result.name}: {search_verdict(result)}", *([] if switch is None else [switch_text(switch, reason)])]
    if result.best is not None:
        shown = list(_best(result.best, result))
        if links := links_words(result.links):
            shown.append(f"  links        {links}")
        parts[0] += "\n" + "\n".join(shown)
    elif result.space.in_headroom:
        parts[0] += f"\n  memory       {headroom_words(result)}"
    if len(result.ranked) > 1:
        parts.append(_ranked_table(result))
    if changed := _mathematics(result):
        parts.append(changed)
    if result.ways:
        parts.append(_ways_table(result))
    if len(result.objectives) == 2 and result.pareto:
        parts.append(_front_table(result))
    parts.append(_space_table(result.space))
    if result.unsearched:
        parts[-1] += f"\n  {unsearched_words(result)}"
    if result.nearest_misses:
        parts.append("Near misses\n" + "\n".join(f"  - {miss_words(miss)}" for miss in result.nearest_misses))
    if result.changes:
        lines = (f"  - {change.words}: {search_plan_words(change.plan, change.software)}" for change in result.changes)
        parts.append("Changes that make a plan feasible, each tried\n" + "\n".join(lines))
    if result.assumptions:
        parts.append(assumed_text(result.assumptions))
    return "\n\n".join([*parts, *suggestions(next_steps)])


_MATHEMATICS = {
    "optimizer": "another optimizer is another update",
    "base_weights": "fewer bits round frozen weights",
    "lora_rank": "a rank bounds what adapters learn",
}


def _mathematics(result: SearchResult) -> str:
    """Sentence on searched options that change what is trained; empty for none."""
    searched = {name for plan in result.ranked for name in plan.software}
    words = [sentence for name, sentence in _MATHEMATICS.items() if name in searched]
    return f"Losses were not compared: {', '.join(words)}." if words else ""


def _best(best: RankedPlan, result: SearchResult) -> Iterator[str]:
    yield f"  plan         {search_plan_words(best.plan, best.software)}"
    if best.alike.num_plans:
        yield f"  equivalent   {alike_words(best.alike)}"
    why = best.explanation
    if why is not None:
        low_s, high_s = why.step_time_interval_s
        yield (
            f"  step time    {format_time(best.step_time_s)}  "
            f"(90 % interval {format_time(low_s)} to {format_time(high_s)})"
        )
    mfu = "" if why is None or why.mfu is None else f", MFU {format_percent(why.mfu)}"
    yield f"  throughput   {best.tokens_per_s_per_device:,.0f} {result.unit}/s per device{mfu}"
    if best.cost_dollars is not None:
        yield f"  cost         {best.cost_dollars:,.0f} dollars for the token budget"
    rank = "the worst device" if why is None else f"rank {why.worst_rank}"
    headroom = ""
    if best.headroom_bytes is not None:
        usable = best.device_bytes + best.headroom_bytes
        share = format_percent(best.headroom_bytes / usable)
        kept = result.max_memory_fraction
        of_all = f" ({100 * kept:.3g} % of {format_bytes(usable / kept)})" if kept < 1 else ""
        headroom = f" of {format_bytes(usable)}{of_all}, {format_bytes(best.headroom_bytes)} ({share}) headroom"
    yield f"  memory       {rank} needs {format_bytes(best.device_bytes)}{headroom}"
    if why is not None and why.memory_verdict is not None:
        yield f"  {'':11}  {why.memory_verdict}: {memory_interval(why.device_interval_bytes)}"
    if best.headroom_bytes is not None and (words := headroom_words(result)):
        yield f"  {'':11}  {words}"
    if why is None:
        return
    if why.weakest_term is not None:
        yield f"  least known  {why.weakest_term.fact}"
    first, *others = (f"{name} {format_percent(share)}" for name, share in largest_first(why.shares))
    yield f"  bottleneck   {', '.join((f'{first} of the step of rank {why.busiest_rank}', *others))}"
    if why.contention:
        yield f"  {why.slowest_link}"
        yield f"  contention   {why.contention}"
    for other in why.other_software:
        yield f"  instead      {other_software_words(best, other)}"
    if not why.saved:
        no_rate = "10 % more of any resource makes a step less than 0.01 % shorter"
        shared = "unknown: ranks share cores, whose rates are not modeled"
        yield f"  sensitivity  {shared if why.saved is None else no_rate}"
        return
    (name, most), *rest = largest_first(why.saved, RESOURCES)
    yield f"  sensitivity  10 % more {name} makes a step {format_percent(most, 2)} shorter"
    if rest:
        yield f"  {'':11}  {', '.join(f'{name} {format_percent(share, 2)}' for name, share in rest)}"


def other_software_words(plan: RankedPlan, other: OtherSoftware) -> str:
    """``compiled false: step time 2.3 s (+11.0 %), needs 78.1 GiB, which does not fit``."""
    changed = {name: value for name, value in other.software.items() if plan.software.get(name) != value}
    options = ", ".join(f"{name} {_values([value])}" for name, value in changed.items())
    time = f"step time {format_time(other.step_time_s)} ({100 * (other.step_time_s / plan.step_time_s - 1):+.1f} %)"
    return (
        f"{options}: {time}, needs {format_bytes(other.device_bytes)}, which {'fits' if other.fits else 'does not fit'}"
    )


def largest_first(shares: Mapping[str, float], names: Mapping[str, str] | None = None) -> list[tuple[str, float]]:
    """Names in words and fractions of the step, largest first.

    Args:
        shares: Fraction of the step by key.
        names: Words by key; None for the keys, without shares below 0.05 %.
    """
    if names is None:
        shares = {key: share for key, share in shares.items() if share >= 0.0005}
    ordered = sorted(shares.items(), key=lambda item: (item[1], item[0]), reverse=True)
    return [(key.replace("_", " ") if names is None else names[key], share) for key, share in ordered]


def _ranked_table(result: SearchResult) -> str:
    best = result.ranked[0]

    def row(rank: int, plan: RankedPlan) -> list[str]:
        why = plan.explanation
        return [
            str(rank),
            *_numbers(plan, result),
            "" if rank == 1 else f"{100 * (plan.step_time_s / best.step_time_s - 1):+.1f} %",
            "" if why is None else why.memory_verdict or "",
            main_difference_words(plan, best),
            "" if why is None else f"{why.limit.replace('_', ' ')} {100 * why.shares[why.limit]:.0f} %",
            "" if why is None or why.help is None else RESOURCES[why.help],
            search_plan_words(plan.plan, plan.software)
            + (f" (and {alike_words(plan.alike)})" if plan.alike.num_plans else "")
            + (f" ({plan.samples_factor:g} x the samples)" if plan.samples_factor != 1.0 else ""),
        ]

    headers = [
        "",
        *_headers(result),
        "vs best",
        "memory verdict",
        "main difference",
        "bottleneck",
        "top sensitivity",
        "plan",
    ]
    rows = [row(rank, plan) for rank, plan in enumerate(result.ranked, 1)]
    return "Ranked\n" + format_table_text(headers, rows, words_last=True)


def main_difference_words(plan: RankedPlan, best: RankedPlan) -> str:
    """``+3.1 % exposed communication``: of the best plan's step; empty where the plan is not slower."""
    difference = plan.main_difference(best)
    if difference is None:
        return ""
    name, seconds = difference
    return f"{100 * seconds / best.step_time_s:+.1f} % {name.replace('_', ' ')}"


def _front_table(result: SearchResult) -> str:
    names = " and ".join(GOALS[objective] for objective in result.objectives)
    rows = [[*_numbers(plan, result), search_plan_words(plan.plan, plan.software)] for plan in result.pareto]
    shown = rows if len(rows) <= _MAX_POINTS else [*rows[: _MAX_POINTS - 1], rows[-1]]
    more = f"\n  and {len(rows) - len(shown)} between the last two (--json has all)" if len(rows) > len(shown) else ""
    title = f"Pareto front of {names}: {counted_plans(len(rows))}\n"
    return title + format_table_text([*_headers(result), "plan"], shown, left=0, words_last=True) + more


def _ways_table(result: SearchResult) -> str:
    """Ways to train that change the mathematics, with what they must not need to pay."""
    headers = ["step time", "device memory", "pays below", "samples", "plan"]
    rows = [way_cells(way) for way in result.ways]
    ranked = [way.samples_factor for way in result.ways if way.samples_factor is not None]
    title = "Ways that change the mathematics: a step may be worth fewer samples."
    if result.synchronous is not None:
        best = result.synchronous
        title += (
            f"\n  The best synchronous plan takes {format_time(best.step_time_s)} a step: "
            f"{search_plan_words(best.plan, best.software)}. "
            "Each way pays if it needs fewer times its samples than shown."
        )
    if len(ranked) < len(result.ways):
        title += "\n  A way without search.samples_factor is not ranked."
    sources = [f"  {way.words}: samples x {way.source}" for way in result.ways if way.source]
    return "\n".join([title, format_table_text(headers, rows, left=0, words_last=True), *sources])


def way_cells(way: SearchedWay) -> list[str]:
    """Step time, memory, factor below which it pays, samples factor, and plan of a way."""
    if way.best is None:
        return ["", "", "", "", f"{way.words}: {way.why_not}"]
    return [
        format_time(way.best.step_time_s),
        format_bytes(way.best.device_bytes),
        "" if way.pays_below is None else f"{way.pays_below:.3g} x",
        "unknown" if way.samples_factor is None else f"{way.samples_factor:g} x",
        search_plan_words(way.best.plan, way.best.software),
    ]


def _headers(result: SearchResult) -> list[str]:
    several = len({plan.num_devices for plan in (*result.ranked, *result.pareto)}) > 1
    cost = ["dollars"] if any(plan.cost_dollars is not None for plan in result.ranked) else []
    return [*(["devices", f"{result.unit}/s per device"] if several else []), "step time", "device memory", *cost]


def _numbers(plan: RankedPlan, result: SearchResult) -> list[str]:
    cells = {
        "devices": f"{plan.num_devices:,}",
        f"{result.unit}/s per device": f"{plan.tokens_per_s_per_device:,.0f}",
        "step time": format_time(plan.step_time_s),
        "device memory": format_bytes(plan.device_bytes),
        "dollars": "" if plan.cost_dollars is None else f"{plan.cost_dollars:,.0f}",
    }
    return [cells[header] for header in _headers(result)]


def space_rows(space: SpaceCount) -> list[tuple[int, str, str]]:
    """Plans of the space by outcome: number of plans, rejecting rule or outcome, and reason."""
    return [
        *((number, name, space.why[name]) for name, number in space.rejected.items()),
        (space.bounded, "bounded", "pruned: the lower bound of the step time is above the best plans"),
        (space.timed, "timed", "feasible"),
    ]


def _space_table(space: SpaceCount) -> str:
    rows = space_rows(space)
    width = max(len(f"{number:,}") for number, *_ in rows)
    cells = [
        (f"{number:{width},}", f"rejected: {name}" if name in space.rejected else name, why)
        for number, name, why in rows
    ]
    text = f"Outcomes of the {counted_plans(space.total)}\n" + format_table_text(["plans", "", "why"], cells, left=3)
    return text + (f"\n  {besides(space)}" if space.some_blocks else "")


def miss_words(miss: NearestMiss) -> str:
    """Memory or time by which a plan misses a constraint, and the plan."""
    if miss.lacking_s is not None and miss.step_time_s is not None:
        lack = f"{format_time(miss.lacking_s)} over the deadline, step time {format_time(miss.step_time_s)}"
    else:
        lack = f"{format_bytes(miss.lacking_bytes or 0)} over, needs {format_bytes(miss.device_bytes)}"
    return f"{lack}: {search_plan_words(miss.plan, miss.software)}"
