"""Sequences of calls with known ledgers: what changes is a tensor, its size, or how sizes relate."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip



def add(x, y=None):
    """Add what can be added."""
    if y is None:
        return x + 1
    return x + (len(y) if isinstance(y, (list, dict, str)) else y)


def sized(x):
    """Decide by a size."""
    return x + 1 if x.shape[0] > 5 else x - 1


def even(x):
    """Decide by a remainder."""
    return x + 1 if x.shape[0] % 2 == 0 else x - 1


def two(x, y):
    """Two tensors, of one size or not."""
    return x.sum() + y.sum()


def mutated(x, y):
    """Write to one input, read the other."""
    x.add_(1)
    return x + y


T = torch.ones
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SEQUENCES = {}


def sequence(compiles, recompiles=(), runs=None, since=(2, 8), **options):
    """Note a sequence: kinds of compiles, recompiles as (cause, what, old, new), runs of each graph."""

    def note(function):
        if since <= TORCH:  # what torch says of it changed then
            SEQUENCES[function.__name__] = (function, compiles, list(recompiles), runs, options)
        return function

    return note


FIRST, AGAIN = ["first"], ["first", "recompile"]


@sequence(FIRST, runs=[3])
def one_shape(c):
    """Nothing changes."""
    f = c(add)
    for _ in range(3):
        f(T(3))


@sequence(AGAIN, [("shape", "x.size(0)", "3", "4")], [1, 1], dynamic=False)
def another_size_static(c):
    """dynamic=False: each size is a graph."""
    f = c(add)
    f(T(3)), f(T(4))


@sequence([*AGAIN, "recompile"], [("shape", "x.size(0)", "3", "4"), ("shape", "x.size(0)", "4", "5")],
          [1, 1, 1], dynamic=False)
def three_sizes_static(c):
    """The newest entry's guard is the reason."""
    f = c(add)
    f(T(3)), f(T(4)), f(T(5))


@sequence(AGAIN, [("shape", "x.size(0)", "3", "4")], [1, 2])
def three_sizes_auto(c):
    """The second size makes the dimension dynamic, that graph serves the third."""
    f = c(add)
    f(T(3)), f(T(4)), f(T(5))


@sequence(FIRST, runs=[3], dynamic=True)
def three_sizes_dynamic(c):
    """One graph from the start."""
    f = c(add)
    f(T(3)), f(T(4)), f(T(5))


@sequence(FIRST, runs=[2])
def marked_dynamic(c):
    """mark_dynamic in every call: one graph."""
    f = c(add)
    for size in (3, 4):
        x = T(size)
        torch._dynamo.mark_dynamic(x, 0)
        f(x)


@sequence(AGAIN, [("symbolic", "", "", "")], [1, 1], since=(2, 13))
def marked_late(c):
    """mark_dynamic only from the second call on."""
    f = c(add)
    f(T(3))
    x = T(3)
    torch._dynamo.mark_dynamic(x, 0)
    f(x)


@sequence(AGAIN, [("symbolic", "x.size(0)", "2 <= x.size(0)", "1")], [2, 1], dynamic=True)
def size_one(c):
    """A size of 1 is always compiled apart."""
    f = c(add)
    f(T(3)), f(T(4)), f(T(1))


@sequence(AGAIN, [("symbolic", "x.size(0)", "2 <= x.size(0) <= 5", "6")], [1, 1], dynamic=True)
def size_in_a_branch(c):
    """The code decides by the size."""
    f = c(sized)
    f(T(4)), f(T(6))


@sequence(AGAIN, [("symbolic", "(x.size(0) % 2)", "0", "1")], [2, 1], dynamic=True)
def size_modulo(c):
    """The code decides by a remainder."""
    f = c(even)
    f(T(4)), f(T(6)), f(T(5))


@sequence(AGAIN, [("symbolic", "y.size(0)", "x.size(0)", "4")], [1, 1], dynamic=True)
def duck_sizes(c):
    """Two sizes that were equal by chance."""
    f = c(two)
    f(T(3), T(3)), f(T(3), T(4))


@sequence(AGAIN, [("shape", "x.dim()", "1", "2")], [1, 1])
def another_rank(c):
    """One dimension more."""
    f = c(add)
    f(T(3)), f(T(3, 3))


@sequence(AGAIN, [("stride", "x.stride(0)", "4", "1")], [1, 1], dynamic=False)
def another_stride(c):
    """A transposed tensor of the same size."""
    f = c(add)
    f(T(4, 4)), f(T(4, 4).t())


@sequence(AGAIN, [("dtype", "x.dtype", "Float", "Double")], [1, 1])
def another_dtype(c):
    """float64."""
    f = c(add)
    f(T(3)), f(T(3, dtype=torch.float64))


@sequence(AGAIN, [("requires_grad", "x.requires_grad", "False", "True")], [1, 1])
def now_requires_grad(c):
    """An input with gradient."""
    f = c(add)
    f(T(3)), f(T(3, requires_grad=True))


@sequence(AGAIN, [("type", "x", "a tensor", "Parameter")], [1, 1])
def now_a_parameter(c):
    """A parameter is another type."""
    f = c(add)
    f(T(3)), f(torch.nn.Parameter(T(3), requires_grad=False))


@sequence(AGAIN, [("type", "y", "a tensor", "int")], [1, 1])
def tensor_then_number(c):
    """A Python number in place of a tensor."""
    f = c(add)
    f(T(3), T(3)), f(T(3), 2)


@sequence(AGAIN, [("none", "y", "None", "Tensor of shape (3,)")], [1, 1])
def none_then_tensor(c):
    """An optional argument that comes."""
    f = c(add)
    f(T(3)), f(T(3), T(3))


@sequence(AGAIN, [("none", "y", "a tensor", "None")], [1, 1])
def tensor_then_none(c):
    """An optional argument that goes."""
    f = c(add)
    f(T(3), T(3)), f(T(3))


@sequence(AGAIN, [("other", "", "", "")], [1, 1])
def aliased_inputs(c):
    """The same tensor twice."""
    f, x = c(mutated), T(3)
    f(x, T(3)), f(x, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_ledger_of_a_sequence(name, backend, check_ledger):
    """Exactly the compiles, reasons and graph runs that the sequence is known for; no false alarm."""
    check_ledger(*SEQUENCES[name], backend)


@pytest.mark.parametrize("name", ["one_shape", "another_size_static", "three_sizes_auto", "none_then_tensor"])
def test_ledger_of_a_sequence_on_inductor(name, check_ledger):
    """The same with code generated."""
    check_ledger(*SEQUENCES[name], "inductor")


def test_there_are_enough_sequences():
    """A guard against losing them: with those of the other file fewer than forty are no evidence."""
    assert len(SEQUENCES) >= 19
