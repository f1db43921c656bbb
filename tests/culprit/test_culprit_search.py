"""The search for the culprit: planted faults of torch's compiler are named, clean models accuse nobody."""

from __future__ import annotations

import inspect
import runpy
import time

import pytest
import torch
from torch import nn

from pytest_torchcompile.culprit import compiler_bisection
from pytest_torchcompile.culprit.captured_graph import CapturedGraph, GraphCatcher, graph_size, places_of
from pytest_torchcompile.culprit.compiler_bisection import bisect_compiler
from pytest_torchcompile.culprit.culprit_record import culprit_text
from pytest_torchcompile.culprit.culprit_search import find_culprit
from pytest_torchcompile.culprit.graph_shrinking import shrink_graph
from pytest_torchcompile.culprit.graph_trial import NUMBERS, GraphTrial, signs_of
from pytest_torchcompile.culprit.operator_notes import OperatorNote
from pytest_torchcompile.culprit.operator_script import NoScript, graph_script
from pytest_torchcompile.culprit.wrong_operator import FAR, apart_from_eager, operator_noise
from pytest_torchcompile.faults import FAULTS
from pytest_torchcompile.faults.wrong_compiler import WRONG_COMPILERS
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.equivalence import ObjectTrial
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch

NUMBERS_ONLY = frozenset({NUMBERS})
needs_cxx = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")


@pytest.fixture(autouse=True)
def _isolated():
    with isolated([]):
        yield


def planted(word):
    return next(fault for fault in WRONG_COMPILERS if fault.name == word)


def object_trial(model, batch, backend):
    return ObjectTrial(model, [batch], CompileConfig(enabled=True, backend=backend), None, steps=1)


def captured_graph(model, *inputs):
    catcher = GraphCatcher()
    torch.compile(model, backend=catcher, dynamic=False)(*inputs)
    return catcher.graphs[0]


# ------------------------------------------------------------------------------------------------------ the whole way


@pytest.mark.slow
@needs_cxx
def test_a_wrong_lowering_is_named_with_its_line_and_a_script(tmp_path):
    fault = planted("lowering of relu")
    with fault.plant():
        found = find_culprit(object_trial(fault.build_model(), fault.make_batch(), "inductor"), "inductor",
                             NUMBERS_ONLY, 3000)
        (tmp_path / "script.py").write_text(found.script)
        with pytest.raises(AssertionError):
            runpy.run_path(str(tmp_path / "script.py"))
    assert (found.subsystem, found.operator, found.left) == ("lowerings", "aten.relu.default", ("relu",))
    file, _, line = found.place.rpartition(":")
    assert file.endswith("wrong_compiler.py")
    assert "torch.relu(x)" in inspect.getsource(inspect.getmodule(type(fault))).splitlines()[int(line) - 1]
    assert "pytest_torchcompile" not in found.script
    assert len(found.script.splitlines()) <= 20
    # Without the fault the same script is content.
    torch.compiler.reset()
    from pytest_torchcompile.lowering.scheduler_notes import compile_anew
    with compile_anew():
        runpy.run_path(str(tmp_path / "script.py"))


def test_torchs_own_group_norm_is_named():
    """The operator of the backward, its line, and why: what AOTAutograd hands it lies in memory in two orders."""
    case = next(case for case in FAULTS if case.upstream == "native_group_norm_backward")
    trial = object_trial(case.program.build_model(), case.program.make_calls()[0], "aot_eager")
    found = find_culprit(trial, "aot_eager", NUMBERS_ONLY, 3000)
    if found.why_not.startswith("none of"):
        pytest.skip("this torch has mended native_group_norm_backward")
    assert found.operator == "aten.native_group_norm_backward.default"
    assert found.remark == "mixed memory formats"
    assert found.own_fault
    assert "programs.py:" in found.place
    assert len(found.operator_script.splitlines()) <= 20
    assert "mixed memory formats" in culprit_text(found)


def test_a_clean_model_accuses_nobody():
    fault = planted("lowering of relu")
    for backend in ("aot_eager", "aot_eager_decomp_partition"):
        found = find_culprit(object_trial(fault.build_model(), fault.make_batch(), backend), backend, NUMBERS_ONLY, 100)
        assert (found.operator, found.subsystem, found.left, found.script) == ("", "", (), "")
        assert found.why_not == ("none of 1 graph(s) shows it by itself: it hangs on what is around them, on several "
                                 "calls, or on the loss")


