"""The GitHub action and the workflow that uses it: their commands are run as the runner would run them. No torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sample_report import SMALL, report, sample_report, written

from pytest_torchcompile.report.provenance import head_fingerprint

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/examples.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
COMMIT = "4f2c" * 10
OURS = f"pytest-torchcompile() {{ {sys.executable} -m pytest_torchcompile \"$@\"; }}\n"


def run_step(name: str, folder: Path, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one step with the variables that it has from inputs."""
    known = {"PATH": "/usr/bin:/bin", "GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/models",
             "GITHUB_SHA": COMMIT, "GITHUB_OUTPUT": str(folder / "output"), **variables}
    assert set(STEPS[name].get("env", {})) <= {*known, "OMP_WAIT_POLICY"}
    return subprocess.run(["bash", "-eo", "pipefail", "-c", before + STEPS[name]["run"]], cwd=folder, env=known,
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (2, True), (4, True)])
def test_cells(tmp_path, status, fails):
    """One shard is run, kernels are kept where the cache looks, and failing cells are left to the gate."""
    stand_in = f"pytest() {{ echo \"$@\" \"$TORCHINDUCTOR_CACHE_DIR\"; return {status}; }}\n"
    done = run_step("cells", tmp_path, stand_in, MATRIX="matrix/m.yaml", SHARD="3/8", WORKERS="2")
    assert bool(done.returncode) == fails
    assert done.stdout == f"--compile-matrix=matrix/m.yaml --compile-shard=3/8 -n 2 {tmp_path}/.inductor\n"
    assert (tmp_path / "output").read_text() == "name=report-3\n"
    assert STEPS["cache"]["with"]["path"].endswith("/.inductor")


def test_gate_page_and_comment(tmp_path):
    """A matrix that fails: annotations, the page all the same, and a comment that has the verdict and the map."""
    cells = sample_report(SMALL)["compile_matrix"]["cells"]
    for index in (1, 2):
        whole = report(cells[index - 1 :: 2], shard={"index": index, "of": 2})
        block = whole["compile_matrix"]
        block["matrix"]["cells_planned"] = [each["id"] for each in cells]
        block["run"]["git"]["commit"] = COMMIT
        block["head_sha256"] = head_fingerprint(block)
        (tmp_path / f"reports/report-{index}").mkdir(parents=True)
        written(whole, tmp_path / f"reports/report-{index}/report.json")
    done = run_step("gate", tmp_path, OURS, POLICY="")
    assert done.returncode == 1, done.stderr
    assert "::error" in done.stdout
    done = run_step("page", tmp_path, OURS)
    assert done.returncode == 0, done.stderr
    kept = STEPS["keep the page"]["with"]["path"].split()
    files = [tmp_path / path.rpartition("/")[2] for path in re.sub(r"\$\{\{.*?\}\}", "X", " ".join(kept)).split()]
    assert all(file.stat().st_size for file in files)
    comment = (tmp_path / "comment.md").read_text(encoding="utf-8")
    assert "torch.compile gate: FAIL" in comment
    assert "1 model has graph breaks" in comment
    # A table begins behind an empty line: else it is told as text.
    assert re.search(r"\n\n\| model .*\n\|[ :|-]+\n", comment)
    assert "models.py:41" in comment.rpartition("| model ")[2]


def test_a_word_that_is_no_command(tmp_path):
    """It is refused before anything is installed."""
    first = ACTION["runs"]["steps"][0]
    done = subprocess.run(["bash", "-c", first["run"]], env={"DO": "cell", "PATH": "/usr/bin:/bin"}, text=True,
                          capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (
        1, "::error::the input do of the action is 'cell'; expected: cells or gate\n")


def test_the_workflow_uses_what_there_is():
    """Inputs that the action has, folders and files that are there, and all shards."""
    jobs = WORKFLOW["jobs"]
    uses = [step["with"] for job in jobs.values() for step in job["steps"] if step.get("uses") == "./"]
    assert [given["do"] for given in uses] == ["cells", "gate"]
    for given in uses:
        assert set(given) <= set(ACTION["inputs"])
        folder = ROOT / given["folder"]
        assert (folder / ACTION["inputs"]["matrix"]["default"]).exists()
        assert (folder / given.get("policy", "")).exists()
    shards = jobs["cells"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{number}/{len(shards)}" for number in range(1, len(shards) + 1)]


def test_no_input_is_pasted_into_a_command():
    """Inputs reach bash as variables: else a text of somebody's could be run."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
