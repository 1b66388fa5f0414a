"""A Chromium, and pages in it whose script may not fail."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page

from bench import browser
from tests.integration.api.conftest import api, serve, settings  # noqa: F401
from tests.integration.system.conftest import start_system, system, tiny  # noqa: F401

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A headless Chromium for the whole run."""
    if browser.find() is None:
        pytest.skip(f"no Chromium; to install one: {browser.INSTALL}")
    with browser.opened() as running:
        yield running


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Open]:
    """Open an address in a window of its own; an error in the page's script or against its CSP fails."""
    contexts, faults = [], []

    def said(message: ConsoleMessage) -> None:
        # Answers like 401 or 503 are told on the console, too, and are what some tests are about.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            faults.append(message.text)

    def visit(url: str, **options: Any) -> Page:
        contexts.append(chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | options)))
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("console", said)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not faults
