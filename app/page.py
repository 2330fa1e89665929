"""Runs a page; errors become messages, never a stack trace."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable

import streamlit as st

from app import state
from app.fitting import fitting_batches, with_value
from simplan.documentation import DOCUMENTATION_URL
from simplan.errors import NotModelledError, SimplanError, SpecError

_BATCH = ("training", "global_batch_size")
Following = Callable[[], None]
"""Function that a page calls after it is drawn, e.g. to wait for results."""


def run_page(show: Callable[[], Following | None]) -> None:
    """Shows one page, and writes its state into the address.

    Streamlit's exceptions that stop or rerun a page pass through.
    """
    then = None
    try:
        then = show()
    except SimplanError as error:
        show_problems(error)
        _offer_batches(error)
    except Exception as error:
        logging.getLogger("simplan.app").exception("a page failed")
        st.error(
            f"This is a bug of simplan ({escaped(type(error).__name__)}: {escaped(str(error)[:300])}). The server's "
            "log has the traceback; please report it with the address of this page."
        )
    if not state.write_link():
        st.caption("This scenario is too long for a link; download it as YAML to share it.")
    if then is not None:
        then()


def _offer_batches(error: SimplanError) -> None:
    """Buttons of the batches next to one that the data-parallel ranks cannot share, if that is an error of the page."""
    if not isinstance(error, SpecError) or all(problem.field != ".".join(_BATCH) for problem in error.problems):
        return
    document = state.document()
    with st.container(horizontal=True):
        for size in fitting_batches(document):
            changed = with_value(document, _BATCH, size)
            st.button(f"Batch {size}", key=f"form batch {size}", on_click=state.set_document, args=(changed,))


def show_problems(error: SimplanError, *, lines: bool = False, named: bool = False) -> None:
    """Shows problems and fixes, one line each; unmodeled options look different from mistakes.

    Args:
        error: Error with the problems.
        lines: Begin each problem with its line in the file.
        named: Begin with the name of the file, where a problem has no field.
    """
    if isinstance(error, SpecError):
        sentences = [
            (f"line {problem.line}: " if lines and problem.line else "")
            + (f"{error.file}: " if named and error.file and not problem.field else "")
            + problem.sentence()
            for problem in error.problems
        ]
    else:
        sentences = [str(error)]
    text = escaped(sentences[0]) if len(sentences) == 1 else bullets(sentences)
    if isinstance(error, NotModelledError):
        st.info(f"**Not modeled yet.** {text}" if len(sentences) == 1 else f"**Not modeled yet**\n\n{text}")
    else:
        st.warning(text)


def bullets(texts: Iterable[str]) -> str:
    """Markdown list of texts."""
    return "\n".join(f"- {escaped(text)}" for text in texts)


_AUTOLINK = re.compile(r"https?(?=://)|www(?=\.)|(?=@)", re.IGNORECASE)
_WORD_JOINER = "\u2060"
_KEPT = re.compile(rf"({re.escape(DOCUMENTATION_URL)}/[a-z/-]*|(?<!`)(?P<ticks>`+)[^`\n]+(?P=ticks)(?!`))")


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is, and `code` as code.

    Addresses in names do not become links: an invisible character breaks them, since GitHub's Markdown links escaped
    addresses as well. Links to simplan's documentation stay links. Code shows its text without links or markup.
    """
    parts, end = [], 0
    for kept in _KEPT.finditer(text):
        in_cells = "|" in kept[0]  # it would end the cell of a table, even in code
        parts += [_escaped(text[end : kept.start()]), _escaped(kept[0]) if in_cells else kept[0]]
        end = kept.end()
    return "".join((*parts, _escaped(text[end:])))


def _escaped(text: str) -> str:
    unlinked = _AUTOLINK.sub(rf"\g<0>{_WORD_JOINER}", text)
    return "".join(f"\\{character}" if character in r"\`*_{}[]()<>#+-!|~$:" else character for character in unlinked)
