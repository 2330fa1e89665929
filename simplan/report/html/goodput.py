"""Section of an HTML report on a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simplan.report.drawings.goodput_svg import goodput_svg
from simplan.report.goodput import PARTS, format_money, headline
from simplan.report.html.elements import figures, folded, listing, paragraph, table
from simplan.units import format_bytes, format_number, format_percent, format_span, format_time

Document = Mapping[str, Any]


def goodput_section(document: Document) -> str:
    """Time, cost and goodput of a whole run, where its time goes, and what would change that."""
    return "".join(
        [
            paragraph(headline(document), "verdict"),
            figures(key_figures(document)),
            f'<figure class="picture">{goodput_svg(document)}</figure>',
            table(["part of the time", "mean", "share"], waterfall_rows(document)),
            table(["interruption", "mean number", "share"], interruption_rows(document)),
            table(["change", "time saved", "cost saved"], change_rows(document), "What single changes are worth"),
            folded("Assumptions", listing(document["assumptions"])),
        ]
    )


def key_figures(document: Document) -> Iterator[tuple[str, str]]:
    """Yield names and values of the numbers that a reader looks for first."""
    stops, energy, co2 = document["num_interruptions"], document["energy_kwh"], document["co2_kg"]
    yield "without failures", format_span(document["undisturbed_s"])
    yield "steps", f"{document['num_steps']:,} of {format_time(document['step_time_s'])}"
    yield "interruptions", f"{format_number(stops['mean'])} (P10 {stops['p10']:,.0f}, P90 {stops['p90']:,.0f})"
    yield "device-hours", format_number(document["device_hours"])
    if document["checkpoint_bytes"] is not None:
        interval = format_span(document["checkpoint_interval_s"])
        yield "checkpoints", f"{format_bytes(document['checkpoint_bytes'])} every {interval}"
    if energy is not None:
        yield "energy", f"{format_money(energy)} kWh"
    if co2 is not None:
        yield "CO2", f"{format_money(co2)} kg"


def waterfall_rows(document: Document) -> list[list[str]]:
    """Parts of the time that are there: name, mean and share."""
    total_s = document["time_to_finish_s"]["mean"]
    return [
        [PARTS[name], format_span(seconds), format_percent(seconds / total_s)]
        for name, seconds in document["waterfall_s"].items()
        if seconds > 0
    ]


def interruption_rows(document: Document) -> list[list[str]]:
    """Causes of interruptions, the most frequent first: name, mean number and share."""
    causes = document["interruptions_by_cause"]
    total = sum(causes.values())
    return [[name, format_number(number), format_percent(number / total)] for name, number in causes.items()]


def change_rows(document: Document) -> list[list[str]]:
    """Changes of the run: words, time saved and cost saved, each with its standard error."""
    return [
        [
            change["words"],
            f"{format_span(change['saved_s'])} +/- {format_span(change['saved_s_error'])}",
            ""
            if change["saved_cost"] is None
            else f"{format_money(change['saved_cost'])} +/- {format_money(change['saved_cost_error'])}",
        ]
        for change in document["sensitivity"]
    ]


def simulated(document: Document) -> str:
    """Sentence with the number of runs."""
    return f"{document['trials']:,} simulated runs, seed {document['seed']}"
