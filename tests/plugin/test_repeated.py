"""Failures with one cause are shown once, in whatever order items come; all of them stay failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.observation import NO_RANK, Failure, Judgement, Observation, Problem
from pytest_torchcompile.plugin.repeated import RepeatedFailures, ShortText, mark_repeated
from pytest_torchcompile.ranks.execution import CellResult
from pytest_torchcompile.report.terminal import failure_text, same_text_key

CHECKS = ("graph_breaks", "compiles", "equivalence")
IMPORT = "m.yaml:3:3: cannot import 'models': ModuleNotFoundError: No module named 'lib' (models.py:2)"


def reported(cell, check, result):
    """The report of a failed item, as the process that ran it marks it."""
    report = SimpleNamespace(nodeid=f"m.yaml::{cell}::{check}", failed=True)
    mark_repeated(report, check, result)
    return report


def without_result(kind, message=IMPORT):
    """A cell that came to nothing: each of its checks has the same problem."""
    judged = Judgement("crash" if kind == "crash" else "error", (Problem(message),))
    return CellResult(dict.fromkeys(CHECKS, judged), Observation("c", failure=Failure(kind, message)), 1.0)


def with_problems(**messages):
    judged = {check: Judgement("fail", (Problem(text),)) for check, text in messages.items()}
    return CellResult(judged, Observation("c"), 1.0)


def shown(*reports):
    """Node ids that are shown, and those that are only counted."""
    plugin = RepeatedFailures()
    for report in reports:
        plugin.pytest_runtest_logreport(report)
    told = [report for report in reports if plugin.pytest_report_teststatus(report) is None]
    return [report.nodeid.partition("::")[2] for report in told], len(reports) - len(told)


@pytest.mark.parametrize("kind", ["usage", "user"])
def test_a_mistake_is_one_failure_in_all_cells(kind):
    reports = [reported(cell, check, without_result(kind)) for cell in ("a", "b") for check in CHECKS]
    assert shown(*reports) == (["a::graph_breaks"], 5)
    assert shown(*reversed(reports)) == (["b::equivalence"], 5)


def test_another_mistake_is_another_failure():
    one, other = without_result("usage"), without_result("usage", "m.yaml:9:3: no such thing")
    assert shown(reported("a", "compiles", one), reported("b", "compiles", other)) == (["a::compiles", "b::compiles"],
                                                                                       0)


def test_each_crash_is_shown():
    """Once for its cell: it may have another reason in the next one."""
    crash = without_result("crash", "killed by SIGSEGV")
    reports = [reported(cell, check, crash) for cell in ("a", "b") for check in CHECKS]
    assert shown(*reports) == (["a::graph_breaks", "b::graph_breaks"], 4)


def test_what_follows_is_shown_where_its_cause_was_not():
    """A cause that was never reported, because the run was ended before, has told nothing."""
    result = with_problems(graph_breaks="graph break: item()",
                           compiles="only 80% of the model's operator calls ran inside compiled graphs at call 1",
                           equivalence="output: error is 9 times the rounding noise")
    breaks, compiles, wrong = (reported("a", check, result) for check in CHECKS)
    assert shown(breaks, compiles, wrong) == (["a::graph_breaks", "a::equivalence"], 1)
    assert shown(compiles) == (["a::compiles"], 0)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "stopped"])
def test_what_comes_before_its_cause_is_told_there(whole):
    """The item of graph breaks is run first; that the run raised is told at compiles, unless the run stopped before."""
    result = with_problems(graph_breaks="nothing to judge: the compiled run raised ValueError",
                           compiles="the compiled run raised ValueError in forward; eager did not: no")
    breaks, compiles = (reported("a", check, result) for check in CHECKS[:2])
    plugin, stats = RepeatedFailures(), {"failed": [breaks]}
    plugin.pytest_runtest_logreport(breaks)
    if whole:
        plugin.pytest_runtest_logreport(compiles)
        stats["failed"].append(compiles)
    next(plugin.pytest_terminal_summary(SimpleNamespace(stats=stats)))
    assert stats == ({"failed": [compiles], "same cause": [breaks]} if whole else {"failed": [breaks]})


def test_a_break_of_several_cells_is_told_in_full_once():
    """Each is shown, the later ones in a line; a break elsewhere, or one that needs another limit, in full."""
    def broken(cell, line=3, limit=1):
        problem = Problem("graph break: item()", "all of it", f"if it is meant: `- limits: {{graph_breaks: {limit}}}`",
                          "net.py", line)
        judgements = {"graph_breaks": Judgement("fail", (problem,))}
        same = same_text_key("graph_breaks", judgements)
        short = failure_text("graph_breaks", judgements, f"pytest {cell}", told_before=True)
        report = SimpleNamespace(nodeid=f"m.yaml::{cell}::graph_breaks", failed=True, longrepr="full")
        mark_repeated(report, "graph_breaks", CellResult(judgements, Observation("c"), 1.0), ShortText(same, short))
        return report

    plugin = RepeatedFailures()
    reports = [broken("a"), broken("b"), broken("c", line=4), broken("d", limit=2)]
    for report in reports:
        plugin.pytest_runtest_logreport(report)
    assert [report.longrepr for report in reports] == ["full"] * 4, "files that are written meanwhile have it in full"
    next(plugin.pytest_terminal_summary(SimpleNamespace(stats={})))
    assert [report.longrepr for report in reports] == [
        "full", "graph_breaks: same as above, net.py:3: graph break: item()\n  again  pytest b", "full", "full"]
    assert all(plugin.pytest_report_teststatus(report) is None for report in reports)


def test_what_has_no_place_is_told_in_full():
    """So are wrong numbers, which differ from cell to cell, and what ended a cell."""
    no_place = {"equivalence": Judgement("fail", (Problem("output: error is 9 times the rounding noise"),))}
    assert same_text_key("equivalence", no_place) == ""
    crash = {"compiles": Judgement("crash", (Problem("SIGSEGV", file="net.py", line=3),))}
    assert same_text_key("compiles", crash) == ""


def test_what_could_not_be_run_has_a_word_of_its_own():
    """And so has no mark, nor has another test that fails."""
    report = reported("a", "compiles", without_result(NO_RANK))
    assert vars(report) == {"nodeid": "m.yaml::a::compiles", "failed": True}
    assert shown(report, SimpleNamespace(nodeid="test_a.py::test", failed=True)) == (["a::compiles", "test"], 0)


STOPPED = """
import pytest
from pytest_torchcompile.plugin.repeated import MARK, RepeatedFailures

def pytest_configure(config):
    config.pluginmanager.register(RepeatedFailures())

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    if report.failed:
        setattr(report, MARK, {"first": "", "mistake": "the same"})
    return report
"""


@pytest.mark.parametrize("options", [(), ("--maxfail=2",), ("--maxfail=2", "-v")], ids=["whole", "stopped", "verbose"])
def test_the_last_line_counts_them(options, pytester):
    """Also that of a run that pytest ended after some failures; only the first is in its list."""
    pytester.makeconftest(STOPPED)
    pytester.makepyfile("def test_a(): assert 0\n\ndef test_b(): assert 0\n")
    result = pytester.runpytest(*options)
    result.stdout.fnmatch_lines(["FAILED test_the_last_line_counts_them.py::test_a*", "=* 1 failed, 1 same cause in *"])
    result.stdout.no_fnmatch_line("FAILED *::test_b*")
    # One failure has one letter.
    if not options:
        result.stdout.re_match_lines([r"test_the_last_line_counts_them\.py F +\["])
    assert result.ret == 1
