"""Kernels that touch a part of a large tensor: rows that are looked up, and rows that are written in place."""

from __future__ import annotations

import pytest
import torch
from explain.generated_code import differences
from torch import nn

from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.roofline import kernel_roofs
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks

pytestmark = pytest.mark.needs_torch
ROWS, WIDTH = 4096, 256
ROW = 4 * WIDTH
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})


class Cache(nn.Module):
    """One row of many is written, as by a model that generates token after token."""

    def __init__(self, method):
        super().__init__()
        self.register_buffer("rows", torch.zeros(ROWS, WIDTH))
        self.register_buffer("place", torch.tensor([5]))
        self.method = method

    def forward(self, x):
        getattr(self.rows, self.method)(0, self.place, x * 2)
        return x + 1


def _kernel(module, given):
    with torch.no_grad():
        explained = explain(module, given)
    assert not explained.error
    (kernel,) = explained.kernels
    return explained, kernel


@pytest.mark.parametrize(("method", "read"), [("index_copy_", 0), ("index_add_", ROW)])
def test_a_row_that_is_written_in_place(method, read):
    """What is added to is read, and only that row of it."""
    explained, kernel = _kernel(Cache(method), torch.randn(1, WIDTH))
    assert kernel.bytes_read == ROW + 8 + read
    written = {tensor.of: tensor.bytes for tensor in kernel.writes}
    assert written == {"index_put": ROW, "add": ROW}
    assert [operator.node for operator in kernel.kept_inside if not operator.view] == ["mul"]
    (roof,) = kernel_roofs(explained, PEAKS)
    assert roof.flops == 3 * WIDTH
    assert roof.bytes == kernel.bytes_read + 2 * ROW


class Attends(Cache):
    """Writes a row, and then reads all of them, as attention over a cache does."""

    def forward(self, x):
        self.rows[5] = x[0]
        return self.rows.sum(0)


def test_what_others_have_written_there_is_read():
    """Beside the row that the kernel has written itself; only that one told as read would be a line of many."""
    _, kernel = _kernel(Attends("index_copy_"), torch.randn(1, WIDTH))
    assert kernel.bytes_read == ROW + (ROWS - 1) * ROW
    assert kernel.bytes_written == 2 * ROW


class Twice(Cache):
    """Into the same memory twice: its bytes are told once."""

    def forward(self, x):
        self.rows.index_copy_(0, self.place, x)
        self.rows.index_add_(0, self.place, x)
        return x + 1


def test_memory_that_is_written_twice_is_one_tensor():
    _explained, kernel = _kernel(Twice(""), torch.randn(1, WIDTH))
    assert [tensor.of for tensor in kernel.writes] == ["index_put_1", "add"]
    assert kernel.kept_inside == ()


class Counted(nn.Module):
    """Columns are added up in bins: the loop over what is counted is the inner one, and only the bin depends on it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("found", torch.zeros(32, 4))

    def forward(self, values, bins):
        self.found.index_put_((bins,), values.t(), accumulate=True)
        return values + 1


@pytest.mark.parametrize(("steps", "told"), [(81, 32 * 4 * 4), (7, 7 * 4 * 4), (1, 4 * 4)])
def test_what_is_added_up_in_bins_is_told_for_each_step_of_the_loops(steps, told):
    """As many additions as there are, and never more than all of the bins."""
    with torch.no_grad():
        explained = explain(Counted(), (torch.randn(4, steps), torch.randint(32, (steps,))))
    written = [tensor.bytes for kernel in explained.kernels for tensor in kernel.writes if "index_put" in tensor.of]
    assert written == [told]


class Picked(nn.Module):
    """Single numbers of a table of one dimension."""

    def forward(self, table, places):
        return table[places] + 1


def test_numbers_that_are_picked_are_read_each():
    _explained, kernel = _kernel(Picked(), (torch.randn(4096), torch.randint(4096, (100,))))
    assert kernel.bytes_read == 100 * 4 + 100 * 8


class Product(nn.Module):
    """A sum in place is an argument of the product that follows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)

    def forward(self, ids):
        hidden = torch.relu(self.table(ids))
        return hidden @ self.table.weight.t()


def test_what_was_written_in_place_is_read_by_a_library():
    """Both uses of a weight add to its gradient: the product begins with what the embedding has added up."""
    torch.manual_seed(0)
    explained = explain(Product(), torch.randint(64, (4, 8)), train=True)
    assert differences(explained) == []
    (product,) = [kernel for kernel in explained.kernels if kernel.name == "addmm"]
    assert len(product.reads) == 3


def test_an_embedding_reads_the_rows_that_it_returns():
    module = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.ReLU())
    _explained, kernel = _kernel(module, torch.tensor([3, 7, 7]))
    assert kernel.bytes_read == 3 * ROW + 3 * 8
