"""The command `gate`: exit codes, and what it writes for people, for CI and for GitHub."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs import Run, stated

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate import ci_formats, gate_command
from pytest_torchcompile.gate.ci_formats import junit
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.markdown import LONGEST, markdown

STORED = Path(__file__).parents[1] / "reports"
HOSTILE = "<script>alert(1)</script> | `x` [a](b) \x00\x1b[31m \ud800 %0A\n::error::é😀"


@pytest.fixture
def run():
    return Run()


@pytest.fixture(autouse=True)
def _no_github(monkeypatch):
    """These tests may themselves run in GitHub Actions."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def hostile(run):
    run.breaks(run.ids[0], {"file": HOSTILE, "reason": HOSTILE, "hint": HOSTILE})
    run.skips(run.ids[1], reason=HOSTILE)
    return gate(run.reports())


def test_without_arguments_it_judges_the_report_of_the_last_run_here(tmp_path, monkeypatch, capsys):
    """Or its journal; or it says in one sentence what to type."""
    monkeypatch.chdir(tmp_path)
    assert main(["gate"]) == 4
    assert capsys.readouterr().err == (
        "there is no .compile-matrix/report.json here: run `pytest --compile-matrix` first, or name a report, as in "
        "`pytest-torchcompile gate report.json`\n")
    folder = tmp_path / ".compile-matrix"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("")
    assert main(["gate"]) == 2
    assert ".compile-matrix/journal.jsonl" in capsys.readouterr().out
    Run().write(folder)
    assert main(["gate"]) == 0


def test_the_page_is_of_the_last_run_here_too(tmp_path, monkeypatch, capsys):
    """Nobody should have to type what `gate` finds by itself."""
    monkeypatch.chdir(tmp_path)
    assert main(["html"]) == 4
    assert capsys.readouterr().err == (
        "there is no .compile-matrix/report.json here: run `pytest --compile-matrix` first, or name a report, as in "
        "`pytest-torchcompile html report.json`\n")
    folder = tmp_path / ".compile-matrix"
    folder.mkdir()
    Run().write(folder)
    assert main(["html"]) == 0
    assert "compile-matrix.html written" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "code"), [
    (["gate"], 4), (["accept"], 2), (["html", ".compile-matrix/report.json"], 2), (["costs"], 2),
])
def test_where_only_a_model_was_run_its_report_is_named(tmp_path, monkeypatch, capsys, command, code):
    """Such a run has a report of its own, which no command reads unless it is named."""
    monkeypatch.chdir(tmp_path)
    told = "; the last run with --compile-model left .compile-matrix/model/report.json"
    assert main(command) == code
    assert told not in capsys.readouterr().err
    (tmp_path / ".compile-matrix/model").mkdir(parents=True)
    Run().write(tmp_path / ".compile-matrix/model")
    assert main(command) == code
    assert told in capsys.readouterr().err


