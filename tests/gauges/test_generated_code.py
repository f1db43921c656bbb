"""Keys of generated code: what says nothing about the code leaves them, and every change of the code changes them."""

from __future__ import annotations

import pytest

from pytest_torchcompile.gauges.generated_code import read_generated_code
from pytest_torchcompile.ledger.records import Text

KERNEL = """
#include "/tmp/torchinductor_somebody/xy/cxy.h"
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    out_ptr0[0] = in_ptr0[0] + 1;
}
"""
MODULE = f"""
# AOT ID: ['0_forward']
import torch
async_compile = AsyncCompile()

cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''{KERNEL}''')

async_compile.wait(globals())
del async_compile

def call(args):
    primals_1, primals_2 = args
    args.clear()
    buf0 = empty_strided_cpu((s77, 8), (8, 1), torch.float32)
    # Topologically Sorted Source Nodes: [add], Original ATen: [aten.add]
    extern_kernels.addmm(primals_1, primals_2, out=buf0)
    cpp_fused_add_0(buf0, primals_1)
    return (buf0, )

def get_args():
    return [rand_strided((8, 8), (8, 1))]
"""
GRAPH = '''class <lambda>(torch.nn.Module):
    def forward(self, L_x_: "f32[s77, 8][8, 1]cpu"):
        # File: /home/somebody/models.py:7 in forward, code: return torch.relu(x)
        relu: "f32[s77, 8][8, 1]cpu" = torch.relu(L_x_);  L_x_ = None
        return (relu,)
'''


def keys(text, stage="code"):
    """Keys of the graph and of its kernels."""
    (graph,) = read_generated_code([Text("0/0", stage, text)]).graphs
    return graph.key, [kernel.key for kernel in graph.kernels]


@pytest.mark.parametrize(("old", "new"), [
    ("0_forward", "3_forward"), ("cpp_fused_add_0", "cpp_fused_add_7"), ("primals_1", "arg0_1"), ("buf0", "buf9"),
    ("# Topologically", "# Otherwise"), ("/tmp/torchinductor_somebody/xy", "/home/other/ab"), ("(8, 8)", "(9, 9)"),
    ("import torch", "import torch\nfrom ctypes import c_int"),
])  # fmt: skip
def test_what_says_nothing_leaves_the_keys(old, new):
    """Names, numbers, comments, paths, imports and what Inductor writes for its own benchmarks."""
    assert old in MODULE
    assert keys(MODULE.replace(old, new)) == keys(MODULE)


@pytest.mark.parametrize(("old", "new", "graph", "kernel"), [
    ("in_ptr0[0] + 1", "in_ptr0[0] + 2", False, True), ("'const float*', 'float*'", "'float*', 'float*'", False, True),
    ("addmm(primals_1, primals_2", "addmm(primals_2, primals_1", True, False),
    ("torch.float32", "torch.half", True, False), ("(s77, 8)", "(16, 8)", True, False),
    ("return (buf0, )", "return (buf0, primals_2)", True, False),
])  # fmt: skip
def test_what_changes_the_code_changes_its_key(old, new, graph, kernel):
    """Of the kernel, or of what calls it; never of both."""
    assert old in MODULE
    now, before = keys(MODULE.replace(old, new)), keys(MODULE)
    assert (now[0] != before[0], now[1] != before[1]) == (graph, kernel)


@pytest.mark.parametrize(("old", "new", "same"), [
    ("L_x_", "L_batch_", True), ("s77", "s0", True), ("models.py:7", "models.py:9", True), ("<lambda>", "Other", True),
    ("torch.relu", "torch.tanh", False), ("f32[", "bf16[", False), ("8, 1]", "1, 8]", False),
])  # fmt: skip
def test_graphs(old, new, same):
    """A graph that was traced: its variables, symbols and lines say nothing, its operators and layouts do."""
    assert old in GRAPH
    assert (keys(GRAPH.replace(old, new), "forward") == keys(GRAPH, "forward")) == same


SIZED = '''class Graph(torch.nn.Module):
    def forward(self, size: "Sym(s77)", x: "f32[s77, 8][8, 1]cpu", other: "Sym(s9)", last: "i64[][]cpu"):
        tripled: "Sym(3*s77)" = 3 * size;  size = None
        stride: "Sym(s77)" = torch.ops.aten.sym_stride.int(x, 0)
        relu: "f32[s77, 8][8, 1]cpu" = torch.ops.aten.relu.default(x);  x = None
        added: "i64[][]cpu" = torch.ops.aten.add.Tensor(last, 1);  last = None
        view: "f32[8*s77][1]cpu" = torch.ops.aten.view.default(relu, [tripled]);  relu = tripled = None
        return (view, added, stride, other)
'''
TRIPLED = '        tripled: "Sym(3*s77)" = 3 * size;  size = None\n'
ADDED = '        added: "i64[][]cpu" = torch.ops.aten.add.Tensor(last, 1);  last = None\n'
STRIDE = '        stride: "Sym(s77)" = torch.ops.aten.sym_stride.int(x, 0)\n'
ITEM = '        stride: "Sym(u0)" = torch.ops.aten._local_scalar_dense.default(x)\n'
IN_PLACE = "        changed = torch.ops.aten.resize_.default(x, [2])\n"


