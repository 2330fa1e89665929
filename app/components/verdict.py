"""Memory verdict in one line, and a row of key numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import result_cache, state
from app.budget import IMAGES, IMAGES_START, STEPS, TOKENS, TOKENS_START, length_of, price_of, with_length, with_price
from app.components.elements import meaning
from app.fields import about, number, quantity
from app.predictions import Headline
from simplan.documentation import documentation
from simplan.errors import SpecError
from simplan.prediction import MemoryVerdict
from simplan.report.text import memory_interval, short_of_reserve
from simplan.units import format_bytes, format_count, format_number, format_percent, format_time

_TOKENS = (TOKENS, "Tokens (billion)", 1e9, TOKENS_START)

_BANNERS: dict[MemoryVerdict, tuple[str, str]] = {
    "fits": ("success", ":material/check_circle:"),
    "may not fit": ("warning", ":material/warning:"),
    "likely does not fit": ("error", ":material/warning:"),
    "does not fit": ("error", ":material/cancel:"),
    "unknown": ("warning", ":material/help:"),
}
"""Banner and icon by verdict."""
_HELP = f"[What uses the memory, and what shrinks it]({documentation('how-to/troubleshooting')})"


def show_verdict(place: DeltaGenerator, headline: Headline, host_words: str = "") -> DeltaGenerator:
    """Shows fit, peak-memory rank and headroom; returns the banner.

    Args:
        place: Container, or an earlier banner, which is replaced.
        headline: Key numbers of the prediction.
        host_words: Message about insufficient host memory; empty if host memory suffices.
    """
    memory, verdict = headline.memory, headline.memory_verdict
    rank = "the worst rank" if headline.step_time_interval_s is None else f"rank {memory.rank}"
    needed_bytes = memory.needed_bytes
    needs = f"{rank} needs {format_bytes(needed_bytes)}"
    capacity = memory.capacity_bytes
    if host_words:
        return place.error(f"**Does not fit**: {host_words}. {_HELP}", icon=":material/cancel:")
    if verdict is None or capacity is None:
        return place.warning(f"{needs}; the memory of a device is unknown", icon=":material/help:")
    headroom = capacity - needed_bytes
    share = format_percent(abs(headroom) / capacity)
    words = f"{needs} of {format_bytes(capacity)}, {format_bytes(abs(headroom))} ({share}) "
    words += f"{'over' if headroom < 0 else 'headroom'}; {memory_interval(memory.device_interval_bytes)}"
    if memory.fits and memory.short_bytes:
        tensors = format_bytes(memory.unavoidable_bytes)
        words = f"tensors and context of {rank} take {tensors} of {format_bytes(capacity)}; "
        words += short_of_reserve(memory.short_bytes)
    kind, icon = _BANNERS[verdict]
    words += f". {_HELP}" if kind == "error" else ""
    banner: DeltaGenerator = getattr(place, kind)(f"**{verdict[:1].upper()}{verdict[1:]}**: {words}", icon=icon)
    return banner


def show_budget() -> float:
    """Inputs for length and price of the training in the sidebar; returns the number of tokens or images to use."""
    with st.sidebar:
        st.markdown("###### Budget")
        left, right = st.columns(2)
        with left:
            budget = show_length(usual=True)
        with right:
            show_price()
    return budget or TOKENS_START


def show_length(*, usual: bool = False, steps: bool = False) -> float | None:
    """Inputs for the length of the training: tokens, or images; also of a wrong scenario.

    Args:
        usual: Show the usual budget where the scenario has no length.
        steps: Show optimizer steps, too: the same length in other words.

    Returns:
        The tokens or images; None for none.
    """
    scenario, length = None, None
    with suppress(SpecError):
        scenario = result_cache.scenario(state.document())
        length = length_of(scenario)
    is_image = scenario is not None and scenario.job.model.sample != "sequence"
    path, words, scale, start = (IMAGES, "Images (million)", 1e6, IMAGES_START) if is_image else _TOKENS
    budget = length.budget if length is not None else start if usual and "run" not in state.current() else None
    quantity(words, path, budget, scale=scale, change=partial(with_length, path=path))
    if steps:
        number("Steps", STEPS, None if length is None else length.num_steps, change=partial(with_length, path=STEPS))
    return budget


def show_price() -> None:
    """Input for the price of a device."""
    more = "Empty for no cost"
    path = ("cluster", "price_per_device_hour")
    quantity("Price", path, price_of(state.current()), change=with_price, help=about(path, "Per device and hour", more))


def show_numbers(
    places: Sequence[DeltaGenerator], headline: Headline, budget: float, price: float | None
) -> list[DeltaGenerator]:
    """Step time with its interval, throughput, MFU, and time and cost of the training budget; returns the metrics.

    Args:
        places: Earlier metrics, which are replaced; for a new row, only its container.
        headline: Key numbers of the prediction.
        budget, price: See ``budget_of``.
    """
    job = headline.job
    training = headline.training(budget, price)
    images = job.model.sample != "sequence"
    rate = headline.samples_per_s if images else headline.tokens_per_s
    noun = "images" if images else "tokens"
    limits_s = headline.step_time_interval_s
    interval = " to ".join(map(format_time, limits_s)) if limits_s else "interval pending"
    cells = [
        (
            "Step time",
            format_time(headline.step_time_s),
            interval,
            f"{meaning('step_time_s')}; {meaning('interval')}"
            + (f". Least known: {headline.least_known}" if headline.least_known else ""),
        ),
        (
            f"{noun.capitalize()} per second",
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            f"{format_number(rate / job.cluster.num_devices)} per device",
            f"global batch{'' if images else ' x sequence length'} / step time, of all devices",
        ),
        (
            "MFU",
            "unknown" if headline.mfu is None else format_percent(headline.mfu),
            job.training.precision + " dense peak",
            f"{meaning('mfu')}: model FLOPs of a step / (step time x devices x dense peak)",
        ),
        (
            f"{format_count(budget)} {noun}",
            f"{training.days:,.1f} days" if training.days < 1000 else f"{training.days / 365.25:,.1f} years",
            f"{format_count(training.device_hours)} device hours",
            f"optimizer steps x step time: {training.num_steps:,} steps"
            + _of_interval(training.days_interval, "days")
            + ". Constant step time, no failures, checkpoints or restarts",
        ),
        (
            "Cost",
            "no price" if training.cost is None else format_count(training.cost),
            "set a price in the sidebar" if price is None else f"at {price:g} per device and hour",
            "device hours x price, in the currency of the price" + _of_interval(training.cost_interval),
        ),
    ]
    return [
        place.metric(label, value, below, delta_color="off", delta_arrow="off", help=about)
        for place, (label, value, below, about) in zip(cycle(places), cells)
    ]


def _of_interval(interval: tuple[float, float] | None, unit: str = "") -> str:
    """Words of a 90 % interval; empty while it is unknown."""
    if interval is None:
        return ""
    low, high = map(format_number, interval)
    return f". 90 % interval {low} to {high} {unit}".rstrip()
