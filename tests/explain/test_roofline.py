"""The roofline of kernels: FLOPs of torch's own counter, bytes of reads and writes, the figure and the lines."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchcompile import zoo
from pytest_torchcompile.explain import roofline as roofline_module
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.graph_texts import Stage, read_graph
from pytest_torchcompile.explain.roofline import KernelRoof, Roofline, flops_of_stage, kernel_roofs
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.lowering.kernel_records import KernelCall, Operator, TensorAccess

pytestmark = pytest.mark.needs_torch
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})


def test_flops_of_all_kernels_are_those_of_torch(head):
    """A product forward, and the two of its backward pass."""
    model, batch = zoo.tiny_head(), torch.randn(4, 64)
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    roofs = kernel_roofs(head, PEAKS)
    assert sum(roof.flops for roof in roofs if roof.counted) == counter.get_total_flops() > 0


def test_each_kernel_has_its_bytes_and_its_bound(head):
    roofs = kernel_roofs(head, PEAKS)
    moved = [call.bytes_read + call.bytes_written for call in head.kernels]
    assert [roof.bytes for roof in roofs] == [size for size in moved if size]
    for roof in roofs:
        by_memory = roof.bytes / 1e9
        if roof.counted:
            assert roof.seconds == max(by_memory, roof.flops / 1e10)
        else:
            # One an element: never held against the peak of products.
            assert (roof.seconds, roof.bound) == (by_memory, "memory")
    assert {roof.bound for roof in roofs} == {"memory", "compute"} or all(roof.bound == "memory" for roof in roofs)


def test_the_lines_and_the_figure(head):
    roofline = Roofline(tuple(kernel_roofs(head, PEAKS)), PEAKS)
    first, measured, _head, *rows = roofline.lines()
    assert first.startswith("roofline: at this machine's peaks (cpu: 954 MiB/s, 10 GFLOP/s in float32) all kernels")
    assert f"in {len(rows)} kernels; " in measured
    assert len(rows) == len(roofline.kernels)
    root = ElementTree.fromstring(str(roofline.figure()))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == len(roofline.kernels)
    assert roofline.to_dict()["kernels"][0]["intensity"] > 0


def test_the_roof_is_that_of_the_dtype_with_most_products():
    """A GPU multiplies bfloat16 many times as fast as float32, so that its kernels would stand above that roof."""
    peaks = MachinePeaks("cpu", bandwidth=1e9, products={"float32": 1e10, "bfloat16": 1e11})
    kernels = (KernelRoof("mm", "forward", 10**9, 10**5, 1e-2, "compute", counted=True, dtype="bfloat16"),
               KernelRoof("fused", "forward", 10**3, 10**6, 1e-3, "memory", counted=False))
    roofline = Roofline(kernels, peaks)
    assert "(cpu: 954 MiB/s, 100 GFLOP/s in bfloat16) all kernels" in next(roofline.lines())
    assert "Roofline: 2 points and a roof of 100 GFLOP/s" in str(roofline.figure())
    assert Roofline(kernels[1:], peaks).dtype == "float32"


@pytest.mark.parametrize(("target", "takes_tf32", "seconds", "dtype"), [
    ("aten.convolution.default", True, 2.0, "tf32"),
    ("aten.convolution.default", False, 10.0, "float32"),
    ("aten.mm.default", True, 10.0, "float32"),
])
def test_a_gpu_convolves_float32_in_tf32(monkeypatch, target, takes_tf32, seconds, dtype):
    """Half as fast as bfloat16; against float32's own peak such a kernel stood above the roof."""
    monkeypatch.setattr(roofline_module, "_flops_of_graphs", lambda stages: {0: {"product": 10**11}})
    peaks = MachinePeaks("a GPU", 1e12, products={"float32": 1e10, "bfloat16": 1e11}, takes_tf32=takes_tf32)
    operators = (Operator("product", target, target, (8, 8), "float32", 256),)
    wrote = (TensorAccess("buf0", (8, 8), "float32", 256, of="product"),)
    call = KernelCall("extern_kernels.it", "library", "0/0", 0, operators=operators, writes=wrote)
    (roof,) = kernel_roofs(Explanation("net", "2.11.0", "", kernels=[call]), peaks)
    assert (roof.seconds, roof.dtype, roof.bound) == (seconds, dtype, "compute")


