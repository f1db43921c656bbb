"""Does --compile-reuse ever hand out a stale pass? Seeded edits of a small project, and what each does to its cells.

``python benchmarks/reuse_damage.py [EDITS] [SEED] [SECONDS] [FIRST]``. Where the seconds are over before the edits it
says which is next; given as FIRST, another call goes on there. One run fills the store. Each edit is then made by
itself: of models, data files, the matrix, packages, environment and settings. For each cell it is asked whether its
result would be reused. What the edit really does is found by running it: a fork of a process with torch builds the
model of the cell and hashes what it computes and the settings that it leaves. A result that would be reused, though
that hash changed or the edit is of what the run was asked, is a stale pass. So is one whose report names a line that
is not the line that it quotes. Every 100th edit is a whole run of pytest.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from edited_project import (
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

from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.ranks.execution import CellResult, Execution
from pytest_torchcompile.report.safe_output import REUSED
from pytest_torchcompile.reuse import machine_facts, run_inputs
from pytest_torchcompile.reuse.cell_reuse import CellReuse
from pytest_torchcompile.run.settings import Settings


class ReusingProject(Project):
    """The project, with runs of pytest in it."""

    untrue: tuple[str, ...] = ()
    """Lines that reused reports have named, and that are others."""

    def run(self, *options: str) -> dict[str, bool]:
        """A whole run of pytest; cell to whether its result was reused."""
        subprocess.run([sys.executable, "-m", "pytest", "--compile-matrix", "--compile-reuse", "-q", *options],
                       cwd=self.root, check=False, capture_output=True)
        block = json.loads((self.root / ".compile-matrix/report.json").read_text())["compile_matrix"]
        return {cell["id"].partition("-")[0]: "reused" in cell for cell in block["cells"]}

    def run_apart(self, *options: str) -> dict[str, bool]:
        """The same, of which nothing is kept."""
        kept, beside = self.root / REUSED, self.root.with_name("kept")
        shutil.copytree(kept, beside)
        reused = self.run(*options)
        shutil.rmtree(kept)
        beside.rename(kept)
        return reused

    def ask(self, *options: str) -> dict[str, bool]:
        """Model to whether the result of its cell would be reused; a matrix that can't be read reuses nothing."""
        machine_facts.machine_facts.cache_clear()
        machine_facts._tools_of.cache_clear()
        run_inputs._importable_names.cache_clear()
        run_inputs._first_hash.cache_clear()
        importlib.invalidate_caches()
        try:
            matrix = load_matrix("matrix/default.yaml")
        except Exception:
            return {}
        given = dict(option.removeprefix("--compile-").split("=") for option in options)
        settings = Settings.read(lambda option: given.get(option.name, option.default))
        execution = Execution(matrix, settings)
        execution.reuse = CellReuse(self.root / REUSED, dict)
        reused = {}
        for planned in matrix.cells:
            checks = matrix.checks_of(planned, settings.checks)
            found = execution.earlier_result(planned, checks)
            reused[planned.cell.model] = isinstance(found, CellResult)
            if isinstance(found, CellResult):
                self.untrue += untrue_lines(found.observation.sections, self.root)
        return reused


def untrue_lines(sections: dict[str, Any], root: Path) -> tuple[str, ...]:
    """The places of a report that are not what it quotes of them."""
    untrue = []
    for each in sections["graph_breaks"]["graph_breaks"]:
        lines = (root / each["file"]).read_text().splitlines()
        if lines[each["line"] - 1].strip() != each["source"].strip():
            untrue.append(f"{each['file']}:{each['line']} is not {each['source']!r}")
    return tuple(untrue)


def behaviour(root: Path, model: str) -> str:
    """The hash of what a model computes, and of the settings of torch then, in a fork that ends with it."""
    read, written = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            text = compute(root, model)
        except BaseException as error:
            text = f"raises {type(error).__name__}"
        os.write(written, hashlib.sha256(text.encode()).hexdigest().encode())
        os._exit(0)
    os.close(written)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def compute(root: Path, model: str) -> str:
    """What a rank process would: import every module that the matrix names, build the model and run it."""
    sys.path[:0] = [str(root), os.environ["PYTHONPATH"]]
    models = importlib.import_module("models")
    torch.manual_seed(0)
    net = getattr(models, model)().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        out = net(models.batch(4))
    # What a compiler is given is more than the numbers that come of it.
    settings = (torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision())
    return f"{out.double().tolist()} {net} {settings}"


