"""Sequences of calls with known ledgers: what changes is a tensor, its size, or how sizes relate."""

from __future__ import annotations

import pytest
import torch
from torch_versions import since

from pytest_torchcompile import observe
from pytest_torchcompile.ledger.explain import recompile_advice

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
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
FIRST, AGAIN = ["first"], ["first", "recompile"]


def test_one_shape(known_ledger):
    """Nothing changes."""
    with known_ledger(FIRST, [], [3]) as c:
        f = c(add)
        for _ in range(3):
            f(T(3))


def test_another_size_static(known_ledger):
    """dynamic=False: each size is a graph."""
    with known_ledger(AGAIN, [("shape", "x.size(0)", "3", "4")], [1, 1], dynamic=False) as c:
        f = c(add)
        f(T(3)), f(T(4))


def test_three_sizes_static(known_ledger):
    """The newest entry's guard is the reason."""
    with known_ledger([*AGAIN, "recompile"], [("shape", "x.size(0)", "3", "4"), ("shape", "x.size(0)", "4", "5")],
                      [1, 1, 1], dynamic=False) as c:
        f = c(add)
        f(T(3)), f(T(4)), f(T(5))


def test_three_sizes_auto(known_ledger):
    """The second size makes the dimension dynamic, that graph serves the third."""
    with known_ledger(AGAIN, [("shape", "x.size(0)", "3", "4")], [1, 2]) as c:
        f = c(add)
        f(T(3)), f(T(4)), f(T(5))


def test_three_sizes_dynamic(known_ledger):
    """One graph from the start."""
    with known_ledger(FIRST, [], [3], dynamic=True) as c:
        f = c(add)
        f(T(3)), f(T(4)), f(T(5))


def test_marked_dynamic(known_ledger):
    """mark_dynamic in every call: one graph."""
    with known_ledger(FIRST, [], [2]) as c:
        f = c(add)
        for size in (3, 4):
            x = T(size)
            torch._dynamo.mark_dynamic(x, 0)
            f(x)


def test_marked_late(known_ledger):
    """mark_dynamic only from the second call on."""
    told = since((2, 13), ("", ""), ("hasattr(x, '_dynamo_dynamic_indices')", "False"))
    with known_ledger(AGAIN, [("symbolic", *told, "")], [1, 1]) as c:
        f = c(add)
        f(T(3))
        x = T(3)
        torch._dynamo.mark_dynamic(x, 0)
        f(x)


def test_size_one(known_ledger):
    """A size of 1 is always compiled apart."""
    with known_ledger(AGAIN, [("symbolic", "x.size(0)", "2 <= x.size(0)", "1")], [2, 1], dynamic=True) as c:
        f = c(add)
        f(T(3)), f(T(4)), f(T(1))


def test_size_in_a_branch(known_ledger):
    """The code decides by the size."""
    with known_ledger(AGAIN, [("symbolic", "x.size(0)", "2 <= x.size(0) <= 5", "6")], [1, 1], dynamic=True) as c:
        f = c(sized)
        f(T(4)), f(T(6))


def test_size_modulo(known_ledger):
    """The code decides by a remainder."""
    with known_ledger(AGAIN, [("symbolic", "(x.size(0) % 2)", "0", "1")], [2, 1], dynamic=True) as c:
        f = c(even)
        f(T(4)), f(T(6)), f(T(5))


@pytest.mark.parametrize("dynamic", [None, True])
def test_size_that_an_operator_fixes(dynamic):
    """Pooling makes a constant of what a convolution leaves: each size is compiled apart, and no side is advised."""
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 10, stride=5), torch.nn.MaxPool1d(2))
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", dynamic=dynamic)
    with observe() as seen:
        for size in (100, 150, 200, 300):
            compiled(torch.ones(2, 1, size))
    by_size = [found for found in seen.recompiles if found.cause == "symbolic"]
    assert len(by_size) == (3 if dynamic else 2), "each size is compiled apart"
    for found in by_size:
        advice = recompile_advice(found, dynamic=bool(dynamic))
        assert advice.startswith("an operator of torch's (return F.max_pool1d(, nn/modules/pooling.py:")
        assert "one side" not in advice


def test_duck_sizes(known_ledger):
    """Two sizes that were equal by chance."""
    with known_ledger(AGAIN, [("symbolic", "y.size(0)", "x.size(0)", "4")], [1, 1], dynamic=True) as c:
        f = c(two)
        f(T(3), T(3)), f(T(3), T(4))


def test_another_rank(known_ledger):
    """One dimension more."""
    with known_ledger(AGAIN, [("shape", "x.dim()", "1", "2")], [1, 1]) as c:
        f = c(add)
        f(T(3)), f(T(3, 3))


def test_another_stride(known_ledger):
    """A transposed tensor of the same size."""
    with known_ledger(AGAIN, [("stride", "x.stride(0)", "4", "1")], [1, 1], dynamic=False) as c:
        f = c(add)
        f(T(4, 4)), f(T(4, 4).t())


def test_another_dtype(known_ledger):
    """float64."""
    with known_ledger(AGAIN, [("dtype", "x.dtype", "Float", "Double")], [1, 1]) as c:
        f = c(add)
        f(T(3)), f(T(3, dtype=torch.float64))


def test_now_requires_grad(known_ledger):
    """An input with gradient."""
    with known_ledger(AGAIN, [("requires_grad", "x.requires_grad", "False", "True")], [1, 1]) as c:
        f = c(add)
        f(T(3)), f(T(3, requires_grad=True))


def test_now_a_parameter(known_ledger):
    """A parameter is another type."""
    with known_ledger(AGAIN, [("type", "x", "a tensor", "Parameter")], [1, 1]) as c:
        f = c(add)
        f(T(3)), f(torch.nn.Parameter(T(3), requires_grad=False))


def test_tensor_then_number(known_ledger):
    """A Python number in place of a tensor."""
    with known_ledger(AGAIN, [("type", "y", "a tensor", "int")], [1, 1]) as c:
        f = c(add)
        f(T(3), T(3)), f(T(3), 2)


def test_none_then_tensor(known_ledger):
    """An optional argument that comes."""
    with known_ledger(AGAIN, [("none", "y", "None", "Tensor of shape (3,)")], [1, 1]) as c:
        f = c(add)
        f(T(3)), f(T(3), T(3))


def test_tensor_then_none(known_ledger):
    """An optional argument that goes."""
    with known_ledger(AGAIN, [("none", "y", "a tensor", "None")], [1, 1]) as c:
        f = c(add)
        f(T(3), T(3)), f(T(3))


def test_aliased_inputs(known_ledger):
    """The same tensor twice."""
    with known_ledger(AGAIN, [("other", "", "", "")], [1, 1]) as c:
        f, x = c(mutated), T(3)
        f(x, T(3)), f(x, x)
