"""The page in a real browser; skipped where none is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import NAMES, Chromium, chromium, found
from sample_report import written

from pytest_torchcompile.cli import main


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests."""
    if found() is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with chromium() as running:
        yield running


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path):
    """Make a page of a report (and a baseline) and open it; returns the browser."""
    def open(content: dict[str, Any], *arguments: str, baseline: dict[str, Any] | None = None, at: str = "",
             **window: Any) -> Chromium:
        report, page = written(content, tmp_path / "report.json"), tmp_path / "page.html"
        before = [] if baseline is None else ["--baseline", str(written(baseline, tmp_path / "before.json"))]
        assert main(["html", str(report), "-o", str(page), *before, *arguments]) == 0
        browser.open(f"{page.as_uri()}{at}", **window)
        return browser

    return open
