"""Kernels explained: what they read and write is what the generated code says, and what fusion keeps from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from explain.generated_code import differences, read_memory

from pytest_torchcompile import CompileConfig, zoo
from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.lowering.kernel_records import readable_bytes

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def images():
    """Convolutions with batch norm, dropout and a mean: buffers written in place, half results, several outputs."""
    torch.manual_seed(0)
    return explain(zoo.conv_net(), zoo.image_batch(2))


@pytest.fixture(params=["head", "images"])
def explained(request):
    """Each of them."""
    return request.getfixturevalue(request.param)


def test_reads_and_writes_are_those_of_the_code(explained):
    """Every kernel, in the order of the code: the memory that it is given, shapes, dtypes and bytes."""
    assert not explained.error
    assert not explained.lost
    assert len(explained.kernels) >= 5
    assert differences(explained) == []


def test_a_wrong_tensor_would_be_seen(head):
    """The check above can fail: a wrong shape, too many bytes, a read that is not there, a kernel too few."""
    softmax = next(kernel for kernel in head.kernels if "softmax" in kernel.name)
    scores = softmax.reads[0]
    for wrong in (replace(softmax, reads=(replace(scores, shape=(4, 601)),)),
                  replace(softmax, reads=(replace(scores, bytes=scores.bytes + 4),)),
                  replace(softmax, reads=(replace(scores, name="primals_1"),))):
        kernels = [wrong if kernel is softmax else kernel for kernel in head.kernels]
        assert differences(replace(head, kernels=kernels))
    assert differences(replace(head, kernels=head.kernels[1:]))


def test_a_fused_softmax(head):
    """Its operators in order, its loops, the user's line, and the two intermediates that stay inside."""
    softmax = next(kernel for kernel in head.kernels if kernel.stage == "forward" and not kernel.library)
    # With one thread, as OMP_NUM_THREADS may say, Inductor writes no parallel loop.
    assert (softmax.kind, softmax.parallel) == ("reduction", "#pragma omp parallel" in softmax.source)
    assert [operator.node for operator in softmax.operators] == ["amax", "sub", "exp", "sum_1", "div"]
    assert {operator.original for operator in softmax.operators} == {"aten._softmax.default"}
    assert ((4,), (600,)) in softmax.loops
    assert [tensor.of for tensor in softmax.reads] == ["addmm"]
    assert [tensor.of for tensor in softmax.writes] == ["amax", "sum_1", "div"]
    assert [(operator.node, operator.bytes) for operator in softmax.kept_inside] == [("sub", 9600), ("exp", 9600)]
    lines = Path(zoo.__file__).read_text().splitlines()
    file, _, line = softmax.places[0].rpartition(":")
    assert file == zoo.__file__
    assert "softmax(dim=-1)" in lines[int(line) - 1]
    assert softmax.name in softmax.source or 'extern "C"' in softmax.source


def test_library_calls(head, images):
    """Whose they are, and only their own operator."""
    assert {kernel.library for kernel in head.kernels if kernel.kind == "library"} == {"BLAS"}
    convolutions = [kernel for kernel in images.kernels if kernel.library == "convolution"]
    assert [len(kernel.operators) for kernel in convolutions] == [1] * len(convolutions)
    backward = next(kernel for kernel in convolutions if kernel.stage == "backward")
    assert len(backward.writes) > 1
    assert not backward.kept_inside


