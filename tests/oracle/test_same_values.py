"""Many pairs of tensors at once: the answers of each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_torchcompile.oracle import same_values
from pytest_torchcompile.oracle.same_values import names_of_differing, same_bits_on_gpu, same_but_for_rounding
from pytest_torchcompile.state.tensor_forms import same_bits

pytestmark = pytest.mark.needs_torch
NAN = float("nan")
ONE = torch.tensor([1.0, -2.0, 0.0, 4.0])
PAIRS: dict[str, tuple[Any, Any]] = {
    "equal": (ONE, ONE.clone()),
    "zeros of two signs": (ONE, torch.tensor([1.0, -2.0, -0.0, 4.0])),
    "other": (ONE, torch.tensor([1.0, -2.0, 0.0, 5.0])),
    "NaN in both": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
    "NaN in one": (torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0])),
    "NaN in the other": (torch.tensor([0.0, 1.0]), torch.tensor([NAN, 1.0])),
    "infinities": (torch.tensor([float("inf")]), torch.tensor([-float("inf")])),
    "complex": (torch.tensor([1 + 2j, complex(NAN, 1)]), torch.tensor([1 + 2j, complex(NAN, 1)])),
    "whole numbers": (torch.arange(3), torch.arange(3)),
    "other whole numbers": (torch.arange(3), torch.arange(3) + 1),
    "half precision": (ONE.bfloat16(), ONE.bfloat16() * 2),
    "empty": (torch.zeros(0), torch.zeros(0)),
}


@pytest.fixture
def cuda_everywhere(monkeypatch):
    """Tensors of the CPU pass for those of a GPU."""
    monkeypatch.setattr(same_values, "_is_on_gpu", lambda tensor: True)


@pytest.mark.parametrize("name", PAIRS)
def test_bits(cuda_everywhere, name):
    one, other = PAIRS[name]
    assert same_bits_on_gpu([(name, one, other)]) == {name: same_bits(one, other)}


def test_all_bits_at_once(cuda_everywhere):
    found = same_bits_on_gpu((name, *pair) for name, pair in PAIRS.items())
    assert found == {name: same_bits(*pair) for name, pair in PAIRS.items()}


@pytest.mark.parametrize(("one", "other"), [
    (ONE, ONE.double()), (ONE, ONE[:3]), (ONE, 3.0), (None, ONE), (ONE.to_sparse(), ONE.to_sparse()),
    (ONE.to(torch.float8_e4m3fn), ONE.to(torch.float8_e4m3fn)),
])
def test_nothing_is_said_of_what_is_not_alike(cuda_everywhere, one, other):
    assert same_bits_on_gpu([("pair", one, other)]) == {}
    assert same_but_for_rounding([("pair", one, other, 1.0)]) == set()


def test_names_of_pairs_that_differ(monkeypatch):
    """Of those on a GPU, of those that are not, and of what is not alike."""
    monkeypatch.setattr(same_values, "_is_on_gpu", lambda tensor: tensor.numel() != 2)
    reads = []
    monkeypatch.setattr(same_values, "read_numbers", lambda *numbers: reads.append(numbers) or [*map(float, numbers)])
    pairs = {**PAIRS, "lengths": (ONE, ONE[:3]), "sparse": (ONE.to_sparse(), ONE.to_sparse()),
             "float8": (ONE.to(torch.float8_e4m3fn), ONE.to(torch.float8_e4m3fn))}
    found = names_of_differing((name, *pair) for name, pair in pairs.items())
    assert found == {name for name, pair in pairs.items() if not same_bits(*pair)}
    assert {"other", "NaN in one", "lengths"} <= found
    assert len(reads) == 1


def test_on_a_cpu_each_is_compared_by_itself():
    assert same_bits_on_gpu([("equal", ONE, ONE.clone())]) == {}


@pytest.mark.parametrize(("change", "same"), [
    (lambda x: x, True),
    (lambda x: x * (1 + 15 * 2.0**-24), True),
    (lambda x: x * (1 + 20 * 2.0**-24), False),
    # An element of zero counts as one of the typical size, which is 2.
    (lambda x: x + 31 * 2.0**-24, True),
    (lambda x: x + 40 * 2.0**-24, False),
    (lambda x: x.masked_fill(x == 4, NAN), False),
    (lambda x: x.masked_fill(x == 4, float("inf")), False),
])
def test_rounding(change, same):
    values = torch.tensor([2.0, -2.0, 0.0, 4.0])
    found = same_but_for_rounding([("pair", values, change(values.double()).float(), 2.0)])
    assert found == ({"pair"} if same else set())


def test_rounding_of_some_and_not_of_others():
    runs = [(str(number), ONE, ONE + number * 2.0**-22, 2.0) for number in range(20)]
    assert same_but_for_rounding(runs) == {str(number) for number in range(9)}
