"""A matrix file as pytest sees it: the file is a node, a cell a node in it, a check of the cell an item."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_torchcompile.culprit.culprit_record import Culprit, issue_text
from pytest_torchcompile.observation import NO_RANK, Judgement
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell
from pytest_torchcompile.plan.selection import cells_of_shard
from pytest_torchcompile.plugin.outside import Named
from pytest_torchcompile.plugin.rank_supply import CellNotRun
from pytest_torchcompile.plugin.repeated import ShortText, mark_repeated
from pytest_torchcompile.ranks.execution import CellResult, Execution
from pytest_torchcompile.ranks.torchrun import Torchrun, own_file
from pytest_torchcompile.report.journal import Journal
from pytest_torchcompile.report.keeping import ReportKeeper
from pytest_torchcompile.report.reproduction import file_name, is_reproducible, reproduction_text
from pytest_torchcompile.report.safe_output import FOLDER, JOURNAL_FILE, REPRODUCTIONS, harmless_text, replace_file
from pytest_torchcompile.report.terminal import failure_text, header_lines, same_text_key
from pytest_torchcompile.run.settings import Settings
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["CellNode", "CheckFailure", "CheckItem", "MatrixFile", "MatrixSession"]

TIMES_ITEMS = "timeout"
"""pytest-timeout, by the name of its plugin and of its marker. It would end the waiting for a cell, not the cell."""
SECONDS_KEY = "compile-matrix/seconds"
GRAPHS_KEY = "compile-matrix/graphs"
"""Where pytest's cache keeps how long each cell took, so that the next run starts the longest first."""
PROPERTY = "compile_matrix"
"""The attribute of a test report that carries a verdict, as JSON text, from an xdist worker to the controller."""

MATRIX_TEXT = "compile_matrix_text"
"""The key under which xdist's workers get the text of a matrix that is in no file."""


class CheckFailure(Exception):
    """A check of a cell did not hold; its text is the whole failure report."""


