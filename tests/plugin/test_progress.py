"""The live line and the line a minute, without a terminal and without waiting; and a run that goes on after Ctrl-C."""

from __future__ import annotations

import io
import subprocess
from types import SimpleNamespace

import pytest
from runs import Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.plugin.progress_line import LINE_SECONDS, ProgressHooks, is_live, open_terminal
from pytest_torchcompile.plugin.resuming import judged_cells_of, why_not_to_resume
from pytest_torchcompile.report.kept_runs import RUNS

CELLS = ("a", "b")


@pytest.fixture
def hooks():
    """Hooks of a run of two cells, whose clock stands still and whose terminal is a text."""
    writer = SimpleNamespace(width_of_current_line=3, fullwidth=81, flush=lambda: None)
    config = SimpleNamespace(get_terminal_writer=lambda: writer)
    session = SimpleNamespace(
        config=config, known_seconds=lambda: {"a": 40.0, "b": 20.0}, journal=SimpleNamespace(workers=1),
        planned=[SimpleNamespace(cell=SimpleNamespace(id=cell)) for cell in CELLS])
    made = ProgressHooks(session)
    made.out, made.clock = io.StringIO(), lambda: 0.0
    # No thread: the test is the clock.
    made._start = lambda: None
    made._expect([f"m.yaml::{cell}::compiles" for cell in CELLS] + ["test_a.py::test"])
    return made


def reported(nodeid, when="call", failed=False):
    return SimpleNamespace(nodeid=nodeid, when=when, failed=failed, passed=not failed)


def through(hook):
    """Run a wrapper; what pytest writes meanwhile is a dot."""
    def run(hooks):
        next(hook)
        hooks.out.write(".")
        with pytest.raises(StopIteration):
            hook.send(None)
    return run


def test_the_live_line_makes_way_for_pytest(hooks):
    """It is taken away before pytest writes, and drawn below it with the cursor back in pytest's line."""
    hooks._live = True
    hooks.tell()
    assert hooks.out.getvalue() == "\x1b[J\ncompile matrix: 0/2 cells, about 60 s left\x1b[1A\x1b[4G"
    hooks.out.truncate(hooks.out.seek(0))
    through(hooks.pytest_runtest_logstart("m.yaml::a::compiles"))(hooks)
    assert hooks.out.getvalue() == ("\x1b[J.\x1b[J\ncompile matrix: 0/2 cells, about 60 s left, runs a (0 s)"
                                    "\x1b[1A\x1b[4G")
    hooks.out.truncate(hooks.out.seek(0))
    through(hooks.pytest_runtest_logreport(reported("m.yaml::a::compiles", failed=True)))(hooks)
    assert "compile matrix: 1/2 cells, 1 fails: a, about 20 s left\x1b" in hooks.out.getvalue()
    out = hooks.out
    hooks.out = SimpleNamespace(write=out.write, flush=out.flush, close=lambda: None)
    hooks.stop()
    assert out.getvalue().endswith("\x1b[J")
    hooks.draw()
    assert out.getvalue().endswith("\x1b[J")


def test_setup_and_other_tests_judge_nothing(hooks):
    for report in (reported("m.yaml::a::compiles", "setup"), reported("test_a.py::test"),
                   reported("m.yaml::a::compiles", "teardown")):
        through(hooks.pytest_runtest_logreport(report))(hooks)
    assert hooks.progress.line(0) == "compile matrix: 0/2 cells, about 60 s left"


def test_without_a_terminal_it_is_a_line_a_minute(hooks):
    """On a line of its own, whatever pytest has begun; and none before the first minute is over."""
    hooks.tell()
    hooks.clock = lambda: LINE_SECONDS - 1
    hooks.tell()
    assert hooks.out.getvalue() == ""
    hooks.clock = lambda: LINE_SECONDS
    hooks.tell()
    hooks.tell()
    assert hooks.out.getvalue() == "\ncompile matrix: 0/2 cells, about 60 s left\n"
    through(hooks.pytest_runtest_logfinish())(hooks)
    assert "\x1b" not in hooks.out.getvalue()


def test_the_queue_for_gpus_is_looked_at(hooks):
    """Who waits is told; a queue that can't be read is told by whoever needs a GPU."""
    waiting = frozenset({"a"})

    def refuse():
        raise TorchcompileError("no folder")

    hooks._live, hooks._leases = True, SimpleNamespace(waiting_names=lambda: waiting)
    hooks.progress.begin("a", 0.0)
    hooks.tell()
    assert "left, waits for a GPU: a (0 s)" in hooks.out.getvalue()
    hooks._leases = SimpleNamespace(waiting_names=refuse)
    hooks.tell()