def test_a_model_without_a_graph_says_so():
    class Plain(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x + 1

    found = find_culprit(object_trial(Plain(), torch.randn(2), "aot_eager"), "aot_eager", NUMBERS_ONLY, 100)
    assert found.why_not == "Dynamo captures no graph of the model"


# ------------------------------------------------------------------------------------------------------- the bisector


@needs_cxx
@pytest.mark.parametrize("name", ["pattern of abs", "fusion of cos"])
def test_the_bisector_names_the_part(name):
    fault = planted(name)
    graph = captured_graph(fault.operation, torch.randn(4, 32))
    trial = GraphTrial(graph.module, graph.inputs, False)
    with fault.plant():
        found = bisect_compiler(lambda backend: NUMBERS in trial.signs(backend), "inductor", time.monotonic() + 3000)
    assert (found.subsystem, found.why_not) == (fault.subsystem, "")


def test_a_wrong_decomposition_is_named():
    fault = planted("decomposition of silu")
    trial = object_trial(fault.build_model(), fault.make_batch(), "aot_eager_decomp_partition")
    with fault.plant():
        found = find_culprit(trial, fault.backend, NUMBERS_ONLY, 3000)
    assert (found.subsystem, found.operator) == ("decomposition", "aten.silu.default")
    assert found.left == ("silu",)


def test_nothing_of_a_bisection_is_left():
    from torch._inductor.compiler_bisector import BACKENDS, CompilerBisector

    before = [subsystem.name for subsystem in BACKENDS["inductor"]]
    found = bisect_compiler(lambda backend: False, "inductor", time.monotonic() + 10)
    assert found.why_not == "with torch's bisector, inductor did not show it again"
    assert [subsystem.name for subsystem in BACKENDS["inductor"]] == before
    assert not CompilerBisector.bisection_enabled
    assert CompilerBisector.get_backend() is None


def test_a_fault_that_no_part_mends_accuses_none():
    found = bisect_compiler(lambda backend: True, "aot_eager_decomp_partition", time.monotonic() + 10)
    assert found.subsystem == ""
    assert found.why_not == "no part that torch's bisector can leave out of aot_eager_decomp_partition mends it"


def test_the_budget_ends_it():
    found = bisect_compiler(lambda backend: True, "inductor", time.monotonic() - 1)
    assert found.why_not == "the time was over before torch's bisector had an answer"


def test_a_torch_without_the_bisector(monkeypatch):
    monkeypatch.setattr(compiler_bisection, "_MODULE", "torch._inductor.no_such_module")
    found = bisect_compiler(lambda backend: True, "inductor", time.monotonic() + 10)
    assert found.why_not.startswith(f"torch {torch.__version__} has no torch._inductor.no_such_module.CompilerBisector"
                                    ", which tries parts of the compiler one by one")


# ------------------------------------------------------------------------------------------- graphs, signs, operators


def test_shrinking_leaves_the_operator_that_is_asked_for():
    graph = captured_graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid()), torch.randn(2, 4))

    def has_relu(captured):
        return any("relu" in str(node.target) for node in captured.module.graph.nodes)

    small = shrink_graph(graph, has_relu, time.monotonic() + 600)
    assert (graph_size(graph.module), graph_size(small.module)) == (4, 1)
    assert shrink_graph(graph, has_relu, time.monotonic() - 1) is graph


def test_captured_graphs_have_real_inputs_and_lines():
    weight = torch.randn(3, requires_grad=True)
    kept = torch.randn(3)

    def model(x):
        return x.t() * weight + kept

    graph = captured_graph(model, torch.randn(3, 2).t().contiguous().t())
    assert torch.equal(graph.module(*graph.inputs)[0], model(next(x for x in graph.inputs if x.shape == (3, 2))))
    (place,) = places_of(graph.module)
    assert place.rpartition(":")[0].endswith("test_culprit_search.py")


def test_signs_tell_faults_apart():
    assert signs_of(["gradient", "value"]) == {NUMBERS}
    assert signs_of(["stride", "vacuous", "nondeterministic"]) == {"stride"}
    assert signs_of([], "KeyError") == {"raises KeyError"}


def test_a_graph_that_eager_refuses_is_not_accused():
    graph = captured_graph(lambda x: x.view(4) + 1, torch.randn(4))
    assert GraphTrial(graph.module, (torch.randn(5),)).signs("aot_eager") == frozenset()


def note(operator, args, result):
    return OperatorNote(operator, args, {}, (result,), "models.py:3")


def test_operators_in_units_of_their_noise():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    right = note(torch.ops.aten.mm.default, (x, x), x @ x)
    wrong = note(torch.ops.aten.mm.default, (x, x), x @ x + 1e-3)
    assert operator_noise(right)[0] < 4
    assert operator_noise(wrong)[0] > FAR


def test_the_first_operator_apart_from_eager():
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    exp, sin = torch.ops.aten.exp.default, torch.ops.aten.sin.default
    eager = [note(exp, (x,), x.exp()), note(sin, (x.exp(),), x.exp().sin())]
    ours = [note(exp, (x + 1,), (x + 1).exp()), note(sin, ((x + 1).exp(),), (x + 1).exp().sin())]
    found = apart_from_eager(ours, eager)
    assert (found.note.name, found.remark, found.own_fault) == ("aten.exp.default", "eager's has other inputs", False)
    assert apart_from_eager(eager, eager) is None
    # One that eager calls more often has no partner.
    assert apart_from_eager(ours[:1], [*eager, eager[0]]) is None


def test_no_script_that_does_not_show_it():
    graph = captured_graph(lambda x: x + 1, torch.randn(4))
    with pytest.raises(NoScript, match="the graph alone does not show it"):
        graph_script(graph, "nothing", {"backend": "aot_eager"}, NUMBERS)
    checkpointed = captured_graph(
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), torch.randn(4).requires_grad_())
    with pytest.raises(NoScript, match="calls a graph of its own"):
        graph_script(CapturedGraph(checkpointed.module, checkpointed.inputs, True), "", {"backend": "eager"}, NUMBERS)
