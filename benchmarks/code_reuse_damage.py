"""Does --compile-reuse=code ever take a comparison that would come out otherwise? Seeded edits of a small project.

``python benchmarks/code_reuse_damage.py [EDITS] [SEED] [SECONDS]``. Each cell is run once, and its comparisons kept.
After each edit of models, imports, files, data or environment it is run in a fork with these on offer. Where some are
taken it is run once more without any, and both observations are held against each other: a difference is a stale one.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from edited_project import (
    CODE,
    Edit,
    MakeEdit,
    Project,
    Tally,
    edit_code,
    edit_data,
    edit_environment,
    edit_files,
    edit_harmless,
    edit_imports,
    try_edits,
    write,
)

from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.ranks.execution import Execution
from pytest_torchcompile.run.settings import Settings

CHECKS = ("compiles", "equivalence", "aliasing")


def edit_one_side(project: Project, chance: random.Random) -> Edit:
    """What only eager, only compiled code, only a later call or only a run in float64 computes."""
    condition = chance.choice(["torch.compiler.is_compiling()", "not torch.compiler.is_compiling()",
                               "x.dtype == torch.float64", "x.shape[0] == 5", "x.sum() > 0"])
    factor = chance.choice(["1.5", "1.0", "(1 + 1e-7)"])
    file = project.root / "layers.py"
    text = file.read_text().replace("class Unused", "    def forward(self, x):\n        y = super().forward(x)\n"
                                    f"        return y * {factor} if {condition} else y\n\n\nclass Unused", 1)
    write(file, text)
    return Edit("one side", f"* {factor} if {condition}")


def edit_writing(project: Project, chance: random.Random) -> Edit:
    """The same written otherwise."""
    before, after = chance.choice([
        ("return self.two(torch.relu(self.one(x)))", "y = torch.relu(self.one(x))\n        return self.two(y)"),
        ("return super().forward(x) * self.scale", "scale = self.scale\n        return super().forward(x) * scale"),
        ("def mix(x, share):", "def mix(x, share, unused=None):"), ("def plain():\n    return Plain()",
                                                                 "def plain():\n    made = Plain()\n    return made"),
    ])
    file = project.root / "models.py"
    write(file, file.read_text().replace(before, after))
    return Edit("writing", after)


EDITS: tuple[tuple[MakeEdit, int], ...] = (
    (edit_code, 35), (edit_one_side, 20), (edit_writing, 15), (edit_imports, 10), (edit_files, 6), (edit_data, 8),
    (edit_environment, 3), (edit_harmless, 3),
)


def jobs_of() -> dict[str, Job]:
    """What each model's cell is asked; none of a matrix that can't be read."""
    matrix = load_matrix("matrix/default.yaml")
    execution = Execution(matrix, Settings.read(lambda option: option.default))
    return {planned.cell.model: execution._make_job(planned, CHECKS) for planned in matrix.cells}


def run_apart(job: Job, packages: str) -> dict[str, Any]:
    """The observation of a cell, in a fork that ends with it."""
    read, written = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        told: dict[str, Any] = {}
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.path[:0] = [job.root, packages]
            importlib.invalidate_caches()
            from pytest_torchcompile.run.runner import run_cell

            told, _ = run_cell(job)
        except BaseException as error:
            told = {"failure": repr(error)}
        with os.fdopen(written, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(written)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    told = json.loads(text)
    return dict(told)


def judged(observation: dict[str, Any]) -> str:
    """What its checks judge, as text."""
    sections = observation.get("sections", {})
    return json.dumps([observation.get("failure"), *(sections.get(check) for check in CHECKS[1:])], sort_keys=True)


def main(edits: int = 500, seed: int = 0, seconds: int = 10**6) -> int:
    """Print what came of it; 1 if a comparison was stale."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        project = Project(Path(name).resolve())
        os.chdir(project.root)
        packages = str(project.packages)
        jobs = jobs_of()
        first = {model: run_apart(replace(job, comparisons={}), packages) for model, job in jobs.items()}

        def judge(number: int, edit: Edit, chance: random.Random) -> None:
            for model in [chance.choice(sorted(first))] if seconds < 10**6 else first:
                job = jobs[model]
                now = run_apart(replace(job, comparisons=first[model]["comparisons"]["made"]), packages)
                tally.cells[edit.kind] += 1
                if (now.get("comparisons") or {}).get("taken"):
                    tally.counted[edit.kind] += 1
                    if judged(now) != judged(run_apart(replace(job, comparisons={}), packages)):
                        tally.stale.append(f"{number} {model}: {edit.kind}: {edit.what}")

        try_edits(project, EDITS, tally, judge, edits, seed, seconds)
    print(f"edits of {', '.join(CODE)} and what they read")
    tally.print_lines("comparisons were taken")
    return bool(tally.stale)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