def test_exit_codes(run, tmp_path, capsys):
    """0 pass, 1 fail, 2 unusable, 3 nothing to judge, 4 usage."""
    good = run.write(tmp_path)
    assert main(["gate", *good]) == 0
    assert capsys.readouterr().out.startswith("PASS: ")
    assert main(["gate", *run.write(tmp_path, 2)[:1]]) == 2
    assert capsys.readouterr().out.startswith("UNUSABLE: shard 2 of 2 is missing")
    run.skips(*run.ids)
    assert main(["gate", *run.write(tmp_path)]) == 3
    assert capsys.readouterr().out.startswith("NOTHING TO JUDGE: ")
    run = Run()
    run.breaks(run.ids[0])
    assert main(["gate", *run.write(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("FAIL: 1 model has graph breaks (net, models.py:12)\n")


def test_json_for_programs(run, tmp_path, capsys):
    """The same verdict as the text, on stdout alone: findings whole, with all of their cells."""
    good = run.write(tmp_path)
    assert main(["gate", "--json", *good]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["verdict"]) == (0, "PASS")
    assert told["sentence"].startswith("PASS: ")
    assert set(told["verdicts"]) == set(run.ids)
    run = Run()
    run.breaks(run.ids[0])
    assert main(["gate", "--json", *run.write(tmp_path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["verdict"]) == (1, "FAIL")
    assert told["verdicts"][run.ids[0]] == "fail"
    worst = told["findings"][0]
    assert (worst["weight"], worst["kind"], worst["cells"]) == ("fail", "graph_breaks", [run.ids[0]])
    assert (worst["file"], worst["line"]) == ("models.py", 12)
    assert run.ids[0] in worst["again"]


def test_json_of_what_cannot_be_judged(run, tmp_path, capsys):
    """Reports that are none have an answer with the same first keys; a wrong call has none."""
    assert main(["gate", "--json", str(tmp_path / "none.json")]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["verdict"], told["findings"]) == (2, "UNUSABLE", [])
    assert "no such file" in told["sentence"]
    assert main(["gate", "--json", "--github", *run.write(tmp_path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--json: --github prints annotations where the JSON would be" in captured.err


@pytest.mark.parametrize(("arguments", "text"), [
    (["r.json", "--policy", "none.yaml"], "none.yaml:1:1: no such file"),
    (["r.json", "--update-policy"], "--update-policy: there is no policy to update; give one by --policy"),
    (["r.json", "--polcy", "p"], "unrecognized arguments"),
    (["r.json", "--junit", "/proc/no/where.xml"], "/proc/no/where.xml: cannot be written"),
])
def test_usage(run, tmp_path, capsys, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    Path(run.write(tmp_path)[0]).rename("r.json")
    assert main(["gate", *arguments]) == 4
    assert text in capsys.readouterr().err


def test_a_mistake_of_ours_is_no_verdict(run, tmp_path, capsys, monkeypatch):
    """Python's own 1 would read as a verdict."""
    monkeypatch.setattr(gate_command, "gate", lambda *_: 1 / 0)
    assert main(["gate", *run.write(tmp_path)]) == 70
    assert "this is a mistake of pytest-torchcompile, and no verdict" in capsys.readouterr().err


def test_unreadable_reports_write_the_files_too(tmp_path, capsys, monkeypatch):
    """CI that shows JUnit or the summary must not show nothing."""
    monkeypatch.chdir(tmp_path)
    Path("r.json").touch()
    assert main(["gate", "r.json", "--junit", "out/j.xml", "--summary", "s.md", "--github"]) == 2
    assert ElementTree.parse("out/j.xml").find(".//error").get("message").startswith("UNUSABLE: r.json: is empty")
    assert Path("s.md").read_text().startswith("### 🔴 torch.compile gate: UNUSABLE")
    assert "::error title=torch.compile gate::UNUSABLE: r.json: is empty" in capsys.readouterr().out


def test_junit_has_a_case_with_properties_for_each_cell(run):
    run.breaks(run.ids[0])
    run.skips(run.ids[1])
    run.plan(run.ids[2], "xfail")
    run.breaks(run.ids[2])
    run.fails(run.ids[3], "crash", "SIGSEGV")
    root = ElementTree.fromstring(junit(gate(run.reports())))
    cells, whole = root
    assert cells.attrib == {"name": "torch.compile cells", "tests": "4", "failures": "1", "errors": "1", "skipped": "2"}
    properties = {each.get("name"): each.get("value") for each in cells[0].iter("property")}
    assert properties.items() >= {"model": "net", "backend": "inductor", "graph_breaks": "1", "recompiles": "0"}.items()
    assert cells[0].get("name") == run.ids[0]
    assert "graph break (1 place(s), 0 allowed)" in cells[0].find("failure").get("message")
    assert [child.tag for case in cells for child in case if child.tag != "properties"] == \
        ["failure", "skipped", "skipped", "error"]
    assert whole[0].find("failure").get("message").startswith("FAIL: ")


def test_hostile_names_are_shown_not_run(run):
    """In XML, Markdown and workflow commands; also what XML and UTF-8 have no form for."""
    outcome = hostile(run)
    ElementTree.fromstring(junit(outcome))
    text = markdown(outcome)
    shown = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.M | re.S)  # in a fenced block nothing is markup
    assert "script" in shown
    assert "<script" not in shown.replace("\\<script", "")
    assert text.encode()
    rows = [line for line in text.splitlines() if line.startswith("| 🔴")]
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    for line in ci_formats.annotate_findings(outcome):
        assert line.startswith("::error ")
        assert "\n" not in line
        assert "\r" not in line


def test_markdown_is_bounded(run):
    run.breaks(run.ids[0], *({"line": k, "reason": "é" * 400_000} for k in range(9)))
    assert len(markdown(gate(run.reports())).encode()) <= LONGEST + 100


def test_annotations_stand_at_the_users_line(run):
    """Relative to the repository, though the matrix may lie in a folder of it; ten at most."""
    run.breaks(run.ids[0])
    (report,) = run.reports()
    report.block["run"]["git"] = {"commit": "a" * 40, "changed": False, "prefix": "models/"}
    (line,) = ci_formats.annotate_findings(gate([stated(report)]))
    assert line.startswith("::error file=models/models.py,line=12,title=torch.compile gate::graph_breaks: graph break")
    assert line.endswith(f"[{run.ids[0]}]")
    for cell in run.ids:
        run.breaks(cell, *({"line": 100 + k, "reason": f"reason {k}"} for k in range(14)))
    lines = list(ci_formats.annotate_findings(gate(run.reports())))
    assert len(lines) == ci_formats.MOST_ANNOTATIONS == 10
    assert "5 more findings: see the summary." in lines[-1]


def test_github(run, tmp_path, capsys, monkeypatch):
    """`--github` adds to the summary of the step; a policy's mistake is shown at its line."""
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["gate", *run.write(tmp_path), "--github"]) == 0
    assert summary.read_text().startswith("before\n### 🟢 torch.compile gate: PASS\n")
    (tmp_path / "p.yaml").write_text("version: 1\nlimit: 3\n")
    assert main(["gate", *run.write(tmp_path), "--github", "--policy", str(tmp_path / "p.yaml")]) == 4
    assert f"::error file={tmp_path}/p.yaml,line=2,title=" in capsys.readouterr().out


def test_update_policy(run, tmp_path, capsys):
    """What was taken over is said, and the verdict is that of the policy that is there now."""
    path = tmp_path / "p.yaml"
    entry = "  - {cells: {model: net}, reason: x, issue: y, until: 2999-01-01}\n"
    path.write_text(f"version: 1\nallowed_failures:\n{entry}")
    reports = run.write(tmp_path)
    assert main(["gate", *reports, "--policy", str(path)]) == 1
    assert main(["gate", *reports, "--policy", str(path), "--update-policy"]) == 0
    out = capsys.readouterr().out
    assert f"taken over: {path}:3: allowed failure taken out: x (y; until 2999-01-01)" in out
    assert main(["gate", *reports, "--policy", str(path)]) == 0


def test_several_baselines_are_the_shards_of_one(run, tmp_path):
    reports = run.write(tmp_path, 2)
    assert main(["gate", *reports, "--baseline", *reports]) == 0


def test_a_reader_that_leaves_early_is_no_mistake_of_ours(run, tmp_path):
    """`gate ... | head -1`: no traceback, and the files are there."""
    for cell in run.ids:
        run.breaks(cell, *({"line": k, "hint": "x" * 20_000} for k in range(20)))
    arguments = [*run.write(tmp_path), "--junit", str(tmp_path / "j.xml")]
    process = subprocess.Popen([sys.executable, "-m", "pytest_torchcompile", "gate", *arguments],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout.readline().startswith("FAIL: ")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141
    assert (tmp_path / "j.xml").is_file()


LOADED = """
import sys
from pytest_torchcompile.cli import main
code = main(["gate", *sys.argv[1:]])
print([name for name in ("torch", "pytest", "hypothesis", "numpy", "pydantic") if name in sys.modules], code)
"""


def test_no_torch_and_no_pytest(tmp_path):
    """At the end of a gate over real reports with a policy, none of the heavy packages was loaded."""
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nlimits: [{recompiles: 1, silent_eager: 0}]\n")
    reports = [str(STORED / "shard-1.json"), str(STORED / "broken-2.json")]
    done = subprocess.run([sys.executable, "-c", LOADED, *reports, "--policy", str(policy), "--baseline",
                           str(STORED / "shard-1.json"), str(STORED / "shard-2.json"), "--github"],
                          capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 1"
    assert done.stdout.startswith("FAIL: 1 model recompiles too often (scorer, models.py:10, new); ")
    assert json.loads((STORED / "broken-2.json").read_text())["compile_matrix"]["run"]["exit_status"] == 1
