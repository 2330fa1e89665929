"""Pictures of pages: ``python -m tests.browser.screenshots FOLDER``.

The pages that the documentation shows, as it names them; with ``--every``, all pages in light, dark and on a phone.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser.serving import LARGE, PAGES, browser, opened, serving, settled

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 1250}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1440, "height": 1250}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 1250}, "color_scheme": "light", "has_touch": True},
}
DOCUMENTED = {"plan": 1220, "search": 1250, "timeline": 1190, "network": 1500}
"""Height of the pictures that the documentation shows, by page."""
PIPELINE = "model.preset=gpt2-1.5b&cluster.preset=dgx-h100&cluster.num_devices=8&training.global_batch_size=64"
PIPELINE += "&software=torch&plan.pp=4&plan.dp_replicate=2"
CONTENDED = "model.preset=llama3-8b&cluster.preset=dgx-h100&cluster.num_nodes=8"
CONTENDED += '&cluster.topology={"kind":"leaf_spine","nodes_per_leaf":2,"oversubscription":4}'
CONTENDED += "&training.global_batch_size=128&software=torchtitan&plan.tp=2&plan.dp_replicate=4&plan.dp_shard=8"
_DRAWN_MS = 1500


def main(folder: Path, *, every: bool = False) -> None:
    """Takes them all; a search and a prediction of published runs are done once and seen by all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as workspace, serving(Path(workspace)) as (url, _), browser() as chromium:
        for look, context in LOOKS.items() if every else [("light", LOOKS["light"])]:
            tab = chromium.new_context(**context).new_page()
            tab.set_default_timeout(240_000)
            for name in PAGES if every else DOCUMENTED:
                if not every:
                    tab.set_viewport_size({"width": 1440, "height": DOCUMENTED[name]})
                _show(tab, url, name)
                if look == "phone":
                    _close_sidebar(tab)
                tab.screenshot(path=str(folder / (f"{name}-{look}.png" if every else f"{name}.png")))
            tab.context.close()


def _show(tab: Any, url: str, name: str) -> None:
    scenario = {"timeline": PIPELINE, "network": CONTENDED}.get(name, LARGE)
    view = "&v.what_if=slow+link" if name == "network" else ""
    opened(tab, f"{url}/{'' if name == 'plan' else name}?{scenario}{view}")
    if name == "search":
        start = tab.locator(".st-key-search-start button")  # a table has a button of this name, too
        start.or_(tab.get_by_role("button", name="Open as the plan")).first.wait_for()
        if start.count():
            start.click()
        tab.get_by_text(re.compile(r"a step on .* \(in .* s\)")).wait_for()  # all is explained
    if name == "run":
        tab.get_by_role("button", name="Start with an example").click()
        tab.locator("[data-testid=stMetric]").first.wait_for()
    if name == "validate":
        start = tab.get_by_role("button", name="Predict runs")
        start.or_(tab.get_by_text("Runs by error")).first.wait_for()
        if start.count():
            start.click()
        tab.get_by_text("Runs by error").first.wait_for()
    settled(tab)
    tab.wait_for_timeout(_DRAWN_MS)


def _close_sidebar(tab: Any) -> None:
    close = tab.locator("[data-testid=stSidebarCollapseButton] button")
    if close.count() and close.first.is_visible():
        close.first.click()
        tab.wait_for_timeout(_DRAWN_MS / 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), every="--every" in sys.argv)