class CheckItem(pytest.Item):
    """One check of one cell."""

    parent: CellNode
    short_text: ShortText | None = None
    """What the terminal shows of its failure where another cell has told the same."""

    def runtest(self) -> None:
        """Have the cell run, unless an item before this one did, and report this check's verdict."""
        result = self.parent.cell_result()
        judgement = result.judgements[self.name]
        self.config.stash[SESSION].judged[self.nodeid] = (result, judgement)
        # A run of some checks keeps the file for the others, whose verdicts stay in the report.
        if self.first_of_cell and len(self.parent.selected) == len(self.parent.applicable_checks()):
            self.parent.forget_reproduction()
        match judgement.verdict:
            case "skip":
                raise pytest.skip.Exception(harmless_text(judgement.note), _use_item_location=True)
            case "xfail":
                raise pytest.xfail.Exception(harmless_text(judgement.note))
            case "error" if (failure := result.observation.failure) and failure.kind == NO_RANK:
                raise CellNotRun(harmless_text(failure.message))
            case verdict if verdict != "pass":
                alone = ""
                if self.name in self.parent.reproducible_checks():
                    alone = self.parent.write_reproduction()
                tell = partial(failure_text, self.name, result.judgements, self.rerun_command, alone)
                if same := same_text_key(self.name, result.judgements):
                    self.short_text = ShortText(same, tell(told_before=True))
                raise CheckFailure(tell())

    @property
    def first_of_cell(self) -> bool:
        """Whether this is the first item of its cell that this run judges."""
        return self.name == self.parent.selected[0]

    @property
    def rerun_command(self) -> str:
        """The command that runs this item again."""
        settings = self.parent.parent.session_of.settings
        words = [f"pytest --compile-matrix={settings.matrix}"]
        # What was named for this run alone is needed for the item to be there, and to draw what it drew.
        if settings.checks:
            words.append(f"--compile-checks={','.join(settings.checks)}")
        if settings.fuzz.seed:
            words.append(f"--compile-fuzz-seed={settings.fuzz.seed}")
        if settings.fuzz.settings:
            words.append(f"--compile-fuzz-settings={','.join(settings.fuzz.settings)}")
        return " ".join([*words, f"'{self.nodeid}'"])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The text of a check's failure as it is, without a traceback through this file."""
        if isinstance(excinfo.value, (CheckFailure, CellNotRun)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The line of the model in the matrix file, and the item as a title."""
        title = f"{self.parent.name}::{self.name}"
        if "." in title:
            # Where a title ends the node id, pytest shows its dots as "::" under -v. With a blank it does not end it.
            title += " "
        return self.path, self.parent.model_line, title


class CellNode(pytest.Collector):
    """One cell of the matrix."""

    parent: MatrixFile

    def __init__(self, *, planned: PlannedCell, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.planned = planned
        self.own_markers.append(pytest.mark.compile_cell(**planned.cell.axes).mark)
        # Pytest's `-k` takes no "=", which the ids of axes of one's own have; its words are changed in the same way.
        self.extra_keyword_matches.add(planned.cell.id.replace("=", "-"))
        if self.config.pluginmanager.hasplugin(TIMES_ITEMS):
            # Not at all: --compile-timeout ends a cell with its process.
            self.own_markers.append(pytest.mark.timeout(0).mark)
        self.selected: list[str] = []
        """The checks of this cell that are run: all, less what ``-k``, ``-m`` or a node id left out."""
        self._reproduced = False

    @property
    def model_line(self) -> int:
        """Line of the cell's model in the matrix file, counted from 0 as pytest does."""
        where = self.parent.matrix.models[self.planned.cell.model].where
        return int(where.rsplit(":", 2)[-2]) - 1

    def applicable_checks(self) -> list[str]:
        """The checks that the run asks for and that have something to judge in the cell's phase."""
        return self.parent.matrix.checks_of(self.planned, self.parent.session_of.settings.checks)

    def collect(self) -> Iterator[CheckItem]:
        """One item for each check."""
        for name in self.applicable_checks():
            if self.parent.session_of.named.has(self.name, name):
                item = CheckItem.from_parent(self, name=name)
                # As the heading of a failure and the short summary show it, for whoever pastes that.
                item.extra_keyword_matches.add(item.nodeid.replace("=", "-"))
                yield item

    def cell_result(self) -> CellResult:
        """What came of the cell; it runs when this is first asked."""
        return self.parent.session_of.execution.cell_result(self.planned, self.selected, self.applicable_checks())

    def reproducible_checks(self) -> dict[str, str]:
        """The checks that a file without the matrix would fail as well, and what each says; in one process, that is."""
        if Wrapping.read(self.planned.cell.wrapper).ranks > 1:
            return {}
        result = self.cell_result()
        messages: dict[str, str] = {}
        for name, judgement in result.judgements.items():
            if is_reproducible(name, judgement, result.observation):
                messages[name] = judgement.problems[0].message
        return messages

    @property
    def reproduction_file(self) -> Path:
        """Where a test that fails as the cell does is written."""
        return self.parent.session_of.files / REPRODUCTIONS / file_name(self.planned.cell)

    def forget_reproduction(self) -> None:
        """Remove the file of an earlier run: the cell has run, and may fail for another reason or for none."""
        for file in (self.reproduction_file, self.issue_file):
            remove = partial(file.unlink, missing_ok=True)
            self.parent.session_of.journal.trouble.try_writing(file, remove)

    @property
    def issue_file(self) -> Path:
        """Where an issue draft for torch's tracker is written, if the operator to blame is known."""
        return self.reproduction_file.with_suffix(".issue.md")

    def culprit(self) -> Culprit | None:
        """The operator to blame, where it was looked for."""
        for section in self.cell_result().observation.sections.values():
            located = section.get("located")
            if located and located.get("culprit"):
                return Culprit.from_dict(located["culprit"])
        return None

    def write_reproduction(self) -> str:
        """The command that runs such a file; the first item that asks has it written. Empty where it can't be."""
        cell, matrix, file = self.planned.cell, self.parent.matrix, self.reproduction_file
        if not self._reproduced:
            self._reproduced = True
            trouble, culprit = self.parent.session_of.journal.trouble, self.culprit()
            text = reproduction_text(cell, matrix.models[cell.model], Path(matrix.root), file,
                                     self.reproducible_checks(), self.planned.limits, culprit)
            trouble.try_writing(file, partial(replace_file, file, text))
            issue = issue_text(culprit) if culprit else ""
            if issue:
                trouble.try_writing(self.issue_file, partial(replace_file, self.issue_file, issue))
        if not file.exists():
            return ""
        return f"pytest {os.path.relpath(file, self.config.invocation_params.dir)}"


class MatrixFile(pytest.File):
    """The matrix file."""

    @property
    def session_of(self) -> MatrixSession:
        """The matrix session that this file belongs to."""
        return self.config.stash[SESSION]

    @property
    def matrix(self) -> Matrix:
        """The matrix that the file describes."""
        return self.session_of.matrix

    def collect(self) -> Iterator[CellNode]:
        """One node for each planned cell of this shard."""
        for planned in self.session_of.planned:
            if self.session_of.named.has(planned.cell.id):
                yield CellNode.from_parent(self, name=planned.cell.id, planned=planned)


class MatrixSession:
    """The hooks of a run with ``--compile-matrix``."""

    def __init__(self, config: pytest.Config, settings: Settings, matrix: Matrix, named: Named,
                 torchrun: Torchrun | None, report: Path, files: Path, folder: str = FOLDER) -> None:
        """``report`` is where the report will be, ``files`` the folder with ``.compile-matrix``.

        ``folder``, below ``files``, has the journal and what is kept of earlier reports.
        """
        self.config, self.settings, self.matrix, self.named = config, settings, matrix, named
        self.files = files
        self.torchrun = torchrun
        self.planned = cells_of_shard(matrix.cells, *settings.shard)
        self.judged: dict[str, tuple[CellResult, Judgement]] = {}
        # Of xdist; the controller has all verdicts.
        self.is_worker = hasattr(config, "workerinput")
        self.execution = Execution(matrix, settings, torchrun=self.torchrun)
        journal_file = f"{folder}/{Path(JOURNAL_FILE).name}"
        self.journal = Journal(matrix, self.planned, settings, own_file(files, self.torchrun, journal_file))
        # xdist has one specification for each of its workers.
        self.journal.workers = max(1, len(config.getoption("tx", None) or ()))
        self.keeper = ReportKeeper(files, report, self.journal.path, matrix.root, folder)
        self.journal.report = Path(os.path.relpath(self.keeper.report, self.journal.path.parent)).as_posix()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Begin the journal before anything can end the run: what is there is an earlier run's."""
        if not self.is_worker and not self.config.option.collectonly:
            begin = partial(self.keeper.begin, self.config.invocation_params.args)
            self.journal.trouble.try_writing(self.keeper.report, begin)
            self.journal.begin()

    # collection

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> MatrixFile | None:
        """The matrix file is a test file."""
        if not self.named.node_id and file_path == self.matrix.path:
            return MatrixFile.from_parent(parent, path=file_path)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """A matrix that pytest does not look up hangs on the session."""
        report = yield
        node_id = self.named.node_id
        if node_id and isinstance(collector, pytest.Session) and report.passed:
            report.result.append(MatrixFile.from_parent(collector, path=self.matrix.path, nodeid=node_id))
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell each cell and the journal what is left to judge, when everybody has deselected."""
        for item in session.items:
            if isinstance(item, CheckItem):
                item.parent.selected.append(item.name)
        self.journal.expect_items(item.nodeid for item in session.items)

    # Optional: xdist may be switched off.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Under xdist the controller collects nothing itself: the workers tell what will be judged."""
        self.journal.expect_items(ids)

    # Optional: xdist may be switched off.
    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Workers of xdist need not look at the model again: they run the controller's matrix."""
        node.workerinput[MATRIX_TEXT] = self.config.stash.get(TEXT_OF_MATRIX, "")

    # Optional: xdist may be switched off.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Keep a cell's items on one worker, longest cells first, unless another --dist was asked for."""
        if config.getoption("dist") != "load":
            return None
        from pytest_torchcompile.plugin.scheduler_choice import choose_scheduler

        return choose_scheduler(config, log, self.known_seconds(), self.known_graphs(), self.planned)

    # running

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Put the verdict on the report; the first item of a cell carries the cell's observation."""
        report = yield
        judged = self.judged.pop(item.nodeid, None)
        if judged is not None and isinstance(item, CheckItem):
            result, judgement = judged
            carried: dict[str, Any] = {"cell": item.parent.name, "check": item.name, **judgement.to_dict()}
            if item.first_of_cell:
                carried |= result.carried()
            setattr(report, PROPERTY, json.dumps(carried))
            mark_repeated(report, item.name, result, item.short_text)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep and journal each verdict where it arrives: in the controller, or in the only process."""
        # pytest-rerunfailures will run an item again: this report is not its last, and not its verdict.
        will_run_again = str(report.outcome) == "rerun"
        if self.is_worker or will_run_again:
            return
        carried = getattr(report, PROPERTY, None)
        if carried is not None:
            self.journal.add_verdict(json.loads(carried))
        elif str(report.when) == "???":
            # xdist's name for the stage in which a worker died.
            self.journal.add_lost_item(report.nodeid, str(report.longrepr))

    # the terminal

    def pytest_report_header(self) -> list[str]:
        """Versions, device, compiler, and what is planned."""
        return header_lines(self.matrix, self.planned, self.settings)

    def known_seconds(self) -> dict[str, float]:
        """How long each cell took when it was last run here."""
        cache = getattr(self.config, "cache", None)
        if cache is None:
            return {}
        return dict(cache.get(SECONDS_KEY, {}))

    def known_graphs(self) -> dict[str, list[str]]:
        """Keys of the graphs that each cell shared with another one when it was last run here."""
        cache = getattr(self.config, "cache", None)
        if cache is None:
            return {}
        return dict(cache.get(GRAPHS_KEY, {}))


SESSION = pytest.StashKey[MatrixSession]()
TEXT_OF_MATRIX = pytest.StashKey[str]()
"""The text of a matrix that is in no file; not there where it is in one."""
