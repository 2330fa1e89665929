"""Several predictions in one table, best first: their order, its certainty, and what else differs between them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simplan.cost.model import Provenance
from simplan.model.step_work import StepWork, WorkUnit, work_differences, work_unit
from simplan.report.table import format_table_text
from simplan.units import GIB, format_bytes, format_number, format_percent, format_time

Document = Mapping[str, Any]

_FROM_DATASHEETS = (Provenance.DATASHEET, Provenance.PUBLISHED)
_SAME_PLANS = (
    "certainty: share of published pairs of plans, predicted as far apart as a plan and the fastest of its job, that "
    "were measured in this order"
)
_OTHER_MACHINES = (
    "certainty of a job on other devices, links or software: whether its 90 % interval overlaps that of the first row; "
    "if it does, either may be faster"
)


def compared_predictions(predictions: Iterable[Document]) -> dict[str, Any]:
    """Several predictions as one JSON document, best first.

    Steps of equal work are ordered by time, others by their time per sample or token.

    Args:
        predictions: JSON documents of predictions, with distinct names.
    """
    listed = [*predictions]
    unit = _unit(listed)
    ordered = [
        prediction
        for _, prediction in sorted(zip(_times_s(listed, unit), listed, strict=True), key=lambda pair: pair[0])
    ]
    unit = _unit(ordered)
    names, works = [prediction["name"] for prediction in ordered], [_work(prediction) for prediction in ordered]
    differences = work_differences(names, works)
    if unit.name != "step":
        differences += (f"The order is that of the time per {unit.name}, since steps do unequal work.",)
    return {
        "schema_version": 1,
        "kind": "predictions",
        "ordered_by": f"time per {unit.name}",
        "predictions": ordered,
        "published_pairs_in_this_order": _published_pairs(ordered),
        "intervals_overlap": _overlaps(ordered, unit),
        "notes": [*differences, *_without_published_runs(ordered)],
    }


def predictions_text(document: Document) -> str:
    """Table of several predictions as text, with its notes."""
    headers, rows = predictions_table(document)
    notes = [*document["notes"], *certainty_notes(document)]
    return "\n\n".join([format_table_text(headers, rows, indent=0), *(["\n".join(notes)] if notes else [])])


def predictions_table(document: Document) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: time and memory with their intervals, certainty, throughput, cost, verdict, and what limits.

    Columns without a cell are left out. Throughput is a column if steps do unequal work, or have unequal devices.
    """
    predictions = document["predictions"]
    works = [_work(prediction) for prediction in predictions]
    one_kind = len({work.sample for work in works}) == 1
    devices_differ = len({work.num_devices for work in works}) > 1
    shows_rate = one_kind and (devices_differ or _unit(predictions).name != "step")
    noun = "tokens/s" if works[0].sample == "sequence" else f"{works[0].sample}s/s"
    headers = ["scenario", "step time", "90 % interval", "certainty", noun, f"{noun} per device", "days", "cost"]
    headers += ["MFU", "peak memory", "90 % interval", "verdict", "limited by"]
    rows = []
    for place, (prediction, work) in enumerate(zip(predictions, works, strict=True)):
        run = prediction.get("training_run") or {}
        per_device = prediction["samples_per_s_per_device" if work.sample != "sequence" else "tokens_per_s_per_device"]
        needed_gib = prediction["peak_memory_gib"]["device"] - (
            0 if prediction["fits"] else prediction["reserve_short_gib"]
        )
        memory = needed_gib, *prediction["peak_memory_interval_gib"]["device"]
        peak, low, high = (format_bytes(gib * GIB) for gib in memory)
        rows.append(
            [
                prediction["name"],
                format_time(prediction["step_time_s"]),
                " to ".join(map(format_time, prediction["step_time_interval_s"])),
                _certainty(document, place),
                format_number(per_device * work.num_devices) if shows_rate and devices_differ else "",
                format_number(per_device) if shows_rate else "",
                f"{run['days']:,.3g}" if run else "",
                "" if run.get("cost") is None else f"{run['cost']:,.0f}",
                "?" if prediction["mfu"] is None else format_percent(prediction["mfu"]),
                peak,
                f"{low} to {high}",
                prediction["memory_verdict"] or "?",
                _limits(prediction),
            ]
        )
    filled = [place for place in range(len(headers)) if any(row[place] for row in rows)]
    return [headers[place] for place in filled], [[row[place] for place in filled] for row in rows]


