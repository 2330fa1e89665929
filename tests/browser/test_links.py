"""Links: the button that copies the address, the title of each page, and addresses in names, which are no links."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.serving import PAGES, SMALL, opened, settled

pytestmark = pytest.mark.browser


def test_copied_link_reopens_the_page(page: Any, served: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, f"{served}/timeline?{SMALL}&v.schedules=%5B%221f1b%22%2C%22gpipe%22%5D")
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Link copied").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == page.url
    opened(page, copied)
    assert "gpipe" in page.locator(".js-plotly-plot").first.text_content()
    assert "plan.pp=2" in page.url


def test_link_is_copied_without_the_clipboard_interface(page: Any, served: str) -> None:
    """Browsers have no ``navigator.clipboard`` on a plain HTTP address of another machine."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.add_init_script("window.real = navigator.clipboard; delete Navigator.prototype.clipboard")
    opened(page, f"{served}/scale?{SMALL}")
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Link copied").wait_for()
    assert page.evaluate("() => window.real.readText()") == page.url


def test_phone_shows_the_title_of_every_page(chromium: Any, served: str) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    tab = context.new_page()
    tab.set_default_timeout(180_000)
    for name in PAGES:
        opened(tab, f"{served}/{'' if name == 'plan' else name}?{SMALL}")
        heading = tab.get_by_role("heading", level=1)
        title, box = heading.inner_text(), heading.bounding_box()
        assert 0 <= box["x"] < 390
        assert 0 <= box["y"] < 400
        assert name in title.lower()
        assert tab.title() == f"{title} - simplan"
        assert tab.evaluate("() => document.documentElement.scrollWidth") <= 390, "nothing is cut off"
    context.close()


def test_tables_end_above_what_follows_on_a_phone(chromium: Any, served: str) -> None:
    """Streamlit gives their elements a height, and space for their buttons must not leave it."""
    context = chromium.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    tab = context.new_page()
    tab.set_default_timeout(180_000)
    opened(tab, f"{served}/learn?{SMALL}&v.topic=definitions")
    element = tab.get_by_test_id("stElementContainer").filter(has=tab.get_by_test_id("stDataFrame")).last
    outer, inner = element.bounding_box(), tab.get_by_test_id("stDataFrame").bounding_box()
    assert inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    context.close()


def test_addresses_in_names_are_no_links(page: Any, served: str) -> None:
    bad = "model.name=see https://evil.example www.evil.example me@evil.example&name=https://evil.example"
    model = "&model.family=gpt&model.num_hidden_layers=2&model.hidden_size=64&model.num_attention_heads=4"
    model += "&model.vocab_size=256&model.seq_len=64"
    opened(page, f"{served}/?{bad}{model}&{re.sub('model.preset=[^&]*&', '', SMALL)}")
    settled(page)
    assert "evil.example" in page.locator("[data-testid=stMainBlockContainer]").inner_text()
    assert page.locator("a[href*='evil.example']").count() == 0
