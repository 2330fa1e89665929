"""Serves the dashboard of this checkout, and starts a browser for it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hosts import free_port

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE_S = 180.0
"""For what takes a second or two; only a failing test, or a loaded machine, takes so long."""
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("plan", "search", "timeline", "compare", "network", "scale", "run", "validate", "learn")
SMALL = (
    "model.preset=gpt2-124m&cluster.preset=dgx-h100&cluster.num_devices=4&training.global_batch_size=16"
    "&software=torch&plan.pp=2&plan.dp_replicate=2"
)
"""A scenario that is answered in a moment."""
LARGE = (
    "model.preset=llama3-70b&model.seq_len=8192&cluster.preset=dgx-h100&cluster.num_devices=64"
    "&training.global_batch_size=128&software=torch&plan.dp_shard=64&plan.microbatch_size=2&plan.recompute=full"
)
"""What a session starts with: its best plans take seconds to explain."""
DRAWN = """
() => document.querySelector('[data-testid=stApp][data-test-script-state=notRunning]')
  && !document.querySelector('[data-testid=stSkeleton]')
  && [...document.querySelectorAll('.js-plotly-plot')].every(chart => chart.querySelector('.main-svg .infolayer'))
"""
"""Whether Streamlit has done what it was asked, and figures are there; for a browser."""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """The address of a dashboard whose workspace is a folder, and its process; it ends with us, however we end."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "simplan", "dashboard", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
    try:
        wait_for(port, lambda: server.poll() is None)
        yield f"http://localhost:{port}", server.pid
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(_PATIENCE_S)


@contextmanager
def browser() -> Iterator[Any]:
    """The system's chromium, or the one that Playwright brings."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=1e3 * _PATIENCE_S
        )
        yield launched
        launched.close()


def opened(page: Any, url: str) -> None:
    """Opens an address and waits until the page is whole."""
    page.goto(url)
    page.locator("[data-testid=stMainBlockContainer]").wait_for()
    settled(page)


def settled(page: Any) -> None:
    """Waits until Streamlit has done what it was asked and all figures are drawn."""
    page.wait_for_function(DRAWN)


def _end_with_parent() -> None:
    """Linux: a process that is killed cannot end what it started, but the kernel does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_for(port: int, lives: Callable[[], bool] = lambda: True) -> None:
    """Waits until a server answers."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _answers(port):
        assert lives(), "the server has ended"
        assert time.monotonic() < deadline_s, "the server does not answer"
        time.sleep(0.1)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 1).close()
    except OSError:
        return False
    return True