def certainty_notes(document: Document) -> list[str]:
    """Meaning of the column ``certainty``; empty without this column."""
    pairs, overlaps = document["published_pairs_in_this_order"], document["intervals_overlap"]
    notes = ((_SAME_PLANS, any(pairs)), (_OTHER_MACHINES, any(overlap is not None for overlap in overlaps)))
    return [note for note, applies in notes if applies]


def _certainty(document: Document, place: int) -> str:
    pairs, overlap = document["published_pairs_in_this_order"][place], document["intervals_overlap"][place]
    if pairs is not None:
        return f"{100 * pairs['fraction']:.0f} % of {pairs['num_pairs']} pairs"
    return "" if overlap is None else "overlap" if overlap else "no overlap"


def _work(prediction: Document) -> StepWork:
    return StepWork(**prediction["step_work"])


def _unit(predictions: Sequence[Document]) -> WorkUnit:
    return work_unit([_work(prediction) for prediction in predictions])


def _times_s(predictions: Sequence[Document], unit: WorkUnit) -> list[float]:
    """Seconds per unit of work."""
    pairs = zip(predictions, unit.amounts, strict=True)
    return [prediction["step_time_s"] / amount for prediction, amount in pairs]


def _job_without_plan(prediction: Document) -> str:
    return json.dumps({**prediction["inputs"], "plan": None}, sort_keys=True)


def _published_pairs(predictions: Sequence[Document]) -> list[dict[str, float] | None]:
    """Certainty that each plan is slower than the fastest one of its job (``right_order``); None for the fastest."""
    from simplan.search.switch import right_order

    fastest: dict[str, Document] = {}
    pairs: list[dict[str, float] | None] = []
    for prediction in predictions:
        first = fastest.setdefault(_job_without_plan(prediction), prediction)
        if first is prediction:
            pairs.append(None)
        else:
            fraction, num_pairs = right_order(first["step_time_s"], prediction["step_time_s"])
            pairs.append({"fraction": fraction, "num_pairs": num_pairs})
    return pairs


def _overlaps(predictions: Sequence[Document], unit: WorkUnit) -> list[bool | None]:
    """True if the interval of a job overlaps that of the first one; None for the same devices, links and software."""
    machines = [_machine(prediction) for prediction in predictions]
    ends_s = predictions[0]["step_time_interval_s"][1] / unit.amounts[0]
    return [
        None if machine == machines[0] else prediction["step_time_interval_s"][0] / amount < ends_s
        for machine, prediction, amount in zip(machines, predictions, unit.amounts, strict=True)
    ]


def _machine(prediction: Document) -> tuple[Document, object]:
    """Devices, links and software of a prediction, whose estimates have one source and err alike."""
    inputs = prediction["inputs"]
    return {**inputs["cluster"], "num_devices": None}, inputs["software_settings"]


def _without_published_runs(predictions: Sequence[Document]) -> list[str]:
    """Sentence on each architecture of which no published run was seen, if devices differ."""
    if len({_work(prediction).devices for prediction in predictions}) == 1:
        return []
    names: dict[str, list[str]] = {}
    for prediction in predictions:
        device = prediction["inputs"]["cluster"]["device"]
        is_estimated = any(term["provenance"] in _FROM_DATASHEETS for term in prediction["terms"])
        if is_estimated and device["kernels"]["fitted_on"] is None:
            names.setdefault(device["architecture"], []).append(prediction["name"])
    return [
        f"No published run on {architecture} was seen, so the interval of {', '.join(members)} is wide."
        for architecture, members in names.items()
    ]


def _limits(prediction: Document) -> str:
    """Largest two shares of the step of the rank that waits least: ``compute 71 %, exposed communication 20 %``."""
    split = min((rank["split"] for rank in prediction["ranks"]), key=lambda split: split["wait"])
    largest = sorted((name for name in split if split[name] > 0), key=lambda name: -split[name])[:2]
    parts = (f"{name.replace('_', ' ')} {100 * split[name] / sum(split.values()):.0f} %" for name in largest)
    return ", ".join(parts)
