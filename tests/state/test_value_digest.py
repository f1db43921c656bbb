"""A digest of values: equal for equal ones, another one for every difference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pytest_torchcompile.state.value_digest import Undigestible, ValueDigest

pytestmark = pytest.mark.needs_torch


@dataclass
class Pair:
    """Two values."""

    one: object
    other: object = None


def digest_of(*values):
    digest = ValueDigest()
    for value in values:
        digest.take(value)
    return digest.hexdigest()


ONES = torch.ones(2, 3)
VALUES = [
    (), (ONES,), (ONES * 2,), (ONES.double(),), (ONES.reshape(3, 2),), (torch.ones(3, 2).t(),), (ONES, ONES), ([ONES],),
    ((ONES,),), (torch.nn.Parameter(ONES),), (torch.zeros(0),), (torch.zeros(0, 1),), (torch.tensor(0.0),),
    (torch.tensor(-0.0),), ("a", "b"), ("ab",), ("a",), (b"a",), (1,), (1.0,), (True,), (None,), ({"a": 1},),
    ({"a": "1"},), ({1, 2},), ({1, 3},), (Pair(1),), (Pair(None, 1),), (torch.float32,), (float("nan"),),
]  # fmt: skip


def test_every_difference_counts():
    """Also of kind, dtype, shape and strides, and where one value ends."""
    assert len({digest_of(*values) for values in VALUES}) == len(VALUES)


@pytest.mark.parametrize(("one", "other"), [
    (ONES, torch.full((2, 3), 1.0)), (ONES.expand(2, 3), ONES.clone()), ({3, 1, 2}, {1, 2, 3}),
    (Pair([1, "a"]), Pair([1, "a"])), (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
    (torch.view_as_complex(torch.ones(2, 2)).conj(), torch.view_as_complex(torch.ones(2, 2)).conj().resolve_conj()),
])  # fmt: skip
def test_equal_values(one, other):
    """Wherever they lie in memory."""
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize("value", [
    object(), [object()], {"a": len}, Pair, torch.ones(2, device="meta"), torch.ones(2).to_sparse(),
], ids=["object", "list of an object", "dict of a builtin", "class", "meta tensor", "sparse tensor"])
def test_what_nobody_can_tell_apart(value):
    """It has no digest, rather than one that hides a difference."""
    with pytest.raises(Undigestible):
        digest_of(value)
