"""Private names of torch: each one that is missing is told in one sentence, and nothing else is lost."""

from __future__ import annotations

import importlib

import pytest
import torch
from lowering.missing_names import lacking

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.explain import explain
from pytest_torchcompile.ledger.torch_internals import private_name

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize(("module", "path"), [
    ("torch.gone", "name"), ("torch._dynamo", "gone"), ("torch._inductor.scheduler", "Scheduler.gone")])
def test_a_missing_name(module, path):
    """A module, a name in it, or a method of a class."""
    words = f"^torch {torch.__version__} has no {module}.{path}, which does this; nothing works with it; please report"
    with pytest.raises(InstrumentError, match=words.replace("+", r"\+")):
        private_name(module, path, "does this", "nothing works")


@pytest.mark.parametrize(("module", "owner", "name", "purpose", "gone"), [
    ("torch._inductor.scheduler", "Scheduler", "codegen_extern_call", "writes calls of libraries", "kernels"),
    ("torch._inductor.codegen.cpp", "CppScheduling", "define_kernel", "names the kernels", "kernels"),
    ("torch._inductor.codegen.triton", "TritonScheduling", "define_kernel", "names the kernels", "kernels"),
    ("torch._guards", "CompileContext", "current_compile_id", "tells what is compiled now",
     "kernels bytecode graph_runs"),
    ("torch.fx.experimental.proxy_tensor", "", "maybe_handle_decomp", "looks decompositions up", ""),
    ("torch._dynamo.convert_frame", "", "register_bytecode_hook", "shows bytecode", "bytecode"),
    ("torch._dynamo.output_graph", "OutputGraph", "call_user_compiler", "hands a graph to the backend", "graph_runs"),
])
def test_explained_without_it(module, owner, name, purpose, gone, monkeypatch):
    """One sentence among what could not be read; all else is explained."""
    holder = importlib.import_module(module)
    if owner:
        holder = getattr(holder, owner)
    kept = getattr(holder, name)
    lacking(monkeypatch, module, owner, name)
    explained = explain(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()), torch.randn(4, 3))
    assert not explained.error
    assert getattr(holder, name) is kept
    full = f"{module}.{owner + '.' if owner else ''}{name}"
    (text,) = [text for text in explained.lost if full in text]
    assert text.startswith(f"torch {torch.__version__} has no {full}, which {purpose}")
    assert len(explained.lost) == 1
    for part in {"kernels", "bytecode", "graph_runs", "stages", "compiles"} - set(gone.split()):
        assert getattr(explained, part), part
    for part in gone.split():
        assert not getattr(explained, part)
