"""Does --compile-reuse ever hand out a stale pass? Seeded edits of a small project, and what each does to its cells.

``python benchmarks/reuse_damage.py [EDITS] [SEED]``. One run of pytest fills the store. Then each edit is made by
itself: of models, data files, the matrix, packages, environment and settings. For each cell it is asked whether its
result would be reused. What the edit really does is found by running it: a fork of a process with torch builds the
model of the cell and hashes what it computes and the settings that it leaves. A result that would be reused, though
that hash changed or the edit is of what the run was asked, is a stale pass. Every 100th edit is a whole run of pytest.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.ranks.execution import CellResult, Execution
from pytest_torchcompile.report.safe_output import REUSED
from pytest_torchcompile.reuse import cell_key, run_inputs
from pytest_torchcompile.reuse.cell_reuse import CellReuse
from pytest_torchcompile.run.settings import Settings

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "models.py": '''
"""Three models that share a layer, and one that reads data."""
import json
import os

import torch
from layers import Layer
from tiny_ops import double

WIDTH = 6
SETTINGS = {}


class Plain(torch.nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(WIDTH, 8), Layer(8, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x))) * 1.5


class Gated(torch.nn.Module):
    """A gate."""

    def __init__(self):
        super().__init__()
        self.one, self.gate = Layer(WIDTH, 4), Layer(WIDTH, 4)

    def forward(self, x):
        return double(self.one(x)) * mix(self.gate(x), 0.25)


def mix(x, share):
    # A part of it is smooth.
    return share * torch.sigmoid(x) + (1 - share) * x.abs()


class Scaled(Plain):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


def plain():
    return Plain()


def gated():
    return Gated()


def named():
    return getattr(__import__("extra"), os.environ.get("MODEL_KIND", "First"))()


def scaled():
    """The scale is read from a file, the shift is found in a folder."""
    with open("data/scale.json") as file:
        SETTINGS.update(json.load(file))
    return Scaled(SETTINGS["scale"] + len(os.listdir("data/parts")))


def batch(B):
    return torch.randn(B, WIDTH) + 0.125
''',
    "layers.py": '''
import torch
from sizes import BIAS, START


class Layer(torch.nn.Linear):
    def __init__(self, inside, outside):
        super().__init__(inside, outside, bias=BIAS)
        with torch.no_grad():
            self.weight.mul_(START)


class Unused(torch.nn.Module):
    def forward(self, x):
        return x + 3.25
''',
    "sizes.py": "BIAS = True\nSTART = 1.25\n",
    "extra.py": '''
import torch
from layers import Layer


class First(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(6, 2)

    def forward(self, x):
        return self.layer(x).tanh() + 0.75


class Second(First):
    def forward(self, x):
        return self.layer(x).cos() - 0.5
''',
    "data/scale.json": '{"scale": 2.5, "unused": 7}\n',
    "data/parts/one.txt": "1\n",
    "matrix/default.yaml": '''
version: 1
models:
  plain: {factory: "models:plain", inputs: "models:batch", dims: {B: 4}}
  gated: {factory: "models:gated", inputs: "models:batch", dims: {B: 5}}
  named: {factory: "models:named", inputs: "models:batch", dims: {B: 4}}
  scaled: {factory: "models:scaled", inputs: "models:batch", dims: {B: 3}}
axes:
  backend: [eager]
  phase: [inference]
checks: [compiles, equivalence]
''',
}
PACKAGE = {
    "tiny_ops/__init__.py": "def double(x):\n    return x * 2.0\n",
    "tiny_ops-1.0.dist-info/METADATA": "Name: tiny_ops\nVersion: 1.0\n",
    "tiny_ops-1.0.dist-info/RECORD": "tiny_ops/__init__.py,sha256=abc,10\n",
}
CODE = ("models.py", "layers.py", "sizes.py", "extra.py")


@dataclass(frozen=True)
class Edit:
    """One edit: what was done, and whether every cell must run after it."""

    kind: str
    what: str
    every: bool = False
    models: tuple[str, ...] = ()
    """Those that are asked another thing after it."""
    options: tuple[str, ...] = ()


class Project:
    """The project, in a folder of its own, and an environment that is put back."""

    def __init__(self, folder: Path) -> None:
        self.root, self.packages = folder / "project", folder / "lib" / "site-packages"
        self.before = dict(os.environ)
        self.variables = {**self.before, "PYTHONPATH": str(self.packages), "PYTEST_TORCHCOMPILE_WARM": "0",
                          "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.restore()

    def restore(self) -> None:
        """Every file and variable as it was at first, but what is kept of results."""
        for folder, files in ((self.root, FILES), (self.packages, PACKAGE)):
            for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else ():
                name = path.relative_to(folder).as_posix()
                if path.is_file() and name not in files and ".compile-matrix" not in path.parts:
                    path.unlink()
                elif path.is_dir() and ".compile-matrix" not in path.parts and not any(path.iterdir()):
                    path.rmdir()
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file() or path.read_text() != text:
                    write(path, text)
        os.environ.clear()
        os.environ.update(self.variables)

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
        cell_key.machine_digests.cache_clear()
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
        return reused


def write(path: Path, text: str) -> None:
    """Write a file that is older than the processes to come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    long_ago = time.time() - random.Random(text).randrange(5, 500)
    os.utime(path, (long_ago, long_ago))


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


