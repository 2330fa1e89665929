"""Sections of an HTML report: one for each kind of JSON document that simplan writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from simplan.cluster.hardware import ClusterSpec
from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan
from simplan.problems import parse_model
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.report.drawings.drawing import draw_timeline
from simplan.report.drawings.drawing_svg import drawing_svg
from simplan.report.drawings.fabric_drawing import draw_fabric
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.report.html.elements import (
    Share,
    bar,
    bars,
    figures,
    folded,
    listing,
    number_text,
    paragraph,
    table,
    words,
)
from simplan.report.predictions import certainty_notes, predictions_table
from simplan.report.text import microbatch_words, plan_words
from simplan.training import PAIRED_TASKS
from simplan.units import counted, format_bytes, format_percent, format_rate, format_time

_FEWEST_NODES = 2
"""Nodes of a cluster whose network is drawn."""
_MOST_ROWS = 16
"""Pipeline ranks of a drawing, and rows of a table before the rest is folded."""

Document = Mapping[str, Any]


def predictions_section(document: Document) -> str:
    """Table of several predictions, best first, with its notes; each has its own section."""
    parts = [table(*predictions_table(document)), listing([*document["notes"], *certainty_notes(document)])]
    return "".join(parts)


def prediction_section(document: Document) -> str:
    """Verdict, time, memory, picture and terms of a prediction."""
    low_s, high_s = document["step_time_interval_s"]
    worst = next(rank for rank in document["ranks"] if rank["rank"] == document["worst_rank"])
    inputs = document["inputs"]
    plan = _plan(inputs["plan"])
    needed = document["peak_memory_gib"]["device"] - document.get("reserve_short_gib", 0.0)
    capacity = document["capacity_gib"]
    verdict = document.get("memory_verdict") or ""
    shown = [
        ("step time", f"{format_time(document['step_time_s'])} ({format_time(low_s)} to {format_time(high_s)})"),
        (
            "memory",
            f"{needed:.2f} GiB{f' of {capacity:.2f} GiB' if capacity else ''}{f': {verdict}' if verdict else ''}",
        ),
        ("tokens per second and device", number_text(document["tokens_per_s_per_device"])),
        ("MFU", "" if document["mfu"] is None else format_percent(document["mfu"])),
    ]
    cluster = parse_model(ClusterSpec, inputs["cluster"])
    return "".join(
        [
            figures((name, value) for name, value in shown if value),
            table(
                ["", ""],
                [
                    ["model", f"{inputs['model']['name']}, sequences of {inputs['model']['seq_len']:,} tokens"],
                    ["cluster", f"{cluster.id}: {cluster.devices_in_words}, {cluster.nodes_in_words}"],
                    ["plan", plan],
                    ["batch", _batch(document)],
                    ["software", inputs["software"]],
                    *_loading(document),
                    *([["least known", weakest["fact"]]] if (weakest := document.get("weakest_term")) else []),
                ],
            ),
            *_splits(document),
            _memory(worst, capacity),
            _picture(document),
            *_fabric(document, cluster),
            _terms(document["terms"]),
            folded("Assumptions", listing(document["assumptions"])),
        ]
    )


def _loading(document: Document) -> list[list[str]]:
    """Row on memory while the model is loaded; none for random weights."""
    loading = document.get("loading")
    if loading is None:
        return []
    peaks = f"device {loading['device_gib']:.2f} GiB, host {loading['host_gib']:.2f} GiB per node"
    return [["loading", f"{peaks}: {loading['words']}"]]


def _memory(rank: Document, capacity_gib: float | None) -> str:
    """Bar of the memory of a rank by category with the allocator's reserve, in a box as wide as the device's memory."""
    peak = rank["peak_memory_gib"]
    sizes = {**rank["memory_gib"], "allocator_reserve": peak["reserved"] - peak["allocated"]}
    of = " with the allocator's whole reserve," if rank["reserve_short_gib"] else ""
    of += f" of {capacity_gib:.2f} GiB" if capacity_gib else ""
    return bar(
        (Share(words(name), gib, f"{gib:.2f} GiB") for name, gib in _largest(sizes)),
        sum(sizes.values()),
        f"Memory of rank {rank['rank']} at its peak: {peak['device']:.2f} GiB{of}",
        box=capacity_gib,
    )


def _batch(document: Document) -> str:
    training, sample = document["inputs"]["training"], document["step_work"]["sample"]
    sample = "pair" if training["task"] in PAIRED_TASKS else sample
    plan = document["inputs"]["plan"]
    sizes = plan["microbatch_sizes"] if isinstance(plan["microbatch_sizes"], list) else [plan["microbatch_size"]]
    return (
        f"{counted(training['global_batch_size'], sample)}, "
        f"{microbatch_words(document['num_microbatches'], sizes, sample)}, "
        f"{training['precision']}, {training['optimizer']}"
    )


def _splits(document: Document) -> Iterator[str]:
    """Yield one bar for the ranks of each distinct split."""
    ranks = sorted(document["ranks"], key=lambda rank: sorted(rank["split"].items()))
    shown = [(split, [rank["rank"] for rank in members]) for split, members in _grouped(ranks)]
    for split, members in sorted(shown, key=lambda item: item[1][0])[:_MOST_ROWS]:
        label = f"rank {members[0]}" if len(members) == 1 else f"{len(members)} ranks, the first is {min(members)}"
        shares = (Share(words(name), value, format_time(value)) for name, value in split.items())
        yield bar(shares, document["step_time_s"], f"Step of {label}")


def _grouped(ranks: Iterable[Document]) -> Iterator[tuple[Mapping[str, float], list[Document]]]:
    for split, members in groupby(ranks, key=lambda rank: rank["split"]):
        yield split, list(members)


def _picture(document: Document) -> str:
    """The step as a picture, one row per pipeline rank; empty for a prediction that was written without it."""
    if not document.get("timeline"):
        return ""
    plan = document["inputs"]["plan"]
    width = len(document["ranks"]) // plan["pp"]
    rows = range(0, len(document["ranks"]), width)[:_MOST_ROWS]
    spans = [Span(**{**span, "kind": SpanKind(span["kind"])}) for span in document["timeline"] if span["rank"] in rows]
    in_flight = {
        rank["rank"]: {int(stage): number for stage, number in rank["activations_in_flight"].items()}
        for rank in document["ranks"]
    }
    timeline = Timeline(spans, len(document["ranks"]), document["step_time_s"])
    drawing = draw_timeline(document["name"], timeline, rows, ranks_per_row=width, activations_in_flight=in_flight)
    return f'<figure class="picture">{drawing_svg(drawing)}</figure>'


def _fabric(document: Document, cluster: ClusterSpec) -> Iterator[str]:
    """Nodes and switches with the load of their links; nothing for a single node."""
    network = document.get("network")
    if cluster.cores_per_node is not None or cluster.num_nodes < _FEWEST_NODES:
        return
    links = network["links"] if network else []
    drawing = draw_fabric(cluster)
    has_all = not network or network["num_loaded_links"] <= len(links)
    svg = fabric_svg(drawing, {link["name"]: link["busy_share"] for link in links} or None, has_all=has_all)
    yield f'<figure class="picture"><figcaption>{escape(drawing.words)}</figcaption>{svg}</figure>'
    if network:
        words = "Color of a cable: mean load of its busier direction; gray for links that are not listed. "
        yield paragraph(f"{words}Contention costs {format_time(network['contention_s'])} of the step.")
    rows = [
        [
            link["name"],
            format_rate(link["bytes_per_s"]),
            format_percent(link["busy_share"]),
            format_bytes(link["num_bytes"]),
            format_time(link["lost_s"]),
            "; ".join(part["name"] for part in link["communications"]),
        ]
        for link in links
    ]
    columns = ["link", "bandwidth", "busy", "a step", "delays", "communications"]
    yield table(columns, rows[:_MOST_ROWS], "Links that delay communications most, then the busiest")
    yield folded(f"{len(rows) - _MOST_ROWS} more", table(columns, rows[_MOST_ROWS:]))


def _terms(terms: Iterable[Document]) -> str:
    ordered = sorted(terms, key=lambda term: -term["seconds"] * term["count"])
    rows = [
        [
            term["name"],
            format_time(term["seconds"] * term["count"]),
            number_text(term["count"]),
            format_time(term["seconds"]),
            f"{term['provenance']}, +/- {format_percent(term['relative_std'])}",
            term["formula"],
        ]
        for term in ordered
        if term["seconds"]
    ]
    columns = ["cost", "per rank", "times", "each", "source", "formula"]
    most = table(columns, rows[:_MOST_ROWS], "Largest costs, mean over ranks, overlapped or not")
    return most + folded(f"{len(rows) - _MOST_ROWS} more", table(columns, rows[_MOST_ROWS:]))


def search_section(document: Document) -> str:
    """Best and ranked plans, and why others lost."""
    space, best = document["space"], document["best"]
    parts = []
    if best is None:
        parts.append(paragraph("No plan fits.", "verdict"))
    else:
        headline = f"Best of {space['total']:,} plans: {_plan(best['plan'])}{_options(best['software'])}"
        parts.append(paragraph(headline, "verdict"))
        parts.append(
            figures(
                [
                    ("step time", format_time(best["step_time_s"])),
                    ("memory", f"{best['peak_memory_gib']['device']:.2f} GiB: {best['memory_verdict']}"),
                    ("tokens per second and device", number_text(best["tokens_per_s_per_device"])),
                    ("MFU", "" if best["mfu"] is None else format_percent(best["mfu"])),
                ]
            )
        )
    if document["interrupted"]:
        parts.append(paragraph("The search was interrupted: a better plan may exist."))
    for title, plans in (("Ranked", document["ranked"]), ("Front", document["pareto"])):
        rows = [
            [
                str(place + 1),
                format_time(plan["step_time_s"]),
                f"{plan['step_time_s'] / best['step_time_s'] - 1:+.1%}",
                f"{plan['peak_memory_gib']['device']:.2f} GiB",
                plan.get("memory_verdict") or "",
                _plan(plan["plan"]) + _options(plan["software"]),
            ]
            for place, plan in enumerate(plans)
        ]
        parts.append(table(["", "step time", "vs best", "memory", "verdict", "plan"], rows, title))
    outcomes = [
        [f"{number:,}", f"rejected: {name}", document["rules"].get(name, "")]
        for name, number in sorted(space["rejected"].items(), key=lambda item: -item[1])
    ]
    outcomes += [
        [f"{space['bounded']:,}", "bounded", "the lower bound of the step time is above the best plans"],
        [f"{space['timed']:,}", "timed", "feasible"],
    ]
    parts.append(table(["plans", "outcome", "why"], outcomes, f"Outcomes of the {space['total']:,} plans"))
    misses = [
        [f"{miss['peak_memory_gib']['device']:.2f} GiB", _plan(miss["plan"]) + _options(miss["software"])]
        for miss in document["nearest_misses"]
    ]
    parts.append(table(["needs", "plan"], misses, "Near misses"))
    parts.append(folded("Assumptions", listing(document["assumptions"])))
    return "".join(parts)


def sweep_section(document: Document) -> str:
    """One plan over an axis, its sensitivity to resources and the cost of a slow rank."""
    points = document["points"]
    shown = [point for point in points if point["step_time_s"] is not None]
    curves = {"step_time_s": "step time", "per_s": document["rate"], "device_gib": "peak device memory", "cost": "cost"}
    parts = [paragraph(document["words"], "verdict")]
    for key, title in curves.items():
        values = (
            Share(number_text(point["value"]), point[key], number_text(point[key], _UNITS.get(key, "")) + _unfit(point))
            for point in shown
            if point.get(key) is not None
        )
        parts.append(bars(values, f"{title[:1].upper()}{title[1:]}, by {document['axis']}"))
    refused = [[number_text(point["value"]), point["refused"]] for point in points if point["step_time_s"] is None]
    parts.append(table([document["axis"], "why there is no prediction"], refused))
    changes = [[rate["resource"], f"{100 * rate['step_time_change']:+.3f} %"] for rate in document["sensitivity"]]
    parts.append(table(["1 % more", "step time"], changes, "Sensitivity"))
    slow = document["slow_ranks"]
    slow_rows = [[delay["ranks"], f"{100 * delay['step_time_change']:+.1f} %"] for delay in slow["ranks"]]
    columns = [f"one of these ranks takes {format_percent(slow['slowdown'])} more compute time", "step time"]
    parts.append(table(columns, slow_rows, "Slow rank"))
    return "".join(parts)


_UNITS = {"step_time_s": "s", "device_gib": "GiB"}
"""Key of a point of a sweep -> unit."""


def _unfit(point: Document) -> str:
    """Words for a point that needs more memory than a device has; empty for others."""
    return "" if point["fits"] is not False else ", does not fit"


def explanation_section(document: Document) -> str:
    """Terms of time and memory with their formulas; kernels are folded."""
    return "".join(
        [
            *_explained(document["time"], document["step_time_s"], f"Step of rank {document['rank']}"),
            *_explained(document["memory"], document["device_bytes"], f"Memory of rank {document['memory_rank']}"),
            table(["figure", "value", "formula"], [_row(term)[:3] for term in document["figures"]]),
        ]
    )


def _explained(terms: Iterable[Document], whole: float, label: str) -> Iterator[str]:
    groups = [(group, list(members)) for group, members in groupby(terms, key=lambda term: term["group"])]
    totals = [(group, sum(term["value"] for term in members)) for group, members in groups]
    unit = groups[0][1][0]["unit"]
    yield bar((Share(words(group), value, _value(value, unit)) for group, value in totals), whole, label)
    yield table(["term", "value", "formula", "source"], [_row(term) for _, members in groups for term in members])
    kernels = [
        [term["name"], part["name"], _value(part["value"], "s"), part["limit"], part["formula"]]
        for _, members in groups
        for term in members
        for part in term.get("parts", ())
    ]
    yield folded("Kernels and transfers", table(["term", "part", "seconds", "bound by", "formula"], kernels))


def _row(term: Document) -> list[str]:
    note = f"; {term['note']}" if term.get("note") else ""
    source = "" if term["provenance"] is None else f"{term['provenance']}, +/- {format_percent(term['relative_std'])}"
    return [words(term["name"]), _value(term["value"], term["unit"]), term["formula"] + note, source]


def difference_section(document: Document) -> str:
    """Difference of two explanations, term by term."""
    first, second = document["first"], document["second"]
    columns = ["term", first["name"], second["name"], "difference"]
    times = f"{format_time(first['step_time_s'])} -> {format_time(second['step_time_s'])}"
    parts = [paragraph(f"A step: {times}.", "verdict"), *map(paragraph, document["reasons"])]
    for title, key in (("Time", "time"), ("Memory", "memory"), ("Figures", "figures")):
        rows = [
            [
                words(row["group"]) if row["name"] == row["group"] else f"{words(row['group'])}: {row['name']}",
                *(_value(row[name], row["unit"]) for name in ("first", "second", "difference")),
            ]
            for row in document[key]
        ]
        parts.append(table(columns, rows, title))
    return "".join(parts)


def comparison_section(document: Document) -> str:
    """Prediction beside measurement, and the terms of the difference."""
    rows = [
        [
            row["name"],
            _value(row["predicted"], row["unit"]),
            _value(row["measured"], row["unit"]),
            "" if row["signed_error"] is None else f"{row['signed_error']:+.1%}",
        ]
        for row in document["rows"]
    ]
    parts = [table(["", "predicted", "measured", "error"], rows)]
    inside = document.get("interval_holds")
    if inside is not None:
        where = "lies" if inside else "does not lie"
        parts.insert(0, paragraph(f"The measured step time {where} in the predicted interval.", "verdict"))
    if document.get("other_framework"):
        parts.insert(0, paragraph(f"Warning: {document['other_framework']}.", "verdict"))
    if document.get("terms"):
        terms = [
            [
                term["part"],
                format_time(term["predicted_s"]),
                format_time(term["measured_s"]),
                _value(term["predicted_s"] - term["measured_s"], "s"),
            ]
            for term in document["terms"]
        ]
        parts.append(table(["on the critical path", "predicted", "measured", "difference"], terms))
    if document.get("parts"):
        uncertain = [
            [part["part"], format_time(part["predicted_s"]), format_time(part["std_s"])] for part in document["parts"]
        ]
        parts.append(table(["part of the predicted step", "predicted", "standard deviation"], uncertain))
    if document.get("hypotheses"):
        hypotheses = [
            [
                hypothesis["change"],
                format_time(hypothesis["step_time_s"]),
                "" if hypothesis["step_error"] is None else f"{hypothesis['step_error']:+.1%}",
            ]
            for hypothesis in document["hypotheses"]
        ]
        parts.append(table(["what could explain it", "step time", "error"], hypotheses))
    parts.append(listing(document["notes"]))
    return "".join(parts)


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**30:.3f} GiB"
    return number_text(value, unit)


def _largest(sizes: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


def _plan(fields: Document) -> str:
    """Short form of a plan; of one with keys that this version does not know, the degrees as written."""
    try:
        plan = ParallelPlan.from_fields(
            {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        )
    except SpecError:
        return ", ".join(f"{key} {value}" for key, value in fields.items() if value not in (None, False, 1))
    return f"{plan_words(plan) or 'one device'}, microbatch size {plan.microbatch_size}"


def _options(software: Document) -> str:
    return "".join(f", {name} = {str(value).lower()}" for name, value in software.items())
