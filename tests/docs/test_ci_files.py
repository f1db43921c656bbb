"""The ready files for engines that spread a matrix over machines: every shard is run once, and the gate takes them all.

Their commands are run as the engine would run them, with a stand-in for pytest that prints what it is given.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from runs import Run

from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plan.selection import cells_of_shard, parse_shard
from pytest_torchcompile.run.options import OPTIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "ci"
OURS = f"pytest-torchcompile() {{ {sys.executable} -m pytest_torchcompile \"$@\"; }}\n"
COMMITS = dict.fromkeys(("GITHUB_SHA", "BUILDKITE_COMMIT", "COMMIT"), "4f2c" * 10)
"""What the engines call the commit that they have checked out."""
FOUND = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
PRINTS = "pytest() { printf '%s\\n' \"$@\"; return ${STATUS:-0}; }\n"


def loaded(name: str) -> list:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def github() -> tuple[str, list[dict[str, str]]]:
    """The command of the cells, and for each job of the engine the variables that it sets."""
    job = loaded("github-shards.yml")[0]["jobs"]["cells"]
    command = next(step["run"] for step in job["steps"] if step.get("name") == "cells")
    shards = job["strategy"]["matrix"]["shard"]
    command = command.replace("${{ matrix.shard }}", "$SHARD").replace("${{ strategy.job-total }}", "$TOTAL")
    return command, [{"SHARD": str(each), "TOTAL": str(len(shards))} for each in shards]


def buildkite() -> tuple[str, list[dict[str, str]]]:
    """As :func:`github`; the agent turns ``$$`` into ``$`` when it uploads a pipeline."""
    step = loaded("buildkite.yml")[0]["steps"][0]
    command = next(each for each in step["commands"] if "--compile-matrix" in each)
    assert not re.search(r"(?<!\$)\$(?!\$)", command), "the agent would fill in a variable of its own"
    count = step["parallelism"]
    return command.replace("$$", "$").replace(".venv/bin/", ""), [
        {"BUILDKITE_PARALLEL_JOB": str(i), "BUILDKITE_PARALLEL_JOB_COUNT": str(count)} for i in range(count)]


def kubernetes() -> tuple[str, list[dict[str, str]]]:
    """As :func:`github`; what is not pytest's is left out."""
    spec = loaded("kubernetes.yaml")[1]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] <= spec["completions"]
    container = spec["template"]["spec"]["containers"][0]
    given = {each["name"]: each["value"] for each in container["env"]}
    command = next(line for line in container["args"][0].splitlines() if line.startswith("pytest "))
    return command, [{**given, "JOB_COMPLETION_INDEX": str(i)} for i in range(spec["completions"])]


ENGINES = {"github-shards.yml": github, "buildkite.yml": buildkite, "kubernetes.yaml": kubernetes}


def given(command: str, variables: dict[str, str], status: int = 0) -> tuple[int, list[str]]:
    """The exit code of a command, and the arguments that pytest gets from it."""
    known = {"PATH": os.defpath, "MATRIX": "matrix/default.yaml", "STATUS": str(status), **variables}
    done = subprocess.run(["bash", "-ec", PRINTS + command], env=known, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def value(arguments: list[str], option: str) -> Iterator[str]:
    yield from (text.partition("=")[2] for text in arguments if text.partition("=")[0] == option)


def test_every_file_is_tested():
    """A file for another engine needs a test that reads it."""
    here = {file.name for file in FOLDER.iterdir()}
    assert here == {"github-cpu.yml", "github-gpu.yml", "github-real.yml", *ENGINES}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_cell_is_run_once(engine):
    """The shards that the engine's jobs ask for are 1/N to N/N, and of the matrix that is named each cell is in one."""
    command, jobs = ENGINES[engine]()
    told = [given(command, job)[1] for job in jobs]
    options = {text.partition("=")[0] for arguments in told for text in arguments if text.startswith("--compile-")}
    assert options == {"--compile-matrix", "--compile-shard"} <= {option.flag for option in OPTIONS}
    shards = [parse_shard(text) for arguments in told for text in value(arguments, "--compile-shard")]
    assert shards == [(number, len(jobs)) for number in range(1, len(jobs) + 1)]
    matrix = {text for arguments in told for text in value(arguments, "--compile-matrix")}
    assert matrix == {"matrix/default.yaml"}
    cells = load_matrix(ROOT / matrix.pop()).cells
    parts = [[planned.cell.id for planned in cells_of_shard(cells, *each)] for each in shards]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(planned.cell.id for planned in cells)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (2, True), (4, True)])
