"""Stages explained: decompositions, guards, bytecode; as a page and as files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from chromium import chromium, found
from explain.captures import operators_of, without_code
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch_versions import TORCH

from pytest_torchcompile import CompileConfig, zoo
from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.decompositions import _name_of, _table_asked
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.explain.graph_drawing import svg_text
from pytest_torchcompile.explain.graph_texts import Stage, read_graph
from pytest_torchcompile.explain.guards import explain_symbolic, read_guards
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.explain.runnable import write_runnables
from pytest_torchcompile.ledger.records import Compile

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize(("model", "batch"), [
    (zoo.feed_forward, lambda: zoo.vector_batch(4)),
    (zoo.mini_gpt, lambda: zoo.token_batch(2, 16)),
    (zoo.conv_net, lambda: zoo.image_batch(2)),
], ids=["feed_forward", "mini_gpt", "conv_net"])
def test_operators_before_decomposition(model, batch):
    """They are exactly those of a second capture without decompositions, and what they became is the graph."""
    torch.manual_seed(0)
    net, given = model(), batch()
    explained = explain(net, given, CompileConfig(backend=without_code(select_decomp_table())))
    plain = explain(net, given, CompileConfig(backend=without_code({})))
    assert not explained.error
    assert not plain.error
    before = Counter(operator.operator for operator in explained.operators)
    assert before == operators_of(plain.traced_graphs[0])
    # The other way round: nothing was taken apart there, and here the parts are the graph.
    assert not any(operator.by for operator in plain.operators)
    after = Counter(part for operator in explained.operators for part in operator.into)
    assert after == operators_of(explained.traced_graphs[0])
    assert any(len(operator.into) > 3 for operator in explained.operators)


def test_one_decomposition(head):
    """A softmax: its parts, who took it apart, and the user's line."""
    softmax = next(operator for operator in head.operators if operator.operator == "aten._softmax.default")
    assert [part.split(".")[1] for part in softmax.into] == ["amax", "sub", "exp", "sum", "div"]
    assert "_softmax" in softmax.by
    assert softmax.by.startswith("torch.")
    assert softmax.place.startswith(zoo.__file__)
    text = "\n".join(explanation_lines(head))
    assert "_softmax -> amax, sub, exp, sum, div" in text


def test_guards(head):
    """By kind, with what would break each; torch's own apart."""
    guards = {(guard.kind, guard.source): guard for guard in head.guards}
    weight = guards["TENSOR_MATCH", "self.linear.weight"]
    assert "another dtype" in weight.broken_by
    assert not weight.torchs_own
    assert any(guard.torchs_own and guard.kind == "GLOBAL_STATE" for guard in head.guards)
    assert head.compiles[0].guards > 0
    if TORCH >= (2, 13):
        # Torch counts a tensor's marks as one guard. Before 2.13 it counts guards that its own text has not.
        assert len(head.guards) >= head.compiles[0].guards
    assert f"guards     {len(head.guards)}" in "\n".join(explanation_lines(head))


