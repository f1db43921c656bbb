"""The command ``pytest-torchcompile explain``: one cell, or one model without a matrix."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
from pytest_torchcompile.cell import TOOLKIT
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import folder_of, write_files
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.wrappers.wrapping import Wrapping

if TYPE_CHECKING:
    from pytest_torchcompile.explain.explanation import Explanation
    from pytest_torchcompile.plan.expansion import PlannedCell
    from pytest_torchcompile.plan.matrix import Matrix

__all__ = ["explain_cell", "run_command"]

SEED = 0


def run_command(given: argparse.Namespace) -> int:
    """Compile the model, print what became of it; returns 0, or 1 where the compiled step raised.

    Raises :class:`UsageError` for a model or a cell that is not there, and for one of several ranks.
    """
    matrix, planned = chosen_cell(given)
    ranks = Wrapping.read(planned.cell.wrapper).ranks
    if ranks > 1:
        raise UsageError(f"{planned.cell.id}: explain runs in one process, and wrapper {planned.cell.wrapper!r} needs "
                         f"{ranks}; name the cell of this model with wrapper none")
    # Before torch is loaded.
    set_environment()
    from pytest_torchcompile.explain.roofline import Roofline

    folder = folder_of(planned.cell.id)
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.log")
        explained = explain_cell(matrix, planned, trace)
        roofline = Roofline.of(explained, planned.cell.device)
        write_files(explained, folder, trace, roofline)
    if given.json:
        print(json.dumps({**explained.to_dict(), "roofline": roofline.to_dict()}, indent=1))
    else:
        for line in explanation_lines(explained):
            print(harmless_text(line))
        print()
        for line in roofline.lines():
            print(harmless_text(line))
        print(f"\nall stages side by side: {folder}/index.html; graphs, kernels, guards and the roofline "
              "are files beside it")
    return 1 if explained.error else 0


def explain_cell(matrix: Matrix, planned: PlannedCell, trace: Path | None = None) -> Explanation:
    """Compile the model of a cell as the cell would, run a step of its first size, and tell what became of it.

    :param trace: as for :func:`~pytest_torchcompile.explain.capture.explain_step`.
    """
    from pytest_torchcompile.explain.capture import explain_step
    from pytest_torchcompile.explain.toolkit_notes import read_changes, table_changes
    from pytest_torchcompile.layer.preservation import preserved
    from pytest_torchcompile.layer.step_runner import StepRunner
    from pytest_torchcompile.layer.training_step import loss_of_step
    from pytest_torchcompile.oracle.whole_step import WholeStep, compile_step
    from pytest_torchcompile.run import subject
    from pytest_torchcompile.state.torch_state import isolated
    from pytest_torchcompile.wrappers.protocol import load as load_wrapper

    cell, root = planned.cell, Path(matrix.root)
    entry = matrix.models[cell.model]
    settings = subject.compile_settings(cell, root, entry.where)
    wrapper = load_wrapper(cell.wrapper, root, entry.where)
    module = subject.build_model(entry, cell, root, SEED)
    _sizes, batch = subject.make_batches(entry, cell, root, SEED)[0]
    loss = loss_of_step(module, subject.loss_function(entry, root), train=cell.phase == "training")

    if cell.backend == "toolkit" and cell.capture == "step":
        # It has its loss, and its backward pass, itself.
        module, loss = WholeStep(module, subject.loss_function(entry, root)), None

    def compile_with(chosen: dict[str, Any]) -> StepRunner:
        if isinstance(module, WholeStep):
            return StepRunner(compile_step(module, chosen), module, None)
        return StepRunner(wrapper.wrap(module, chosen, cell), module, loss)

    def compile_model() -> StepRunner:
        return compile_with(settings)

    idle = set() if cell.backend == "toolkit" else set(TOOLKIT)
    shown = ", ".join(f"{axis}={value}" for axis, value in cell.axes.items() if axis not in {"model", *idle})
    if cell.backend != "toolkit":
        return explain_step(compile_model, module, batch, cell.id, shown, trace)
    with tempfile.TemporaryDirectory() as dumps:
        toolkit = replace(settings["backend"], dump=Path(dumps))
        settings["backend"] = toolkit
        explained = explain_step(compile_model, module, batch, cell.id, shown, trace)
        explained.passes = read_changes(Path(dumps))
    if not explained.error:
        with isolated([]), preserved(module):
            explained.tables = table_changes(
                toolkit, lambda other: compile_with({**settings, "backend": other}).step(batch.clone()))
    return explained