class Attention(torch.nn.Module):
    """Queries are scaled after a bias was added; ``@`` expands each to the size that it has, which makes nothing."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, images):
        # Not contiguous, so the bias is added apart from the product.
        tokens = images.flatten(2).transpose(1, 2)
        query, key, value = self.project(tokens).reshape(-1, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = (query * 0.5) @ key.transpose(-2, -1)
        return scores.softmax(-1) @ value


def test_operators_before_what_makes_nothing():
    """A kernel that adds a bias and scales is told so, not as three copies; a softmax has its division."""
    torch.manual_seed(0)
    explained = explain(Attention(), torch.randn(4, 32, 4, 4))
    generated = [kernel for kernel in explained.kernels if kernel.stage == "forward" and not kernel.library]
    scaling = next(kernel for kernel in generated if "_mul_" in kernel.name)
    assert {"add", "mul"} <= {operator.node for operator in scaling.operators}
    assert [operator.node for operator in scaling.kept_inside] == ["add", "mul"]
    softmax = next(kernel for kernel in generated if "softmax" in kernel.name)
    assert [operator.node for operator in softmax.operators][-1] == "div"
    assert "div" not in [operator.node for operator in softmax.kept_inside]
    for kernel in generated:
        # Inductor names a kernel by the operators that it was made of.
        operators = {operator.original.split(".")[1] for operator in kernel.operators}
        assert kernel.name.startswith("cpp_fused_" + "_".join(sorted(operators)))


def test_a_mean_in_two_kernels(images):
    """The sum is written as a part of the mean, and the kernel that divides it is told nothing that was before."""
    written = next(tensor for kernel in images.kernels for tensor in kernel.writes if tensor.of == "mean")
    assert written.partly
    reader = next(kernel for kernel in images.kernels if written.name in {tensor.name for tensor in kernel.reads})
    assert reader.operators[0].node == "mean"
    assert not any("batch_norm" in operator.original for operator in reader.operators)


@pytest.mark.slow
def test_what_a_kernel_overwrites_itself_is_not_written():
    """A layer norm keeps its sum where its mean comes; the last one leaves its results, their mean and variance."""
    torch.manual_seed(0)
    explained = explain(zoo.mini_gpt(), zoo.token_batch(2, 32), loss_fn=zoo.lm_loss)
    assert differences(explained) == []
    norms = [kernel for kernel in explained.kernels if kernel.stage == "forward" and "layer_norm" in kernel.name]
    large = [tensor.of for tensor in norms[-2].writes if tensor.bytes == 2 * 32 * 64 * 4]
    assert large == ["mul_14", "add_16"]
    small = [(tensor.of, tensor.partly) for tensor in norms[-2].writes if tensor.bytes == 2 * 32 * 4]
    assert small == [("getitem_19", False), ("var_mean_4", True), ("div", False)]


def test_buffers_in_place(images):
    """Running statistics are read and written under the input's own name."""
    kernels = [kernel for kernel in images.kernels if any(tensor.of.startswith("copy_") for tensor in kernel.writes)]
    updated = [tensor for kernel in kernels for tensor in kernel.writes if tensor.of.startswith("copy_")]
    assert len(updated) == 6
    assert all(tensor.name.startswith("primals_") for tensor in updated)


def test_saved_for_the_backward(head):
    """The softmax's result is kept, the inputs are in memory anyway."""
    saved = {tensor.name: (tensor.bytes, tensor.given) for tensor in head.saved_of("0/0")}
    assert saved == {"primals_3": (4 * 64 * 4, True), "div": (9600, False)}


def test_as_text(head):
    """The first line, a kernel, and what never reaches memory."""
    text = "\n".join(explanation_lines(head))
    assert text.startswith("head: 1 frame, 2 generated graphs, ")
    assert "operators _softmax (amax, sub, exp, sum, div)" in text
    assert "inside    18.8 KiB never reach memory: sub 9.38 KiB, exp 9.38 KiB" in text
    assert "saved      1 tensor of 9.38 KiB for the backward pass" in text


def test_what_raises_is_told():
    """A model that does not compile gets its error into the explanation; what came before is there."""
    explained = explain(torch.nn.Linear(3, 2), torch.randn(4, 5), CompileConfig(backend="aot_eager"))
    assert "RuntimeError" in explained.error
    assert "the compiled step raised" in "\n".join(explanation_lines(explained))


