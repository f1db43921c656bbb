"""Reproduction: a small pytest file that fails as a cell did, with nothing of the matrix in it. Pure text, no torch."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_torchcompile import __version__
from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.checks import COMPARING
from pytest_torchcompile.culprit.culprit_record import Culprit, culprit_text
from pytest_torchcompile.dims import batch_sizes
from pytest_torchcompile.observation import Judgement, Observation
from pytest_torchcompile.oracle.proof import compiled_code_ran
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.plan.targets import Targets
from pytest_torchcompile.report.torch_alone import LONE_IMPORTS, LoneTest, lone_test_text

__all__ = ["file_name", "is_reproducible", "reproduction_text"]


def file_name(cell: Cell) -> str:
    """A name that pytest can import."""
    return f"test_{_identifier(cell.id)}.py"


def is_reproducible(check: str, judgement: Judgement, observation: Observation) -> bool:
    """Would ``compare()`` fail too? Not for a graph break, a recompile, or a part of the model that ran eagerly."""
    if judgement.verdict in ("crash", "timeout"):
        return True
    if judgement.verdict != "fail" or check not in (*COMPARING, "compiles"):
        return False
    if check in COMPARING:
        return True
    # "compiles" also fails where a part of the model ran eagerly; that is in the ledger only, so compare() passes.
    compiles = observation.sections.get("compiles", {})
    return bool(compiles.get("error")) or not compiled_code_ran(observation.sections)


def reproduction_text(cell: Cell, entry: ModelEntry, root: Path, file: Path, failed: Mapping[str, str],
                      limits: Mapping[str, float], culprit: Culprit | None = None) -> str:
    """The text of ``file``: a test that compares the cell's model as the cell did, and one that needs torch alone.

    The second needs the model's module too. A cell with a wrapper of ours, or the toolkit, has none.

    Args:
        cell: What failed.
        entry: Its model.
        root: The folder in which the model's modules are looked up.
        file: Where the text will be.
        failed: Check to the first line of what it said.
        limits: The cell's.
        culprit: The operator to blame, where it was looked for; its script becomes a test of torch alone.
    """
    # Only a failure of several steps needs as many to show again.
    steps = int(limits.get("steps", 2)) if "training_steps" in failed else None
    targets = Targets(root)
    folder = os.path.relpath(root, file.parent)
    told = ""
    if culprit is not None:
        told = f"\n{culprit_text(culprit)}\n"
    is_alone = _is_torchs_alone(cell)
    parts = [
        _docstring(cell, file, failed, told),
        _imports(is_alone),
        _constants(cell, entry, targets, folder),
        _test(cell, entry, targets, steps),
    ]
    if is_alone:
        parts.append(_lone_test(cell, entry, targets))
    parts.append(_smallest_graph(culprit))
    return "".join(parts)


def _smallest_graph(culprit: Culprit | None) -> str:
    """A test of what torch alone shows; empty where there is no script."""
    if culprit is None or not culprit.script:
        return ""
    # Its own imports make it whole: it may be taken out and filed.
    return f"\n\ndef test_smallest_graph():\n{textwrap.indent(culprit.script, '    ')}"


def _docstring(cell: Cell, file: Path, failed: Mapping[str, str], told: str) -> str:
    says = "".join(f"{check}: {_escape_quotes(text)}\n" for check, text in failed.items())
    command = f"pytest {_escape_quotes(os.path.relpath(file))}"
    return (f'"""{_escape_quotes(cell.id)}\n\n{says}{_escape_quotes(told)}'
            f'\nWritten by pytest-torchcompile {__version__}. Run it with:  {command}\n"""\n\n')


def _imports(is_alone: bool) -> str:
    standard = ["import logging", "import sys", "from pathlib import Path"]
    if is_alone:
        standard = sorted([*LONE_IMPORTS, *standard], key=lambda line: (line.startswith("from"), line))
    return "\n".join([*standard, "", "import pytest", "import torch"]) + "\n"


def _constants(cell: Cell, entry: ModelEntry, targets: Targets, folder: str) -> str:
    """What the tests need at the file's top: the models' modules, device and sizes."""
    modules = sorted({target.partition(":")[0] for target in _named_targets(cell, entry).values()})
    lines = [
        "",
        f"ROOT = (Path(__file__).parent / {folder!r}).resolve()",
        # The models' modules are imported from there, so the path comes before them.
        "sys.path.insert(0, str(ROOT))",
        "# Else pytest shows torch's own trace of a failing test: many lines that say nothing.",
        "logging.getLogger('torch.__trace').propagate = False",
        "",
        *map("import {}".format, modules),
        "",
        f"DEVICE, DTYPE = torch.device({cell.device!r}), torch.{cell.dtype}",
        "SIZES = [",
        *(f"    {_as_python(arguments)}," for arguments in _input_arguments(cell, entry, targets)),
        "]",
        # Taken here: a module may have the name of a variable below, as model.py has.
        *(f"{name} = {_dotted(target)}" for name, target in _named_targets(cell, entry).items()),
    ]
    return "\n".join(lines) + "\n"


def _named_targets(cell: Cell, entry: ModelEntry) -> dict[str, str]:
    """What the tests take from the user's modules, by the names that they know it under."""
    named = {"FACTORY": entry.factory, "INPUTS": entry.inputs}
    if entry.loss:
        named["LOSS"] = entry.loss
    if _is_users_backend(cell):
        named["BACKEND"] = cell.backend
    return named