def test_failing_cells_are_the_gates_to_judge(engine, status, fails):
    """A shard fails for mistakes of its own, not for cells that fail."""
    command, jobs = ENGINES[engine]()
    code, _ = given(command, jobs[0], status)
    assert bool(code) == fails


def gate_of(engine: str) -> str:
    """What the file runs to judge the reports in ``reports/*/report.json`` of the current folder."""
    if engine == "github-shards.yml":
        steps = loaded(engine)[0]["jobs"]["gate"]["steps"]
        return next(step["run"] for step in steps if step.get("name") == "gate")
    if engine == "buildkite.yml":
        commands = loaded(engine)[0]["steps"][1]["commands"]
        return "\n".join(each for each in commands if "pytest-torchcompile " in each and "pip" not in each)
    return loaded(engine)[2]["spec"]["template"]["spec"]["containers"][0]["args"][0].replace("/reports/", "reports/")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("lost", "commit"), [(False, "4f2c" * 10), (True, "4f2c" * 10), (False, "a" * 40)],
                         ids=["complete", "a shard is lost", "another commit"])
def test_the_gate_wants_every_shard(engine, lost, commit, tmp_path):
    """Cells that all pass, on all machines, are a pass; without one machine's, or of another commit, they are none."""
    _, jobs = ENGINES[engine]()
    run = Run(model=["net", "gpt"], backend=["inductor", "aot_eager"], mode=["default", "max-autotune"], width=[8, 16])
    run.git = {"commit": commit, "changed": False, "prefix": ""}
    for index, file in enumerate(run.write(tmp_path, len(jobs))):
        (tmp_path / f"reports/{index}").mkdir(parents=True)
        Path(file).rename(tmp_path / f"reports/{index}/report.json")
    if lost:
        (tmp_path / "reports/7/report.json").unlink()
    command = gate_of(engine).replace(".venv/bin/", "").replace("$$", "$")
    done = subprocess.run(["bash", "-ec", OURS + command], cwd=tmp_path, env={"PATH": os.defpath, **COMMITS, **FOUND},
                          capture_output=True, text=True, check=False)
    other = commit not in COMMITS.values()
    assert done.returncode == (2 if lost or other else 0), done.stdout + done.stderr
    assert ("and 4f2c4f2c4f2c is wanted" in done.stdout) == other
    assert (f"shard {len(jobs)} of {len(jobs)} is missing" in done.stdout) == lost, done.stdout
    assert list(tmp_path.rglob("gate.xml"))


def test_shards_keep_their_reports_apart():
    """No shard overwrites another's: the place of its report has its index in it, and is where the gate looks."""
    cells, gate = loaded("buildkite.yml")[0]["steps"]
    assert '"reports/$$BUILDKITE_PARALLEL_JOB"' in cells["commands"][-1]
    assert any("reports/*/report.json" in each for each in gate["commands"])
    assert gate["depends_on"] == [{"step": cells["key"], "allow_failure": True}]
    job, judge = (each["spec"]["template"]["spec"] for each in loaded("kubernetes.yaml")[1:])
    assert '"/reports/$JOB_COMPLETION_INDEX/"' in job["containers"][0]["args"][0].splitlines()[-1]
    assert "/reports/*/report.json" in judge["containers"][0]["args"][0]
    assert job["volumes"] == judge["volumes"]
    assert job["containers"][0]["volumeMounts"] == judge["containers"][0]["volumeMounts"]
    upload = next(step for step in loaded("github-shards.yml")[0]["jobs"]["cells"]["steps"]
                  if "upload-artifact" in step.get("uses", ""))
    assert upload["with"]["name"] == "report-${{ matrix.shard }}"
