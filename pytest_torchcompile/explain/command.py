"""The command ``pytest-torchcompile explain``: one cell, or one model without a matrix."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
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

__all__ = ["run_command"]

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
    explained = _explain_cell(matrix, planned)
    folder = folder_of(explained.name)
    write_files(explained, folder)
    if given.json:
        print(json.dumps(explained.to_dict(), indent=1))
    else:
        for line in explanation_lines(explained):
            print(harmless_text(line))
        print(f"\nall stages side by side: {folder}/index.html; graphs, kernels and guards are files beside it")
    return 1 if explained.error else 0


def _explain_cell(matrix: Matrix, planned: PlannedCell) -> Explanation:
    from pytest_torchcompile.explain.capture import explain_step
    from pytest_torchcompile.layer.benchmark import StepRunner
    from pytest_torchcompile.layer.training_step import adapted_loss
    from pytest_torchcompile.oracle import default_loss
    from pytest_torchcompile.run import subject
    from pytest_torchcompile.wrappers.protocol import load as load_wrapper

    cell, root = planned.cell, Path(matrix.root)
    entry = matrix.models[cell.model]
    settings = subject.compile_settings(cell, root, entry.where)
    wrapper = load_wrapper(cell.wrapper, root, entry.where)
    module = subject.build_model(entry, cell, root, SEED)
    _sizes, batch = subject.make_batches(entry, cell, root, SEED)[0]
    loss = None
    if cell.phase == "training":
        own = subject.loss_function(entry, root)
        loss = default_loss if own is None else adapted_loss(own)

    def compile_model() -> StepRunner:
        return StepRunner(wrapper.wrap(module, settings, cell), module, loss)

    shown = ", ".join(f"{axis}={value}" for axis, value in cell.axes.items() if axis != "model")
    return explain_step(compile_model, module, batch, cell.id, shown)
