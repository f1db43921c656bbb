"""How long the page of 1,080 cells takes to write and to open: ``python benchmarks/page.py``.

Opens it in headless Chromium several times and prints the medians: from the start of the navigation until the page is
loaded and its script has run, and until the first paint; the CPU seconds of the page's own thread, which say more on a
busy machine; what a filter and the opening of a cell take; and the same of a page of 12 cells, for the share of the
browser itself.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chromium import Chromium, chromium
from sample_report import SMALL, sample_report, written

from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.page.document import page
from pytest_torchcompile.page.svg import svg
from pytest_torchcompile.report.reading import read_report

TIMES = 9
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null)"
FILTER = """(() => { const start = performance.now(); const s = document.querySelector('[data-axis]');
    s.value = '1'; s.dispatchEvent(new Event('change')); document.body.offsetHeight;
    const took = performance.now() - start; s.value = ''; s.dispatchEvent(new Event('change')); return took; })()"""
SEARCH = """(() => { const start = performance.now(); const s = document.getElementById('search');
    s.value = 'models.py:41'; s.dispatchEvent(new Event('input')); document.body.offsetHeight;
    return performance.now() - start; })()"""
OPENED = """new Promise(done => { const start = performance.now();
    const end = () => { document.body.offsetHeight; done(performance.now() - start); };
    addEventListener('hashchange', end, {once: true});
    location.hash = document.querySelector('.s.fail').getAttribute('href'); })"""


def cpu(browser: Chromium) -> float:
    """CPU seconds of the page's thread, in all."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return next(m["value"] for m in metrics if m["name"] == "ThreadTime")


def measure(browser: Chromium, file: Path) -> dict[str, float]:
    """Milliseconds of one opening."""
    browser.call("Performance.enable")
    before = cpu(browser)
    browser.open(file.as_uri())
    browser.wait(f"{PAINTED} !== null && {LOADED} > 0")
    found = {"loaded": browser.evaluate(LOADED), "painted": browser.evaluate(PAINTED),
             "thread CPU": 1000 * (cpu(browser) - before)}
    if file.stem != "12":
        found |= {"filter": browser.evaluate(FILTER), "search, first": browser.evaluate(SEARCH),
                  "search, again": browser.evaluate(SEARCH), "open a cell": browser.evaluate(OPENED)}
    browser.call("Performance.disable")
    return found


def main() -> None:
    """Write the pages, open them, print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size, axes in (("12", SMALL), ("1080", None)):
            report = written(sample_report(axes), folder / f"{size}.json")
            outcome = gate([read_report(report)])
            start = time.process_time()
            text = page(outcome)
            took = time.process_time() - start
            (folder / f"{size}.html").write_text(text, encoding="utf-8")
            print(f"{size} cells: page {len(text) / 1e6:.2f} MB, written in {took:.2f} CPU s; "
                  f"SVG {len(svg(outcome)) / 1e3:.0f} kB")
        with chromium() as browser:
            for size in ("12", "1080"):
                runs = [measure(browser, folder / f"{size}.html") for _ in range(TIMES)]
                told = ", ".join(f"{what} {statistics.median(run[what] for run in runs):.0f}" for what in runs[0])
                print(f"{size} cells, ms, median of {TIMES}: {told}")


if __name__ == "__main__":
    main()
