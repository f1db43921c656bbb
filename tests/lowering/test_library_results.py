"""What a library has computed, in the kernels behind it: copied, or finished by a bias, and always in memory.

As on a GPU, where Inductor adds the bias of a convolution in a kernel of its own.
"""

from __future__ import annotations

import pytest

from pytest_torchcompile.lowering.kernel_facts import complete_calls
from pytest_torchcompile.lowering.kernel_records import KernelCall, Operator, TensorAccess
from pytest_torchcompile.lowering.scheduler_notes import KernelNote

pytestmark = pytest.mark.needs_torch
CODE = """
def call(args):
    x, w, b, = args
    buf0 = convolution(x, w)
    fused(buf0, b, buf1)
    return (buf1,)
"""
SHAPE = (2, 16, 7, 7)
SIZE = 2 * 16 * 7 * 7 * 4


def operator(node, *inputs):
    return Operator(node, f"aten.{node}.default", f"aten.{node}.default", SHAPE, "float32", SIZE, inputs=inputs)


def tensor(name, of=""):
    return TensorAccess(name, SHAPE, "float32", SIZE, of)


CONVOLUTION, RELU = operator("convolution", "x", "w", "b"), operator("relu", "convolution")


def behind(reads, writes, operators):
    """The generated kernel behind a convolution."""
    library = KernelCall("convolution", "library", "0/0", 0, library="convolution", operators=(CONVOLUTION,),
                         reads=(tensor("x"), tensor("w")), writes=(tensor("buf0", "convolution"),))
    fused = KernelCall("fused", "pointwise", "0/0", 0, operators=operators, reads=reads, writes=writes, source="code")
    _, kernel = complete_calls([KernelNote(library, {}), KernelNote(fused, {})], [CODE])
    return [each.target for each in kernel.operators], [each.node for each in kernel.kept_inside]


def test_a_copy_is_no_convolution():
    assert behind((tensor("buf0", "convolution"),), (tensor("buf1", "convolution"),), (CONVOLUTION,)) == (["copy"], [])


def test_a_bias_finishes_it():
    """It is told as a part of the convolution, whose result is what the kernel reads and writes."""
    reads = tensor("buf0", "convolution"), tensor("b")
    assert behind(reads, (tensor("buf1", "convolution"),), (CONVOLUTION,)) == (["aten.convolution.default"], [])


def test_what_a_library_computed_was_in_memory():
    """A bias is added and relu taken at once: nothing of a convolution's size stays inside."""
    reads = tensor("buf0", "convolution"), tensor("b")
    operators, inside = behind(reads, (tensor("buf1", "relu"),), (CONVOLUTION, RELU))
    assert "aten.relu.default" in operators
    assert inside == []


def test_what_a_kernel_keeps_is_still_told():
    after = operator("tanh", "relu")
    assert behind((tensor("buf0", "convolution"),), (tensor("buf1", "tanh"),), (CONVOLUTION, RELU, after)) == (
        ["aten.relu.default", "aten.tanh.default"], ["relu"])
