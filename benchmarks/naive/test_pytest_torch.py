"""The same models by pytest-torch's own assertions, one test a cell; ``benchmarks/matrix_run.py`` runs it.

It knows forward passes in inference mode: compiled beside eager for each batch, one graph, and recompiles. Gradients,
training, layouts and wrappers it does not compare, so it does less than a cell of the matrix.
"""

import json
import os
from pathlib import Path

import pytest
from pytest_torch import assert_compile_parity, assert_no_graph_breaks, assert_no_recompiles

from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.run import subject

PLAN = json.loads(Path(os.environ["NAIVE_CELLS"]).read_text())
MATRIX = load_matrix(os.environ["NAIVE_MATRIX"])
CELLS = [planned.cell for planned in MATRIX.cells if planned.cell.id in {cell["id"] for cell in PLAN}]
BREAKS = ("moe_lite",)
"""Models whose graph breaks the matrix allows."""


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_cell(cell):
    """All that it has to say of one model and one way to compile it."""
    entry = MATRIX.models[cell.model]
    model = subject.build_model(entry, cell, MATRIX.root, 0).eval()
    settings = subject.compile_settings(cell, MATRIX.root, "")
    inputs = []
    for _, batch in subject.make_batches(entry, cell, MATRIX.root, 0):
        inputs.append(batch.kwargs or tuple(batch.args))
    for each in inputs:
        assert_compile_parity(model, each, rtol=5e-2, atol=5e-2, **settings)
    if cell.model not in BREAKS:
        assert_no_graph_breaks(model, inputs[0])
    assert_no_recompiles(model, *inputs, max_recompiles=12)
