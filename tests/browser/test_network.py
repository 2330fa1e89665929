"""The page Network in a browser: the fabric on light and dark paper, load of links, and cost of a slow link."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from tests.browser.serving import opened, settled

pytestmark = pytest.mark.browser

SHARED = (
    "model.preset=gpt2-124m&cluster.preset=dgx-h100&cluster.num_nodes=4&training.global_batch_size=32&software=torch"
    '&plan.dp_shard=32&cluster.topology={"kind":"leaf_spine","nodes_per_leaf":2,"oversubscription":8}'
)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_fabric_has_the_paper_of_the_theme_and_is_legible_on_a_phone(chromium: Any, served: str, theme: str) -> None:
    from PIL import Image

    context = chromium.new_context(color_scheme=theme, viewport={"width": 390, "height": 1500})
    tab = context.new_page()
    tab.set_default_timeout(180_000)
    opened(tab, f"{served}/network?{SHARED}")
    frame, box = tab.locator(".st-key-drawing-fabric iframe"), tab.locator(".st-key-drawing-fabric").bounding_box()
    picture = frame.content_frame.locator("svg")
    assert "GB/s" in picture.locator("title").nth(1).text_content(), "a tooltip"
    assert picture.bounding_box() == frame.bounding_box(), "nothing is cut off"
    assert 900 < picture.bounding_box()["width"] <= 960
    assert picture.bounding_box()["height"] == pytest.approx(box["height"], abs=20)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the picture scrolls, not the page"
    corner = Image.open(io.BytesIO(tab.locator(".st-key-drawing-fabric").screenshot())).convert("L").getpixel((6, 60))
    assert isinstance(corner, int)
    assert corner > 240 if theme == "light" else corner < 40
    context.close()


def test_a_click_on_a_loaded_link_shows_what_it_costs_if_slow(page: Any, served: str) -> None:
    opened(page, f"{served}/network?{SHARED}")
    assert page.locator(".js-plotly-plot .heatmaplayer image").count() == 1
    sentence = page.get_by_text(re.compile("^With .* in place of .* a step takes"))
    assert sentence.count() == 0, "simulated on request"
    bars = page.locator(".js-plotly-plot").first.locator(".barlayer .point path")
    names = []
    for bar in (bars.first, bars.last):
        before = page.url
        bar.click(force=True)
        page.wait_for_url(lambda url, before=before: "v.link=" in url and url != before)
        settled(page)
        sentence.wait_for()
        names.append(re.match(r"With (\S+ . \S+) at", sentence.inner_text())[1])  # type: ignore[index]
    assert names[0] != names[1]
    assert page.get_by_text("One link of each kind is slow").count() == 1
    assert page.locator("[data-testid=stException]").count() == 0
