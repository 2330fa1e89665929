"""Entry of the dashboard: the list of pages and their common elements. ``simplan dashboard`` starts it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import state
from simplan.documentation import DOCUMENTATION_URL

_FOLDER = Path(__file__).resolve().parent
_PAGES = _FOLDER / "views"
_ICON = str(_FOLDER / "icon.svg")  # an icon by name would be fetched from another host
_ABOUT = "simplan predicts time and memory of distributed training, and says how sure it is."

_STYLE = """
<style>
.block-container { max-width: 1500px; padding-top: 4.2rem; padding-bottom: 3rem; }
div[data-testid="stVerticalBlock"] { gap: 0.6rem; }
div[data-testid="stMetric"] { padding: 0; }
div[data-testid="stMetricValue"] { font-variant-numeric: tabular-nums; }
[data-testid="stSkeleton"], [data-testid="stSkeleton"] * { animation: none !important; }
/* One ring that is seen on light and dark paper; around the whole field where what has the focus is inside of one. */
:focus-visible, [role=group]:has(> input:focus-visible), div:has(> div > input[type=range]:focus-visible),
[data-testid=stNumberInputContainer]:has(> input:focus-visible), [data-baseweb=textarea]:has(textarea:focus-visible) {
  outline: 2px solid #3f85db !important; outline-offset: 1px; box-shadow: none !important;
}
:is([role=group], [data-testid=stNumberInputContainer]) > input:focus-visible { outline: none !important; }
[data-testid=stMain]:focus-visible, .modebar-btn:focus-visible, .dvn-scroller :focus-visible { outline-offset: -2px; }
[data-testid=stHeaderActionElements] a { display: none; }  /* an address has no room for headings */
#MainMenu, footer, div[data-testid="stDecoration"], [data-testid="stAppDeployButton"] { display: none; }
.stStatusWidget:has([data-testid="stStatusWidgetRunningIcon"]) { display: none; }
[data-testid=stHeading] h1 { padding: 0; }
.copy-link { font: inherit; color: inherit; background: none; border: 1px solid; border-radius: 4px; cursor: pointer;
  padding: 0.1rem 0.6rem; margin: 1px; white-space: nowrap; }
[data-testid=stHtml]:has(.copy-link) { font-size: 0.9rem; overflow: visible; }
/* Contrast of 4.5:1 at least: captions, options of commands, text of figures outside of bars, and text on the
   primary color. */
[data-testid=stCode] .token:is(.parameter, .number) { color: light-dark(#4f5a66, #b3bcc6) !important; }
[data-testid=stCaptionContainer], [data-testid=stCaptionContainer] :not(a, a *) {
  color: light-dark(#4f5a66, #b3bcc6) !important; opacity: 1; }
.js-plotly-plot :is(.xtick, .ytick, .y2tick, .y3tick, .y4tick) text, .js-plotly-plot [class$=title],
.js-plotly-plot :is(.annotation-text, .legend2text, .bartext-outside) {
  fill: light-dark(#4f5a66, #b3bcc6) !important; }
[data-testid=stBaseButton-primary]:not(:disabled), [data-testid=stBaseButton-primary]:not(:disabled) *,
[data-tag], [data-tag] * { color: light-dark(#ffffff, #12171d) !important; }
@media (max-width: 640px) {
  .block-container { padding-left: 0.8rem; padding-right: 0.8rem; }
  [data-testid=stColumn]:has(> [data-testid=stVerticalBlock] > :only-child [data-testid=stMetric]) {
    min-width: calc(50% - 0.5rem); }  /* two metrics in a row */
}
[class*=st-key-drawing] { overflow-x: auto; }
[class*=st-key-drawing] > [data-testid=stElementContainer] { flex: none; height: auto; }
[class*=st-key-drawing] iframe { display: block; width: max(100%, 960px); height: auto; }  /* legible on a phone */
/* Without a pointer, the buttons of a table are always there: above the table, in an element that grows with them. */
@media (hover: none) { [data-testid=stElementContainer]:has([data-testid=stDataFrame]) {
  padding-top: 2.2rem; box-sizing: content-box; } }
/* Why a file is not taken is a text for screen readers alone, as Streamlit has it. */
[data-testid=stFileChip][aria-invalid=true] { flex-wrap: wrap; height: auto; max-width: none; }
[data-testid=stFileChip][aria-invalid=true] > [role=alert] { position: static !important; width: auto !important;
  height: auto !important; margin: 0 !important; clip: auto !important; clip-path: none !important;
  overflow: visible !important; white-space: normal !important; font-size: 0.85rem; }
[data-testid=stErrorCodeBlock] [data-testid=stElementToolbarButton] { display: none; }  /* copies another command */
.katex-display { overflow-x: auto; overflow-y: hidden; }
@media (hover: none) { .js-plotly-plot:not(:hover) .modebar { opacity: 0; pointer-events: none; } }
</style>
"""
"""Style beyond ``theme.toml``: denser, fewer decorations, a ring around the focus, and contrast."""

_COPY_LINK = '<button type="button" class="copy-link" aria-live="polite">Copy link</button>'
"""``head.html`` copies the address when it is pressed: a button of Streamlit would run the page again."""


_INTRODUCTION = (
    "**simplan** finds the fastest parallel training plan that fits your GPUs, before you book them: choose model and "
    "nodes on the left, paste what you have below, or let **Search** find the best plan. "
    f"[Documentation]({DOCUMENTATION_URL})"
)
"""Sentence for who opens the dashboard for the first time."""


def main() -> None:
    """Runs the requested page."""
    st.set_page_config(page_title="simplan", page_icon=_ICON, layout="wide", menu_items={"About": _ABOUT})
    st.html(_STYLE)
    state.open_link()
    pages = [
        st.Page(_PAGES / "plan.py", title="Plan", icon=":material/fact_check:", default=True),
        st.Page(_PAGES / "search.py", title="Search", icon=":material/search:"),
        st.Page(_PAGES / "timeline.py", title="Timeline", icon=":material/view_timeline:"),
        st.Page(_PAGES / "compare.py", title="Compare", icon=":material/compare_arrows:"),
        st.Page(_PAGES / "network.py", title="Network", icon=":material/lan:"),
        st.Page(_PAGES / "scale.py", title="Scale", icon=":material/monitoring:"),
        st.Page(_PAGES / "run.py", title="Whole run", icon=":material/event_available:", url_path="run"),
        st.Page(_PAGES / "validate.py", title="Validate", icon=":material/straighten:"),
        st.Page(_PAGES / "learn.py", title="Learn", icon=":material/school:"),
    ]
    page = st.navigation(pages, position="top")
    st.set_page_config(page_title=f"{page.title} - simplan")
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title(page.title, width="content")
        st.html(_COPY_LINK, width="content")
    if page.title == pages[0].title:
        st.caption(_INTRODUCTION)
    page.run()


if __name__ == "__main__":
    main()
