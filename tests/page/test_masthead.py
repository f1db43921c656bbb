"""What a release manager reads first: the verdict, cards by severity, when and where it ran; and what was asked."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planted import planted
from sample_report import SMALL, cell, check, report, sample_report, written

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.page.article import article
from pytest_torchcompile.page.document import page
from pytest_torchcompile.page.expectations import expectations_section
from pytest_torchcompile.page.heatmap import cell_in_words
from pytest_torchcompile.page.markup import again, hint
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import merge_reports

CARD = re.compile(r'<a href="(#[\w-]*)" class="card ?(\w*)"><b>(\d+)</b> <span class="title">([^<]*)</span>'
                  r'((?:<span class="detail">[^<]*</span>)*)</a>')
PLANNED: dict[str, Any] = {"outcome": "run", "reason": "", "issue": "", "until": "", "expected": [], "limits": {},
                           "rule": "", "checks": ["compiles"]}


def cards(text: str) -> list[tuple[str, ...]]:
    """Address, kind, number, title and details of each card."""
    return [(*found[:4], *re.findall(r">([^<]+)<", found[4])) for found in CARD.findall(text)]


def facts_at_top(text: str) -> dict[str, str]:
    """What was run, when and where."""
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))


def test_cards_have_the_worst_first():
    """A card for each severity, with how many of its findings are new; each leads to its findings."""
    reports, before = planted().reports(), planted(faulty=False).reports()
    text = page(gate(reports, baseline=before), merge_reports(before))
    found = cards(text)
    assert [card[:4] for card in found] == [
        ("#group-0", "bad", "1", "Wrong numbers"), ("#group-1", "bad", "9", "Slow"), ("#map", "", "0", "Hold")]
    label = facts_at_top(text)["compared with"]
    assert found[0][4:] == ("2 cells", f"1 new since {label}")
    assert found[1][4:] == ("18 cells", f"9 new since {label}")
    assert re.search(r'id="group-0" class="group fail"', text)
    assert text.index("1 new since") < text.index('class="findings"') < text.index('id="map"')


def test_without_a_baseline_nothing_is_called_new():
    """Nor is anything said of what it was compared with."""
    text = page(gate(planted().reports()))
    assert [card[4:] for card in cards(text)] == [("2 cells",), ("18 cells",), ("of 20 cells",)]
    assert "compared with" not in facts_at_top(text)
    assert 'class="since"' not in text


def test_a_note_has_no_card():
    """What got better is told below, and nothing in it is to be done."""
    before = planted().reports()
    text = page(gate(planted(faulty=False).reports(), baseline=before), merge_reports(before))
    assert [card[:4] for card in cards(text)] == [("#map", "good", "20", "Hold")]
    assert "<h3>Notes " in text


def made(content: dict[str, Any], tmp_path, *arguments: str) -> str:
    """The page that the command writes."""
    target = tmp_path / "page.html"
    path = written(content, tmp_path / "report.json")
    assert main(["html", str(path), "-o", str(target), "--force", *arguments]) == 0
    return target.read_text(encoding="utf-8")


def test_when_and_where_it_ran(tmp_path):
    """Always there, whatever the page says."""
    content = sample_report(SMALL)
    content["compile_matrix"]["run"]["git"]["changed"] = True
    assert facts_at_top(made(content, tmp_path)) == {
        "matrix": "matrix/default.yaml", "when": "2026-11-20 10:00 UTC, took 20.0 min",
        "commit": "4f2c9d with uncommitted changes",
        "versions": "torch 2.13.0+cpu, python 3.11.7, pytest-torchcompile 0.1.0", "machine": "Linux, 2 cores, cpu",
        "judged": "12 cells: 6 pass, 6 fail; 12 ran compiled code"}


def test_when_the_run_before_ran_whose_verdicts_are_kept(tmp_path):
    """After --compile-resume most cells are of the run before: its seconds are told beside those of the last one."""
    content = sample_report(SMALL)
    git = content["compile_matrix"]["run"]["git"]
    earlier = {"checks": ["compiles"], "started": "2026-11-20T09:00:00+00:00",
               "finished": "2026-11-20T09:50:00+00:00", "git": git, "sources": "same"}
    cells = content["compile_matrix"]["cells"]
    for each in cells[:5]:
        each["kept"] = [earlier]
    assert facts_at_top(made(content, tmp_path))["when"] == (
        "2026-11-20 10:00 UTC, took 20.0 min; 5 cells of an earlier run: 2026-11-20 09:00 UTC, took 50.0 min")
    cells[0]["kept"] = [{**earlier, "started": "2026-11-20T08:00:00+00:00", "finished": "2026-11-20T08:01:00+00:00"}]
    assert facts_at_top(made(content, tmp_path))["when"].endswith(
        "; 5 cells of 2 earlier runs: 2026-11-20 08:00 UTC, took 60.0 s; 2026-11-20 09:00 UTC, took 50.0 min")


def test_what_an_old_report_does_not_tell(tmp_path):
    """A report of schema 1.0 has neither run nor plan: the page says that it is not told."""
    content = sample_report(SMALL)
    block = content["compile_matrix"]
    for key in ("run", "tests", "tests_planned", "head_sha256"):
        block.pop(key, None)
    for each in block["cells"]:
        for key in ("planned", "evidence_sha256"):
            each.pop(key)
    block["schema_version"] = "1.0"
    text = made(content, tmp_path)
    assert {name: facts_at_top(text)[name] for name in ("when", "commit")} == {"when": "not told", "commit": "not told"}
    assert 'id="expected"' not in text


@pytest.mark.parametrize("started", ["yesterday", "0001-01-01T00:00:00+23:00", "<b>", ""])
def test_a_time_that_is_none(started, tmp_path):
    """It is not told, and nothing raises."""
    content = sample_report(SMALL)
    content["compile_matrix"]["run"]["started"] = started
    assert facts_at_top(made(content, tmp_path))["when"] == "not told"


def reused() -> dict[str, Any]:
    """A cell with the result of an earlier run."""
    one = cell({"model": "scorer", "backend": "inductor"})
    return one | {"reused": {"run": "2026-11-19T08:00:00+00:00", "commit": "a" * 40, "changed": True, "age": 7200}}


def test_a_reused_cell_says_so(tmp_path):
    """On a card, in the legend, at its square and in its article."""
    one = reused()
    facts = Facts(one)
    assert cell_in_words(facts) == "scorer-inductor: pass, reused"
    told = article(facts, "")
    assert ("it was not run again. Its result is 2 hours old, of the run of aaaaaaaa, 2026-11-19, "
            "with uncommitted changes") in told
    text = made(report([one, cell({"model": "scorer", "backend": "eager"})]), tmp_path)
    assert ("#map", "", "1", "Reused", "results of earlier runs; underlined in the map") in cards(text)
    assert len(re.findall('class="s pass reused" aria-label', text)) == 1
    assert " reused 1<" in text


def test_expected_failures_and_limits_are_shown():
    """By rule: the reason, its last day, and in how many cells it was used. Limits: in how many cells."""
    expected = PLANNED | {"outcome": "xfail", "reason": "it <wavers>", "issue": "us/models#12", "until": "2027-03-01",
                          "rule": "m.yaml:14", "limits": {"recompiles": 1}}
    one = cell({"model": "a"}) | {"planned": expected, "status": "xfail", "checks": {"compiles": check("xfail")}}
    other = cell({"model": "b"}) | {"planned": expected}
    third = cell({"model": "c"}) | {"planned": PLANNED | {"limits": {"recompiles": 1, "speedup": 1.25, "odd": 3}}}
    facts = list(map(Facts, (one, other, third)))
    text = str(expectations_section(facts))
    for told in ("it &lt;wavers&gt; (us/models#12)", "m.yaml:14", "2027-03-01", "1 of 2 cells failed",
                 "<b>recompiles ≤ 1</b> in every cell", "<b>speedup ≥ 1.25</b> in 1 cell", "<b>odd = 3</b> in 1 cell"):
        assert told in text
    told = article(facts[0], "")
    assert "Expected to fail, by m.yaml:14: it &lt;wavers&gt; (us/models#12), until 2027-03-01" in told
    assert "<span>recompiles ≤ 1</span>" in told
    assert expectations_section([Facts(cell({"model": "a"}))]) is None


def test_what_to_try_and_the_command():
    """Code between backticks is code, lines to paste keep their form, and a command has its button."""
    assert hint("set `x < y`\na:\n  b: 1") == ('<div class="try"><p><b>try </b>set <code>x &lt; y</code></p>'
                                               '<pre>a:\n  b: 1</pre></div>')
    assert "<code>" not in str(hint("a ` b"))
    assert hint("") is None
    assert again("pytest 'a'") == ('<p class="again">again <code>pytest &#x27;a&#x27;</code> '
                                   '<button type="button" class="js copy">copy</button></p>')
    assert again("") is None


@pytest.mark.parametrize(("limits", "shown"), [
    ({"coverage": 1.0, "graph_breaks": 1}, "coverage ≥ 1, except at allowed graph breaks"),
    ({"coverage": 1.0, "graph_breaks": 0}, "coverage ≥ 1<"), ({"coverage": 0.5, "graph_breaks": 1}, "coverage ≥ 0.5<"),
])  # fmt: skip
def test_allowed_graph_breaks_lower_the_coverage_that_is_asked(limits, shown):
    one = cell({"model": "a"})
    one["planned"] = {"limits": limits}
    assert shown in str(expectations_section([Facts(one)]))
