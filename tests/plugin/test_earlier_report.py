"""What an earlier run left: never judged as this run's, and never destroyed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.reading import read_report

pytestmark = pytest.mark.needs_torch
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
  hidden: [8, 16]
checks: [compiles, graph_breaks]
"""
ONE = "net-eager-default-auto-none-hidden=8"
OTHER = "net-eager-default-auto-none-hidden=16"
BROKEN = """
def net(hidden=8):
    net = Net(hidden)
    if hidden == 8:
        net.forward = torch.compiler.disable(net.forward)
    return net
"""
PLAIN = ("-p", "no:xdist", "-p", "no:cacheprovider")


def gate(repo, *arguments, capsys):
    """Exit code and first line of the gate over all that a run leaves."""
    capsys.readouterr()
    code = main(["gate", *arguments])
    return code, capsys.readouterr().out.splitlines()[0]


def report(repo):
    return str(repo.path / ".compile-matrix/report.json")


def globbed(repo):
    """``.compile-matrix/*.json*`` as a shell has it."""
    return sorted(map(str, (repo.path / ".compile-matrix").glob("*.json*")))


def commit(repo, message="one"):
    """Commit everything; returns the name of the commit."""
    def git(*arguments):
        known = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(["git", "-c", "user.name=us", "-c", "user.email=us@example.org", *arguments],
                              cwd=repo.path, env=known, check=True, capture_output=True, text=True).stdout.strip()

    if not (repo.path / ".git").exists():
        git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", message)
    return git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where the first test keeps its green repository, so that the others need not run the matrix."""
    return tmp_path_factory.mktemp("green") / "repository"


@pytest.fixture
def green(repo, made, capsys):
    """A repository with a green report, committed."""
    if made.exists():
        shutil.copytree(made, repo.path, dirs_exist_ok=True)
        return repo
    repo.matrix(MATRIX)
    commit(repo)
    assert repo.run(*PLAIN).ret == 0
    assert gate(repo, report(repo), capsys=capsys)[0] == 0
    shutil.copytree(repo.path, made)
    return repo


@pytest.mark.parametrize("mistake", [
    ["--compile-shard=9/8"], ["--compile-shard"], ["--unknown-option"], ["--json-report-indent=x"], ["nowhere.py"],
    ["--compile-checks=complies"], ["-m", "compile_cell(backend='eagre')"], ["--compile-baseline=lost.json"],
], ids=" ".join)
def test_a_mistake_on_the_command_line(green, capsys, mistake):
    """The run ends with 4; the report is there, of an earlier run, and so says the gate."""
    before = green.block()
    assert green.run(*PLAIN, *mistake).ret == pytest.ExitCode.USAGE_ERROR
    assert green.block() == before
    for given in ([report(green)], globbed(green)):
        code, first = gate(green, *given, capsys=capsys)
        assert code == 2, first
    code, first = gate(green, report(green), capsys=capsys)
    assert first.startswith(f"UNUSABLE: {report(green)} is of an earlier run: a later one began, `pytest ... "), first
    assert gate(green, report(green), "--earlier", capsys=capsys)[0] == 0


@pytest.mark.parametrize("where", ["matrix", "conftest"])
def test_a_mistake_in_a_file(green, capsys, where):
    """A typo in the matrix, or a conftest that can't be loaded, ends the run before our session is made."""
    if where == "matrix":
        green.matrix(MATRIX.replace("axes:", "axis:"))
    else:
        green.file("conftest.py", "import nowhere")
    assert green.run(*PLAIN).ret == pytest.ExitCode.USAGE_ERROR
    for given in ([report(green)], globbed(green)):
        assert gate(green, *given, capsys=capsys)[0] == 2


def test_a_journal_of_an_earlier_run(green, capsys):
    """The journal says so too: a usage error has no journal of its own."""
    journal = str(green.path / ".compile-matrix/journal.jsonl")
    assert gate(green, journal, capsys=capsys)[0] == 0
    green.run(*PLAIN, "--compile-shard=9/8")
    assert gate(green, journal, capsys=capsys)[0] == 2
    assert gate(green, journal, "--earlier", capsys=capsys)[0] == 0
    assert read_report(journal).later_run


def files_of(repo) -> dict[str, bytes]:
    """What a run has left, each file with its contents."""
    return {str(path): path.read_bytes() for path in (repo.path / ".compile-matrix").rglob("*") if path.is_file()}


