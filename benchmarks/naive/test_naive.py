"""What one writes by hand instead of a matrix: a parametrized test per cell and check, each compiling for itself.

The baseline of ``benchmarks/matrix_run.py``, which sets ``NAIVE_CELLS`` (the JSON of ``pytest-torchcompile cells``)
and ``NAIVE_ONE`` (one test a cell instead of one a check). It shares the models and wrappers with the matrix and
nothing else: the comparison is against eager with the tolerances that people use.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.run import subject
from pytest_torchcompile.wrappers.protocol import load

PLAN = json.loads(Path(os.environ["NAIVE_CELLS"]).read_text())
MATRIX = load_matrix(os.environ["NAIVE_MATRIX"])
CELLS = [planned.cell for planned in MATRIX.cells if planned.cell.id in {cell["id"] for cell in PLAN}]


def compiled_and_eager(cell: Cell):
    """Reset, build, compile afresh, and run every batch forward and backward, compiled and eager."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    entry, root = MATRIX.models[cell.model], MATRIX.root
    wrapper = load(cell.wrapper, root, "")
    loss = subject.loss_function(entry, root) or (lambda out, batch: out.float().square().mean())
    results = []
    for settings in (None, subject.compile_settings(cell, root, "")):
        model = subject.build_model(entry, cell, root, 0)
        call = wrapper.wrap(model, settings, cell)
        outs = []
        for _, batch in subject.make_batches(entry, cell, root, 0):
            batch = batch.clone()
            model.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            torch.compiler.cudagraph_mark_step_begin()
            with torch.set_grad_enabled(model.training):
                out = call(*batch.args, **batch.kwargs)
            if model.training:
                loss(out, batch.value).backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            outs.append((out.detach().clone(), grads))
        results.append(outs)
    return results


def compiles(eager, compiled):
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def equivalence(eager, compiled):
    for (a, _), (b, _) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def gradients(eager, compiled):
    for (_, a), (_, b) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-1, atol=5e-1)


def graph_breaks(eager, compiled):
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) <= 3


def recompiles(eager, compiled):
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12


CHECKS = [compiles, equivalence, gradients, graph_breaks, recompiles]

if os.environ.get("NAIVE_ONE"):

    @pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
    def test_cell(cell):
        with torch._inductor.config.patch(fallback_random=True):
            eager, compiled = compiled_and_eager(cell)
        for check in CHECKS:
            check(eager, compiled)

else:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
    def test_check(cell, check):
        with torch._inductor.config.patch(fallback_random=True):
            check(*compiled_and_eager(cell))