# --------------------------------------------------------------------------------------------------- the edits


def edit_code(project: Project, chance: random.Random) -> Edit:
    """Another number, function or operator somewhere in the code, or a package's."""
    file = chance.choice([project.root / name for name in CODE] + [project.packages / "tiny_ops/__init__.py"])
    text = file.read_text()
    places = list(re.finditer(r"\b\d+\.\d+\b|\b[2-9]\b|relu|sigmoid|tanh|\.abs\(\)|\.cos\(\)| \* | \+ |True", text))
    place = chance.choice(places)
    old = place[0]
    other = {"relu": "tanh", "sigmoid": "tanh", "tanh": "sin", ".abs()": ".exp()", ".cos()": ".sin()", " * ": " + ",
             " + ": " - ", "True": "False"}
    new = other.get(old) or (f"{float(old) + 0.5}" if "." in old else str(int(old) + 1))
    write(file, text[:place.start()] + new + text[place.end():])
    return Edit("code", f"{file.name}: {old!r} is {new!r} at {place.start()}")


def edit_harmless(project: Project, chance: random.Random) -> Edit:
    """A comment, a docstring or blank lines."""
    file = project.root / chance.choice(CODE)
    lines = file.read_text().splitlines()
    at = chance.choice([i for i, line in enumerate(lines) if line and not line.startswith((" ", '"', ")"))])
    lines[at:at] = chance.choice([["# a comment"], [""], ["", "# another", ""]])
    write(file, "\n".join(lines) + "\n")
    return Edit("comment", f"{file.name}: line {at}")


def edit_imports(project: Project, chance: random.Random) -> Edit:
    """A statement that runs when a module is imported, or a definition that takes another's place."""
    text = chance.choice([
        "import torch\ntorch.set_default_dtype(torch.float64)\n",
        "import torch\ntorch.set_float32_matmul_precision('medium')\n",
        "import layers\nlayers.START = 2.0\n",
        "import torch\ndef strange(x):\n    return x * 3\ntorch.relu = strange\n",
        "import layers\nclass Layer(layers.Layer if hasattr(layers, 'Layer') else object):\n    extra = 1\n",
        "def mix(x, share):\n    return x * 4\n",
        "class Plain:\n    pass\n",
        "def __getattr__(name):\n    return 5\n",
        "import torch\nclass Late(torch.nn.Module):\n    torch.set_default_dtype(torch.float64)\n",
        "def set_up(how=__import__('torch').set_default_dtype(__import__('torch').float64)):\n    pass\n",
    ])
    file = project.root / chance.choice(CODE)
    write(file, file.read_text() + "\n\n" + text)
    return Edit("import", f"{file.name}: {text!r}")


def edit_files(project: Project, chance: random.Random) -> Edit:
    """A module that takes the place of another one, or is gone."""
    what = chance.choice(["package", "shadow", "gone", "packages' own"])
    name = chance.choice(["layers", "sizes", "extra"])
    if what == "package":
        text = (project.root / f"{name}.py").read_text()
        write(project.root / name / "__init__.py", text.replace("1.25", "1.75").replace("0.75", "0.5"))
    elif what == "shadow":
        write(project.root / "tiny_ops.py", "def double(x):\n    return x * 2.5\n")
    elif what == "gone":
        (project.root / f"{name}.py").unlink()
    else:
        write(project.packages / f"{name}.py", "START = 4.0\nBIAS = False\n")
    return Edit("files", f"{what} {name}")