@pytest.mark.parametrize("key", [False, True], ids=["option", "ini"])
def test_a_run_with_a_folder_of_its_own_leaves_all_others_alone(green, capsys, key):
    """Report and journal stay as they were, byte for byte, also where the run fails or its command has a mistake."""
    before, words = files_of(green), ["--compile-folder=out/second"]
    assert any(name.endswith("journal.jsonl") for name in before)
    if key:
        green.file("pyproject.toml", "[tool.pytest.ini_options]\ncompile_folder = 'out/second'\n")
        words = []
    green.file("models.py", (green.path / "models.py").read_text().replace("return self.outer", "raise ValueError #"))
    assert green.run(*PLAIN, *words).ret == 1
    own = green.path / "out/second/.compile-matrix"
    assert {"report.json", "journal.jsonl", ".gitignore"} <= {path.name for path in own.iterdir()}
    assert (own / "runs").is_dir()
    assert green.run(*PLAIN, *words, "--compile-shard=9/8").ret == pytest.ExitCode.USAGE_ERROR
    assert files_of(green) == before
    assert read_report(str(own / "report.json")).later_run
    assert not read_report(report(green)).later_run


@pytest.mark.parametrize("listing", ["--co", "--help", "--markers"])
def test_what_only_lists_is_no_run(green, capsys, listing):
    green.run(*PLAIN, "-q", listing)
    assert gate(green, report(green), capsys=capsys)[0] == 0