def test_products_of_open_sizes_are_told_to_be_missing():
    """Nothing counts them, so nobody may take the kernel for one that computes little."""
    operators = (Operator("mm", "aten.mm.default", "aten.mm.default", ("s0", "s0"), "float32", 400),)
    wrote = (TensorAccess("buf0", ("s0", "s0"), "float32", 400, of="mm"),)
    call = KernelCall("extern_kernels.mm", "library", "0/0", 0, operators=operators, writes=wrote)
    relu = replace(call, operators=(replace(operators[0], target="aten.relu.default"),))
    roofs = kernel_roofs(Explanation("net", "2.13.0", "", kernels=[call, relu]), PEAKS)
    assert [roof.uncounted for roof in roofs] == [True, False]
    _first, _head, *rows = Roofline(tuple(roofs), PEAKS).lines()
    assert rows[0].endswith("extern_kernels.mm (computes more: FLOPs not known, or sizes open)")
    assert rows[1].endswith("extern_kernels.mm (one FLOP an element)")


def test_what_was_measured_stands_beside_the_least():
    """The dearest comes first; what was not timed has no share."""
    kernels = (KernelRoof("quick", "forward", 10, 10**3, 1e-6, "memory", counted=False, measured=4e-6),
               KernelRoof("slow", "forward", 10, 10**3, 1e-6, "memory", counted=False, measured=1e-4),
               KernelRoof("untimed", "forward", 10, 10**3, 1e-6, "memory", counted=False),
               KernelRoof("in a cache", "forward", 10, 10**4, 1e-5, "memory", counted=False, measured=5e-6))
    assert [roof.share_of_roof for roof in kernels] == [0.25, pytest.approx(0.01), None, 2.0]
    assert [roof.seconds_left for roof in kernels] == pytest.approx([3e-6, 9.9e-5, 0.0, 0.0])
    roofline = Roofline(kernels, PEAKS)
    _first, measured, _head, *rows = roofline.lines()
    assert measured == "  measured 109.0 µs in 3 kernels; 102.0 µs of it is above the roof, with the calls themselves"
    assert [row.split("  ")[-1].partition(" (")[0] for row in rows] == ["slow", "in a cache", "quick", "untimed"]
    assert rows[0].split()[:3] == ["1.00", "100.00", "1%"]
    assert rows[3].split()[:3] == ["1.00", "-", "-"]
    assert [kernel["share_of_roof"] for kernel in roofline.to_dict()["kernels"]][2:] == [None, 2.0]


def test_without_kernels_there_is_nothing_to_say():
    assert list(Roofline((), PEAKS).lines()) == []


GRAPH = '''
    def forward(self, x: "f32[2, 3, 8, 8][192, 64, 8, 1]cpu", w: "f32[5, 3, 3, 3][27, 9, 3, 1]cpu", s: "f32[s0, 4]"):
        conv: "f32[2, 5, 6, 6]" = torch.ops.aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1);  x = None
        back = torch.ops.aten.convolution_backward.default(conv, x, w, [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        open: "f32[s0, s0]" = torch.ops.aten.mm.default(s, s)
        relu: "f32[2, 5, 6, 6]" = torch.ops.aten.relu.default(conv)
'''  # noqa: E501


def test_formulas_take_the_arguments_that_the_graph_has():
    """A convolution needs more than shapes; what has an open size is left out, and so is what has no formula."""
    found = flops_of_stage(Stage("0/0", "forward", 0, GRAPH, tuple(read_graph(GRAPH))))
    forward = 2 * 2 * 6 * 6 * 5 * 3 * 9
    assert found == {"conv": forward, "back": 2 * forward}


def test_functions_of_a_kernel_are_held_against_their_peak():
    """A fused chain of sigmoid moves little; what its bytes take is not what is left to win."""
    operators = tuple(Operator(f"sigmoid_{number}", "aten.sigmoid.default", "aten.sigmoid.default", (100,), "float32",
                               400) for number in range(10))
    wrote = (TensorAccess("buf0", (100,), "float32", 400, of="sigmoid_9"),)
    call = KernelCall("cpp_fused", "pointwise", "0/0", 0, operators=operators, writes=wrote)
    peaks = replace(PEAKS, functions=1e6)
    [roof] = kernel_roofs(Explanation("net", "2.13.0", "", kernels=[call]), peaks)
    assert (roof.bound, roof.seconds) == ("functions", pytest.approx(1e-3))
    assert "cpp_fused" in str(Roofline((roof,), peaks).figure())
    assert any("functions" in line for line in Roofline((roof,), peaks).lines())
    cheap = replace(call, operators=(replace(operators[0], target="aten.mul.Tensor"),))
    [roof] = kernel_roofs(Explanation("net", "2.13.0", "", kernels=[cheap]), peaks)
    assert (roof.bound, roof.seconds) == ("memory", pytest.approx(4e-7))