def edit_data(project: Project, chance: random.Random) -> Edit:
    """What a model reads, or lists; or only when it was written."""
    what = chance.choice(["scale", "unused", "part", "gone", "touched", "text"])
    if what == "scale":
        write(project.root / "data/scale.json", json.dumps({"scale": chance.random()}))
    elif what == "unused":
        write(project.root / "data/scale.json", json.dumps({"scale": 2.5, "unused": chance.random()}))
    elif what == "part":
        write(project.root / f"data/parts/{chance.randrange(99)}.txt", "")
    elif what == "gone":
        (project.root / chance.choice(["data/scale.json", "data/parts/one.txt"])).unlink()
    elif what == "touched":
        os.utime(project.root / "data/scale.json")
    else:
        write(project.root / "README.md", "A text that nobody reads.")
    return Edit("data", what)


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


def edit_environment(project: Project, chance: random.Random) -> Edit:
    """A variable that the project reads, any other, or one of CI's."""
    counted = ("MODEL_KIND", "OMP_NUM_THREADS", "TORCH_LOGS_OUT", "MY_FLAG", "TORCHINDUCTOR_FREEZING")
    name = chance.choice([*counted, "GITHUB_RUN_ID", "TERM"])
    values = {"MODEL_KIND": "Second", "OMP_NUM_THREADS": "2"}
    os.environ[name] = values.get(name, str(chance.randrange(1, 999)))
    return Edit("environment", name, every=name in counted)


def edit_matrix(project: Project, chance: random.Random) -> Edit:
    """What is asked of the cells."""
    every = ("plain", "gated", "named", "scaled")
    rule = "rules:\n  - limits: {graph_breaks: 1}\n    when: {model: plain}\n    reason: known\nchecks:"
    before, after, models = chance.choice([
        ("dims: {B: 4}", "dims: {B: 6}", ("plain", "named")), ("dims: {B: 5}", "dims: {B: 7}", ("gated",)),
        ("models:gated", "models:plain", ("gated",)), ("equivalence]", "equivalence, aliasing]", every),
        ("[inference]", "[training]", every), ("[eager]", "[aot_eager]", every),
        ("checks:", "autotune_choices: 3\nchecks:", every), ("version: 1", "# a comment\nversion: 1", ()),
        ("checks:", rule, ("plain",)),
    ])
    file = project.root / "matrix/default.yaml"
    write(file, file.read_text().replace(before, after))
    return Edit("matrix", f"{before} is {after!r}", models=models)


def edit_settings(project: Project, chance: random.Random) -> Edit:
    """Options of the run that change what a cell is asked."""
    option = chance.choice(["--compile-checks=equivalence", f"--compile-fuzz-seed={chance.randrange(1, 999)}",
                            "--compile-fuzz-examples=7", "--compile-fuzz-seconds=9"])
    return Edit("settings", option, every=True, options=(option,))


EDITS: tuple[tuple[Callable[[Project, random.Random], Edit], int], ...] = (
    (edit_code, 40), (edit_harmless, 12), (edit_imports, 10), (edit_files, 6), (edit_data, 10), (edit_packages, 6),
    (edit_environment, 6), (edit_matrix, 6), (edit_settings, 4),
)


def main(edits: int = 500, seed: int = 0) -> int:
    """Print what came of it; 1 if there was a stale pass."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    stale: list[str] = []
    tried, needless, cells = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        project = Project(Path(name).resolve())
        os.chdir(project.root)
        sys.path.insert(0, str(project.packages))
        project.run()
        first = {model: behaviour(project.root, model) for model in project.run()}
        if not all(project.ask().values()) or not project.ask():
            print(f"the first run was not kept as a whole: {project.ask()}")
            return 2
        for number in range(edits):
            make = chance.choices([make for make, _ in EDITS], [weight for _, weight in EDITS])[0]
            edit = make(project, chance)
            whole = number % 100 == 99
            reused = project.run_apart(*edit.options) if whole else project.ask(*edit.options)
            for model, before in first.items():
                changed = edit.every or model in edit.models or behaviour(project.root, model) != before
                cells[edit.kind] += 1
                if changed and reused.get(model):
                    stale.append(f"{model}: {edit.kind}: {edit.what}")
                if not changed and not reused.get(model):
                    needless[edit.kind] += 1
            tried[edit.kind] += 1
            project.restore()
    for kind, number in tried.most_common():
        print(f"{number:4} edits of {kind}: {needless[kind]} of {cells[kind]} cells ran, though nothing was changed")
    print(f"{sum(tried.values())} edits, {len(stale)} stale passes")
    for text in stale:
        print(f"  stale: {text}")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
