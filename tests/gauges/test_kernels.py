"""Kernels out of generated code: what is called how often, what is fused, which of the user's lines."""

from __future__ import annotations

import json

import pytest

from pytest_torchcompile.checks import load
from pytest_torchcompile.gauges.kernels import read_kernels, read_module
from pytest_torchcompile.ledger.records import Text

CPP = '''# AOT ID: ['0_forward']
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
async_compile = AsyncCompile()

cpp_fused__softmax_add_native_layer_norm_relu_0 = async_compile.cpp_pybinding(['float*'], r\'\'\'
extern "C" void kernel(float* in_out_ptr0) { call(1); }
\'\'\')


cpp_fused_sum_1 = async_compile.cpp_pybinding(['float*'], r\'\'\'
\'\'\')

async_compile.wait(globals())

class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.t, aten.addmm]
        extern_kernels.addmm(primals_2, primals_1, alpha=1, beta=1, out=buf0)
        cpp_fused__softmax_add_native_layer_norm_relu_0(buf0)
        # Topologically Sorted Source Nodes: [sort], Original ATen: [aten.sort]
        buf9 = torch.ops.aten.sort.stable(buf0, stable=False, dim=1)
        cpp_fused_sum_1(buf9)
        cpp_fused_sum_1(buf0)
        extern_kernels.addmm(primals_2, primals_1, out=buf0)
        return (buf9, )

def benchmark_compiled_module(times=10):
    cpp_fused_sum_1(None)
'''

TRITON = '''# AOT ID: ['3_inference']
# kernel path: /tmp/x.py
# Topologically Sorted Source Nodes: [add, mul], Original ATen: [aten.add, aten.mul, aten.add]
# Source node to ATen node mapping:
#   add => add
triton_poi_fused_add_mul_0 = async_compile.triton('triton_poi_fused_add_mul_0', \'\'\'
def triton_poi_fused_add_mul_0(in_ptr0): pass
\'\'\', device_str='cuda')

def partition_0(args):
    with torch.cuda._DeviceGuard(0):
        # Topologically Sorted Source Nodes: [add, mul], Original ATen: [aten.add, aten.mul]
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_mul_0.run(arg0_1, buf0, 64, stream=stream0)
    return (buf0, )

def call(args):
    return partition_0(args)
'''

OPERATORS = frozenset({"_softmax", "add", "native_layer_norm", "native", "layer_norm", "relu", "sum", "norm_relu"})


def test_calls_of_a_generated_module():
    """Generated kernels, library calls and fallbacks of one run; benchmark code is not run."""
    found = read_module(CPP, "0/0", OPERATORS)
    assert (found.compile_id, found.stage) == ("0/0", "forward")
    assert {k.name: k.calls for k in found.generated} == {
        "cpp_fused__softmax_add_native_layer_norm_relu_0": 1, "cpp_fused_sum_1": 2}  # fmt: skip
    assert found.library == {"addmm": 2}
    assert found.fallbacks == {"aten.sort.stable": 1}
    assert found.launches == 6


def test_operators_come_out_of_the_name():
    """Sorted words joined by underscores, some with underscores of their own."""
    first, second = read_module(CPP, operators=OPERATORS).generated
    assert first.ops == ("_softmax", "add", "native_layer_norm", "relu")
    assert (second.ops, second.language) == (("sum",), "cpp")


def test_without_the_operators_the_name_stays_whole():
    """No guess where words cannot be told apart."""
    assert read_module(CPP).generated[0].ops == ("_softmax_add_native_layer_norm_relu",)


def test_triton_names_its_operators_in_a_comment():
    """Each once, in torch's order; calls inside of partitions count."""
    found = read_module(TRITON)
    (kernel,) = found.generated
    assert (kernel.language, kernel.ops, kernel.calls) == ("triton", ("add", "mul"), 1)
    assert found.stage == "inference"


def test_lines_belong_to_the_code_recorded_before_them():
    """Several calls of one kernel: their lines together, each once; empty payloads are none."""
    lines = json.dumps({
        "cpp_fused_sum_1:3": ['  File "/src/net.py", line 7, in f\n    x\n  File "/src/net.py", line 9, in g\n'],
        "cpp_fused_sum_1:4": ['  File "/src/net.py", line 9, in g\n', '  File "/src/net.py", line 11, in g\n'],
        "extern_kernels.addmm:1": ['  File "/src/net.py", line 1, in g\n'], "version": 2.0,
    } | {"version": []})  # fmt: skip
    made = [("dynamo", "graph"), ("kernel_lines", ""), ("code", CPP), ("kernel_lines", lines), ("code", TRITON),
            ("kernel_lines", "")]  # fmt: skip
    texts = [Text("0/0", stage, text) for stage, text in made]
    first, second = read_kernels(texts, OPERATORS)
    assert first.generated[1].lines == ("/src/net.py:9", "/src/net.py:11")
    assert first.generated[0].lines == ()
    assert second.generated[0].lines == ()


@pytest.mark.parametrize("code", ["", "def call(args):\n    return ()\n"])
def test_a_module_without_kernels(code):
    """An identity graph calls nothing."""
    assert read_module(code).launches == 0


LAUNCHED = {"kernels": 3, "graphs": 0, "host_launches": 3, "by_name": {"triton_poi_fused_add_0": 2, "gemm": 1}}


@pytest.mark.parametrize(("compiled", "most", "message"), [
    (LAUNCHED, 3, ""),
    (LAUNCHED, 2, "kernels that the GPU runs in a compiled step (call 1): 3, at most 2 allowed; eagerly 5"),
    (LAUNCHED | {"kernels": 0}, 2, "the profiler saw no kernel in call 1, so a limit of 2 says nothing"),
    (None, 2, "no GPU ran anything, so the limit of 2 launches says nothing"),
])
def test_the_limit_of_launches(compiled, most, message):
    """Kernels that ran on a GPU, with their names; a limit that nothing was measured for is a problem itself."""
    launches = compiled and {"call": "call 1", "eager": LAUNCHED | {"kernels": 5}, "compiled": compiled}
    found = list(load("kernels").judge({"raised": None, "graphs": [], "launches": launches}, {"launches": most}))
    assert [problem.message for problem in found] == ([message] if message else [])
    if "at most" in message:
        assert found[0].evidence == "2 x triton_poi_fused_add_0\n1 x gemm"
