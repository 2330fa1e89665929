"""Refuses what other sites ask a browser to do here: to frame pages, to open sessions, to send files.

Streamlit compares the origin of a session with addresses that it looks up on the internet, and lets any site frame its
pages, so that a click meant for that site could start a run. Here the origin must be the server itself, under a name
that no other site can take: a foreign name may stand for 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from simplan.cli.dashboard import is_local

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = (
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_READING = ("GET", "HEAD", "OPTIONS")
_CLOSED_PATHS = ("/_stcore/metrics",)
_POLICY_VIOLATION = 1008  # RFC 6455


class Guard:
    """Middleware before all others.

    Args:
        host: Address that the server listens at.
        names: Further names of the server, such as that of a proxy.
    """

    def __init__(self, app: ASGIApp, host: str, names: tuple[str, ...] = ()) -> None:
        self._app = app
        self._only_here = is_local(host)
        of_machine = () if self._only_here else (socket.gethostname(), socket.getfqdn())
        self._names = frozenset(name.lower() for name in (host, "localhost", *of_machine, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or passes it on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if scope["type"] == "websocket":
            if self._is_ours(host) and _is_same(origin, host):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        allowed = self._is_ours(host) and (scope["method"] in _READING or _is_same(origin, host))
        if not allowed or scope["path"] in _CLOSED_PATHS:
            await send({"type": "http.response.start", "status": 403, "headers": [*_HEADERS]})
            await send({"type": "http.response.body", "body": b"not for other sites\n"})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"access-control-allow-origin"]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        await self._app(scope, receive, guarded)

    def _is_ours(self, host: str) -> bool:
        """True for a ``Host`` header with an address, or with a name of this server."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            return ipaddress.ip_address(name).is_loopback or not self._only_here
        except ValueError:
            return name in self._names


def _is_same(origin: str | None, host: str) -> bool:
    """True where a page of this server asks; programs other than browsers send no origin."""
    return origin is None or urlsplit(origin).netloc.lower() == host.lower()
