"""Kernels that touch a part of a large tensor: rows that are looked up, and rows that are written in place."""

from __future__ import annotations

import pytest
import torch
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


def test_an_embedding_reads_the_rows_that_it_returns():
    module = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.ReLU())
    _explained, kernel = _kernel(module, torch.tensor([3, 7, 7]))
    assert kernel.bytes_read == 3 * ROW + 3 * 8
