"""Contrast of all text of all pages in both themes, from the styles that the browser computed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.serving import PAGES, SMALL, opened

pytestmark = pytest.mark.browser

CONTRASTS = """
() => {
  const rgba = text => {
    const [r, g, b, a = 1] = (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number)
    const scale = text.startsWith("color(") ? 255 : 1
    return [r * scale, g * scale, b * scale, a]
  }
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1)
  const luminance = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  // the value of a slider is above the thumb that contains it
  const besides = (outer, inner) => outer.height < 40 && outer.top > (inner.top + inner.bottom) / 2
  const paper = (at, box) => {
    if (!at) return [255, 255, 255, 1]
    const below = paper(at.parentElement, box)
    return besides(at.getBoundingClientRect(), box) ? below : over(rgba(getComputedStyle(at).backgroundColor), below)
  }
  const opacity = at => at ? getComputedStyle(at).opacity * opacity(at.parentElement) : 1
  const found = []
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walk.nextNode()) {
    const at = walk.currentNode.parentElement, words = walk.currentNode.textContent.trim()
    const box = at.getBoundingClientRect()
    if (!words || box.width < 2 || box.height < 2 || !at.checkVisibility({ visibilityProperty: true })) continue
    if (at.closest("script, style, noscript, canvas, [disabled], [data-testid=stIconMaterial]")) continue
    const style = getComputedStyle(at), drawn = at.closest("svg") && at.matches("text, tspan")
    let ink = rgba(drawn ? style.fill : style.color), below = paper(at, box)
    const own = at.closest(".point") && at.closest(".point").querySelector("path")
    if (own && !at.closest(".bartext-outside")) below = over(rgba(getComputedStyle(own).fill), below)
    ink = over([ink[0], ink[1], ink[2], ink[3] * (drawn ? style.fillOpacity : 1) * opacity(at)], below)
    if (opacity(at) === 0) continue
    const [low, high] = [luminance(ink), luminance(below)].sort((a, b) => a - b)
    found.push([words.slice(0, 60), (high + 0.05) / (low + 0.05), at.className.baseVal ?? at.className])
  }
  return found
}
"""
"""Text, contrast and class of every visible text, after https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

VIEWS = {
    "network": "&v.what_if=topology",
    "run": "&training.num_tokens=1e9&reliability.preset=llama3-2024&checkpoint.interval_s=best&checkpoint.blocking_s=9",
}
"""Settings with which a page shows everything that it has."""
LEAST = 4.5
"""https://www.w3.org/TR/WCAG22/#contrast-minimum, level AA."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_of_every_page_has_enough_contrast(chromium: Any, served: str, theme: str) -> None:
    context = chromium.new_context(color_scheme=theme, viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(180_000)
    pale: dict[str, float] = {}
    for name in PAGES:
        opened(page, f"{served}/{'' if name == 'plan' else name}?{SMALL}{VIEWS.get(name, '')}")
        contrasts = page.evaluate(CONTRASTS)
        assert any("tick" in look or look == "xtitle" for _, _, look in contrasts) or name in (
            "search",
            "run",
            "validate",
        )
        pale |= {f"{name}: {words}": round(ratio, 2) for words, ratio, _ in contrasts if ratio < LEAST}
    context.close()
    assert not pale