def edit_packages(project: Project, chance: random.Random) -> Edit:
    """Another version, another package, another file of a package."""
    info = project.packages / "tiny_ops-1.0.dist-info"
    what = chance.choice(["version", "new", "rebuilt", "path"])
    if what == "version":
        info.rename(info.with_name(f"tiny_ops-1.{chance.randrange(1, 99)}.dist-info"))
    elif what == "new":
        write(project.packages / f"other-{chance.randrange(99)}.0.dist-info/METADATA", "Name: other\n")
    elif what == "rebuilt":
        write(info / "RECORD", f"tiny_ops/__init__.py,sha256={chance.random()},11\n")
    else:
        write(project.packages / "more.pth", f"/somewhere/{chance.random()}\n")
    return Edit("packages", what, every=True)


def edit_matrix(project: Project, chance: random.Random) -> Edit:
    """What is asked of the cells."""
    every = ("plain", "gated", "named", "scaled", "broken")
    rule = "  - limits: {graph_breaks: 1}\n    when: {model: plain}\n    reason: known\nchecks:"
    before, after, models = chance.choice([
        ("dims: {B: 4}", "dims: {B: 6}", ("plain", "named")), ("dims: {B: 5}", "dims: {B: 7}", ("gated",)),
        ("models:gated", "models:plain", ("gated",)), ("recompiles]", "recompiles, aliasing]", every),
        ("[inference]", "[training]", every), ("[eager]", "[aot_eager]", every),
        ("checks:", "autotune_choices: 3\nchecks:", every), ("version: 1", "# a comment\nversion: 1", ()),
        ("checks:", rule, ("plain",)),
    ])
    file = project.root / "matrix/default.yaml"
    write(file, file.read_text().replace(before, after))
    return Edit("matrix", f"{before} is {after!r}", models=models)


def edit_settings(project: Project, chance: random.Random) -> Edit:
    """Options of the run that change what a cell is asked, and those of the fuzzer, by which no check here draws."""
    option = chance.choice(["--compile-checks=equivalence", "--compile-checks=compiles",
                            f"--compile-fuzz-seed={chance.randrange(1, 999)}", "--compile-fuzz-examples=7"])
    return Edit("settings", option, every="checks" in option, options=(option,))


EDITS: tuple[tuple[MakeEdit, int], ...] = (
    (edit_code, 40), (edit_harmless, 12), (edit_imports, 10), (edit_files, 6), (edit_data, 10), (edit_packages, 6),
    (edit_environment, 12), (edit_matrix, 6), (edit_settings, 4),
)


def main(edits: int = 500, seed: int = 0, seconds: int = 10**6, first_edit: int = 0,
         kinds: tuple[tuple[MakeEdit, int], ...] = EDITS) -> int:
    """Print what came of it; 1 if there was a stale pass."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        project = ReusingProject(Path(name).resolve())
        os.chdir(project.root)
        sys.path.insert(0, str(project.packages))
        project.run()
        first = {model: behaviour(project.root, model) for model in project.run()}
        if not all(project.ask().values()) or not project.ask():
            print(f"the first run was not kept as a whole: {project.ask()}")
            return 2

        def judge(number: int, edit: Edit, _chance: random.Random) -> None:
            project.untrue = ()
            whole = number % 100 == 99
            reused = project.run_apart(*edit.options) if whole else project.ask(*edit.options)
            for model, before in first.items():
                changed = edit.every or model in edit.models or behaviour(project.root, model) != before
                tally.cells[edit.kind] += 1
                if changed and reused.get(model):
                    tally.stale.append(f"{number} {model}: {edit.kind}: {edit.what}")
                if not changed and not reused.get(model):
                    tally.counted[edit.kind] += 1
            tally.stale += [f"{number} {edit.kind}: {edit.what}: {line}" for line in project.untrue]

        try_edits(project, kinds, tally, judge, edits, seed, seconds, first_edit)
    tally.print_lines("nothing was changed, and yet the cell ran,")
    return bool(tally.stale)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