@pytest.mark.parametrize(("condition", "words"), [
    ("2 <= L['x'].size()[0]", "sizes 0 and 1 are compiled apart"),
    ("L['x'].size()[0] >= 2", "sizes 0 and 1 are compiled apart"),
    ("L['x'].size()[0] <= 128", "128 is the most: a comparison or an operator of the model needs that, or "),
    ("L['x'].size()[0] < 128", "127 is the most: "),
    ("16 <= L['x'].size()[0]", "16 is the least: a comparison or an operator of the model needs that, or "),
    ("15 < L['x'].size()[0]", "16 is the least: "),
    ("L['x'].size()[0] > 15", "16 is the least: "),
    ("2 <= L['x'].size()[0] <= 256", "from 2 on to 256 one code serves; 256 is the most: a comparison or an operator"),
    ("16 <= L['x'].size()[0] < 257", "16 is the least: a comparison or an operator of the model needs that, or "
                                     "mark_dynamic was told so; 256 is the most: "),
    ("L['x'].size()[0] % 8 == 0", "this size must be divisible by 8"),
    ("(L['x'].size()[0] % 8) == 0", "this size must be divisible by 8"),
    ("(L['x'].size()[0] % 8) != 0", "this size must not be divisible by 8"),
    ("(L['x'].size()[0] % 8) == 3", "this size must leave 3 over, divided by 8"),
    ("(L['x'].size()[0] % 8) != 3", "this size must not leave 3 over"),
    ("(L['x'].size()[0] % L['y'].size()[0]) < 4", "asks for a remainder: in this call it was as said here"),
    ("L['x'].stride()[0] == L['x'].size()[1]", "how the tensor lies in memory"),
    ("L['x'].size()[0] == L['y'].size()[1]", "these sizes were equal"),
    ("L['x'].size()[0] == 7", "taken for a constant"),
    ("L['x'].size()[0] != 7", "another way"),
    ("L['x'].size()[0] > L['y'].size()[0]", "a comparison in the model"),
])
def test_symbolic_guards(condition, words):
    """Why each is there, in words."""
    assert words in explain_symbolic(condition)
    guard, = read_guards(f"+- LAMBDA_GUARD: {condition}  # return x  # net.py:3 in forward (user code shown)", "0/0")
    assert (guard.kind, guard.source, guard.place) == ("SHAPE_ENV", "x", "net.py:3 in forward")
    assert words in guard.why


def cannot(graph, inputs):
    """A backend that meets what torch takes for a reason to run the graph eagerly."""
    raise DataDependentOutputException(torch.ops.aten.item.default)


def broken(graph, inputs):
    """A backend with an error of its own."""
    raise ValueError("no such operator")


def stepped(x):
    x = x.relu()
    return x * 2


@pytest.mark.parametrize("whole", [False, True])
def test_a_backend_that_fails_is_no_graph_break(whole):
    """Torch records it as one, at the line of whoever called the model: no line of the model is to blame."""
    config = CompileConfig(enabled=True, backend=cannot, fullgraph=whole)
    explained = explain(stepped, torch.randn(4), config, train=False)
    text, page = "\n".join(explanation_lines(explained)), explanation_page(explained)
    assert "graph break" not in text.partition("\n")[0]
    assert "Graph break at" not in page
    assert "capture.py" not in text
    assert "WON'T CONVERT" not in text
    if whole:
        assert "the compiled step raised Unsupported: Backend compiler exception" in text
    else:
        line = stepped.__code__.co_firstlineno
        assert ", 1 graph that the backend failed on, " in text
        assert f"test_explain_stages.py:{line}  the backend failed, and torch ran what it was given eagerly: Backend "\
            "compiler `cannot` failed with aten.item.default." in text
        assert ", 1 graph that the backend failed on; " in page
        assert "<li>In <code>" in page
        assert f"test_explain_stages.py:{line}</code>: the backend failed, and torch ran what it was given" in page


def test_a_backend_with_an_error_of_its_own():
    explained = explain(stepped, torch.randn(4), CompileConfig(enabled=True, backend=broken), train=False)
    text = "\n".join(explanation_lines(explained))
    assert "the compiled step raised BackendCompilerFailed: backend='broken' raised: ValueError: no such op" in text
    assert "graph break" not in text


def test_a_graph_break_is_still_told_as_one():
    def breaks(x):
        x = x.relu()
        torch._dynamo.graph_break()
        return x * 2

    explained = explain(breaks, torch.randn(4), CompileConfig(enabled=True, backend="eager"), train=False)
    first, *rest = explanation_lines(explained)
    assert ", 1 graph break, " in first
    line = breaks.__code__.co_firstlineno + 2
    assert any(text.startswith("graph break  ") and f"test_explain_stages.py:{line}" in text for text in rest)
    page = explanation_page(explained)
    assert ", 1 graph break; " in page
    assert "<li>Graph break at <code>" in page
    assert f"test_explain_stages.py:{line}</code>: " in page
    assert "Torch's hint, not tried here: " in page.replace("&#x27;", "'").replace("&#39;", "'")