def test_a_terminal_that_is_gone_ends_nothing(hooks):
    hooks._live = True
    hooks.out.close()
    hooks.tell()


@pytest.mark.parametrize(("variables", "capture", "terminal", "live"), [
    ({"TERM": "xterm"}, "fd", True, True),
    ({"TERM": "xterm", "CI": "false"}, "fd", True, True),
    ({"TERM": "xterm", "CI": "true"}, "fd", True, False),
    ({"TERM": "dumb"}, "fd", True, False),
    ({"TERM": "xterm"}, "no", True, False),
    ({"TERM": "xterm"}, "fd", False, False),
])
def test_where_a_line_may_move(monkeypatch, variables, capture, terminal, live):
    """On a terminal, where nothing but pytest writes to it."""
    monkeypatch.delenv("CI", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = SimpleNamespace(getoption=lambda name: capture, option=SimpleNamespace(usepdb=False))
    assert is_live(config, SimpleNamespace(isatty=lambda: terminal)) is live
    assert not is_live(config, io.StringIO())


def test_what_is_no_file_of_the_system_is_left_alone():
    assert open_terminal(io.StringIO()) is None


def test_what_an_interrupted_run_has_judged():
    """A cell with a verdict missing is run again as a whole; so is one that was not selected."""
    run = Run(model=["net"], backend=["eager", "inductor", "aot_eager"])
    one, other, last = run.ids
    run.stored[other, "recompiles"] = "not_run"
    (report,) = run.reports()
    report.cells[2].update(selected=False, checks={}, status="not_run")
    assert judged_cells_of(report) == {one}
    sha = report.block["matrix"]["sha256"]
    assert why_not_to_resume(report, sha, []) == ""
    assert why_not_to_resume(report, "0" * 64, []) == "is of another matrix, or of one that was edited since"
    assert why_not_to_resume(report, sha, ["models.py"]) == ("is of other sources, for these were edited since: "
                                                             "models.py")
    assert last not in judged_cells_of(report)


def git(folder, *command):
    subprocess.run(["git", "-c", "user.name=us", "-c", "user.email=us@example.org", *command], cwd=folder, check=True)


@pytest.mark.needs_torch
def test_a_run_goes_on_after_ctrl_c(repo, capsys, monkeypatch):
    """What was judged stays, what was left is run, and the report is whole. Without a report it says so."""
    repo.file("matrix/default.yaml", """
        version: 1
        models: {net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}}
        axes: {backend: [eager], hidden: [8, 16]}
        checks: [compiles, graph_breaks]
        """)
    repo.file("conftest.py", """
        import os
        def pytest_runtest_setup(item):
            if "hidden=16" in item.name + item.parent.name and "STOP" in os.environ:
                raise KeyboardInterrupt
        """)
    # Of kept verdicts the gate takes only those of this very commit.
    repo.file(".gitignore", "__pycache__/\n.pytest_cache/\n")
    git(repo.path, "init", "-q")
    git(repo.path, "add", "-A")
    git(repo.path, "commit", "-qm", "one")
    refused = repo.run("--compile-resume", "-p", "no:xdist")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*--compile-resume: there is no report *; leave out --compile-resume to run all"])
    monkeypatch.setenv("STOP", "1")
    stopped = repo.run("-p", "no:xdist")
    monkeypatch.delenv("STOP")
    stopped.stdout.fnmatch_lines(["interrupted: 1 of 2 cells judged, in the middle of *hidden=16, 1 left",
                                  "  go on  pytest --compile-matrix=matrix/default.yaml --compile-resume"])
    assert not (repo.path / RUNS).exists(), "what was interrupted is no whole run"
    resumed = repo.run("--compile-resume", "--compile-baseline=last", "-p", "no:xdist")
    resumed.stdout.fnmatch_lines([
        "compile matrix: 1 cell is judged already, and not run again",
        "nothing to compare with: no run of another commit is kept in .compile-matrix/runs"])
    resumed.assert_outcomes(passed=2, deselected=2)
    assert set(repo.verdicts().values()) == {"pass"}
    assert len(repo.verdicts()) == 4
    capsys.readouterr()
    assert main(["gate", str(repo.path / ".compile-matrix/report.json")]) == 0, capsys.readouterr().out
    # The next commit is compared with the run that is kept of this one.
    (kept,) = (repo.path / RUNS).iterdir()
    git(repo.path, "commit", "-qm", "two", "--allow-empty")
    beside = repo.run("--compile-baseline=last", "-p", "no:xdist", "-k", "hidden-8")
    beside.stdout.fnmatch_lines([f"*beside {RUNS}/{kept.name}/report.json*", "1 cell as in the baseline"])
