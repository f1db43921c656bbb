"""What a kernel touches, and what it is told to be: views and gathers of libraries, results in place, and fills."""

from __future__ import annotations

import pytest
import torch
from explain.generated_code import differences
from torch import nn

from pytest_torchcompile.explain import explain

pytestmark = pytest.mark.needs_torch
IDS = torch.tensor([[1, 5, 7], [0, 2, 3]])


def explained_of(function, *given):
    """Without a backward pass."""
    with torch.no_grad():
        explained = explain(function, (given, {}), train=False)
    assert not explained.error
    assert not explained.lost
    return explained


def library_call(explained, name):
    (call,) = [kernel for kernel in explained.kernels if name in kernel.name and not kernel.source]
    return call


@pytest.mark.parametrize(("take", "elements"), [
    (lambda x: x, 64 * 1024), (lambda x: x[:, :16], 64 * 16), (lambda x: x.view(64, 16, 64)[:, 0], 64 * 64),
    (lambda x: x[:4].expand(4, 1024), 4 * 1024),
])
def test_a_library_touches_no_more_than_the_view_that_it_is_given(take, elements):
    x = torch.randn(64, 1024)
    weight = torch.randn(take(x).shape[1], 8)
    call = library_call(explained_of(lambda x, weight: take(x) @ weight, x, weight), "mm")
    assert [tensor.bytes for tensor in call.reads] == [4 * elements, 4 * weight.numel()]


def test_two_views_of_one_tensor_are_both_touched():
    call = library_call(explained_of(lambda x: x[:8, :4].t() @ x[:8, 8:24], torch.randn(64, 64)), "mm")
    assert call.bytes_read == 4 * (8 * 4 + 8 * 16)


def test_a_slice_of_what_a_library_returned():
    def largest(x, weight):
        return torch.topk(x, 32).values[:, :4] @ weight

    call = library_call(explained_of(largest, torch.randn(64, 128), torch.randn(4, 8)), "mm")
    assert call.bytes_read == 4 * (64 * 4 + 4 * 8)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_reads_the_rows_of_its_numbers(mode):
    """24 MiB were told for a few rows, and then hundreds of per cent of the memory's bandwidth."""
    bag = nn.EmbeddingBag(50_000, 64, mode=mode)
    call = library_call(explained_of(bag, IDS), "embedding_bag")
    rows, ids, offsets = (tensor.bytes for tensor in call.reads)
    assert (rows, ids, offsets) == (6 * 64 * 4, 6 * 8, 2 * 8)


def test_more_numbers_than_rows_read_each_row_once():
    bag = nn.EmbeddingBag(4, 64, mode="sum")
    call = library_call(explained_of(bag, IDS % 4), "embedding_bag")
    assert call.reads[0].bytes == 4 * 64 * 4


def test_zeros_that_are_added_to_were_in_memory():
    def add_up(x, at):
        return torch.zeros(10, x.shape[1]).index_add(0, at, x) * 2

    explained = explained_of(add_up, torch.randn(20, 8), torch.arange(20) % 10)
    (kernel,) = explained.kernels
    assert differences(explained) == []
    assert "full" in {operator.target.split(".")[1] for operator in kernel.operators}
    assert kernel.kept_inside == ()
    assert [tensor.of for tensor in kernel.writes] == ["index_put", "mul"]


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[1:3].mul_(2)], ids=["whole", "part"])
def test_what_is_written_into_an_input_is_in_memory(change):
    """The graph computes it, and copies it into the input at its end: that is one store."""
    def step(x):
        change(x)
        return x + 1

    (kernel,) = explained_of(step, torch.randn(8, 8)).kernels
    assert "mul" in {operator.node for operator in kernel.operators}
    assert kernel.kept_inside == ()


def test_what_is_cast_into_an_input_never_was_in_memory():
    """The copy casts: the result before is nowhere."""
    def step(x):
        x.copy_(x.double() * 2)
        return x + 1

    (kernel,) = explained_of(step, torch.randn(8, 8)).kernels
    assert "mul" in {operator.node for operator in kernel.kept_inside}


class Words(nn.Module):
    """Its backward pass fills zeros in one kernel, and adds the gradients of words to them in another."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)

    def forward(self, ids):
        return self.out(self.norm(self.words(ids)))


def test_a_kernel_that_fills_zeros_is_no_layer_norm():
    """Inductor names it so, for the sum that is added later; the kernel that adds has all of its operators."""
    torch.manual_seed(0)
    explained = explain(Words(), torch.randint(0, 50, (4, 16)), train=True)
    assert differences(explained) == []
    filling = [kernel for kernel in explained.kernels if kernel.source and not kernel.reads]
    assert len(filling) == 1
    # Torch 2.11 has no node of the graph for it, and the fill is told as what it does.
    assert [operator.target for operator in filling[0].operators] in (["aten.full.default"], ["fill"])
    assert [(tensor.of, tensor.partly) for tensor in filling[0].writes] == [(filling[0].operators[0].node, False)]
    assert filling[0].kept_inside == ()
    (adding,) = [kernel for kernel in explained.kernels if any("put_accumulate" in operator.node
                                                               for operator in kernel.operators)]
    assert any("layer_norm" in operator.original for operator in adding.operators)


def test_what_takes_no_tensor_is_computed_by_a_kernel_that_reads_none():
    """A row of numbers, and constants: no fill."""
    (kernel,) = explained_of(lambda: torch.arange(100).float().sin() * torch.tensor(3.0)).kernels
    assert not kernel.reads
    assert {"sin", "mul"} <= {operator.node for operator in kernel.operators}
