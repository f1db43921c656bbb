"""Places in memory: accesses that touch the same elements are equal, whatever loops run over them."""

from __future__ import annotations

import pytest
import sympy

pytestmark = pytest.mark.needs_torch

A, B, C = sympy.symbols("a b c", integer=True)
S = sympy.Symbol("s0", integer=True, positive=True)


def place(index, names, sizes):
    from torch._inductor.dependencies import MemoryDep

    from pytest_torchcompile.lowering.memory_accesses import _place_of

    return _place_of(MemoryDep("x", sympy.sympify(index), names, tuple(map(sympy.Integer, sizes))))


@pytest.mark.parametrize(("index", "names", "sizes"), [
    (192 * A + B + 64, (A, B), (5, 32)),
    (B + 64 + 192 * A, (B, A), (32, 5)),              # the other loop first
    (192 * A + C + 64, (A, B, C), (5, 16, 32)),       # a loop that does not move it
    (192 * A + 16 * B + C + 64, (A, B, C), (5, 2, 16)),  # one loop as two
    (192 * A + B + 64 + 7 * C, (A, B, C), (5, 32, 1)),   # a loop of one step
])
def test_the_same_place(index, names, sizes):
    assert place(index, names, sizes) == place(192 * A + B + 64, (A, B), (5, 32))


@pytest.mark.parametrize(("index", "names", "sizes"), [
    (192 * A + B + 96, (A, B), (5, 32)),              # further on
    (192 * A + B + 64, (A, B), (5, 31)),              # fewer
    (96 * A + B + 64, (A, B), (5, 32)),               # other rows
    (192 * A + 8 * B + C + 64, (A, B, C), (5, 2, 16)),   # loops that overlap
    (192 * A + sympy.Mod(B, 16) + 64, (A, B), (5, 32)),  # a remainder
    (S * A + B + 64, (A, B), (5, 32)),                # an open size
])
def test_another_place(index, names, sizes):
    assert place(index, names, sizes) != place(192 * A + B + 64, (A, B), (5, 32))


def test_an_open_size_in_another_order_is_the_same_place():
    assert place(S * A + B, (A, B), (5, 32)) == place(B + S * A, (B, A), (32, 5))
