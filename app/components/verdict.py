"""The verdict: what people ask first, in one line and a row of numbers."""

from __future__ import annotations

import streamlit as st

from app.components.problems import escaped
from simplan.prediction import Prediction
from simplan.report.text import verdict

__all__ = ["show_verdict"]


def show_verdict(prediction: Prediction) -> None:
    """Fits or not, the worst rank and the headroom, in colour and words."""
    show = st.warning if prediction.fits is None else st.success if prediction.fits else st.error
    show(f"**{escaped(verdict(prediction))}**")
