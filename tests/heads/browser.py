"""The browser that opens pages in tests: found, and started without a window.

python tests/heads/browser.py    prints its path, or says in one sentence what is missing
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
NAMES += ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)


def find_browser() -> str:
    """The path of a Chromium that runs: what CHROMIUM names, else one on PATH, else the one Playwright installed.

    Raises:
        RuntimeError: there is none; the sentence says what to install
    """
    wish = os.environ.get("CHROMIUM")
    if wish:
        path = shutil.which(wish)
        if path and _runs(path):
            return path
        raise RuntimeError(f"browser: expected CHROMIUM to name a Chromium or Chrome that runs, got {wish!r}")
    path = next(filter(_runs, filter(None, map(shutil.which, NAMES))), None) or _of_playwright()
    if path:
        return path
    raise RuntimeError(
        "browser: expected Chromium or Chrome on PATH, or named by the variable CHROMIUM, found none; install one "
        "(`apt-get install chromium`, or `python -m playwright install --with-deps chromium`)"
    )


def _runs(path: str) -> bool:
    """Whether it can tell its version; Ubuntu's chromium-browser is a file that only recommends another package."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _of_playwright() -> str | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if _runs(path) else None


@contextmanager
def started_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = find_browser()  # may start Playwright, which cannot run twice at a time
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


if __name__ == "__main__":
    try:
        print(find_browser())
    except RuntimeError as error:
        sys.exit(str(error))
