"""How the workbench is served: what Streamlit is told exists there, and pages come with the server's address."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from streamlit import config

from app.server import FirstPage, settings


def test_streamlit_knows_what_it_is_told() -> None:
    assert settings("localhost", 1).keys() <= config.get_config_options().keys()


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"nobody"})


@pytest.mark.parametrize(
    ("path", "is_page"), [("/", True), ("/timeline", True), ("/_stcore/health", False), ("/timeline/x", False)]
)
def test_pages_say_where_the_server_is(path: str, is_page: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(FirstPage(_nobody)({"type": "http", "method": "GET", "path": path}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    assert (b"BACKEND_BASE_URL" in body) is is_page
    assert (body == b"nobody") is not is_page
