"""Kernels of a cell: its section has what each call touches, of every compile of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowering.missing_names import lacking
from torch.nn import functional

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks.kernels import CHECK
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.lowering import scheduler_notes
from pytest_torchcompile.lowering.scheduler_notes import KernelNotes
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell

pytestmark = pytest.mark.needs_torch
TENSOR = {"float32[4, 6]": 96, "float32[5, 6]": 120}


class Rectified(torch.nn.Module):
    """A product, and what fusion makes one kernel of."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return functional.relu(self.linear(x)) * 2


def batch(B):
    return torch.randn(B, 6)


@pytest.fixture(autouse=True)
def cold():
    """Nothing is in a cache that another test has filled."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def kernels_of(*sizes, phase="inference"):
    """The section of a cell that is compiled once for each size."""
    entry = ModelEntry("net", f"{__name__}:Rectified", f"{__name__}:batch", dims={"B": Dim(choices=sizes)})
    cell = Cell(model="net", dynamic="static", phase=phase)
    seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), ("kernels",)))
    assert seen["failure"] is None, seen["failure"]
    return seen["sections"]["kernels"]


def test_calls_of_every_compile():
    """Each of two sizes has its graph: a library call and a fused kernel, with shapes, bytes and the user's lines."""
    section = kernels_of(4, 5)
    assert section["lost"] == []
    first, second = section["graphs"]
    for graph, shape in ((first, "float32[4, 6]"), (second, "float32[5, 6]")):
        product, fused = graph["calls"]
        assert (product["kind"], product["library"]) == ("library", "BLAS")
        assert product["operators"] == ["aten.addmm.default"]
        assert shape in [tensor["tensor"] for tensor in product["reads"]]
        assert fused["operators"] == ["aten.relu.default", "aten.mul.Tensor"]
        # The product's memory is written in place.
        (read,), (written,) = fused["reads"], fused["writes"]
        assert (read["of"], read["tensor"], read["bytes"]) == ("addmm", shape, TENSOR[shape])
        assert (written["of"], written["tensor"], written["bytes"]) == ("mul", shape, TENSOR[shape])
        assert fused["kept_inside"] == [{"of": "relu", "bytes": TENSOR[shape]}]
        (kernel,) = graph["generated"]
        lines = [line.rpartition(":") for line in kernel["lines"]]
        assert {Path(file).name for file, _, _ in lines} == {Path(__file__).name}
        texts = Path(__file__).read_text().splitlines()
        assert "functional.relu" in texts[int(lines[0][2]) - 1]


def test_a_warm_run():
    """Caches stay on: the second run compiles nothing, counts the same kernels, and says what it does not know."""
    cold, warm = kernels_of(4, 5), kernels_of(4)
    assert [graph["cached"] for graph in cold["graphs"]] == [False, False]
    (graph,) = warm["graphs"]
    assert (graph["cached"], graph["calls"], warm["lost"]) == (True, [], [])
    assert graph["library"] == cold["graphs"][0]["library"] == {"addmm": 1}
    assert [kernel["ops"] for kernel in graph["generated"]] == [("mul", "relu")]
    assert CHECK.remark(cold) == ""
    assert CHECK.remark(warm) == ("1 graph was served by a cache; run once with a cold cache to see reads and writes")
    # The limit counts what the cache brought.
    (problem,) = CHECK.judge(warm, {"kernels": 0})
    assert problem.message == "kernels that Inductor generated: 1, at most 0 allowed"
    assert list(CHECK.judge(warm, {"kernels": 1})) == []


def test_a_second_size_beside_a_cached_one():
    """Each graph has the calls of its own."""
    kernels_of(4)
    first, second = kernels_of(4, 5)["graphs"]
    assert (first["cached"], first["calls"]) == (True, [])
    assert not second["cached"]
    assert [call["kind"] for call in second["calls"]] == ["library", "pointwise"]
    assert second["calls"][1]["writes"][0]["tensor"] == "float32[5, 6]"