def _lone_test(cell: Cell, entry: ModelEntry, targets: Targets) -> str:
    """The test that needs torch and the model's module alone."""
    backend = "BACKEND" if _is_users_backend(cell) else repr(cell.backend)
    return lone_test_text(LoneTest(
        name=_identifier(cell.model), model=_made_model(cell, entry, targets), inputs="INPUTS",
        loss="LOSS" if entry.loss else "", is_training=cell.phase == "training",
        backend=backend, mode=cell.mode, dynamic=cell.torch_dynamic,
    ))


def _test(cell: Cell, entry: ModelEntry, targets: Targets, steps: int | None) -> str:
    """The test that compares as the cell did. What it imports of ours stands in it: the other tests do without."""
    config = _keywords({"backend": cell.backend, "mode": cell.mode, "dynamic": cell.torch_dynamic})
    if cell.backend == "toolkit":
        toolkit = f"Toolkit({_keywords(cell.toolkit)}, root=ROOT)"
        config = f"backend={toolkit}, dynamic={cell.torch_dynamic!r}, fullgraph=True"
    options: dict[str, Any] = {"train": cell.phase == "training"}
    if steps is not None:
        options["steps"] = steps
    lines = [
        "", "",
        f"def test_{_identifier(cell.model)}():",
        '    pytest.importorskip("pytest_torchcompile")',
        *map("    {}".format, _own_imports(cell)),
        "",
    ]
    if _has_wrapper(cell):
        axes = {name: getattr(cell, name) for name in AXES} | {"user": cell.user}
        lines.append(f"    cell = Cell({_keywords(axes)})")
        lines.append(f"    wrapper = load({cell.wrapper!r}, ROOT, 'the axis wrapper')")
    lines += [
        "    seed_everything(0)",
        f"    model = {_made_model(cell, entry, targets)}",
        "    calls = []",
        "    for seed, sizes in enumerate(SIZES):",
        "        seed_everything(seed)",
        "        calls.append(Batch.of(INPUTS(**sizes)).to(DEVICE, DTYPE))",
        f"    config = CompileConfig({config})",
        "    assert_equivalent(",
        "        model, calls, config,",
    ]
    if entry.loss:
        lines.append("        loss=LOSS,")
    if _has_wrapper(cell):
        lines.append("        wrap=lambda model, settings: wrapper.wrap(model, settings, cell),")
    lines += [f"        {_keywords(options)},", "    )"]
    return "\n".join(lines) + "\n"


def _own_imports(cell: Cell) -> list[str]:
    lines = [
        "from pytest_torchcompile import CompileConfig, assert_equivalent",
        "from pytest_torchcompile.batch import Batch",
    ]
    if cell.backend == "toolkit":
        lines.insert(1, "from pytest_torchcompile.backends.toolkit import Toolkit")
    if _has_wrapper(cell):
        lines.append("from pytest_torchcompile.cell import Cell")
    lines.append("from pytest_torchcompile.oracle.recorder import seed_everything")
    if _has_wrapper(cell):
        lines.append("from pytest_torchcompile.wrappers.protocol import load")
    return lines


def _made_model(cell: Cell, entry: ModelEntry, targets: Targets) -> str:
    """What makes the model, on its device, in its dtype and its mode."""
    arguments = _keywords(_factory_arguments(cell, entry, targets))
    return f"FACTORY({arguments}).to(DEVICE, DTYPE){_mode_call(cell, entry)}"


def _is_users_backend(cell: Cell) -> bool:
    """Whether the axis names a function, ``module:function``."""
    return ":" in cell.backend


def _is_torchs_alone(cell: Cell) -> bool:
    """Whether torch.compile alone makes of the model what the cell did: wrappers and the toolkit are ours."""
    return not _has_wrapper(cell) and cell.backend != "toolkit"


def _factory_arguments(cell: Cell, entry: ModelEntry, targets: Targets) -> dict[str, Any]:
    arguments = dict(cell.user)
    if "device" in _parameters(targets, entry.factory):
        arguments["device"] = cell.device
    return arguments | entry.arguments_of("factory")


def _input_arguments(cell: Cell, entry: ModelEntry, targets: Targets) -> Iterator[dict[str, Any]]:
    """The arguments of each batch. An axis is handed to the inputs only if they have a parameter of its name."""
    named = _parameters(targets, entry.inputs)
    # Their sizes come last: where an axis has the name of a dim, the dim decides.
    shared = {name: value for name, value in cell.user if name in named}
    shared |= entry.arguments_of("inputs")
    for sizes in batch_sizes(entry.dims):
        yield shared | sizes


def _has_wrapper(cell: Cell) -> bool:
    return cell.wrapper != "none"


def _mode_call(cell: Cell, entry: ModelEntry) -> str:
    """The call that puts the model into the cell's phase; none where its modules keep their modes."""
    if entry.mode_of_modules == "keep":
        return ""
    return ".train()" if cell.phase == "training" else ".eval()"


def _parameters(targets: Targets, target: str) -> frozenset[str]:
    return targets.parameters(target) or frozenset()


def _dotted(target: str) -> str:
    """``models.net`` of ``models:net``."""
    return target.replace(":", ".")


def _identifier(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", text)


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_as_python(value)}" for name, value in values.items())


def _as_python(value: Any) -> str:
    """A value of the matrix as Python reads it: ``repr`` of infinity and NaN are names that Python does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_as_python(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_python, value)) + "]"
    return repr(value)


def _escape_quotes(text: str) -> str:
    """Text that can stand between triple quotes."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
