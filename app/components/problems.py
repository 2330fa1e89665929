"""Errors as sentences."""

from __future__ import annotations

import streamlit as st

from simplan.errors import NotModelledError, SimplanError, SpecError

__all__ = ["escaped", "show_bug", "show_problems"]


def show_problems(error: SimplanError) -> None:
    """Shows problems and fixes, one line each; unmodeled options look different from mistakes."""
    sentences = [problem.sentence() for problem in error.problems] if isinstance(error, SpecError) else [str(error)]
    text = (
        "\n".join(f"- {escaped(sentence)}" for sentence in sentences) if len(sentences) > 1 else escaped(sentences[0])
    )
    if isinstance(error, NotModelledError):
        st.info(f"**Not modelled yet.** {text}" if len(sentences) == 1 else f"**Not modelled yet**\n\n{text}")
    else:
        st.warning(text)


def show_bug(error: Exception) -> None:
    """Shows an error that only a bug of simplan can cause."""
    st.error(
        f"This is a bug of simplan ({escaped(type(error).__name__)}: {escaped(str(error)[:300])}). The server's log "
        "says where; please report it with the address of this page."
    )


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return "".join(f"\\{character}" if character in r"\`*_{}[]()<>#+-!|~$:" else character for character in text)
