"""Plan: one plan of a model on a cluster; whether it fits, how long a step takes and where it goes."""

from __future__ import annotations

import streamlit as st

from app import answers, state
from app.components.downloads import download, show_figure
from app.components.verdict import show_verdict
from app.fields import choice, number
from app.figures.memory import memory_bars, memory_figure
from app.page import run_page
from app.words import meaning
from simplan.spec import catalogue
from simplan.units import format_percent, format_time


def show() -> None:
    """The form beside the answer."""
    form, answer = st.columns([1, 3])
    with form:
        choice("Model", ("model", "preset"), catalogue.names("models"), "llama3-70b")
        choice("Cluster", ("cluster", "preset"), catalogue.names("clusters"), "dgx-h100")
        number("Devices", ("cluster", "num_devices"), 64)
        number("Global batch size", ("training", "global_batch_size"), 128)
    document = state.document()
    with answer:
        prediction = answers.prediction(document)
        show_verdict(prediction)
        columns = st.columns(3)
        low_s, high_s = prediction.step_time_interval_s
        columns[0].metric("Step time", format_time(prediction.step_time_s), help=meaning("step_time_s"))
        columns[1].metric(
            "In 9 of 10 cases", f"{format_time(low_s)} to {format_time(high_s)}", help=meaning("interval")
        )
        mfu = "unknown" if prediction.mfu is None else format_percent(prediction.mfu)
        columns[2].metric("MFU", mfu, help=meaning("mfu"))
        figure = memory_figure(memory_bars(prediction.memory), prediction.capacity_bytes)
        show_figure(figure, f"{prediction.name} memory by rank", alt="Memory of every rank at its worst instant")
        download("Scenario", prediction.name, "yaml", state.document_text(document))


if __name__ == "__main__":
    run_page(show)
