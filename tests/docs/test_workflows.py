"""The ready workflow files: their commands are commands of ours, and run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sample_report import SMALL, report, sample_report, written

from pytest_torchcompile.report.provenance import head_fingerprint
from pytest_torchcompile.run.options import OPTIONS

FOLDER = Path(__file__).parents[2] / "docs" / "ci"
FILES = sorted(FOLDER.glob("github-*.yml"))
COMMIT = "4f2c" * 10
HERE = f"set -eo pipefail\npytest-torchcompile() {{ {sys.executable} -m pytest_torchcompile \"$@\"; }}\n"


def steps(file: Path) -> dict[str, str]:
    """The commands of a workflow by the name of their step."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {f"{job}: {step.get('name', step['run'])}": step["run"]
            for job, all_ in content["jobs"].items() for step in all_["steps"] if "run" in step}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step as the runner does."""
    known = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/models", "GITHUB_SHA": COMMIT}
    return subprocess.run(["bash", "-c", HERE + command], cwd=folder, env={"PATH": "/usr/bin:/bin", **known},
                          capture_output=True, text=True, check=False)


def test_there_are_workflows():
    """One for CPU, one for GPU runners, one for shards, and the weekly one of this repository."""
    assert [file.stem for file in FILES] == ["github-cpu", "github-gpu", "github-real", "github-shards"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_options_exist(file):
    """Options of pytest that the steps use are ours, and every shard is run and kept."""
    text = "\n".join(steps(file).values())
    assert set(re.findall(r"--compile-[\w-]+", text)) <= {option.flag for option in OPTIONS}
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for job in content["jobs"].values():
        shards = job.get("strategy", {}).get("matrix", {}).get("shard", [])
        total = {str(len(shards)), "${{ strategy.job-total }}"} if shards else set()
        assert set(re.findall(r"matrix\.shard \}\}/(\d+|\$\{\{.*?\}\})", str(job))) <= total
        assert not shards or "--compile-shard=${{ matrix.shard }}/" in str(job)


@pytest.fixture
def folder(tmp_path):
    """Two shards' artifacts, and a baseline, where the CPU workflow has them."""
    cells = sample_report(SMALL)["compile_matrix"]["cells"]
    for index in (1, 2):
        block = report(cells[index - 1 :: 2], shard={"index": index, "of": 2})
        block["compile_matrix"]["matrix"]["cells_planned"] = [each["id"] for each in cells]
        block["compile_matrix"]["run"]["git"]["commit"] = COMMIT
        block["compile_matrix"]["head_sha256"] = head_fingerprint(block["compile_matrix"])
        for name in (f"reports/report-{index}/report.json", f"baseline/{index}.json"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            written(block, tmp_path / name)
    return tmp_path


def test_gate_and_page_run(folder):
    """The gate judges both shards, and fails; the page is written all the same, with links to the commit."""
    commands = steps(FOLDER / "github-cpu.yml")
    done = run(commands["gate: gate"], folder)
    assert done.returncode == 1, done.stderr
    assert "FAIL: 1 model has graph breaks (moe_lite, models.py:41)" in done.stdout
    assert "::error" in done.stdout
    assert (folder / "gate.xml").exists()
    done = run(commands["gate: page"], folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "compile-matrix.html").read_text()
    assert f'href="https://example.org/us/models/blob/{COMMIT}/models.py#L41"' in page
    assert (folder / "compile-matrix.svg").exists()


def test_without_a_baseline(folder):
    """The first run has none to compare with."""
    for file in (folder / "baseline").iterdir():
        file.unlink()
    done = run(steps(FOLDER / "github-cpu.yml")["gate: page"], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (2, True), (4, True)])
def test_failing_cells_are_the_gates_to_judge(tmp_path, status, fails):
    """A shard fails for mistakes of its own, not for cells that fail."""
    for file in FILES:
        command = next(c for name, c in steps(file).items() if name.endswith(": cells"))
        done = run(f"pytest() {{ return {status}; }}\n{re.sub(r'[$]{{.*?}}', '1', command)}", tmp_path)
        assert bool(done.returncode) == fails, done.stderr
