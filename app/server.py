"""The server: Streamlit's application on uvicorn, with optimizations for a fast first page.

Streamlit's own start binds a socket with Nagle's algorithm, which delays small responses by 40 ms per file, and a page
is over a hundred files; uvicorn's sockets have no delay. The first HTML document contains the server's address.
Otherwise the browser first looks below the page's address, with a pause and two errors in the console. The files of the
first visit are cached in memory.
"""

from __future__ import annotations

import json
import logging
import mimetypes
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from app.guard import Guard
from simplan.cli.terminal.output import say
from simplan.cli.terminal.processes import ending_signals_raise

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_FOLDER = Path(__file__).resolve().parent
_MAX_UPLOAD_MIB = 64
_LAST_WORDS_S = 2
_LATER = ("Progress", "PlotlyChart", "Metric", "DataFrame")


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
        self._document = (static / "index.html").read_bytes().replace(b"</head>", head, 1)
        self._pages = {"/", *(f"/{page.stem}" for page in (_FOLDER / "views").glob("*.py"))}
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

            await HTMLResponse(self._document, headers={"Cache-Control": "no-cache"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _file(self, path: str) -> Response:
        from starlette.responses import Response

        if path not in self._read:
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            headers = {"Cache-Control": "public, immutable, max-age=31536000"}
            self._read[path] = Response(self._files[path].read_bytes(), media_type=kind, headers=headers)
        return self._read[path]