def test_a_graph_break_is_told_first():
    """In the first line too; torch's hint as what it is, for the check of a matrix may find that it does not help."""
    class Asks(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    explained = explain(Asks(), torch.ones(4), CompileConfig(backend="aot_eager"))
    first, *others = explanation_lines(explained)
    assert ", 1 graph break, " in first
    (hint,) = (line for line in others if line.startswith("  torch's hint, not tried here (the check "))
    assert "capture_scalar_outputs" in hint


def test_a_compiled_model_is_refused():
    """There is nothing to compile anew in it."""
    with pytest.raises(ValueError, match=r"it runs compiled already .* give explain the eager model"):
        explain(torch.compile(torch.nn.Linear(3, 2)), torch.randn(4, 3))


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "0.977 KiB"), (9600, "9.38 KiB"),
                                             (153600, "150 KiB"), (3 << 20, "3.00 MiB"), (5 << 30, "5.00 GiB")])
def test_readable_bytes(count, text):
    """Three digits and a unit."""
    assert readable_bytes(count) == text


def test_a_library_writes_also_what_nobody_reads():
    """Of a sort the values or the indices may be unread, and both are written; a kernel of ours writes what is read."""
    class Sorted(torch.nn.Module):
        def forward(self, x):
            return x.sort(-1).values * 2, torch.topk(x, 5).indices, x.max(-1).values + 1

    found = explain(Sorted(), torch.randn(64, 64), CompileConfig())
    written = {}
    for call in found.kernels:
        written[call.name] = sorted((tensor.dtype, tensor.shape) for tensor in call.writes)
    assert written["aten.sort.stable"] == [("float32", (64, 64)), ("int64", (64, 64))]
    assert written["aten.topk.default"] == [("float32", (64, 5)), ("int64", (64, 5))]
    [maximum] = [writes for name, writes in written.items() if "max" in name]
    assert "int64" not in dict(maximum)
    assert differences(found) == []


def test_a_result_that_nobody_reads_is_held_against_torch():
    """It has no name in the code; a wrong shape of it, or one too few, is seen all the same."""
    def attends(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) + 1

    found = explain(attends, torch.randn(2, 3, 8, 16), CompileConfig(), train=False)
    assert differences(found) == []
    attention = next(kernel for kernel in found.kernels if kernel.library == "SDPA")
    output, unread = attention.writes
    for wrong in ((output,), (output, replace(unread, shape=(2, 3, 9)))):
        kernels = [replace(kernel, writes=wrong) if kernel is attention else kernel for kernel in found.kernels]
        assert any("and returns" in text for text in differences(replace(found, kernels=kernels)))


TRITON = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''...''', device_str='cuda')
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        with torch.cuda._DeviceGuard(0):
            buf0 = torch.ops.aten.sort.stable(arg0_1, stable=False, dim=1, descending=False)
            buf1 = buf0[0]
            buf3 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_0.run(buf1, arg1_1, buf3, 32, stream=stream0)
            buf4 = buf3; del buf3  # reuse
            extern_kernels.mm(arg0_1, arg1_1, out=buf4)
def get_args():
    arg0_1 = rand_strided((8, 4), (4, 1), device='cuda:0', dtype=torch.float32)
    arg1_1 = rand_strided((8, 4), (4, 1), device='cuda:0', dtype=torch.float32)
"""


def test_generated_code_for_a_gpu_is_read_too():
    memory = read_memory(TRITON)
    assert memory.calls == [("aten.sort.stable", {"arg0_1", "buf0"}),
                            ("triton_poi_fused_add_0", {"buf1", "arg1_1", "buf3"}),
                            ("mm", {"arg0_1", "arg1_1", "buf4"})]
    assert memory.results_of(0) == {((8, 4), "float32"): 1, ((8, 4), "int64"): 1}
    assert not memory.results_of(1)
    assert (memory.root("buf1"), memory.root("buf4")) == ("buf0", "buf3")
