"""The command, with faked environments and planted runs: what is told before, pages, exit codes, bisection, edits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import ReportError, UsageError
from pytest_torchcompile.report.merging import merge_reports
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.upgrade import first_bad, matrix_runs, upgrade_command
from pytest_torchcompile.upgrade.environments import Environment
from pytest_torchcompile.upgrade.matrix_runs import MatrixRun, run_matrix

MODEL = "{factory: 'zoo:anything', inputs: 'zoo:batch'}"
VERSIONS = ["1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7", "2.0"]
AXES = {"model": ["net", "gpt"], "backend": ["inductor", "eager"]}


class Versions:
    """A package of which each version gives a planted run; stands for environments, pip and pytest."""

    def __init__(self) -> None:
        self.faults = {}
        """Version to what is planted in a run of it."""
        self.lost = set()
        """Versions that cannot be installed."""
        self.asked = []
        """Version and cells of each run."""

    def get(self, wanted):
        if wanted.version in self.lost:
            raise UsageError(f"{wanted.requirement} cannot be installed")
        return Environment(wanted.version, {wanted.package: wanted.version}, was_made=True)

    def run_matrix(self, python, matrix, report, *, cells=(), arguments=()):
        self.asked.append((python, tuple(cells)))
        self.arguments = arguments
        run = Run(**AXES)
        if python in self.faults:
            self.faults[python](run)
        report.parent.mkdir(parents=True, exist_ok=True)
        path = Path(run.write(report.parent)[0]).replace(report)
        return MatrixRun(path, merge_reports([read_report(str(path))]), 60.0)

    def since(self, first, plant):
        """Plant the same in this version and in all later ones."""
        for version in VERSIONS[VERSIONS.index(first):]:
            self.faults[version] = plant


@pytest.fixture
def versions(project, monkeypatch):
    """A project whose matrix/smoke.yaml is that of the runs, and a package with nine versions."""
    monkeypatch.chdir(project.root)
    (project.root / "tox.ini").touch()
    models = "".join(f"  {name}: {MODEL}\n" for name in AXES["model"])
    (project.root / "matrix" / "smoke.yaml").write_text(
        f"version: 1\nmodels:\n{models}axes: {{backend: [inductor, eager]}}\n"
        "checks: [compiles, graph_breaks, recompiles]\n")
    made = Versions()

    class Faked(upgrade_command.Environments):
        def outlook(self, wanted):
            return f"{wanted.requirement}: faked"

        def get(self, wanted):
            return made.get(wanted)

    monkeypatch.setattr(upgrade_command, "Environments", Faked)
    monkeypatch.setattr(upgrade_command, "run_matrix", made.run_matrix)
    monkeypatch.setattr(upgrade_command, "versions_between", lambda old, new, **more: VERSIONS)
    return made


def upgrade(*more: str) -> int:
    return main(["upgrade", "--package", "lego==1.0", "2.0", "--matrix", "matrix/smoke.yaml", *more])


def break_graph(run):
    run.breaks(run.ids[0])


def test_nothing_is_worse(versions, capsys):
    """What it takes is told first; then old and new in turn, three files, and exit code 0."""
    assert upgrade() == 0
    told = capsys.readouterr()
    assert told.err.splitlines()[:3] == [
        "lego==1.0: faked", "lego==2.0: faked",
        "4 cells of matrix/smoke.yaml, 4 runs: 2 of each version, in turn; the first tells how long one takes"]
    assert "lego==1.0, run 1: 60.0 s, about 3.0 min for the 3 runs left" in told.err
    assert [version for version, _ in versions.asked] == ["1.0", "2.0", "1.0", "2.0"]
    assert told.out.startswith("lego 1.0 to 2.0: nothing is worse, nothing better, in 4 cells of matrix/smoke.yaml\n")
    folder = Path(".compile-matrix/upgrade/lego-1.0..2.0-smoke")
    assert {"upgrade.html", "upgrade.md", "upgrade.json", "old-1.json", "new-2.json"} <= {
        path.name for path in folder.iterdir()}


def test_what_is_worse_makes_exit_code_1(versions, capsys):
    """With place and remedy, also as JSON; and elsewhere if that is asked for."""
    versions.since("1.4", break_graph)
    assert upgrade("--json", "-o", "docs/upgrades") == 1
    told = json.loads(capsys.readouterr().out)
    (line,) = told["lines"]
    assert (told["exit_code"], line["section"], line["place"], line["check"]) == (
        1, "breaks", "models.py:12", "graph_breaks")
    assert told["differences"] == [["lego", "1.0", "2.0"]]
    assert json.loads(Path("docs/upgrades/upgrade.json").read_text())["lines"] == told["lines"]


def test_a_part_of_the_matrix(versions, capsys):
    """What chooses cells and checks is handed to pytest, and it is said that they are not all."""
    assert upgrade("-k", "gpt", "-m", "compile_cell(backend='eager')", "--checks", "compiles") == 0
    assert versions.arguments == ("-k", "gpt", "-m", "compile_cell(backend='eager')", "--compile-checks=compiles")
    assert "4 cells of matrix/smoke.yaml, less those that -k and -m leave out, 4 runs" in capsys.readouterr().err


def test_a_dry_run_makes_nothing(versions, capsys):
    """It tells what it would do."""
    assert upgrade("--dry-run", "--runs", "3") == 0
    assert "6 runs: 3 of each version" in capsys.readouterr().err
    assert versions.asked == []
    assert not Path(".compile-matrix").exists()


@pytest.mark.parametrize("first", ["1.1", "1.4", "2.0"])
def test_a_planted_shift_is_bisected(versions, first, capsys):
    """Only the cells of the cause are run, in few versions."""
    versions.since(first, break_graph)
    assert upgrade("--bisect", "--runs", "1") == 1
    before = VERSIONS[VERSIONS.index(first) - 1]
    assert f"since lego {first}; {before} does not have it (3 runs)" in capsys.readouterr().out
    assert versions.asked[2:] == [(version, (Run(**AXES).ids[0],)) for version, _ in versions.asked[2:]]
    assert len(versions.asked[2:]) == 3


def test_what_cannot_be_told_is_said(versions, capsys):
    """A version that cannot be installed, and one in which another thing goes wrong."""
    versions.since("1.4", break_graph)
    versions.lost.add("1.4")
    versions.faults["1.3"] = lambda run: run.skips(run.ids[0])
    assert upgrade("--bisect", "--runs", "1") == 1
    told = capsys.readouterr()
    assert "lego 1.2 does not have it and 1.5 has it; between them 1.3, 1.4 could not be told (4 runs)" in told.out
    assert "bisect: lego==1.4: cannot be told: lego==1.4 cannot be installed" in told.err


def test_two_causes_are_bisected_by_the_same_runs(versions, capsys):
    """Each version is installed once, whatever number of causes asks it."""
    def both(run):
        break_graph(run)
        run.recompiles(run.ids[3], 9)

    versions.since("1.3", break_graph)
    versions.since("1.6", both)
    assert upgrade("--bisect", "--runs", "1") == 1
    told = capsys.readouterr().out
    assert "since lego 1.3; 1.2 does not have it" in told
    assert "since lego 1.6; 1.5 does not have it" in told
    asked = [version for version, _ in versions.asked[2:]]
    assert len(asked) == len(set(asked))


def test_rules_that_nothing_needs_any_more(versions, capsys):
    """They are told with the command that takes them out, which keeps every other line."""
    rules = ("rules:\n  # torch is to blame\n  - xfail: {model: net, backend: inductor}\n    reason: it breaks\n"
             "  - limits: {graph_breaks: 1}\n    when: {model: gpt, backend: inductor}\n    reason: it breaks too\n"
             "  - limits: {graph_breaks: 1}   # stays\n    when: {model: gpt, backend: eager}\n    reason: still\n")
    file = Path("matrix/smoke.yaml")
    file.write_text(file.read_text() + rules)
    ids = Run(**AXES).ids

    def planned(run, *broken):
        run.plan(ids[0], "xfail", reason="it breaks", rule="matrix/smoke.yaml:9")
        for name in ids[2:]:
            run.plan(name, "run", limits={"coverage": 1.0, "graph_breaks": 1})
        for name in broken:
            run.breaks(name)

    versions.faults = {"1.0": lambda run: planned(run, ids[0], ids[2], ids[3]),
                       "2.0": lambda run: planned(run, ids[3])}
    assert upgrade() == 0
    told = capsys.readouterr().out
    assert "an expected failure that nothing needs any more: it breaks at matrix/smoke.yaml:9" in told
    assert "limits that nothing needs any more: it breaks too at matrix/smoke.yaml:11" in told
    folder = Path(".compile-matrix/upgrade/lego-1.0..2.0-smoke")
    command = f"accept {folder / 'new-1.json'} --since {folder / 'old-1.json'}"
    assert f"`pytest-torchcompile {command}`" in (folder / "upgrade.md").read_text()
    assert main([*command.split(), "--dry-run"]) == 0
    assert "matrix/smoke.yaml: 2 rules would be taken out\n" in capsys.readouterr().out
    before = file.read_text().splitlines()
    assert main(command.split()) == 0
    after = file.read_text().splitlines()
    assert [line for line in before if line not in after] == [
        "  - xfail: {model: net, backend: inductor}", "    reason: it breaks",
        "  - limits: {graph_breaks: 1}", "    when: {model: gpt, backend: inductor}", "    reason: it breaks too"]
    assert main(command.split()) == 0
    assert "every rule that the earlier run needed is needed still" in capsys.readouterr().out


def test_a_rule_that_one_new_run_needs_stays(versions, capsys):
    """The first new run held without it, the second did not: that is a flake, and nothing got better."""
    file = Path("matrix/smoke.yaml")
    file.write_text(f"{file.read_text()}rules:\n  - limits: {{graph_breaks: 1}}\n"
                    "    when: {model: gpt, backend: inductor}\n    reason: it breaks at times\n")
    breaking = iter([True, False, True, True])

    def at_times(run):
        run.plan(run.ids[2], "run", limits={"coverage": 1.0, "graph_breaks": 1})
        if next(breaking):
            run.breaks(run.ids[2])

    versions.faults = {"1.0": at_times, "2.0": at_times}
    assert upgrade() == 0
    assert "that nothing needs any more" not in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "text"), [
    (["2.13.0"], "upgrade: 1 version given; expected the old and the new one, as in `pytest-torchcompile upgrade"),
    (["2.12.1", "2.13.0", "--package", "a==1", "2"], "--package names the versions; leave out those of torch"),
    (["--package", "transformers", "5"], "--package transformers: expected NAME==OLD NEW, such as transformers==5.20"),
    (["2.12.1", "new"], "torch==new: 'new' is no version"),
    (["2.12.1", "2.13.0", "--runs", "0"], "--runs 0: expected 1 or more runs of each version"),
])
def test_mistakes_are_told(versions, arguments, text, capsys):
    """One line, exit code 4."""
    assert main(["upgrade", *arguments]) == 4
    assert text in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- pytest in an environment
def test_a_run_has_caches_of_its_own(tmp_path):
    """Which are empty, and gone afterwards; its report is read."""
    seen = {}

    def begin(command, variables, log):
        seen.update(command=command, folder=Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent)
        assert seen["folder"].is_dir()
        Run(**AXES).write(tmp_path)
        return 1

    ran = run_matrix("python9", "m.yaml", tmp_path / "report.json", cells=["a-b"], arguments=["-k", "gpt"], begin=begin)
    assert list(ran.merged.cells) == Run(**AXES).ids
    assert seen["command"][:4] == ["python9", "-m", "pytest", "--compile-matrix=m.yaml"]
    assert seen["command"][-3:] == ["-k", "gpt", "m.yaml::a-b"]
    # Report and journal of the user's own last run stay as they are.
    assert f"--compile-folder={tmp_path}" in seen["command"]
    assert not seen["folder"].exists()


@pytest.mark.parametrize(("code", "error"), [(4, UsageError), (3, ReportError), (0, ReportError)])
def test_a_run_without_a_report_is_told(tmp_path, code, error):
    """With the last lines that pytest wrote."""
    def begin(command, variables, log):
        log.write_text("ERROR: m.yaml: no such file\n")
        return code

    with pytest.raises(error, match=rf"ended with {code} and judged nothing; .*report.log has its output:\nERROR: m"):
        run_matrix("python9", "m.yaml", tmp_path / "report.json", begin=begin)


def test_a_program_is_run_to_its_end(tmp_path):
    """The real one: its output goes into the log."""
    import os
    import sys

    code = matrix_runs.start([sys.executable, "-c", "print('hello'); raise SystemExit(3)"], dict(os.environ),
                             tmp_path / "log")
    assert (code, (tmp_path / "log").read_text().strip()) == (3, "hello")


# ------------------------------------------------------------------------------------------------- versions of an index
def answer(out: str, code: int = 0, err: str = ""):
    return lambda command, seconds: first_bad.subprocess.CompletedProcess(command, code, out, err)


def test_versions_of_the_users_index():
    """As pip tells them: sorted, within the two, each once whatever its build."""
    out = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.12.1, 2.12.0, 2.11.0, 2.8.0\n  LATEST:"
    parse = first_bad.PackageVersion.parse
    found = first_bad.versions_between(parse("torch", "2.11.0"), parse("torch", "2.13.0"), pre=False, run=answer(out))
    assert found == ["2.11.0", "2.12.0", "2.12.1", "2.13.0"]
    with pytest.raises(UsageError, match="tells no versions of torch: ERROR: unknown command"):
        first_bad.versions_between(parse("torch", "2.11.0"), parse("torch", "2.13.0"), pre=True,
                                   run=answer("", 1, "ERROR: unknown command"))