@pytest.mark.parametrize("name", ["", "kept.json"], ids=["usual", "named"])
def test_a_run_that_is_killed_before_its_first_verdict(repo, capsys, name):
    """Its plan is in the journal, and the report before is no report of this run, wherever it is."""
    repo.matrix(MATRIX)
    named = [f"--json-report-file={name}"] if name else []
    repo.run(*PLAIN, *named)
    path = str(repo.path / name) if name else report(repo)
    assert gate(repo, path, capsys=capsys)[0] == 0
    repo.models(f"import os, signal\nos.kill({os.getpid()}, 0)\ndef batch(B):\n    import os, signal\n"
                "    os.kill(int(open('pytest.pid').read()), signal.SIGKILL)\n    time.sleep(60)\n")
    repo.file("conftest.py", "import os\nopen('pytest.pid', 'w').write(str(os.getpid()))\n")
    killed = subprocess.run([sys.executable, "-m", "pytest", "--compile-matrix", *PLAIN, *named], cwd=repo.path,
                            check=False, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert gate(repo, path, capsys=capsys)[0] == 2
    assert gate(repo, *globbed(repo), capsys=capsys)[0] == 2
    journal = repo.path / ".compile-matrix/journal.jsonl"
    assert gate(repo, str(journal), capsys=capsys)[0] == 2
    (plan,) = journal.read_text().splitlines()
    assert len(json.loads(plan)["expected"]) == 2


def test_the_command_that_a_failure_prints(repo, capsys):
    """Run as printed it judges one check of one cell; the others keep their verdicts, commit and files."""
    repo.matrix(MATRIX)
    repo.models(BROKEN.replace("if hidden == 8:", "if hidden:"))
    first = commit(repo)
    printed = repo.run(*PLAIN).stdout.str()
    line = next(text for text in printed.splitlines() if " again " in text and ONE in text)
    files = set((repo.path / ".compile-matrix/repro").iterdir())
    assert len(files) == 2
    node = line.rpartition(" ")[2].strip("'")
    assert node.endswith(f"{ONE}::compiles")
    # The check that only follows from that one, by the command changed in its name alone.
    node = node.replace("::compiles", "::graph_breaks")
    repo.models("")
    second = commit(repo, "mended")
    assert repo.run(*PLAIN, node).ret == 0
    block = repo.block()
    cells = {cell["id"]: cell for cell in block["cells"]}
    assert set(cells) == {ONE, OTHER}
    assert cells[ONE]["checks"]["graph_breaks"]["verdict"] == "pass"
    assert set(cells[ONE]["checks"]) == {"compiles", "graph_breaks"}
    assert [each["checks"] for each in cells[ONE]["kept"]] == [["compiles"]]
    assert cells[OTHER]["status"] == "fail"
    assert cells[OTHER]["kept"][0]["git"]["commit"] == first
    assert cells[OTHER]["kept"][0]["finished"]
    assert block["run"]["git"]["commit"] == second
    own = repo.block(".compile-matrix/part/report.json")
    assert [cell["selected"] for cell in own["cells"]] == [True, False]
    before = repo.block(".compile-matrix/previous/report.json")
    assert [cell["status"] for cell in before["cells"]] == ["fail", "fail"]
    # That of `compiles`, whose verdict is kept.
    assert set((repo.path / ".compile-matrix/repro").iterdir()) == files
    assert repo.run(*PLAIN, node.rpartition("::")[0]).ret == 0
    assert set((repo.path / ".compile-matrix/repro").iterdir()) < files


def test_the_gate_judges_what_is_of_one_commit(green, capsys):
    """A part of the same commit completes the report; one of another commit does not, unless that is wanted."""
    assert green.run(*PLAIN, "-m", "compile_cell(hidden=8)").ret == 0
    code, first = gate(green, report(green), capsys=capsys)
    assert code == 0, first
    green.file("models.py", (green.path / "models.py").read_text() + "\n# edited\n")
    assert green.run(*PLAIN, "-m", "compile_cell(hidden=8)").ret == 0
    code, first = gate(green, report(green), capsys=capsys)
    assert code == 2
    assert "1 of 2 cells has verdicts of an earlier run, which had other sources" in first
    assert gate(green, report(green), "--earlier", capsys=capsys)[0] == 0


def test_without_git_nobody_knows_whether_sources_are_the_same(repo, capsys):
    repo.matrix(MATRIX)
    repo.run(*PLAIN)
    repo.run(*PLAIN, "-m", "compile_cell(hidden=8)")
    assert gate(repo, report(repo), capsys=capsys)[0] == 2
    assert gate(repo, report(repo), "--earlier", capsys=capsys)[0] == 0


def test_an_untracked_file_is_a_source_too(repo, capsys):
    """Of two runs with an untracked model that differs, the commit and its changes are the same."""
    repo.matrix(MATRIX)
    text = (repo.path / "models.py").read_text()
    (repo.path / "models.py").unlink()
    commit(repo)
    repo.file("models.py", text)
    repo.run(*PLAIN)
    repo.file("models.py", text + "# edited\n")
    repo.run(*PLAIN, "-m", "compile_cell(hidden=8)")
    assert gate(repo, report(repo), capsys=capsys)[0] == 2


@pytest.mark.parametrize("where", ["ignored", "outside", "fixture"])
def test_sources_that_git_does_not_know(repo, capsys, where):
    """Verdicts are kept as those of the same sources only while what the run imported is as it was."""
    repo.matrix(MATRIX)
    other = repo.path.parent / f"{repo.path.name}-other"
    other.mkdir()
    repo.file("pyproject.toml", f"[tool.pytest.ini_options]\npythonpath = {[str(other)]}\n")
    repo.file(".gitignore", "net_size.py\n")
    size = (other if where == "outside" else repo.path) / "net_size.py"
    size.write_text("SIZE = 6\n")
    if where == "fixture":
        repo.file("test_it.py", "import net_size, torch\n\ndef test_it(recompile_counter):\n"
                                "    torch.compile(lambda x: x + 1, backend='eager')(torch.ones(net_size.SIZE))\n")
    else:
        repo.models("import net_size\n")
    commit(repo)
    tests = ["matrix/default.yaml", *(["test_it.py"] if where == "fixture" else [])]
    assert repo.run(*PLAIN, *tests).ret == 0
    assert any(name.endswith("net_size.py") for name in repo.block()["run"]["sources"])
    part = ["matrix/default.yaml", "-m", "compile_cell(hidden=8)"]
    assert repo.run(*PLAIN, *part).ret == 0
    assert gate(repo, report(repo), capsys=capsys)[0] == 0
    size.write_text("SIZE = 3 + 3\n")
    assert repo.run(*PLAIN, *part).ret == 0
    code, first = gate(repo, report(repo), capsys=capsys)
    assert code == 2
    assert "of an earlier run, which had other sources" in first
    assert repo.run(*PLAIN, *part).ret == 0
    assert gate(repo, report(repo), capsys=capsys)[0] == 2


@pytest.mark.parametrize("file", ["models.py", "test_more.py", "new.py"])
def test_sources_that_are_edited_while_the_run_goes_on(green, capsys, file):
    """The report's commit is that of its beginning. What a run generates is no edit."""
    green.file("test_more.py", f"def test_it():\n    open({file!r}, 'a').write('# edited')\n")
    commit(green, "two")
    result = green.run(*PLAIN, ".")
    assert result.ret == 0
    told = "sources were edited while this run went on, so the gate takes no verdict of it: "
    end = json.loads((green.path / ".compile-matrix/journal.jsonl").read_text().splitlines()[-1])
    for given in ([report(green)], [str(green.path / ".compile-matrix/journal.jsonl")]):
        code, first = gate(green, *given, capsys=capsys)
        if file == "new.py":
            assert code == 0, first
        else:
            assert code == 2
            assert first == f"UNUSABLE: {given[0]}: sources were edited while its run went on: {file}"
    assert (told + file in result.stdout.str()) == (file != "new.py")
    assert end.get("sources_edited", []) == [file] * (file != "new.py")


def test_a_part_that_fails_is_told(green, capsys):
    """A worse verdict of a part holds."""
    green.models(BROKEN)
    assert green.run(*PLAIN, "-m", "compile_cell(hidden=8)").ret == 1
    assert gate(green, report(green), capsys=capsys)[0] == 1


@pytest.mark.parametrize("selection", [["-k", "nothing"], ["-m", "nothing"], ["--deselect", "matrix/default.yaml"]],
                         ids=" ".join)
def test_a_run_that_selects_nothing(green, capsys, selection):
    """It destroys nothing, and its report is not that of the run before."""
    before = green.block()
    result = green.run(*PLAIN, *selection)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*.compile-matrix/report.json is left as an earlier run wrote it, because nothing was "
                                 "judged; the record of this run is .compile-matrix/part/report.json"])
    saved = [line for line in result.outlines if line.startswith("report saved to")]
    assert saved == [f"report saved to: {green.path / '.compile-matrix/part/report.json'}"]
    assert green.block() == before
    assert gate(green, report(green), capsys=capsys)[0] == 2
    assert gate(green, *globbed(green), capsys=capsys)[0] == 2


