"""The server: Streamlit's application on uvicorn, for this machine's browser alone, and fast on the first page.

Streamlit's own start binds a socket with Nagle's algorithm, which delays small responses by 40 ms per file, and a page
is over a hundred files; uvicorn's sockets have no delay. The first HTML document contains the server's address.
Otherwise the browser first looks below the page's address, with a pause and two errors in the console. The files of the
first visit are cached in memory.

``Guard`` refuses what other sites ask a browser to do here: to frame pages, to open sessions, to send files. Streamlit
compares the origin of a session with addresses that it looks up on the internet, and lets any site frame its pages, so
that a click meant for that site could start a run. Here the origin must be the server itself, under a name that no
other site can take: a foreign name may stand for 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import mimetypes
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from simplan.cli.dashboard import is_local
from simplan.cli.terminal.output import say
from simplan.cli.terminal.processes import ending_signals_raise

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FOLDER = Path(__file__).resolve().parent
_MAX_UPLOAD_MIB = 64
_LAST_WORDS_S = 2
_LATER = ("Progress", "PlotlyChart", "Metric", "DataFrame")
_HEADERS = (
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_ABSENT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>simplan</title></head>
<body style="font-family: sans-serif; margin: 3rem"><h1>No page here</h1><p>simplan has these pages: LINKS.</p></body>
</html>
"""
_READING = ("GET", "HEAD", "OPTIONS")
_CLOSED_PATHS = ("/_stcore/metrics",)
_POLICY_VIOLATION = 1008  # RFC 6455


def serve(host: str, port: int, *, browser: bool, then: Callable[[], None]) -> None:
    """Serves until an interrupt; ``then`` runs in a thread once the server is up."""
    import streamlit as st
    import uvicorn
    from starlette.middleware import Middleware
    from streamlit.web.bootstrap import load_config_options

    load_config_options({key.replace(".", "_"): value for key, value in settings(host, port).items()})

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            say(f"the dashboard is at {url}")
            Thread(target=then, daemon=True).start()
            if browser:
                Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    for name in ("uvicorn.access", "uvicorn.error"):  # a filter, since Streamlit sets the log levels itself
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.WARNING)
    names = st.get_option("browser.serverAddress")  # STREAMLIT_BROWSER_SERVER_ADDRESS, behind a proxy
    guard = Middleware(Guard, host=host, names=(names,) if names else ())
    application = st.App(_FOLDER / "main.py", middleware=[guard, Middleware(FirstPage)])
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        ws="websockets-sansio",
        log_config=None,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    with ending_signals_raise():  # uvicorn re-raises the signal that ended it, and child processes must end as well
        Server(config).run()


def settings(host: str, port: int) -> dict[str, str | int | bool]:
    """Settings of Streamlit by name."""
    return {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.maxUploadSize": _MAX_UPLOAD_MIB,
        "server.fileWatcherType": "none",
        "server.enableCORS": False,  # the guard compares origins
        "server.enableXsrfProtection": False,
        "server.enableAgentApi": False,
        "runner.magicEnabled": False,
        "browser.gatherUsageStats": False,
        "client.showErrorDetails": "none",
        "client.toolbarMode": "minimal",
        "theme.base": str(_FOLDER / "theme.toml"),
    }


class FirstPage:
    """Middleware that serves pages as Streamlit's document plus ``head.html``, and static files from memory.

    File names contain a hash of the content, so that browsers can cache the files permanently.
    """

    def __init__(self, app: ASGIApp) -> None:
        import streamlit

        self._app = app
        static = Path(streamlit.__file__).parent / "static"
        later = [
            file.relative_to(static).as_posix() for name in _LATER for file in static.glob(f"static/js/{name}.*.js")
        ]
        head = (_FOLDER / "head.html").read_bytes().replace(b"LATER", json.dumps(later).encode(), 1)
        document = (static / "index.html").read_bytes().replace(b"</head>", head, 1)
        names = [page.stem for page in (_FOLDER / "views").glob("*.py")]
        titles = {"/": "Plan"} | {f"/{name}": name.capitalize() for name in sorted(names)}
        self._pages = {
            path: document.replace(b"<title>Streamlit<", f"<title>{title} - simplan<".encode(), 1)
            for path, title in titles.items()
        }
        links = ", ".join(f'<a href="{path}">{title}</a>' for path, title in titles.items() if path != "/plan")
        self._absent = _ABSENT.replace("LINKS", links)
        self._files = {f"/{file.relative_to(static).as_posix()}": file for file in static.glob("static/*/*")}
        self._read: dict[str, Response] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif path in self._files:
            await self._file(path)(scope, receive, send)
        elif path in self._pages:
            from starlette.responses import HTMLResponse

            await HTMLResponse(self._pages[path], headers={"Cache-Control": "no-cache"})(scope, receive, send)
        else:
            await self._other(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for no page; Streamlit would answer with its document, below the wrong address.

        A report is HTML, too, and is a file to save.
        """
        from starlette.responses import HTMLResponse

        is_document = False

        async def passed(message: Message) -> None:
            nonlocal is_document
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                is_html = headers.get(b"content-type", b"").startswith(b"text/html")
                is_document = message["status"] == 200 and is_html and b"content-disposition" not in headers
            if not is_document:
                await send(message)

        await self._app(scope, receive, passed)
        if is_document:
            await HTMLResponse(self._absent, 404)(scope, receive, send)

    def _file(self, path: str) -> Response:
        from starlette.responses import Response

        if path not in self._read:
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            headers = {"Cache-Control": "public, immutable, max-age=31536000"}
            self._read[path] = Response(self._files[path].read_bytes(), media_type=kind, headers=headers)
        return self._read[path]


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
