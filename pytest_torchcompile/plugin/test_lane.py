"""The lane ``test``: what came of each test that uses our fixtures is told to the report.

A process that runs tests puts a record on the report of each test's tear-down; the controller of xdist, or the only
process, takes it off and keeps it. Registered only where a report is asked for, and idle until such a test comes.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pytest

from pytest_torchcompile.plugin.fixtures import HEAVIEST, gather_evidence, is_watched
from pytest_torchcompile.run.imported import imported_sources

if TYPE_CHECKING:
    from pytest_torchcompile.observation import Problem
    from pytest_torchcompile.report.provenance import Sources
    from pytest_torchcompile.report.record import Record, RecordedTest
    from pytest_torchcompile.run.counters import Evidence

__all__ = ["Lane", "OwnReport", "report_tests"]

CARRIED: Final = "compile_test"
"""The attribute of a pytest report that carries a test's record, as JSON text, from an xdist worker."""
PLANNED: Final = "compile_tests_planned"
"""What a worker of xdist tells at its end: the node ids of its tests that use our fixtures."""
DESELECTED: Final = "compile_tests_deselected"
"""The same of those that `-k`, `-m` or `--deselect` left out."""
PACKAGE: Final = Path(__file__).parent.parent
EVIDENCE: Final = 6000
"""Characters of a failure's text that are kept."""
_TELLING: Final = 160
"""Characters of a message that is made of two lines."""
_ADDRESS: Final = re.compile(" at 0x[0-9a-fA-F]+")
_NOT_RUN: Final = "[NOTRUN] "
"""How pytest begins the reason of a test with `xfail(run=False)`."""


class Keeper(Protocol):
    """Who keeps what came of the tests: the journal of a matrix run, or :class:`OwnReport`."""

    def expect_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests that will be run."""

    def leave_out_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests that use our fixtures and were deselected."""

    def add_test(self, told: dict[str, Any], environment: dict[str, Any], sources: dict[str, str]) -> None:
        """Keep what came of one, and which files its process has imported."""


def report_tests(config: pytest.Config, keeper: Keeper | None) -> None:
    """Have the tests reported to ``keeper``; without one, in pytest-json-report's own file.

    Where tests are only listed, none is reported; but that file may be that of a run.
    """
    if keeper is None:
        keeper = OwnReport(config)
        config.pluginmanager.register(keeper, "compile-own-report")
    if config.option.collectonly:
        return
    config.pluginmanager.register(Lane(config, keeper), "compile-tests")


@dataclass
class _Attempt:
    """One run of one test, phase by phase."""

    number: int
    reports: list[pytest.TestReport] = field(default_factory=list)
    evidence: Evidence | None = None
    ledger: dict[str, Any] | None = None
    """As it was when the body ended, which is when it was judged."""