def test_the_report_before_is_kept(green, capsys):
    """A whole run replaces it, and a part of another matrix does not."""
    before = green.block()
    green.run(*PLAIN)
    assert green.block(".compile-matrix/previous/report.json") == before
    whole = green.block()
    green.matrix(MATRIX.replace("[8, 16]", "[8, 16, 32]"))
    result = green.run(*PLAIN, "-m", "compile_cell(hidden=32)")
    result.stdout.fnmatch_lines(["*is left as an earlier run wrote it, because it is of another matrix; *"])
    assert green.block() == whole
    assert gate(green, report(green), capsys=capsys)[0] == 2
    assert [cell["selected"] for cell in green.block(".compile-matrix/part/report.json")["cells"]] == [False, False,
                                                                                                     True]


@pytest.mark.parametrize("name", [".compile-matrix/report.json", "kept.json"])
def test_a_part_without_an_earlier_report(repo, capsys, name):
    """Its record is the report, and says itself that it is a part."""
    repo.matrix(MATRIX)
    named = [] if name.startswith(".") else [f"--json-report-file={name}"]
    repo.run(*PLAIN, "--compile-checks=compiles", *named)
    assert gate(repo, str(repo.path / name), capsys=capsys)[0] == 2
    repo.run(*PLAIN, "--compile-checks=graph_breaks", *named)
    assert {check for cell in repo.block(name)["cells"] for check in cell["checks"]} == {"compiles", "graph_breaks"}


@pytest.mark.parametrize("plain", [False, True], ids=["json-report", "alone"])
def test_under_xdist_and_without_json_report(green, capsys, plain):
    """The controller alone writes; a worker's selection is the run's."""
    options = ["-p", "no:pytest_jsonreport"] if plain else []
    assert green.run("-n2", "-m", "compile_cell(hidden=8)", *options).ret == 0
    block = green.block()
    assert ["kept" in cell for cell in block["cells"]] == [False, True]
    assert gate(green, report(green), capsys=capsys)[0] == 0


def test_git_does_not_see_the_folder(green):
    assert (green.path / ".compile-matrix/.gitignore").read_text() == "*\n"
    shown = subprocess.run(["git", "status", "--porcelain", "--untracked-files=all"], cwd=green.path, check=True,
                           capture_output=True, text=True).stdout
    assert ".compile-matrix" not in shown


def test_the_journal_of_a_killed_run_is_kept(green):
    """It is all that such a run leaves."""
    journal = green.path / ".compile-matrix/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))
    green.run(*PLAIN, "-m", "compile_cell(hidden=8)")
    green.run(*PLAIN, "-m", "compile_cell(hidden=8)")
    assert (green.path / ".compile-matrix/previous/journal.jsonl").read_text() == "".join(lines[:-1])
