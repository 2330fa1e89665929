"""A served dashboard and a tab of a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.serving import browser, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard in a workspace of its own."""
    with serving(tmp_path_factory.mktemp("workspace")) as (url, _):
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright")
    with browser() as launched:
        yield launched


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A fresh tab."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1000}, accept_downloads=True)
    tab = context.new_page()
    tab.set_default_timeout(180_000)  # only what fails, or a loaded machine, takes so long
    yield tab
    context.close()
