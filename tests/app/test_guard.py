"""Requests that another site makes a browser send are refused; those of our own pages and of programs pass."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.server import Guard

HERE, THERE = "localhost:8501", "http://evil.example"


async def _page(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    headers = [(b"content-type", b"text/html"), (b"access-control-allow-origin", b"*")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"page"})


def answer(
    kind: str = "http",
    *,
    method: str = "GET",
    path: str = "/",
    host: str = HERE,
    origin: str | None = None,
    served_at: str = "localhost",
    names: tuple[str, ...] = (),
) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    headers = [(b"host", host.encode()), *([(b"origin", origin.encode())] if origin else [])]
    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(Guard(_page, served_at, names)(scope, receive, send))
    return sent


def test_pages_cannot_be_framed_or_read_by_other_sites() -> None:
    start, body = answer()
    headers = dict(start["headers"])
    assert (start["status"], body["body"]) == (200, b"page")
    assert headers[b"x-frame-options"] == b"DENY"
    assert headers[b"content-security-policy"] == b"frame-ancestors 'none'"
    assert b"access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8501"}, True),
        ({"host": "[::1]:8501"}, True),
        ({"host": "evil.example:8501"}, False),  # a name that stands for 127.0.0.1: DNS rebinding
        ({"host": "192.0.2.7:8501"}, False),
        ({"host": "192.0.2.7:8501", "served_at": "0.0.0.0"}, True),
        ({"host": "evil.example", "served_at": "0.0.0.0"}, False),
        ({"host": "plan.example", "served_at": "0.0.0.0", "names": ("plan.example",)}, True),
        ({"host": ""}, False),
        ({"method": "PUT", "origin": THERE}, False),
        ({"method": "POST", "origin": "null"}, False),
        ({"method": "PUT", "origin": f"http://{HERE}"}, True),
        ({"method": "PUT"}, True),
        ({"path": "/_stcore/metrics"}, False),
    ],
)
def test_who_may_ask(asked: dict[str, Any], passes: bool) -> None:
    assert answer(**asked)[0]["status"] == (200 if passes else 403)


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({"origin": f"http://{HERE}"}, True),
        ({}, True),
        ({"origin": THERE}, False),
        ({"origin": "http://localhost:9999"}, False),
        ({"origin": "http://evil.example:8501", "host": "evil.example:8501"}, False),
    ],
)
def test_who_may_open_a_session(asked: dict[str, Any], passes: bool) -> None:
    (message,) = answer("websocket", **asked)
    assert message["type"] == ("websocket.accept" if passes else "websocket.close")
