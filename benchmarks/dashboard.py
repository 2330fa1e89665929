"""Latency of the dashboard in a real browser, by the browser's clock.

Each measurement is a separate benchmark on a separate, warm server.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.table import BenchmarkRow
from tests.browser.serving import DRAWN, PAGES, browser, opened, serving, settled, wait_for
from tests.hosts import free_port

_ROUNDS = 5
_USERS, _CROWD, _LOOK_MS = 10, 5, 50
_WINDOW = {"width": 1440, "height": 1000}
_Number = Callable[[Any, str, int], Iterable[BenchmarkRow]]
_PLAN = "model.preset=llama3-70b&model.seq_len=8192&cluster.preset=dgx-h100&cluster.num_devices=64&software=torch"
_PLAN += "&training.global_batch_size=128&training.precision=bf16&plan.tp=8&plan.dp_shard=8&plan.recompute=full"
_GPT3 = "model.preset=gpt3-175b&model.vocab_size=51200&model.tied_embeddings=false&cluster.preset=dgx-a100-80gb"
_GPT3 += "&cluster.num_devices=1024&training.global_batch_size=1536&software=torch"
_SEEN = """
(() => {
  const main = '[data-testid=stMainBlockContainer] ';
  const first = ['stAlert', 'stMetric', 'stSelectbox', 'stMultiSelect', 'stHeading', 'stTabs', 'stPlotlyChart']
    .map(name => `${main}[data-testid=${name}]`).join(', ');
  const seen = window.seen = {};
  const look = () => {
    if (!seen.first_ms && document.querySelector(first)) seen.first_ms = performance.now();
    const now = performance.now();
    const whole = seen.first_ms && (DRAWN)();
    if (!whole) seen.since_ms = 0;
    else seen.since_ms ||= now;
    if (whole && now - seen.since_ms > 400) seen.whole_ms ||= seen.since_ms;
    if (!seen.whole_ms) setTimeout(look, 25);
  };
  look();
})();
""".replace("DRAWN", DRAWN)
"""Script that records the first content of a page and its complete drawing; polls 40 times per second."""

_ANSWERED = """
() => {
  const value = () => document.querySelector('[data-testid=stMetricValue]')?.textContent;
  const before = value(), answered = window.answered = {};
  let changed_ms = 0;
  document.addEventListener('keydown', event => { answered.key_ms ??= event.timeStamp; }, {once: true, capture: true});
  new MutationObserver(records => {
    if (records.some(({target}) => target.closest?.('.js-plotly-plot'))) changed_ms = performance.now();
  }).observe(document, {childList: true, subtree: true, attributes: true});
  const look = () => {
    const now = performance.now();
    if (answered.key_ms && value() && value() !== before) answered.ms ??= now - answered.key_ms;
    if (!answered.ms || !(DRAWN)()) changed_ms = now;
    if (now - changed_ms > 400) answered.whole_ms = changed_ms - answered.key_ms;
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}
""".replace("DRAWN", DRAWN)
"""Script that times from the key that moves the slider to the frame with another step time, and to the last figure."""

_PLANS = """
() => {
  const found = window.found = {longest_ms: 0};
  let last = 0;
  document.addEventListener('click', event => { found.click_ms ??= last = event.timeStamp; },
    {once: true, capture: true});
  setInterval(() => {
    const now = performance.now();
    if (found.click_ms) {
      found.longest_ms = Math.max(found.longest_ms, now - last);
      last = now;
      if (!found.ms && document.querySelector('[data-testid=stMetricValue]')) found.ms = now - found.click_ms;
    }
  }, 25);
}
"""
"""Script that times from the click on Search to the first plans, and the longest block of the page's thread."""


def _measured(number: _Number) -> Iterator[BenchmarkRow]:
    """Run a measurement on a separate server; server and browser always end with it."""
    if find_spec("playwright") is None:
        yield BenchmarkRow(
            "dashboard in a browser", "", "not measured: `make test-browser` installs what it needs", ok=True
        )
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (url, pid), browser() as chromium:
        yield from number(chromium, url, pid)


def _first_paint(page: str, chromium: Any, url: str, _: int) -> Iterator[BenchmarkRow]:
    address = f"{url}/{'' if page == 'plan' else page}?{_PLAN}"
    seen = [_load(chromium, address) for _ in range(_ROUNDS + 1)][1:]  # the first load fills the server's caches
    first, whole = ([visit[key] / 1e3 for visit in seen] for key in ("first_ms", "whole_ms"))
    times_text = f"{_spread(first)}; all of it drawn {_spread(whole)}"
    yield BenchmarkRow(f"dashboard: {page}, first paint", "under 2 s", times_text, statistics.median(first) < 2)


def _load(chromium: Any, address: str) -> dict[str, float]:
    """Open a page with an empty browser cache."""
    context = chromium.new_context(viewport=_WINDOW)
    context.add_init_script(_SEEN)
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_function("() => window.seen.whole_ms", timeout=60_000, polling=_LOOK_MS)
    seen: dict[str, float] = tab.evaluate("() => window.seen")
    context.close()
    return seen


def _slider(chromium: Any, url: str, _: int) -> Iterator[BenchmarkRow]:
    """Move the sliders of pipeline and tensor parallelism up and down; every position is a new request."""
    tab = chromium.new_context(viewport=_WINDOW).new_page()
    taken_ms: list[float] = []
    for batch in (64, 192, 256, 320):
        opened(tab, f"{url}/?{_PLAN.replace('batch_size=128', f'batch_size={batch}')}")
        tab.locator("[data-testid=stPlotlyChart] .main-svg").first.wait_for()
        slider = tab.get_by_role("slider", name="Tensor parallel")
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight"):
            slider.focus()
            tab.evaluate(_ANSWERED)
            tab.keyboard.press(key)
            tab.wait_for_function("() => window.answered.ms", timeout=60_000, polling=_LOOK_MS)
            taken_ms.append(tab.evaluate("() => window.answered.ms"))
            settled(tab)
    tab.context.close()
    what = "dashboard: a slider of Plan to the new step time, 64 devices"
    yield BenchmarkRow(what, "under 300 ms", _spread(taken_ms, "ms", 0), statistics.median(taken_ms) < 300)


def _search(chromium: Any, url: str, _: int) -> Iterator[BenchmarkRow]:
    tab = chromium.new_context(viewport=_WINDOW).new_page()
    opened(tab, f"{url}/search?{_GPT3}")
    tab.wait_for_timeout(8_000)  # the worker that waits ready has loaded what it needs
    tab.evaluate(_PLANS)
    tab.get_by_role("button", name="Search", exact=True).click()
    tab.wait_for_function("() => window.found.ms", timeout=60_000, polling=_LOOK_MS)
    first_s = tab.evaluate("() => window.found.ms") / 1e3
    other = _load(chromium, f"{url}/?{_PLAN}")["first_ms"] / 1e3
    longest_s = tab.evaluate("() => window.found.longest_ms") / 1e3
    tab.locator("[data-testid=stMainBlockContainer]").get_by_role("button", name="Stop").click()
    tab.context.close()
    name = "dashboard: search of GPT-3 175B on 1,024 devices"
    yield BenchmarkRow(f"{name}, first plans", "under 2 s", f"{first_s:.2f} s", first_s < 2)
    answer_text = (
        f"another page opens in {other:.2f} s meanwhile; the searching one is busy for {longest_s:.2f} s at most"
    )
    yield BenchmarkRow(f"{name}, responsiveness", "under 2 s", answer_text, other < 2)


def _users(chromium: Any, url: str, pid: int) -> Iterator[BenchmarkRow]:
    """Open ten tabs with ten different requests simultaneously, then make one more request in each."""
    tabs, before = [], _used_s(pid)
    for user in range(_USERS):
        context = chromium.new_context(viewport=_WINDOW)
        context.add_init_script(_SEEN)
        tabs.append(context.new_page())
        name = ("plan", "timeline", "scale", "learn", "plan")[user % 5]
        scenario = _PLAN.replace("batch_size=128", f"batch_size={96 + 32 * user}")
        tabs[-1].goto(f"{url}/{'' if name == 'plan' else name}?{scenario}", wait_until="commit")
    for tab in tabs:
        tab.wait_for_function("() => window.seen.whole_ms", timeout=240_000, polling=_LOOK_MS)
    first = [tab.evaluate("() => window.seen.first_ms") / 1e3 for tab in tabs]
    used, (server_s, workers_s) = _used_bytes(pid), _used_s(pid)
    bad = sum(tab.locator("[data-testid=stException]").count() + ("bug of simplan" in tab.content()) for tab in tabs)
    for tab in tabs:
        tab.context.close()
    what = f"dashboard: {_USERS} users open a page each at once"
    yield BenchmarkRow(f"{what}: errors", "none", f"{bad}; first paint {_spread(first)}, beside ten browsers", not bad)
    cpu_text = f"{(server_s - before[0]) / _USERS:.2f} s a user, its workers {(workers_s - before[1]) / _USERS:.1f} s"
    yield BenchmarkRow(f"{what}: processor time of the server", "", cpu_text, ok=True)
    cpu_text = f"{used / 2**30:.2f} GiB in {len(_family(pid))} processes (proportional set size)"
    yield BenchmarkRow(f"{what}: memory of server and workers", "under 1.5 GiB", cpu_text, used < 1.5 * 2**30)


def _crowd(chromium: Any, url: str, _: int) -> Iterator[BenchmarkRow]:
    """Five users, alternating with a bare Streamlit page on the same machine."""
    same = f"{url}/?{_PLAN}"
    opened_s: dict[str, list[float]] = {"bare": [], "same": [], "different": []}
    with tempfile.TemporaryDirectory() as folder, _serving_bare(Path(folder)) as bare:
        _open_together(chromium, [bare] * _CROWD), _open_together(chromium, [same] * _CROWD)  # fill caches
        for number in range(_ROUNDS):
            others = [
                f"{url}/?{_PLAN.replace('batch_size=128', f'batch_size={8 * (32 + _CROWD * number + user)}')}"
                for user in range(_CROWD)
            ]
            for name, urls in (("bare", [bare] * _CROWD), ("same", [same] * _CROWD), ("different", others)):
                opened_s[name] += _open_together(chromium, urls)
    for name in ("same", "different"):
        yield _ratio(f"{_CROWD} users open Plan, {name}", opened_s[name], opened_s["bare"], 2.0)


def _relative(chromium: Any, url: str, _: int) -> Iterator[BenchmarkRow]:
    """First paint and a change of one value, alternating with a bare Streamlit page on the same machine."""
    opened_s: dict[str, list[float]] = {"bare": [], "plan": []}
    moved: dict[str, list[dict[str, float]]] = {"bare": [], "plan": [], "known": []}
    with tempfile.TemporaryDirectory() as folder, _serving_bare(Path(folder)) as bare:
        addresses = {"bare": bare, "plan": f"{url}/?{_PLAN}"}
        for address in addresses.values():
            _open_together(chromium, [address])  # fill caches
        for number in range(_ROUNDS):
            for name, address in addresses.items():
                opened_s[name] += _open_together(chromium, [address])
            changed = f"{url}/?{_PLAN.replace('batch_size=128', f'batch_size={16 * (9 + number)}')}"
            moved["bare"].append(_move_slider(chromium, bare, "ArrowRight"))
            for name in ("plan", "known"):  # the same request twice
                moved[name].append(_move_slider(chromium, changed, "ArrowLeft"))
    answered, whole = ({name: [visit[key] for visit in times] for name, times in moved.items()} for key in _ANSWERS)
    yield _ratio("Plan, first paint", opened_s["plan"], opened_s["bare"], 1.5)
    yield _ratio("a slider of Plan to the verdict", answered["plan"], answered["bare"], 2.0)
    yield _ratio("a slider of Plan to a known verdict", answered["known"], answered["bare"], 2.0)
    yield _ratio("a slider of Plan to all figures", whole["plan"], answered["bare"], 15.0)


_ANSWERS = ("ms", "whole_ms")


def _ratio(what: str, taken: Sequence[float], bare: Sequence[float], target: float) -> BenchmarkRow:
    ratio = statistics.median(taken) / statistics.median(bare)
    shown = f"{ratio:.1f} times a bare page, {statistics.median(taken):.2f} and {statistics.median(bare):.2f}"
    return BenchmarkRow(f"dashboard: {what}", f"at most {target:g} times", shown, ratio <= target)


_BARE = """
import streamlit as st
st.set_page_config(layout="wide")
st.metric("Value", st.slider("Tensor parallel", 0, 1000, 500))
"""


@contextmanager
def _serving_bare(folder: Path) -> Iterator[str]:
    """Address of a page with one slider and one number, served by Streamlit's own command."""
    script, port = folder / "bare.py", free_port()
    script.write_text(_BARE)
    command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.headless=true"]
    command += [f"--server.port={port}", "--browser.gatherUsageStats=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait()


def _open_together(chromium: Any, urls: Sequence[str]) -> list[float]:
    """Seconds to the first content of each of several tabs that open at the same time."""
    contexts = [chromium.new_context(viewport=_WINDOW) for _ in urls]
    tabs = []
    for context, url in zip(contexts, urls, strict=True):
        context.add_init_script(_SEEN)
        tabs.append(context.new_page())
        tabs[-1].goto(url, wait_until="commit")
    for tab in tabs:
        tab.wait_for_function("() => window.seen.first_ms", timeout=240_000, polling=_LOOK_MS)
    seconds = [tab.evaluate("() => window.seen.first_ms") / 1e3 for tab in tabs]
    for context in contexts:
        context.close()
    return seconds


def _move_slider(chromium: Any, url: str, key: str) -> dict[str, float]:
    """Milliseconds from a key press on the slider to another first number on the page, and to its last figure."""
    tab = chromium.new_context(viewport=_WINDOW).new_page()
    tab.set_default_timeout(240_000)
    opened(tab, url)
    tab.locator("[data-testid=stMetricValue]").first.wait_for()
    settled(tab)
    tab.get_by_role("slider", name="Tensor parallel").focus()
    tab.evaluate(_ANSWERED)
    tab.keyboard.press(key)
    tab.wait_for_function("() => window.answered.whole_ms", polling=_LOOK_MS)
    answered: dict[str, float] = tab.evaluate("() => window.answered")
    tab.context.close()
    return answered


def _family(pid: int) -> list[int]:
    """Ids of a process and all its descendants."""
    members = [pid]
    for parent in members:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            members += [int(child) for child in children.read_text().split()]
    return members


def _used_bytes(pid: int) -> int:
    """Memory of a process tree in bytes; shared memory counts once."""
    total = 0
    for member in _family(pid):
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _used_s(pid: int) -> tuple[float, float]:
    """CPU seconds so far, of the server and of its workers (Linux, see proc(5))."""
    seconds_of = {}
    for member in _family(pid):
        said = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        is_worker = b"app.jobs.worker" in Path(f"/proc/{member}/cmdline").read_bytes()
        seconds_of[member] = is_worker, (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK")
    server, workers = (sum(s for worker, s in seconds_of.values() if worker is wanted) for wanted in (False, True))
    return server, workers


def _spread(values: Sequence[float], unit: str = "s", digits: int = 2) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} {unit} (of {len(values)}, {low:.{digits}f} to {high:.{digits}f})"


_NUMBERS: dict[str, _Number] = {f"open-{page}": partial(_first_paint, page) for page in PAGES}
_NUMBERS |= {"relative": _relative, "slider": _slider, "search": _search, "users": _users, "crowd": _crowd}
DASHBOARD = {f"dashboard-{name}": partial(_measured, number) for name, number in _NUMBERS.items()}
"""Benchmarks by name."""
