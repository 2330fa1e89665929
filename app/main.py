"""Entry of the dashboard: the list of pages and their common elements. ``simplan dashboard`` starts it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import state
from app.theme import STYLE

_FOLDER = Path(__file__).resolve().parent
_PAGES = _FOLDER / "views"
_ICON = str(_FOLDER / "icon.svg")  # an icon by name would be fetched from another host


def main() -> None:
    """Runs the requested page."""
    st.set_page_config(page_title="simplan", page_icon=_ICON, layout="wide", menu_items={"About": _ABOUT})
    st.html(STYLE)
    state.open_link()
    pages = [
        st.Page(_PAGES / "plan.py", title="Plan", icon=":material/fact_check:", default=True),
        st.Page(_PAGES / "search.py", title="Search", icon=":material/search:"),
        st.Page(_PAGES / "timeline.py", title="Timeline", icon=":material/view_timeline:"),
        st.Page(_PAGES / "scale.py", title="Scale", icon=":material/monitoring:"),
        st.Page(_PAGES / "validate.py", title="Validate", icon=":material/straighten:"),
        st.Page(_PAGES / "learn.py", title="Learn", icon=":material/school:"),
    ]
    st.navigation(pages, position="top").run()


_ABOUT = "simplan predicts time and memory of distributed training, and says how sure it is."

if __name__ == "__main__":
    main()
