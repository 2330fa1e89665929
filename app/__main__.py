"""Serves the workbench: ``python -m app --host ADDRESS --port N [--browser]``; ``simplan dashboard`` calls it.

Streamlit loads pages when the first browser asks for one. What they need is loaded before, beside the server's start.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from threading import Thread

__all__ = ["main", "streamlit_arguments"]

_FOLDER = Path(__file__).resolve().parent
_MAX_UPLOAD_MIB = 64


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="app")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("SIMPLAN_WORKERS", "2")
    Thread(target=_warm_up, daemon=True).start()
    from streamlit.web import cli

    sys.argv = ["streamlit", *streamlit_arguments(options.host, options.port, browser=options.browser)]
    cli.main(prog_name="streamlit")


def streamlit_arguments(host: str, port: int, *, browser: bool) -> list[str]:
    """What Streamlit is told.

    Args:
        host: Address to serve on.
        port: Port.
        browser: Open one.
    """
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": not browser,
        "server.maxUploadSize": _MAX_UPLOAD_MIB,
        "server.fileWatcherType": "none",
        "runner.magicEnabled": False,
        "browser.gatherUsageStats": False,
        "client.showErrorDetails": "none",
        "client.toolbarMode": "minimal",
        "theme.base": _FOLDER / "theme.toml",
    }
    flags = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
    return ["run", str(_FOLDER / "main.py"), *flags]


def _warm_up() -> None:
    """Loads what the first page needs: simplan, its compiled engine, and figures."""
    import plotly.graph_objects as go

    from app.results.quick import quick
    from app.state import START, document_text
    from simplan.scenario import parse_scenario

    pipeline = START | {"plan": {"tp": 8, "pp": 2, "dp_shard": 4}}
    for document in (START, pipeline):
        quick(parse_scenario(document_text(document)))
    go.Figure().add_bar(x=[0], y=[0]).to_json()


if __name__ == "__main__":
    main()