class Lane:
    """The hooks that make the records, and those that collect them."""

    def __init__(self, config: pytest.Config, keeper: Keeper) -> None:
        self.config, self.keeper = config, keeper
        self.is_worker = hasattr(config, "workerinput")
        self.known: set[str] = set()
        """Tests that are known to use our fixtures."""
        self.all_known = False
        """Has a process told all of them?"""
        self.deselected: list[str] = []
        self.lost: dict[str, str] = {}
        """Node id of an item that a worker of xdist died in, to what xdist says of it."""

    # where tests run

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Take note of those of our tests that `-k`, `-m` or `--deselect` left out."""
        self.deselected += [item.nodeid for item in items if is_watched(item)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take note of the tests that are left when everybody has deselected."""
        planned = [item.nodeid for item in session.items if is_watched(item)]
        if self.is_worker:
            self.config.workeroutput[PLANNED] = planned  # type: ignore[attr-defined]
            self.config.workeroutput[DESELECTED] = self.deselected  # type: ignore[attr-defined]
        else:
            self.keeper.leave_out_tests(self.deselected)
            self._expect_tests(planned)
            self.all_known = True

    # Outermost: what others make of xfail and the like is done.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Put the test's record on the last of its reports."""
        report: pytest.TestReport = yield
        if not is_watched(item):
            return report
        if report.when == "setup":
            item.stash[_ATTEMPT] = _next_attempt(item)
            setattr(report, CARRIED, json.dumps({"begun": item.nodeid}))
        attempt = item.stash[_ATTEMPT]
        attempt.reports.append(report)
        if report.when == "teardown":
            record = _record_test(item, attempt).to_dict()
            sources = imported_sources(item.config.rootpath)
            carried = {"test": record, "environment": _process_environment(), "sources": sources}
            setattr(report, CARRIED, json.dumps(carried))
            return report
        evidence = gather_evidence(item)
        if evidence is not None:
            # Now: the tear-down of other fixtures may compile something, or forget what was compiled.
            attempt.evidence, attempt.ledger = evidence, evidence.ledger.to_dict()
        return report

    # where reports arrive

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's record."""
        if self.is_worker:
            return
        carried = json.loads(getattr(report, CARRIED, "{}"))
        if "begun" in carried:
            self._expect_tests([carried["begun"]])
        elif "test" in carried:
            self.keeper.add_test(carried["test"], carried["environment"], carried["sources"])
        elif str(report.when) == "???":
            # The stage in which a process died (xdist, pytest-forked).
            self.lost[report.nodeid] = str(report.longrepr)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over which tests a worker of xdist was to run."""
        planned = getattr(node, "workeroutput", {}).get(PLANNED)
        if planned is not None:
            self.keeper.leave_out_tests(node.workeroutput[DESELECTED])
            self._expect_tests(planned)
            self.all_known = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        """A test that a worker died in has crashed. Where no worker lived to tell which are ours, each may be one."""
        for nodeid, text in self.lost.items():
            if nodeid in self.known or (not self.all_known and "::" in nodeid):
                self._add_crash(nodeid, text)
        return (yield)

    def _add_crash(self, nodeid: str, text: str) -> None:
        from pytest_torchcompile.observation import Problem
        from pytest_torchcompile.report.record import RecordedTest

        problem = Problem("the process that ran this test died", text[-EVIDENCE:])
        self.keeper.expect_tests([nodeid])
        self.keeper.add_test(RecordedTest(nodeid, "crash", (problem,)).to_dict(), {}, {})

    def _expect_tests(self, nodeids: list[str]) -> None:
        self.known.update(nodeids)
        self.keeper.expect_tests(nodeids)


class OwnReport:
    """The block of a run without a matrix: no cells, but tests. It is part of pytest-json-report's file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.record: Record | None = None
        self._sources: Sources | None = None

    def expect_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests that will be run."""
        known = dict.fromkeys(nodeids)
        if known:
            record = self._open_record()
            record.expected_tests = list(dict.fromkeys((*record.expected_tests, *known)))

    def leave_out_tests(self, nodeids: Iterable[str]) -> None:
        """Take note of tests that were deselected."""
        if names := list(nodeids):
            self._open_record().leave_out_tests(names)

    def add_test(self, told: dict[str, Any], environment: dict[str, Any], sources: dict[str, str]) -> None:
        """Keep what came of one."""
        self._open_record().add_test(told, environment, sources)

    # First of all: pytest-json-report writes its file in this hook.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """The run has ended by itself."""
        if hasattr(self.config, "_json_report") and not hasattr(self.config, "workerinput"):
            self._keep_before()
        if self.record is not None and hasattr(self.config, "_json_report"):
            from pytest_torchcompile.report.keeping import save_whole
            from pytest_torchcompile.report.record import utc_time

            edited: Sequence[str] = ()
            if self._sources is not None:
                edited = self._sources.edited_files(self.record.sources or {})
            self.record.finish(int(session.exitstatus), utc_time(), edited)
            save_whole(self.config)
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_json_modifyreport(self, json_report: dict[str, Any]) -> None:
        """Add our block, if one of the tests was ours."""
        if self.record is not None:
            json_report["compile_matrix"] = self.record.block()

    def _keep_before(self) -> None:
        """Keep what a matrix run has left in the file that pytest-json-report is about to replace."""
        from pytest_torchcompile.report.keeping import ReportKeeper

        path = Path(self.config.invocation_params.dir, self.config.option.json_report_file)
        # pytest-json-report says so itself.
        with suppress(OSError):
            ReportKeeper(self.config.rootpath, path, path).keep_before()

    def _open_record(self) -> Record:
        if self.record is None:
            from pytest_torchcompile.report.provenance import Sources
            from pytest_torchcompile.report.record import Record, head_without_matrix

            self._sources = Sources.take(self.config.rootpath)
            self.record = Record(head_without_matrix(self.config.rootpath))
        return self.record


_ATTEMPT = pytest.StashKey[_Attempt]()


def _next_attempt(item: pytest.Item) -> _Attempt:
    """The first one, or the one after that: pytest-rerunfailures runs an item again."""
    before = item.stash.get(_ATTEMPT, None)
    if before is None:
        return _Attempt(1)
    return _Attempt(before.number + 1)


def _record_test(item: pytest.Item, attempt: _Attempt) -> RecordedTest:
    """What came of one attempt, when its last phase has been reported."""
    from pytest_torchcompile.report.record import RecordedTest

    verdict, note, problems = _test_verdict(item, attempt.reports)
    # Set-up and tear-down too: a model is often compiled in a fixture.
    seconds = round(sum(report.duration for report in attempt.reports), 6)
    record = RecordedTest(item.nodeid, verdict, problems, note, attempts=attempt.number, seconds=seconds)
    if attempt.evidence is None:
        return record
    return _with_evidence(record, item, attempt.evidence, attempt.ledger)


def _with_evidence(record: RecordedTest, item: pytest.Item, evidence: Evidence,
                   ledger: dict[str, Any] | None) -> RecordedTest:
    from dataclasses import asdict, replace

    limits = {}
    if evidence.limits is not None:
        # Those that are set: None is "no limit".
        limits = {name: number for name, number in asdict(evidence.limits).items() if number is not None}
    model = asdict(evidence.model) if evidence.model is not None else None
    sequences = None
    heaviest = item.stash.get(HEAVIEST, None)
    if heaviest is not None:
        sequences = heaviest.sequences
        # The ledger of a fuzzed test holds its last sequence only.
        if heaviest.ledger is not None and record.verdict == "pass":
            ledger = heaviest.ledger.to_dict()
    return replace(record, limits=limits, must_run=evidence.must_run, asks_model=evidence.asks_model, model=model,
                   ledger=ledger, sequences=sequences)


def _test_verdict(item: pytest.Item, reports: list[pytest.TestReport]) -> tuple[str, str, tuple[Problem, ...]]:
    """Verdict, note and problems, as pytest has judged the phases."""
    failed = [report for report in reports if report.failed]
    if failed:
        problems = tuple(_phase_problem(item, report) for report in failed)
        if failed[0].when != "call":
            return "error", "", problems
        if str(failed[0].longrepr).startswith("[XPASS(strict)]"):
            return "xpass", "", problems
        return "fail", "", problems
    for report in reports:
        if report.skipped and hasattr(report, "wasxfail"):
            # Nothing was run: pytest calls that an expected failure, but it is a skip.
            if _NOT_RUN in report.wasxfail:
                return "skip", report.wasxfail.removeprefix("reason: ").removeprefix(_NOT_RUN), ()
            return "xfail", report.wasxfail, (_phase_problem(item, report),)
        if report.skipped:
            return "skip", _skip_reason(report), ()
    for report in reports:
        if hasattr(report, "wasxfail"):
            return "pass", f"expected to fail, and passed: {report.wasxfail}", ()
    # `--setup-only` and `--setup-plan` run no body.
    if all(report.when != "call" for report in reports):
        return "not_run", "", ()
    return "pass", "", ()


def _skip_reason(report: pytest.TestReport) -> str:
    reason = str(report.longrepr)
    if isinstance(report.longrepr, tuple):
        # File, line and reason, where a test or fixture has called pytest.skip().
        reason = report.longrepr[2]
    return reason.removeprefix("Skipped: ")


def _phase_problem(item: pytest.Item, report: pytest.TestReport) -> Problem:
    """The failure of one phase: its first line, where it was raised, and its whole text."""
    from pytest_torchcompile.observation import Problem

    where = f"in its {report.when}: " if report.when != "call" else ""
    text = report.longreprtext
    file, line = item.location[0], (item.location[1] or 0) + 1
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return Problem(where + _first_line(text), text[-EVIDENCE:], file=file, line=line)
    path, root = Path(crash.path), item.config.rootpath
    # What our own code says of a test is said of the test's place.
    if not path.is_relative_to(PACKAGE):
        file, line = str(path), crash.lineno
        if path.is_relative_to(root):
            file = path.relative_to(root).as_posix()
    message = _telling_line(crash.message).removeprefix("Failed: ")
    # A text of ours begins with its first line, which need not be said twice.
    evidence = text.removeprefix(message).lstrip("\n")
    return Problem(where + message, evidence[-EVIDENCE:], file=file, line=line)


def _telling_line(text: str) -> str:
    """The first line, and the next where that one says only that something is false."""
    first = _first_line(text)
    if first not in ("assert False", "AssertionError: assert False", "AssertionError:"):
        return first
    rest = _first_line(text.strip().removeprefix(first)).removeprefix("+").strip()
    # Where in memory it was is another place in each run.
    return textwrap.shorten(f"{first} {_ADDRESS.sub('', rest)}", _TELLING, placeholder=" ...")


def _first_line(text: str) -> str:
    for line in text.splitlines():
        if line.strip():
            return line.strip()
    return "it failed without a text"


def _process_environment() -> dict[str, Any]:
    """Of this process, if it has loaded torch."""
    if "torch" not in sys.modules:
        return {}
    from pytest_torchcompile.run.environment import own_environment

    return own_environment()
