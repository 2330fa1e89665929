"""Pasted text or dropped file that the session read last; forgotten when the scenario is another job.

A file of a framework often gives sequences per data-parallel rank, and no global batch. The global batch then follows
the number of devices, also when that number changes later.
"""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from app import state
from app.fitting import Document, fitted, num_data_parallel, num_devices, section
from app.uploads import Recognized
from simplan.interop.formats import changed_settings
from simplan.job import Job
from simplan.report.search import change_words

_READ = "pasted"
_CHANGED_WITH_DEVICES = ("cluster", "plan")


def remember(recognized: Recognized) -> None:
    """Keeps content that was read for the session."""
    st.session_state[_READ] = recognized


def forget() -> None:
    """Forgets what was read."""
    st.session_state.pop(_READ, None)


def last_read() -> Recognized | None:
    """Content that was read last, while the scenario is that job, with any plan; None otherwise."""
    return _read_job(state.current(), "plan")


def _read_job(document: Document, *ignored: str) -> Recognized | None:
    """Content that was read last if a scenario is its job apart from some sections; None otherwise."""
    recognized: Recognized | None = st.session_state.get(_READ)
    if recognized is None or recognized.document is None:
        return None
    now, then = (
        {key: compared[key] for key in compared if key not in ignored} for compared in (document, recognized.document)
    )
    return recognized if now == then else None


def with_batch_of_file(document: Document) -> Document:
    """The scenario on other devices, with the global batch that the file which was read has on these.

    The scenario stays if no file was read, if the file gives a global batch, or if more than devices and plan changed.
    """
    recognized = _read_job(document, *_CHANGED_WITH_DEVICES)
    if recognized is None or recognized.document is None or num_devices(document) == num_devices(recognized.document):
        return document
    before, after = num_data_parallel(recognized.document), num_data_parallel(fitted(document))
    if recognized.batch_follows_devices and before and after:
        training = section(document, "training")
        sequences_of_rank = section(recognized.document, "training")["global_batch_size"] // before
        document = document | {"training": training | {"global_batch_size": sequences_of_rank * after}}
    remember(replace(recognized, document=document, assumed_devices=None))
    return document


def accept_devices() -> None:
    """Takes the assumed number of devices as the answer of the user."""
    recognized = last_read()
    if recognized is not None:
        remember(replace(recognized, assumed_devices=None))


def framework_words(before: Job, after: Job) -> str:
    """Difference of two jobs as settings of the framework whose file was read; empty without such a file."""
    recognized = last_read()
    if recognized is None or recognized.configuration is None:
        return ""
    return "; ".join(change_words(change) for change in changed_settings(recognized.configuration, before, after))
