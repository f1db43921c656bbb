"""The files of docs/ci, copied into a repository that ``init`` made: every command is really run, with two shards.

Inductor's cells are left out here, which take longest. `python tests/ci_engines.py` runs all cells and all shards.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import warm_python
import yaml
from ci_engines import ENGINES, FILES, MODEL, Engine, Job, filled, new_repository

from pytest_torchcompile.ranks.serving import WARM

pytestmark = pytest.mark.needs_torch

BROKEN = MODEL.replace("return self.outer", "torch._dynamo.graph_break()\n        return self.outer")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Made by ``init`` for a model that holds."""
    return new_repository(tmp_path_factory.mktemp("ci") / "clean", MODEL, "[eager, aot_eager]")


@pytest.fixture
def variables(warm):
    """Of all jobs: their zygotes have imported torch already, and compile nothing to get warm: no job has Inductor."""
    imported = warm_python.inner_variables(warm["torch"]) if warm else {}
    return {**imported, WARM: "0"}


def failed(jobs: dict[str, Job]) -> list[str]:
    return [name for name, job in jobs.items() if job.failed]


@pytest.mark.parametrize("name", [
    "buildkite.yml", pytest.param("github-shards.yml", marks=pytest.mark.slow),
    pytest.param("kubernetes.yaml", marks=pytest.mark.slow),
])
def test_a_repository_of_init_passes(name, repository, tmp_path, variables):
    """Each shard runs its cells, the gate takes all of them and passes, and the page is there."""
    engine = Engine(tmp_path, repository, shards=2, variables=variables)
    jobs = ENGINES[name](engine, FILES / name)
    assert not failed(jobs), "\n".join(job.printed for job in jobs.values())
    shards = [job for key, job in jobs.items() if key.startswith("cells")]
    assert [len(re.findall("1 cell: 1 pass; 1 ran compiled code", job.printed)) for job in shards] == [1, 1]
    gate = list(jobs.values())[-1]
    assert "2 cells: 2 pass; 2 ran compiled code; 2 shards" in gate.printed
    assert list(engine.artifacts.rglob("compile-matrix.html"))
    assert list(engine.artifacts.rglob("gate.xml"))


def test_the_workflow_that_init_writes(repository, tmp_path, variables):
    """As it stands in the repository: two shards with pytest-xdist, the gate with the policy of init, and the page."""
    engine = Engine(tmp_path, repository, variables=variables)
    jobs = ENGINES["github-cpu.yml"](engine, repository / ".github/workflows/compile-matrix.yml")
    assert list(jobs) == ["cells 1", "cells 2", "gate"]
    assert not failed(jobs), "\n".join(job.printed for job in jobs.values())
    assert "2 cells: 2 pass; 2 ran compiled code; 2 shards" in jobs["gate"].printed
    assert (engine.artifacts / "compile-matrix/compile-matrix.html").exists()
    assert list(engine.caches.glob("compile-baseline-*"))


@pytest.mark.slow
def test_a_graph_break_fails_the_gate_alone(tmp_path, variables):
    """Shards are green and the gate is red; its page is kept all the same, and no baseline is."""
    repository = new_repository(tmp_path / "broken", BROKEN, "[eager, aot_eager]")
    engine = Engine(tmp_path, repository, shards=2, variables=variables)
    jobs = ENGINES["github-cpu.yml"](engine, FILES / "github-cpu.yml")
    assert failed(jobs) == ["gate"], "\n".join(job.printed for job in jobs.values())
    assert jobs["gate"].codes["gate"] == 1
    assert "FAIL: 1 model has graph breaks (net, models.py:" in jobs["gate"].printed
    assert (engine.artifacts / "compile-matrix/compile-matrix.html").exists()
    assert not list(engine.caches.glob("compile-baseline-*"))


def test_without_a_gpu_that_workflow_stops_at_its_doctor(repository, tmp_path, variables):
    """It says what this machine lacks, and nothing behind it runs."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the workflow would run the whole matrix")
    jobs = ENGINES["github-cpu.yml"](Engine(tmp_path, repository, variables=variables), FILES / "github-gpu.yml")
    codes = jobs["matrix"].codes
    assert codes["install"] == 0
    assert codes["what this machine can run"]
    assert "cells" not in codes
    assert "no GPU" in jobs["matrix"].printed


def test_an_unknown_expression_is_an_error():
    """What stands for an engine here must not pass over what it does not know."""
    assert filled({"a": "x ${{ matrix.shard }}"}, {"matrix.shard": "1"}) == {"a": "x 1"}
    with pytest.raises(KeyError, match=r"secrets\.TOKEN"):
        filled({"a": "${{ secrets.TOKEN }}"}, {})


def installs(name: str, folder: Path) -> list[str]:
    """What pip is called with by the steps of a file that install, in a folder."""
    content = yaml.safe_load((FILES / name if name != "action.yml" else FILES.parents[1] / name).read_text())
    if name == "buildkite.yml":
        commands = [each.replace("$$", "$").replace(".venv/bin/", "") for each in content["steps"][0]["commands"]
                    if "pip install" in each]
    else:
        steps = content["runs"]["steps"] if name == "action.yml" else content["jobs"]["cells"]["steps"]
        commands = [next(step["run"] for step in steps if step.get("name") == "install")]
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", "pip() { echo \"$@\"; }\n" + "\n".join(commands)],
                          cwd=folder, env={"PATH": "/usr/bin:/bin", "INSTALL": ""}, check=True, capture_output=True,
                          text=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(("there", "expected"), [
    ({}, ["install pytest-torchcompile"]),
    ({"requirements.txt": "numpy"}, ["install -r requirements.txt", "install pytest-torchcompile"]),
    ({"setup.py": ""}, ["install -e .", "install pytest-torchcompile"]),
    ({"pyproject.toml": '[project]\nname = "x"'}, ["install -e .", "install pytest-torchcompile"]),
    ({"pyproject.toml": "[tool.ruff]", "requirements.txt": "numpy"},
     ["install -r requirements.txt", "install pytest-torchcompile"]),
], ids=["nothing", "requirements", "setup.py", "project", "settings of tools"])
@pytest.mark.parametrize("name", ["github-cpu.yml", "github-shards.yml", "buildkite.yml", "action.yml"])
def test_what_is_installed(name, there, expected, tmp_path):
    """The repository where it is a package, else its requirements."""
    for file, text in there.items():
        (tmp_path / file).write_text(text)
    assert installs(name, tmp_path) == expected