def moved(line, before, text=SIZED):
    """The text with a line at another place; a line that it has not is put in."""
    return text.replace(line, "").replace(before, line + before)


SIZE_FIRST, SIZE_LATER = ('size: "Sym(s77)", x: "f32[s77, 8][8, 1]cpu"', 'x: "f32[s77, 8][8, 1]cpu", size: "Sym(s77)"')


@pytest.mark.parametrize("other", [
    moved(TRIPLED, ADDED), moved(STRIDE, ADDED), moved(STRIDE, TRIPLED), SIZED.replace(SIZE_FIRST, SIZE_LATER),
    SIZED.replace(";  relu = tripled = None", ""), SIZED.replace(";  size = None", ";  last = None"),
])  # fmt: skip
def test_where_sizes_are_computed_says_nothing(other):
    """As torch 2.15 has them elsewhere than 2.13; nor where they stand among the parameters, or a value is freed."""
    assert other != SIZED
    assert keys(other, "forward") == keys(SIZED, "forward")


CHANGED = moved(IN_PLACE, TRIPLED)
ASKED = SIZED.replace(STRIDE, ITEM)
NESTED = SIZED + """
    class body(torch.nn.Module):
        def forward(self, size: "Sym(s77)", x: "f32[s77, 8][8, 1]cpu"):
            return (size, x)
"""


@pytest.mark.parametrize(("one", "other"), [
    # Lines that read or change values, and what is returned.
    (SIZED, moved(ADDED, "        return")), (CHANGED, moved(IN_PLACE, ADDED)),
    (CHANGED, moved(STRIDE, IN_PLACE, CHANGED)), (ASKED, moved(ITEM, ADDED, ASKED)),
    (SIZED, SIZED.replace("added, stride", "stride, added")),
    # Tensors change places, and sizes do; each is known by its place alone.
    (SIZED, SIZED.replace('add.Tensor(last, 1)', 'add.Tensor(x, 1)')),
    (SIZED, SIZED.replace('size: "Sym(s77)"', 'size: "Sym(s9)"').replace('other: "Sym(s9)"', 'other: "Sym(s77)"')),
    # The caller of a graph gives it its parameters in their order.
    (NESTED, SIZE_LATER.join(NESTED.rsplit(SIZE_FIRST, 1))),
])  # fmt: skip
def test_the_order_of_other_lines_says_something(one, other):
    """Two graphs are never taken for one."""
    assert one != other
    assert keys(one, "forward") != keys(other, "forward")


def test_the_last_stage_stands_for_a_graph():
    """Inductor's code before AOTAutograd's graphs, these before Dynamo's; each compile by itself, in order."""
    texts = [Text("0/0", "dynamo", GRAPH), Text("0/0", "forward", GRAPH), Text("0/0", "code", MODULE),
             Text("0/1", "dynamo", GRAPH), Text("0/1", "forward", GRAPH), Text("0/1", "backward", GRAPH),
             Text("1/0", "dynamo", "no Python"), Text("2/0", "post_grad", GRAPH)]
    generated = read_generated_code(texts)
    assert [graph.graph for graph in generated.graphs] == ["0/0 forward", "0/1 forward", "0/1 backward", "1/0 dynamo"]
    assert generated.texts[generated.graphs[-1].key] == "no Python"
    assert "kernel_0(" in generated.texts[generated.graphs[0].key]
    assert read_generated_code([]).graphs == []
    # Deeper than Python's parser goes.
    assert len(keys(f"def forward(self, x):\n    return {'-' * 20_000}x", "forward")[0]) == 16


COMPILED = """
import sys, torch
from pytest_torchcompile.gauges.generated_code import read_generated_code
from pytest_torchcompile.ledger import observe
linear, NAME = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
model = torch.compile(lambda x: NAME(torch.relu(linear(x)) + x), backend="inductor")
with observe(keep_texts=True) as seen:
    for size in (4, 6):
        model(torch.randn(size, 8)).sum().backward()
for graph in read_generated_code(seen.texts).graphs:
    print(graph.to_dict())
"""


@pytest.mark.slow
@pytest.mark.needs_torch
def test_two_cold_compiles_have_the_same_keys(tmp_path, monkeypatch, run_python):
    """In two processes, with other caches and another name of a variable; static and dynamic, forward and backward."""
    printed = []
    for name in ("norm", "other"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        (tmp_path / f"with_{name}.py").write_text(COMPILED.replace("NAME", name))
        ran = run_python("-m", f"with_{name}", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        printed.append(ran.stdout.splitlines())
    assert printed[0] == printed[1]
    assert len(printed[0]) == 4
    assert all("'kernels': [['" in line for line in printed[0])
