"""A cell of the toolkit explained: what each pass did, as text and files, and what each table would change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.explain.command import explain_cell
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.plan.matrix import load_matrix

pytestmark = pytest.mark.needs_torch
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
MATRIX = """
version: 1
models:
  net: {factory: "pytest_torchcompile.zoo:tiny_head", inputs: "pytest_torchcompile.zoo:vector_batch", dims: {B: 4}}
axes: {backend: [toolkit]}
"""


def explained(tmp_path, **axes):
    """The cell with these axes, without any compiler behind the passes."""
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX)
    cell = Cell(model="net", backend="toolkit", **{"compiler": "eager", **axes})
    return explain_cell(load_matrix(file, tmp_path), SimpleNamespace(cell=cell))


def test_passes_and_tables(tmp_path, monkeypatch):
    """A pass that makes a new module, one that does not, and each table with a name."""
    found = explained(tmp_path, passes="dead_code, common_subexpressions", decompositions="core_aten")
    assert not found.error
    assert [change.stem for change in found.passes] == ["joint-1.1-dead_code", "joint-1.2-common_subexpressions"]
    idle, busy = found.passes
    assert (idle.diff, idle.before) == ("", idle.after)
    added, removed = busy.lines
    # The graph has no doubles. What is made anew has another class name.
    assert (added, removed) == (1, 1)
    text = "\n".join(explanation_lines(found))
    assert "joint-1.1-dead_code                      changed nothing" in text
    assert f"joint-1.2-common_subexpressions          +{added} -{removed}" in text
    assert list(found.tables) == ["inductor", "core_aten"]
    assert found.tables["core_aten"]["aten.t.default"] < 0 < found.tables["core_aten"]["aten.permute.default"]
    assert "core_aten  " in text
    page = explanation_page(found)
    assert "What graph passes changed" in page
    assert "joint-1.2-common_subexpressions.before.py" in page
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".compile-matrix" / "explain" / "net"
    write_files(found, folder)
    written = {file.name: file.read_text() for file in (folder / "passes").iterdir()}
    assert written["joint-1.2-common_subexpressions.diff"] == busy.diff
    assert "is self.get_parameter('linear.weight')" in written["joint-1.2-common_subexpressions.before.py"]
    assert written["joint-1.2-common_subexpressions.after.py"] == busy.after
    assert "What graph passes changed" not in explanation_page(replace(found, passes=[]))


@pytest.mark.skipif(TORCH < (2, 13), reason="torch before 2.13 can't trace a whole step")
def test_a_whole_step(tmp_path):
    """One graph with forward, loss and backward."""
    found = explained(tmp_path, passes="common_subexpressions", capture="step", decompositions="none")
    assert not found.error
    assert [change.stem for change in found.passes] == ["joint-1.1-common_subexpressions"]
    assert "_softmax_backward_data" in found.passes[0].before


def test_a_table_of_ones_own(tmp_path):
    """It is listed beside torch's."""
    (tmp_path / "tables.py").write_text("import torch\nOWN = {torch.ops.aten.t.default: lambda x: x.permute(1, 0)}\n")
    found = explained(tmp_path, decompositions="tables:OWN")
    assert found.tables["tables:OWN"]["aten.t.default"] < 0
    assert found.passes == []


def test_another_backend_has_neither(head):
    """No line of passes or tables."""
    assert (head.passes, head.tables) == ([], {})
    assert "tables of decompositions" not in "\n".join(explanation_lines(head))
