"""Pages run without a browser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from app.state import encode
from tests.app.figures.drawn import checked

MAIN = Path(__file__).resolve().parents[3] / "app" / "main.py"

SMALL: Mapping[str, object] = {
    "model": {"preset": "gpt2-124m", "vocab_size": 50304},
    "cluster": {"preset": "dgx-h100", "num_devices": 4},
    "training": {"global_batch_size": 16},
    "software": "torch",
    "plan": {"pp": 2, "dp_replicate": 2},
}
"""A scenario that is answered in a moment."""


def opened(page: str = "", document: Mapping[str, object] = SMALL, view: Mapping[str, object] | None = None) -> AppTest:
    """A page as a link opens it."""
    test = AppTest.from_file(str(MAIN), default_timeout=600)
    if page:
        test.run()
        test.switch_page(f"views/{page}.py")
    test.query_params.clear()
    for key, value in encode(document, view or {}).items():
        test.query_params[key] = value
    return test.run()


def opened_in_session(page: str, document: Mapping[str, Any], view: Mapping[str, Any]) -> AppTest:
    """A page in a session that has asked this document and seen this view, which no link need be able to say."""
    test = AppTest.from_file(str(MAIN), default_timeout=600)
    test.session_state["simplan document"] = dict(document)
    test.session_state["simplan view"] = dict(view)
    test.switch_page(f"views/{page}.py")
    return test.run()


def complaints(test: AppTest) -> list[str]:
    """Exceptions and errors that the page shows."""
    return [str(element.value) for element in (*test.exception, *test.error)]


def query_of(test: AppTest) -> dict[str, str]:
    """The query of its address."""
    values = {key: test.query_params[key] for key in test.query_params}
    return {key: value if isinstance(value, str) else value[0] for key, value in values.items()}


def assert_no_bug(test: AppTest) -> None:
    """No stack trace, nothing that only a bug of ours explains, and figures that Plotly understands."""
    assert not test.exception, test.exception
    assert not [shown.value for shown in test.error if "bug of simplan" in shown.value]
    for chart in test.get("plotly_chart"):
        checked(json.loads(chart.proto.spec))


def drawings_of(page: AppTest) -> str:
    """The SVG of all drawings of a page."""
    return "\n".join(frame.proto.srcdoc for frame in page.get("iframe"))