def test_a_warm_run_of_training():
    """Forward and backward: both noted, each with its own calls, and both served after that."""
    cold, warm = kernels_of(4, phase="training"), kernels_of(4, phase="training")
    assert [graph["stage"] for graph in cold["graphs"]] == ["forward", "backward"]
    assert not any(graph["cached"] for graph in cold["graphs"])
    for graph in cold["graphs"]:
        assert [call["kind"] for call in graph["calls"]].count("library") == sum(graph["library"].values())
    assert all(graph["cached"] for graph in warm["graphs"])
    assert cold["lost"] == warm["lost"] == []


def test_a_scheduler_that_tells_nothing_is_told(monkeypatch):
    """No cache served the graph, and nothing was noted: that is no clean result."""
    monkeypatch.setattr(KernelNotes, "_note", lambda *given: None)
    section = kernels_of(4)
    (text,) = section["lost"]
    assert text.startswith("graph 0/0 (inference) calls kernels, no cache served it, and its scheduler told of none: ")
    assert CHECK.remark(section) == text


@pytest.mark.parametrize(("step", "text"), [
    ("_extern_name", "a library call: AttributeError: another torch"),
    ("_described", "kernel cpp_fused_mul_relu_0: AttributeError: another torch"),
])
def test_a_scheduler_that_is_another(monkeypatch, step, text):
    """What cannot be read is told; the compile that is watched goes on, and its kernels are counted."""

    def fail(*given):
        raise AttributeError("another torch")

    monkeypatch.setattr(scheduler_notes, step, fail)
    section = kernels_of(4)
    assert text in section["lost"]
    assert len(section["graphs"][0]["generated"]) == 1


def test_a_torch_that_lacks_the_hook(monkeypatch):
    """The cell runs as without, and one sentence says why nothing is told of memory."""
    lacking(monkeypatch, "torch._inductor.scheduler", "Scheduler", "codegen_extern_call")
    section = kernels_of(4)
    (graph,) = section["graphs"]
    assert graph["calls"] == []
    assert [kernel["ops"] for kernel in graph["generated"]] == [("mul", "relu")]
    (text,) = section["lost"]
    assert "has no torch._inductor.scheduler.Scheduler.codegen_extern_call, which writes calls of libraries" in text


def test_loops_side_by_side_in_one_kernel(monkeypatch):
    """On a GPU a ``cat`` is one node of the scheduler that has others inside; it is described by those."""

    class SideBySide:
        read_writes = node = None

        def __init__(self, nodes):
            self.get_nodes = lambda: [node for node in nodes if hasattr(node, "read_writes")]

    noted = KernelNotes._after_definition
    monkeypatch.setattr(KernelNotes, "_after_definition",
                        lambda self, name, source, nodes, *rest: noted(self, name, source, [SideBySide(nodes)]))
    section = kernels_of(4)
    assert section["lost"] == []
    assert [call["kind"] for call in section["graphs"][0]["calls"]] == ["library", "pointwise"]


def test_a_part_of_loops_side_by_side_is_told_once(monkeypatch):
    """Torch makes several kernels of one such node where it is large; the bytes of all would count in each."""
    class SideBySide:
        read_writes = None

        def __init__(self, nodes):
            self.get_nodes = lambda: [node for node in nodes if hasattr(node, "read_writes")]
            self.get_subkernel_nodes = self.get_nodes

    noted = KernelNotes._after_definition

    def in_two_parts(self, name, source, nodes, *rest):
        node = SideBySide(nodes)
        noted(self, name, source, [node])
        noted(self, "second_part", source, [node])

    monkeypatch.setattr(KernelNotes, "_after_definition", in_two_parts)
    section = kernels_of(4)
    assert section["lost"] == ["kernel second_part: a part of loops side by side, told with the first part"]
    assert [call["kind"] for call in section["graphs"][0]["calls"]] == ["library", "pointwise"]
