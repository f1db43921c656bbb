"""What a tensor holds, in whatever form, and bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.state.tensor_forms import (
    dense_form,
    fingerprint,
    is_plain,
    is_spread,
    layout_of,
    same_bits,
    stored_numbers,
    stored_parts,
    visible_strides,
    whole_value,
    write_whole,
)

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor"),
]

NAN = float("nan")


class Sharded(torch.Tensor):
    """A tensor of which this process has a part, as DTensor is."""

    def full_tensor(self):
        return torch.cat([torch.Tensor(self), torch.Tensor(self)])


def ones(*shape):
    return torch.ones(*shape)


@pytest.mark.parametrize(("one", "other", "same"), [
    (ones(3), ones(3), True),
    (ones(3), ones(3) + 1, False),
    (ones(3), ones(4), False),
    (ones(3), ones(3).double(), False),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0]), False),
    (torch.tensor([0.0]), torch.tensor([-0.0]), True),
    (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
    (ones(2, 2).to_sparse(), ones(2, 2).to_sparse(), True),
    (ones(2, 2).to_sparse(), ones(2, 2), False),
    (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse(), False),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
    (torch.tensor([NAN, 0.0]).to_sparse(), torch.tensor([NAN, 0.0]).to_sparse(), True),
    (ones(2).to(torch.float8_e4m3fn), ones(2).to(torch.float8_e4m3fn), True),
    (ones(2).to(torch.float8_e4m3fn), (ones(2) * 2).to(torch.float8_e4m3fn), False),
    (torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)]), True),
], ids=["equal", "values", "shape", "dtype", "nan", "beside a nan", "signed zero", "whole numbers", "sparse", "layout",
        "other places", "other numbers", "sparse nan",
        "8 bits", "8 bits differ", "complex nan"])
def test_same_bits(one, other, same):
    """NaN equals NaN, and 0.0 equals -0.0; nothing else is excused."""
    assert same_bits(one, other) is same


def test_dense_forms():
    """Sparse, nested and quantised tensors as strided ones."""
    nested = torch.nested.nested_tensor([ones(2), torch.zeros(1)])
    quantised = torch.quantize_per_tensor(ones(2), 0.5, 0, torch.qint8)
    assert dense_form(nested).tolist() == [1.0, 1.0, 0.0]
    assert dense_form(ones(2).to_sparse()).tolist() == [1.0, 1.0]
    assert dense_form(quantised).tolist() == [1.0, 1.0]
    plain = ones(2)
    assert dense_form(plain) is plain


def test_an_empty_nested_tensor_is_dense():
    """There is nothing to be joined."""
    assert dense_form(torch.nested.nested_tensor([], dtype=torch.float64)).numel() == 0


def test_layouts():
    """The sizes of a nested tensor are no part of its dense form, so they are told."""
    assert layout_of(ones(2)) == "torch.strided"
    assert "[(2,), (1,)]" in layout_of(torch.nested.nested_tensor([ones(2), ones(1)]))
    assert layout_of(torch.quantize_per_tensor(ones(2), 0.5, 0, torch.qint8)).startswith("quantised, ")


def test_visible_strides():
    """Of an axis of length one no stride can be seen."""
    assert visible_strides(ones(2, 1, 3)) == (3, 1)
    assert visible_strides(ones(2, 3).t()) == (1, 3)
    assert visible_strides(ones(0, 3)) is None
    assert visible_strides(ones(2).to_sparse()) is None


def test_plain_tensors():
    """Of torch's own class, in strides."""
    assert is_plain(nn.Parameter(ones(1)))
    assert not is_plain(ones(1).as_subclass(Sharded))
    assert not is_plain(ones(2).to_sparse())


def test_a_tensor_that_is_spread_is_gathered():
    """One that is not is handed on, detached."""
    part = ones(2).as_subclass(Sharded)
    assert is_spread(part)
    assert whole_value(part).shape == (4,)
    own = ones(2).requires_grad_()
    assert not is_spread(own)
    assert not whole_value(own).requires_grad
    assert whole_value(own).data_ptr() == own.data_ptr()


def test_a_whole_value_is_written_in_place():
    """Whoever holds the tensor sees it."""
    tensor = torch.zeros(2)
    write_whole(tensor, ones(2))
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_changes_with_a_value(dtype):
    """Of many elements too, where a sum in half precision would not notice one; and where two change places."""
    tensor = torch.ones(5000, dtype=dtype)
    tensor[7] = 0
    before = fingerprint(tensor).tolist()
    assert fingerprint(tensor.clone()).tolist() == before
    tensor[3] = 0
    changed = fingerprint(tensor).tolist()
    assert changed != before
    tensor[7] = 1
    assert fingerprint(tensor).tolist() not in (before, changed)


def test_no_fingerprint_of_what_has_no_values():
    """Empty, on the device meta, or sparse without a number."""
    for tensor in (torch.empty(0), torch.empty(2, device="meta"), torch.zeros(2).to_sparse()):
        assert not fingerprint(tensor).numel()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_the_numbers_that_a_sparse_tensor_stores(layout):
    """They are the tensor's own: what is written to them it has."""
    tensor = torch.eye(3).to_sparse(layout=layout)
    stored_numbers(tensor).mul_(2)
    assert torch.equal(tensor.to_dense(), 2 * torch.eye(3))


def test_a_dense_tensor_stores_itself():
    tensor = ones(2)
    assert stored_numbers(tensor) is tensor


def test_the_fingerprint_of_a_sparse_tensor_changes_with_a_value():
    tensor = torch.eye(3).to_sparse()
    before = fingerprint(tensor).tolist()
    tensor.mul_(2)
    assert fingerprint(tensor).tolist() != before


@pytest.mark.parametrize(("layout", "count"), [(torch.sparse_coo, 2), (torch.sparse_csr, 3), (torch.sparse_csc, 3)])
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_all_that_a_sparse_tensor_stores(layout, count):
    """Not of one that may have a place twice."""
    parts = stored_parts(torch.eye(3).to_sparse(layout=layout))
    assert len(parts) == count
    assert parts[0].tolist() == [1.0, 1.0, 1.0]
    twice = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64), ones(2), (3,), check_invariants=True)
    assert stored_parts(twice) is None
    assert stored_parts(ones(2)) is None
