"""EditedProject: a small project, seeded edits of it, and the loop that makes them one by one.

``reuse_damage.py`` and ``code_reuse_damage.py`` ask of each edit whether what an earlier run kept would be taken.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    # The name of what a loop does not need is that of a shell's variable too.
    for _ in range(1):
        return Plain()


def gated():
    return Gated()


def named():
    return getattr(__import__("extra"), os.environ.get("MODEL_KIND", "First"))()


def scaled():
    """The scale is read from a file, the shift is found in a folder."""
    with open("data/scale.json") as file:
        SETTINGS.update(json.load(file))
    # A variable of a kind that counts only because it is named here.
    return Scaled(SETTINGS["scale"] + len(os.listdir("data/parts")) + float(os.environ.get("CI_SCALE", "0")))


class Broken(Plain):
    """Its report names lines: of a graph break, and of what is compiled again for each size."""

    def forward(self, x):
        y = torch.relu(self.one(x))
        # Nothing is printed.
        torch._dynamo.graph_break()
        return self.two(y) * by_size(y)


def by_size(x):
    return 1.5 if x.shape[0] == 4 else 0.75


def broken():
    """A model with a graph break."""
    return Broken()


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
  broken: {factory: "models:broken", inputs: "models:batch", dims: {B: {buckets: [4, 6]}}}
axes:
  backend: [eager]
  phase: [inference]
rules:
  - limits: {graph_breaks: 1, recompiles: 4}
    when: {model: broken}
    reason: its graph break is meant
checks: [compiles, equivalence, graph_breaks, recompiles]
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
        shutil.rmtree(self.packages.parent / "bin", ignore_errors=True)
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


def write(path: Path, text: str) -> None:
    """Write a file that is older than the processes to come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    long_ago = time.time() - random.Random(text).randrange(5, 500)
    os.utime(path, (long_ago, long_ago))


MakeEdit = Callable[[Project, random.Random], Edit]


@dataclass
class Tally:
    """What came of the edits, by their kind."""

    edits: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    """Cells of which the benchmark tells something: run in vain, or with comparisons taken."""
    stale: list[str] = field(default_factory=list)

    def print_lines(self, told: str) -> None:
        """A line for each kind of edit, in which ``told`` says what is counted; then what is stale."""
        for kind, number in self.edits.most_common():
            print(f"{number:4} edits of {kind}: {told} in {self.counted[kind]} of {self.cells[kind]} cells")
        print(f"{self.edits.total()} edits, {len(self.stale)} stale")
        for text in self.stale:
            print(f"  stale: {text}")


def try_edits(project: Project, kinds: Sequence[tuple[MakeEdit, int]], tally: Tally,
              judge: Callable[[int, Edit, random.Random], None], edits: int, seed: int, seconds: float,
              first: int = 0) -> None:
    """Make edits one by one, each of the project as it was at first, and have each judged.

    ``kinds``: how to make one, and how often. Ends after ``edits`` or ``seconds``, whichever is first, and prints where
    to go on. Those before ``first`` are made and not judged; what follows is the same if ``judge`` draws nothing.
    """
    chance, end = random.Random(seed), time.monotonic() + seconds
    for number in range(edits):
        if time.monotonic() > end:
            print(f"edits {first} to {number - 1} of seed {seed} were made; {number} is next")
            break
        make = chance.choices([make for make, _ in kinds], [weight for _, weight in kinds])[0]
        edit = make(project, chance)
        if number >= first:
            tally.edits[edit.kind] += 1
            judge(number, edit, chance)
        project.restore()


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
    """Comments, blank lines, or another docstring, also within functions and beside code."""
    file = project.root / chance.choice(CODE)
    lines = file.read_text().splitlines()
    at = chance.choice([number for number, line in enumerate(lines) if line])
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    what = chance.choice(["above", "above", "blank", "beside", "docstring"])
    if what == "above":
        lines[at:at] = [f"{indent}# a comment"] * chance.randrange(1, 4)
    elif what == "blank":
        lines[at:at] = [""]
    elif what == "beside" and not lines[at].endswith(('"""', ":")):
        lines[at] += f"  # {chance.random()}"
    else:
        lines = [f'{line[:-3]} Or so."""' if line.endswith('."""') else line for line in lines]
    write(file, "\n".join(lines) + "\n")
    return Edit("comment", f"{file.name}: {what} line {at + 1}")


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


def edit_environment(project: Project, chance: random.Random) -> Edit:
    """A variable that the project reads, any other, one that changes no verdict, or a path."""
    counted = ("MODEL_KIND", "OMP_NUM_THREADS", "TORCH_LOGS_OUT", "MY_FLAG", "TORCHINDUCTOR_FREEZING", "CXX",
               "PYTHONHASHSEED", "LD_LIBRARY_PATH", "CI", "XDG_CACHE_HOME")
    read = ("CI_SCALE",)
    passing = ("GITHUB_RUN_ID", "TERM", "_", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "TORCHINDUCTOR_CACHE_DIR")
    name = chance.choice([*counted, *read, *read, *passing, "PATH", "PATH"])
    if name == "PATH":
        return _edit_path(project, chance)
    values = {"MODEL_KIND": "Second", "OMP_NUM_THREADS": "2"}
    os.environ[name] = values.get(name, str(chance.randrange(1, 999)))
    return Edit("environment", name, every=name in counted)


def _edit_path(project: Project, chance: random.Random) -> Edit:
    """A folder more before all others: with a compiler in it, or with a script that no compiler needs."""
    program = chance.choice(["g++", "gcc", "as", "pytest", "ninja", "python"])
    file = project.packages.parent / "bin" / program
    write(file, f"#!/bin/sh\n# {chance.random()}\n")
    file.chmod(0o755)
    os.environ["PATH"] = f"{file.parent}{os.pathsep}{os.environ['PATH']}"
    return Edit("environment", f"PATH with {program}", every=program in ("g++", "gcc", "as"))
