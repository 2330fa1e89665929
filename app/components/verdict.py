"""The verdict: fits or does not fit, in one line, and a row of key numbers."""

from __future__ import annotations

import streamlit as st

from app.fields import kept_number, remembered_number
from app.results.headline import Headline, training_of
from app.words import meaning
from simplan.report.text import short_of_reserve
from simplan.scenario import Scenario
from simplan.units import format_bytes, format_count, format_number, format_percent, format_time

__all__ = ["kept_budget", "show_budget", "show_numbers", "show_verdict"]

_LEAST, _MOST = 0.001, 1e9
_PRICE, _MOST_PRICE = "price", 1e6


def show_verdict(headline: Headline, host_words: str = "") -> None:
    """Fits or not, the peak-memory rank and the headroom, in color and words.

    Args:
        headline: Key numbers of the prediction.
        host_words: Message about insufficient host memory; empty if host memory suffices.
    """
    rank = "the worst rank" if headline.worst_rank is None else f"rank {headline.worst_rank}"
    needs = f"{rank} needs {format_bytes(headline.device_bytes)}"
    capacity = headline.capacity_bytes
    if host_words:
        st.error(f"**Does not fit**: {host_words}", icon=":material/cancel:")
    elif headline.fits is None or capacity is None:
        st.warning(f"{needs}; what a device has is not known", icon=":material/help:")
    else:
        spare = capacity - headline.device_bytes
        share = format_percent(abs(spare) / capacity)
        of = f"{needs} of {format_bytes(capacity)}"
        if headline.fits and headline.short_bytes:
            words = f"{rank} takes all of {format_bytes(capacity)}, and {short_of_reserve(headline.short_bytes)}"
            st.warning(f"**Fits tightly**: {words}", icon=":material/warning:")
        elif headline.fits:
            st.success(f"**Fits**: {of}, {format_bytes(spare)} ({share}) to spare", icon=":material/check_circle:")
        else:
            st.error(f"**Does not fit**: {of}, {format_bytes(-spare)} ({share}) too much", icon=":material/cancel:")


def kept_budget(*, images: bool) -> tuple[float, float | None]:
    """Training budget and price of a device, as remembered for the session.

    Returns:
        Number of tokens (or images), and price per device and hour; None without a price.
    """
    _, name, scale, start = _budget(images=images)
    budget = kept_number(name, start, least=_LEAST, most=_MOST)
    return budget * scale, kept_number(_PRICE, 0.0, most=_MOST_PRICE) or None


def show_budget(*, images: bool) -> None:
    """Inputs for training budget and price in the sidebar."""
    label, name, _, start = _budget(images=images)
    with st.sidebar:
        st.markdown("###### Budget")
        left, right = st.columns(2)
        with left:
            remembered_number(label, name, start, least=_LEAST, most=_MOST, help="How much is trained on in all")
        with right:
            about = "Yours, per device and hour; 0 for no cost"
            remembered_number("CostEstimate", _PRICE, 0.0, most=_MOST_PRICE, help=about)


def _budget(*, images: bool) -> tuple[str, str, float, float]:
    """Label, view-value name, unit and default of the training budget."""
    return ("Images (million)", "images", 1e6, 300.0) if images else ("Tokens (billion)", "tokens", 1e9, 1000.0)


def show_numbers(asked: Scenario, headline: Headline, budget: float, price: float | None) -> None:
    """Step time with its interval, throughput, utilization, and a whole training."""
    devices = asked.job.cluster.num_devices
    whole = training_of(headline, devices, budget, price)
    images = asked.job.model.sample == "image"
    rate = headline.samples_per_s if images else headline.tokens_per_s
    each = "images" if images else "tokens"
    cells = [
        (
            "Step time",
            format_time(headline.step_time_s),
            _interval(headline),
            f"{meaning('step_time_s')}. Below it the interval, which {meaning('interval')}",
        ),
        (
            f"{each.capitalize()} per second",
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            f"{format_number(rate / devices)} per device",
            f"global batch{'' if images else ' x sequence length'} / step time, of all devices",
        ),
        (
            "MFU",
            "unknown" if headline.mfu is None else format_percent(headline.mfu),
            asked.job.training.precision + " dense peak",
            f"{meaning('mfu')}: model FLOPs of a step / (step time x devices x dense peak)",
        ),
        (
            f"{format_count(budget)} {each}",
            f"{whole.days:,.1f} days" if whole.days < 1000 else f"{whole.days / 365.25:,.1f} years",
            f"{format_count(whole.device_hours)} device hours",
            f"{each} / {each} per second, without failures and checkpoints: those are not modelled here",
        ),
        (
            "Cost",
            "no price" if whole.cost is None else format_count(whole.cost),
            "set yours in the sidebar" if price is None else f"at {price:g} per device and hour",
            "device hours x your price",
        ),
    ]
    with st.container(horizontal=True, gap="medium"):
        for label, value, below, about in cells:
            st.metric(label, value, below, delta_color="off", delta_arrow="off", help=about)


def _interval(headline: Headline) -> str:
    if headline.step_time_interval_s is None:
        return "interval: being computed"
    low_s, high_s = headline.step_time_interval_s
    return f"{format_time(low_s)} to {format_time(high_s)}"
