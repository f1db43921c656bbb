"""Reproduction: a small pytest file that fails as a cell did, with nothing of the matrix in it. Pure text, no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_torchcompile import __version__
from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.checks import COMPARING
from pytest_torchcompile.dims import batch_sizes
from pytest_torchcompile.observation import Judgement, Observation
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.plan.targets import Targets

__all__ = ["file_name", "is_reproducible", "reproduction_text"]


def file_name(cell: Cell) -> str:
    """A name that pytest can import."""
    return f"test_{re.sub(r'[^0-9A-Za-z_]', '_', cell.id)}.py"


def is_reproducible(check: str, judgement: Judgement, observation: Observation) -> bool:
    """Would ``compare()`` fail too? Not for a graph break, a recompile, or a part of the model that ran eagerly."""
    if judgement.verdict in ("crash", "timeout"):
        return True
    if judgement.verdict != "fail" or check not in (*COMPARING, "compiles"):
        return False
    compiles = observation.sections.get("compiles", {})
    no_graph = not any(graph["runs"] for graph in compiles.get("graphs", ()))
    return bool(compiles.get("error")) or no_graph or check in COMPARING


def reproduction_text(cell: Cell, entry: ModelEntry, root: Path, file: Path, failed: Mapping[str, str],
                 limits: Mapping[str, float]) -> str:
    """The text of ``file``: a test that compares the cell's model as the cell did.

    Args:
        cell: What failed.
        entry: Its model.
        root: The folder in which the model's modules are looked up.
        file: Where the text will be.
        failed: Check to the first line of what it said.
        limits: The cell's.
    """
    targets = Targets(root)
    code = {name: t.replace(":", ".") for name in ("factory", "inputs", "loss") if (t := getattr(entry, name))}
    axes = dict(cell.user) | ({"device": cell.device} if "device" in _named(targets, entry.factory) else {})
    axes |= entry.arguments_of("factory")
    shared = {name: value for name, value in cell.user if name in _named(targets, entry.inputs)}
    shared |= entry.arguments_of("inputs")
    sizes = "".join(f"    {shared | row!r},\n" for row in batch_sizes(entry.dims))
    options = {"train": cell.phase == "training"}
    steps = {"steps": int(limits.get("steps", 2))} if "training_steps" in failed else {}
    wrapper = cell.wrapper != "none"
    imports = sorted({target.partition(":")[0] for target in (entry.factory, entry.inputs, entry.loss) if target})
    return "".join([
        f'"""{_quoted(cell.id)}\n\n',
        *(f"{check}: {_quoted(text)}\n" for check, text in failed.items()),
        f"\nWritten by pytest-torchcompile {__version__}. Run it with:  pytest {_quoted(_shown(file))}\n\"\"\"\n\n",
        "import sys\nfrom pathlib import Path\n\nimport torch\n\n",
        "from pytest_torchcompile import CompileConfig, assert_equivalent\n",
        "from pytest_torchcompile.batch import Batch\n",
        "from pytest_torchcompile.cell import Cell\n" if wrapper else "",
        "from pytest_torchcompile.oracle.recorder import seed_everything\n",
        "from pytest_torchcompile.wrappers.protocol import load\n" if wrapper else "",
        f"\nROOT = (Path(__file__).parent / {os.path.relpath(root, file.parent)!r}).resolve()\n",
        "sys.path.insert(0, str(ROOT))\n\n",
        *(f"import {module}\n" for module in imports),
        f"\nDEVICE, DTYPE = torch.device({cell.device!r}), torch.{cell.dtype}\n",
        f"SIZES = [\n{sizes}]\n",
        f"CELL = Cell({_keywords({name: getattr(cell, name) for name in AXES} | {'user': cell.user})})\n"
        f"WRAPPER = load({cell.wrapper!r}, ROOT, 'the axis wrapper')\n" if wrapper else "",
        f"\n\ndef test_{re.sub(r'[^0-9A-Za-z_]', '_', cell.model)}():\n",
        "    seed_everything(0)\n",
        f"    model = {code['factory']}({_keywords(axes)}).to(DEVICE, DTYPE)"
        f"{_mode(cell, entry)}\n",
        "    calls = []\n",
        "    for seed, sizes in enumerate(SIZES):\n",
        "        seed_everything(seed)\n",
        f"        calls.append(Batch.of({code['inputs']}(**sizes)).to(DEVICE, DTYPE))\n",
        "    config = CompileConfig("
        f"{_keywords({'backend': cell.backend, 'mode': cell.mode, 'dynamic': cell.torch_dynamic})})\n",
        "    assert_equivalent(\n        model, calls, config,\n",
        f"        loss={code['loss']},\n" if "loss" in code else "",
        "        wrap=lambda model, settings: WRAPPER.wrap(model, settings, CELL),\n" if wrapper else "",
        f"        {_keywords(options | steps)},\n    )\n",
    ])


def _mode(cell: Cell, entry: ModelEntry) -> str:
    """The call that puts the model into the cell's phase; none where its modules keep their modes."""
    if entry.mode_of_modules == "keep":
        return ""
    return ".train()" if cell.phase == "training" else ".eval()"


def _named(targets: Targets, target: str) -> frozenset[str]:
    return targets.parameters(target) or frozenset()


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _quoted(text: str) -> str:
    """Text that can stand between triple quotes."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _shown(file: Path) -> str:
    return os.path.relpath(file)
