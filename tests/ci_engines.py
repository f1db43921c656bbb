"""What runs a file of docs/ci on this machine: each job in a clone of its own, each command by bash.

What an engine does itself is done here in small: clones, artifacts, caches, expressions. Commands are run as they are,
with ``python``, ``pip``, ``pytest`` and ``pytest-torchcompile`` of this very Python. An unknown word is an error.

``python tests/ci_engines.py`` runs all files with as many shards as they have, and prints how long each took.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).parents[1] / "docs" / "ci"
COMMANDS = {"python": "", "python3": "", "pip": "-m pip", "pytest": "-m pytest",
            "pytest-torchcompile": "-m pytest_torchcompile"}
OF_THIS_RUN = ("PYTEST_", "GITHUB_", "BUILDKITE", "CI")
"""How the variables begin that are of the run of these tests, and not of a job."""
MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))
"""


@dataclass
class Job:
    """One job of an engine: where it ran, the exit codes of its steps in order, and all that they printed."""

    name: str
    folder: Path
    codes: dict[str, int] = field(default_factory=dict)
    printed: str = ""

    @property
    def failed(self) -> bool:
        return any(self.codes.values())


class Engine:
    """A place for jobs, artifacts and caches, around one repository."""

    def __init__(self, place: Path, repository: Path, shards: int = 0,
                 variables: Mapping[str, str] | None = None) -> None:
        """``variables`` have all jobs."""
        self.variables = dict(variables or {})
        self.place, self.repository, self.shards = place, repository, shards
        self.artifacts = place / "artifacts"
        self.caches = place / "caches"
        self.bin = place / "bin"
        self.count = 0
        for folder in (self.artifacts, self.caches, self.bin):
            folder.mkdir(parents=True, exist_ok=True)
        for name, words in COMMANDS.items():
            write_command(self.bin / name, f'exec {sys.executable} {words} "$@"')
        # An environment of its own would have to download torch: its commands are these.
        write_command(self.bin / "python3", 'if test "$1 $2" = "-m venv"; then mkdir -p "$3/bin"; '
                                            f'cp {self.bin}/* "$3/bin"; exit; fi; exec {sys.executable} "$@"')
        write_command(self.bin / "buildkite-agent", 'test "$1 $2 $4" = "artifact download ." && '
                                                    f'cd {self.artifacts} && cp -r --parents $3 "$OLDPWD"')
        self.commit = output_of(["git", "rev-parse", "HEAD"], repository)

    def job(self, name: str) -> Job:
        """A job in a fresh clone."""
        self.count += 1
        folder = self.place / f"job{self.count}"
        output_of(["git", "clone", "-q", str(self.repository), str(folder)], self.place)
        return Job(name, folder)

    def run(self, job: Job, name: str, command: str, variables: Mapping[str, str], shell: str = "-eo pipefail") -> int:
        """Run one command as the engine does, and keep what it printed."""
        # All others, for a zygote is forked only where it has the variables of the warm interpreter.
        known = {key: value for key, value in os.environ.items() if not key.startswith(OF_THIS_RUN)}
        known |= self.variables
        # What the job's own commands have put in the PATH comes first, as in GitHub Actions.
        added = (job.folder / "added_path").read_text().split() if (job.folder / "added_path").exists() else []
        known["PATH"] = os.pathsep.join([*added, str(self.bin), "/usr/bin", "/bin"])
        done = subprocess.run(["bash", *shell.split(), "-c", command], cwd=job.folder, env={**known, **variables},
                              text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        job.codes[name] = done.returncode
        job.printed += done.stdout
        return done.returncode


def write_command(file: Path, text: str) -> None:
    """An executable of one line."""
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def output_of(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def new_repository(folder: Path, model: str = MODEL, backends: str = "") -> Path:
    """An empty repository with one model, and what ``init`` writes for it; all of it committed.

    ``backends``: the YAML list that takes the place of all three.
    """
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(model)
    output_of(["git", "init", "-q", "-b", "main", "."], folder)
    output_of([sys.executable, "-m", "pytest_torchcompile", "init", "models:Net", "--no-run"], folder)
    if backends:
        matrix = folder / "matrix/default.yaml"
        matrix.write_text(re.sub(r"backend: \[.*?\]", f"backend: {backends}", matrix.read_text()))
    output_of(["git", "add", "-A"], folder)
    output_of(["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "commit", "-qm", "first"], folder)
    return folder


# ---------------------------------------------------------------------------------------------------- GitHub Actions
def github(engine: Engine, file: Path, event: str = "push") -> dict[str, Job]:
    """Run a workflow for a push to the main branch, or for a ``pull_request``."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    jobs: dict[str, Job] = {}
    for name, job in content["jobs"].items():
        shards = job.get("strategy", {}).get("matrix", {}).get("shard", [None])
        if engine.shards and len(shards) > engine.shards:
            shards = shards[: engine.shards]
        for shard in shards:
            known = github_words(engine, event, shard, len(shards))
            jobs[f"{name} {shard or ''}".strip()] = github_job(engine, name, job, content.get("env", {}), known)
    return jobs


def github_words(engine: Engine, event: str, shard: int | None, shards: int) -> dict[str, str]:
    """The expressions that the files use, and what GitHub puts in their places."""
    pull = event == "pull_request"
    return {
        "github.workspace": "WORKSPACE",
        "github.run_id": str(time.time_ns()),
        "github.event_name == 'pull_request'": str(pull),
        "github.event_name == 'pull_request' && '--compile-reuse' || ''": "--compile-reuse" if pull else "",
        "github.ref == 'refs/heads/main'": str(not pull),
        "github.ref": "refs/heads/main",
        "!cancelled()": "True",
        "runner.arch": "X64",
        "matrix.shard": str(shard),
        "strategy.job-total": str(shards),
        "steps.torch.outputs.version": "2",
        "": engine.commit,
    }


def github_job(engine: Engine, name: str, content: dict, variables: dict, known: dict[str, str]) -> Job:
    job = engine.job(name)
    known["github.workspace"] = str(job.folder)
    outputs = job.folder / "outputs"
    given = {"GITHUB_SHA": engine.commit, "GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/models",
             "GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(outputs),
             "RUNNER_TEMP": str(job.folder / "temp"),
             "GITHUB_PATH": str(job.folder / "added_path"), "GITHUB_ENV": str(job.folder / "added_env"),
             **filled(variables, known), **filled(content.get("env", {}), known)}
    after: list[Callable[[], None]] = []
    for number, step in enumerate(content["steps"]):
        condition = filled({"": step.get("if", "")}, known)[""]
        # A step without a condition is left out behind one that failed.
        if condition == "False" or (job.failed and "cancelled" not in str(step.get("if", ""))):
            continue
        options = filled(step.get("with", {}), known)
        if "uses" in step:
            github_action(engine, job, step["uses"], options, after)
            continue
        for line in lines_of(job.folder / "added_env"):
            given.update([line.partition("=")[::2]])
        command = filled({"": step["run"]}, known)[""]
        step_name = step.get("name", f"step {number}")
        engine.run(job, step_name, command, {**given, **filled(step.get("env", {}), known)})
    for save in after:
        save()
    return job


def filled(values: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Texts with their expressions filled in; one that is not known raises KeyError with it."""
    return {key: re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda found: known[found[1]], str(value))
            for key, value in values.items()}


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def github_action(engine: Engine, job: Job, uses: str, options: dict[str, str], after: list) -> None:
    """What a ``uses:`` does. A cache is saved when its job is done."""
    action = uses.partition("@")[0]
    if action in ("actions/checkout", "actions/setup-python"):
        return
    if action == "actions/upload-artifact":
        kept = engine.artifacts / options["name"]
        shutil.rmtree(kept, ignore_errors=True)
        for path in options["path"].split():
            found = job.folder / path
            # As the action does: what is missing is left out, with a warning.
            if found.is_dir():
                shutil.copytree(found, kept, dirs_exist_ok=True)
            elif found.exists():
                kept.mkdir(exist_ok=True)
                shutil.copy(found, kept)
    elif action == "actions/download-artifact":
        for found in engine.artifacts.glob(options["pattern"]):
            shutil.copytree(found, job.folder / options["path"] / found.name)
    elif action in ("actions/cache", "actions/cache/restore", "actions/cache/save"):
        target = job.folder / options["path"]
        if not action.endswith("save"):
            restore(engine.caches, target, options.get("restore-keys", "").split())
        if not action.endswith("restore"):
            after.append(lambda: save_cache(target, engine.caches / options["key"]))
    else:
        raise KeyError(uses)


def restore(caches: Path, target: Path, prefixes: list[str]) -> None:
    """The newest cache whose key begins with one of these, if there is one."""
    for prefix in prefixes:
        found = sorted(caches.glob(f"{prefix}*"), key=lambda folder: folder.stat().st_mtime_ns)
        if found:
            shutil.copytree(found[-1], target, dirs_exist_ok=True)
            return


def save_cache(target: Path, kept: Path) -> None:
    if target.exists():
        shutil.copytree(target, kept)


# ---------------------------------------------------------------------------------------------------------- Buildkite
def buildkite(engine: Engine, file: Path) -> dict[str, Job]:
    """Run a pipeline: each job of each step."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    jobs = {}
    for step in content["steps"]:
        count = step.get("parallelism", 1)
        count = min(count, engine.shards or count)
        for index in range(count):
            job = engine.job(step["key"])
            jobs[f"{step['key']} {index}"] = job
            given = {**content["env"], "BUILDKITE_PARALLEL_JOB": str(index), "BUILDKITE_COMMIT": engine.commit,
                     "BUILDKITE_PARALLEL_JOB_COUNT": str(count)}
            for command in step["commands"]:
                # The agent runs the commands of a step until one fails.
                if engine.run(job, command, command.replace("$$", "$"), given, "-e"):
                    break
            for pattern in step["artifact_paths"]:
                for found in job.folder.glob(pattern):
                    keep_file(found, engine.artifacts / found.relative_to(job.folder))
    return jobs


def keep_file(found: Path, kept: Path) -> None:
    if found.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, kept)


# --------------------------------------------------------------------------------------------------------- Kubernetes
def kubernetes(engine: Engine, file: Path) -> dict[str, Job]:
    """Run each Pod of both Jobs; the volume is a folder."""
    jobs = {}
    for content in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        if content["kind"] == "Job":
            for index, job in pods(engine, content["spec"]):
                jobs[f"{content['metadata']['labels']['part']} {index}"] = job
    return jobs


def pods(engine: Engine, spec: dict) -> Iterator[tuple[int, Job]]:
    count = spec.get("completions", 1)
    shown = min(count, engine.shards or count)
    (container,) = spec["template"]["spec"]["containers"]
    (script,) = container["args"]
    given = {each["name"]: each["value"] for each in container["env"]}
    for index in range(shown):
        # The image has the repository in /work.
        job = engine.job("pod")
        if "SHARDS" in given:
            given |= {"SHARDS": str(shown), "JOB_COMPLETION_INDEX": str(index)}
        command = script.replace("/reports/", f"{engine.artifacts}/")
        engine.run(job, "pod", command, given, container["command"][1])
        yield index, job


ENGINES: dict[str, Callable[[Engine, Path], dict[str, Job]]] = {
    "github-cpu.yml": github, "github-shards.yml": github, "buildkite.yml": buildkite, "kubernetes.yaml": kubernetes}


def main() -> int:
    """Run all files with all their shards. Returns 1 if a job failed."""
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        repository = new_repository(Path(place) / "repository")
        for name, run in ENGINES.items():
            begun = time.monotonic()
            jobs = run(Engine(Path(place) / name, repository), FILES / name)
            failed = [key for key, job in jobs.items() if job.failed]
            seconds = time.monotonic() - begun
            print(f"{name}: {len(jobs)} jobs in {seconds:.0f} s, failed: {failed or 'none'}", flush=True)
            for key in failed:
                print(jobs[key].printed)
            bad += len(failed)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