def test_a_graph_without_stack_traces():
    """Nodes without a line keep none of the line before; items and sums are expressions."""
    nodes = read_graph('''
    def forward(self, x: "f32[s0, 4][4, 1]cpu", s0: "Sym(s0)"):
        # File: net.py:3 in forward, code: y = x.var_mean()
        var_mean = torch.ops.aten.var_mean.correction(x);  x = None
        # No stacktrace found for following nodes
        getitem: "f32[]" = var_mean[0]
''')
    assert [(node.name, node.place, node.value) for node in nodes] == [
        ("x", "", ""), ("s0", "", ""), ("var_mean", "net.py:3", ""), ("getitem", "", "var_mean[0]")]


@pytest.mark.parametrize("words", ["File: ", "Backward of forward node: File: "], ids=["2.14", "2.15"])
def test_the_line_of_a_backward_node(words):
    """As torch of each version writes it."""
    node, = read_graph(f'''
        # {words}net.py:3 in forward, code: y = x.sin()
        mul: "f32[4][1]cpu" = torch.ops.aten.mul.Tensor(tangents_1, cos)
    ''')
    assert node.place == "net.py:3"


def test_bytecode(head):
    """Of the function that was compiled, before and after."""
    bytecode, = head.bytecode
    assert bytecode.function.endswith("forward")
    assert bytecode.file == zoo.__file__
    assert "softmax" in bytecode.before
    assert "__compiled_fn" in bytecode.after


