"""Serving of the dashboard: Streamlit's options exist, and pages come with the server's address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import streamlit
from streamlit import config

from app.server import FirstPage, settings


def test_streamlit_knows_what_it_is_told() -> None:
    assert settings("localhost", 1).keys() <= config.get_config_options().keys()


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"nobody"})


async def _document(scope: Any, receive: Any, send: Any) -> None:
    """What Streamlit answers for every address that it does not know."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    await send({"type": "http.response.body", "body": b"<title>Streamlit</title>"})


def answered(path: str, app: Any = _nobody) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(FirstPage(app)({"type": "http", "method": "GET", "path": path}, receive, send))
    return sent


def body_of(sent: list[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("path", "is_page"), [("/", True), ("/timeline", True), ("/_stcore/health", False), ("/timeline/x", False)]
)
def test_pages_say_where_the_server_is(path: str, is_page: bool) -> None:
    body = body_of(answered(path))
    assert (b"BACKEND_BASE_URL" in body) is is_page
    assert all((f"static/js/{name}.".encode() in body) is is_page for name in ("PlotlyChart", "DataFrame", "Metric"))
    assert (body == b"nobody") is not is_page


def test_pages_have_a_title_and_a_description_before_they_run() -> None:
    for path, title in (("/", "Plan"), ("/timeline", "Timeline")):
        body = body_of(answered(path))
        assert f"<title>{title} - simplan</title>".encode() in body
        assert b'<meta name="description" content="simplan ' in body
        assert b"<title>Streamlit" not in body


def test_unknown_page_names_the_pages() -> None:
    start, *rest = answered("/no-such-page", _document)
    assert start["status"] == 404
    assert b'<a href="/timeline">Timeline</a>' in body_of(rest)
    assert b"Streamlit" not in body_of(rest)


async def _report(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"text/html"), (b"content-disposition", b'attachment; filename="report.html"')]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"<h1>simplan report</h1>"})


def test_report_that_a_page_offers_is_downloaded() -> None:
    start, *rest = answered("/media/1.html", _report)
    assert start["status"] == 200
    assert body_of(rest) == b"<h1>simplan report</h1>"


def test_files_of_streamlit_are_served_as_they_are_and_no_others() -> None:
    static = Path(streamlit.__file__).parent / "static"
    file = min(static.glob("static/js/*.js"), key=lambda file: file.stat().st_size)
    for _ in range(2):
        start, *rest = answered(f"/static/js/{file.name}")
        assert start["status"] == 200
        assert "javascript" in dict(start["headers"])[b"content-type"].decode()
        assert body_of(rest) == file.read_bytes()
    for path in ("/static/js/../../index.html", "/static/js/", "/static/../index.html"):
        assert body_of(answered(path)) == b"nobody"
