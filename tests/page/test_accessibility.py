"""The page holds to the rules of axe-core (WCAG 2.2 A and AA, and its best practices) in a real browser."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from sample_report import SMALL, sample_report, written

from pytest_torchcompile.cli import main

ROOT = Path(__file__).parents[2]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = f"""axe.run(document, {{runOnly: {{type: 'tag', values: {RULES}}}}}).then(found => found.violations.map(
    rule => [rule.id, rule.nodes.slice(0, 3).map(node => node.html.slice(0, 160))]))"""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core; skips where it is not installed (CONTRIBUTING.md says how)."""
    named = os.environ.get("AXE_CORE")
    path = Path(named) if named else ROOT / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip(f"no axe-core: {path} is no file; `npm install --no-save axe-core` in the repository puts it there")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def violations(axe, browser):
    """Ask axe-core about the page that is open: each rule that does not hold, with the first elements."""
    def ask():
        # The protocol may run what the page's own policy forbids.
        browser.evaluate(f"{axe}; 0")
        return browser.evaluate(RUN)

    return ask


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1400, True)], ids=["phone", "desk in the dark"])
def test_a_run_beside_another_one(browser, violations, tmp_path, width, dark):
    """Findings, map, trend, a reused cell; then an open cell with everything unfolded."""
    now = sample_report(SMALL)
    block = now["compile_matrix"]
    before = copy.deepcopy(now)
    before["compile_matrix"]["run"]["started"] = "2026-11-18T10:00:00+00:00"
    block["cells"][0]["reused"] = {"run": "2026-11-19T08:00:00+00:00", "commit": None, "changed": False, "age": 7}
    last = block["cells"][-1]
    block["cells"][-1] = before["compile_matrix"]["cells"][-1] | {
        "status": "crash", "checks": {name: {**check, "verdict": "crash"} for name, check in last["checks"].items()}}
    folder, page = tmp_path / "runs", tmp_path / "page.html"
    folder.mkdir()
    written(now, folder / "now.json")
    baseline = written(before, folder / "before.json")
    (folder / "other.json").write_text("{}")
    assert main(["html", str(folder), "-o", str(page), "--baseline", str(baseline)]) == 0
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.evaluate("document.querySelectorAll('.turns, .new, .s.reused, .s.worse').length") >= 4
    assert violations() == []
    browser.key("n")
    browser.wait("document.querySelector('#open .cell') !== null")
    browser.evaluate(OPEN_ALL)
    assert violations() == []


def test_axe_sees_a_mistake(opened, violations):
    """A text that is hardly darker than its ground, and a button without a name, are told."""
    page = opened(sample_report(SMALL))
    page.evaluate("""document.querySelector('.sentence').style.color = '#bbbbbb';
        document.querySelector('#theme').textContent = ''""")
    assert [rule for rule, _ in violations()] == ["button-name", "color-contrast"]