def test_files(head, tmp_path, monkeypatch):
    """Graphs, kernels with a comment, guards, page and a manifest that names each; a second writing replaces them."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".compile-matrix" / "explain" / "head"
    written = write_files(head, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {str(file.relative_to(folder)) for file in written} == {*manifest["files"], "manifest.json"}
    graph = (folder / "graphs" / "0_0-post_grad-0.py").read_text()
    compile(graph, "graph", "exec")
    assert "torch.ops.aten.addmm.default" in graph
    kernel = next(file for file in (folder / "kernels").iterdir() if "softmax_0" in file.name)
    assert "// keeps exp inside, 9.38 KiB" in kernel.read_text()
    assert '"exp" -> "sum_1"' in (folder / "graphs" / "0_0-post_grad-0.dot").read_text()
    exported = (folder / "graphs" / "0_0-forward-0.export.txt").read_text()
    assert exported.startswith("ExportedProgram:\n    class ")
    assert "    primals_1: PARAMETER target='linear.weight' f32[600, 64]" in exported
    assert "    primals_3: USER_INPUT target=" in exported
    assert "    div: OUTPUT f32[4, 600]" in exported
    assert json.loads((folder / "explanation.json").read_text())["format"] == 1
    program = [sys.executable, folder / "fx_graph_runnable.py"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout == "1 outputs are those of the compiled graph\n", done.stderr
    wrong = replace(head.graph_runs[0], outputs=(head.graph_runs[0].outputs[0] + 1,))
    write_files(replace(head, graph_runs=[wrong]), folder)
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert "output 0: Tensor-likes are not close" in done.stderr
    write_files(replace(head, kernels=[]), folder)
    assert not (folder / "kernels").exists()


def test_a_random_graph_as_a_program(tmp_path):
    """What dropout draws differs from run to run, so it is not compared, and the program says so; the rest is."""
    class Dropping(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(x, 0.5), x + 1

    explained = explain(Dropping(), torch.randn(40), CompileConfig(backend="aot_eager"))
    write_runnables(explained, tmp_path)
    done = subprocess.run([sys.executable, tmp_path / "fx_graph_runnable.py"], capture_output=True, text=True,
                          check=False)
    assert done.stdout.splitlines() == [
        "1 outputs are those of the compiled graph", "1 outputs are random, and were not compared"], done.stderr


def test_a_graph_as_a_picture(head):
    """Each node has a box with its name, below what it takes; no two overlap; every edge is drawn."""
    stage, = head.stages_of("0/0", "forward")
    root = ElementTree.fromstring(svg_text(stage))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {}
    for group in root.iter(f"{space}g"):
        box = group.find(f"{space}rect")
        boxes[group.find(f"{space}text").text] = int(box.get("x")), int(box.get("y"))
    assert set(boxes) == {node.name for node in stage.nodes}
    assert len(set(boxes.values())) == len(boxes)
    for node in stage.nodes:
        assert all(boxes[given][1] < boxes[node.name][1] for given in node.inputs)
    assert len(root.findall(f"{space}path")) == sum(len(node.inputs) for node in stage.nodes)
    hostile = replace(stage, nodes=(replace(stage.nodes[0], name="<x>&", inputs=()),))
    assert ElementTree.fromstring(svg_text(hostile)).find(f"{space}g/{space}text").text == "<x>&"


def test_the_page_is_whole(head):
    """Every kernel, the decomposed operators and the saved tensor; text of strangers is escaped."""
    page = explanation_page(replace(head, name="<b>x"))
    assert "<h1>&lt;b&gt;x</h1>" in page
    for kernel in head.kernels:
        assert kernel.name in page
    assert "saved, 9.38 KiB" in page


@pytest.mark.skipif(found() is None, reason="no Chromium here")
def test_a_click_lights_up_all_stages(head, tmp_path):
    """A kernel of the forward pass: its nodes in each stage, its line; Esc ends it; narrow, nothing is cut off."""
    file = tmp_path / "page.html"
    file.write_text(explanation_page(head))
    with chromium() as browser:
        browser.open(file.as_uri())
        names = "[...document.querySelectorAll('.kernel .op')]"
        browser.evaluate(f"{names}.find(name => name.innerText.includes('softmax_0')).click()")
        lit = "[...document.querySelectorAll('.column')].map(c => c.querySelectorAll('.same, .lit').length > 0)"
        assert all(browser.evaluate(lit))
        same = "[...document.querySelectorAll('.same')].map(row => row.innerText).join()"
        assert "aten.exp" in browser.evaluate(same)
        assert "aten.mm" not in browser.evaluate(same)
        browser.key("Escape")
        assert browser.evaluate("document.querySelectorAll('.same, .lit').length") == 0
        browser.open(file.as_uri(), width=480)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 480
        assert not browser.complaints()


def test_parts_of_a_function_that_breaks_are_told_apart():
    """Both compiles are of one function and begin in its line; the second goes on behind the break."""
    whole = Compile("Net.forward", "models.py", 9, "0/0", "first")
    rest = replace(whole, compile_id="1/0", kind="resume", resumed_at=11)
    explained = Explanation("net", "2.13.0", "", compiles=[whole, rest],
                            stages=[Stage("0/0", "dynamo", 0, "", ()), Stage("1/0", "dynamo", 0, "", ())])
    titles = [line for line in explanation_lines(explained) if line.startswith("compile ")]
    assert titles == ["compile 0/0  Net.forward  models.py:9", "compile 1/0  Net.forward  models.py:9, from line 11"]
    page = explanation_page(explained)
    assert "Net.forward, models.py:9 (compile 0/0)" in page
    assert "Net.forward, models.py:9, from line 11 (compile 1/0)" in page


@pytest.mark.parametrize("by_mode", [True, False], ids=["2.13", "2.11"])
def test_the_table_that_takes_an_operator_apart(by_mode, monkeypatch):
    """From torch 2.13 on the tracing mode's, before it the module's; with neither the function has no name."""
    from torch.fx.experimental import proxy_tensor

    table = {"silu": torch.sigmoid}
    if by_mode:
        mode = SimpleNamespace(decomposition_table=table)
    else:
        mode = SimpleNamespace()
        monkeypatch.setattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", table, raising=False)
    assert _table_asked(mode) is table
    monkeypatch.delattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", raising=False)
    assert _name_of(_table_asked(SimpleNamespace()).get("silu")) == "a function that this torch does not name"
