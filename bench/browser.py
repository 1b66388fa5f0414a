"""A headless Chromium, for pictures and tests of the web page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
INSTALL = "apt-get install -y chromium"


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def opened() -> Iterator[Browser]:
    """Run a Chromium; raise SystemExit with what to do when there is none."""
    path = find()
    if path is None:
        raise SystemExit(f"No Chromium: {INSTALL}")
    with sync_playwright() as playwright:
        # Its own sandbox needs rights that a container does not give; the pages it opens are ours alone.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
