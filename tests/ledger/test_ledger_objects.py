"""Sequences of calls with known ledgers: what changes is a Python value, a module, or the process."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch_versions import since

from pytest_torchcompile import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip

SCALE = 1
Point = collections.namedtuple("Point", "a b")


@dataclasses.dataclass
class Config:
    """A plain object with a number."""

    k: int = 1


class Net(nn.Module):
    """A linear layer and whatever else it is given."""

    def __init__(self, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        """Forward."""
        return self.linear(x) * getattr(self, "k", 1)


class Stack(nn.Module):
    """Layers in a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        """Forward."""
        for layer in self.layers:
            x = layer(x)
        return x


def add(x, y=None):
    """Add what can be added."""
    if y is None:
        return x + 1
    return x + (len(y) if isinstance(y, (list, dict, str)) else y)


def branch(x, flag):
    """Two ways."""
    return x + 1 if flag else x - 1


def scaled(x):
    """Read a global."""
    return x * SCALE


def lookup(x, d):
    """Read a key that may not be there."""
    return x + d.get("a", 0)


def attribute(x, o):
    """Read an attribute that may not be there."""
    return x + getattr(o, "k", 1)


def apply(x, f):
    """Call what is given."""
    return f(x)


def made(k):
    """Make a function that holds k."""

    def inner(x):
        return x + k

    return inner


T = torch.ones
FIRST, AGAIN = ["first"], ["first", "recompile"]


def test_numbers_static(known_ledger):
    """dynamic=False: each number is a graph."""
    with known_ledger([*AGAIN, "recompile"], [("value", "y", "2", "3"), ("value", "y", "3", "4")],
                      [1, 1, 1], dynamic=False) as c:
        f = c(add)
        f(T(3), 2), f(T(3), 3), f(T(3), 4)


def test_numbers_auto(known_ledger):
    """The second number makes it symbolic."""
    with known_ledger(AGAIN, [("value", "y", "2", "3")], [1, 2]) as c:
        f = c(add)
        f(T(3), 2), f(T(3), 3), f(T(3), 4)


def test_int_then_float(known_ledger):
    """A number of another type."""
    with known_ledger(AGAIN, [("value", "y", "2", "2.5")], [1, 1]) as c:
        f = c(add)
        f(T(3), 2), f(T(3), 2.5)


def test_nan_then_float(known_ledger):
    """Not a number equals nothing, and has a guard of its own."""
    with known_ledger(AGAIN, [("value", "y", "nan", "3.0")], [1, 1], dynamic=False) as c:
        f = c(add)
        f(T(3), float("nan")), f(T(3), 3.0)


def test_another_flag(known_ledger):
    """A bool; going back costs nothing."""
    with known_ledger(AGAIN, [("value", "flag", "True", "False")], [2, 1]) as c:
        f = c(branch)
        f(T(3), True), f(T(3), False), f(T(3), True)


def test_another_text(known_ledger):
    """A string."""
    with known_ledger(AGAIN, [("value", "y", "'a'", "'b'")], [1, 1]) as c:
        f = c(add)
        f(T(3), "a"), f(T(3), "b")


def test_named_tuple_field(known_ledger):
    """A field of a named tuple."""
    with known_ledger(AGAIN, [("value", "p.a", "1", "3")], [1, 1], dynamic=False) as c:
        f = c(lambda x, p: x + p.a)
        f(T(3), Point(1, 2)), f(T(3), Point(3, 2))


def test_dataclass_field(known_ledger):
    """A field of a dataclass."""
    with known_ledger(AGAIN, [("value", "o.k", "1", "2")], [1, 1], dynamic=False) as c:
        f = c(attribute)
        f(T(3), Config(1)), f(T(3), Config(2))


def test_partial_argument(known_ledger):
    """A number inside functools.partial."""
    with known_ledger(AGAIN, [("value", "f.keywords['other']", "1", "2")], [1, 1], dynamic=False) as c:
        f = c(apply)
        for other in (1, 2):
            f(T(3), functools.partial(torch.add, other=other))


def test_longer_list(known_ledger):
    """One item more."""
    with known_ledger(AGAIN, [("length", "len(y)", "1", "2")], [1, 1]) as c:
        f = c(add)
        f(T(3), [1]), f(T(3), [1, 2])


def test_empty_list(known_ledger):
    """Empty at first."""
    with known_ledger(AGAIN, [("length", "len(y)", "0", "2")], [1, 1]) as c:
        f = c(add)
        f(T(3), []), f(T(3), [1, 2])


def test_another_key(known_ledger):
    """A key that goes."""
    with known_ledger(AGAIN, [("dict", "y['a']", "present", "absent")], [1, 1]) as c:
        f = c(add)
        f(T(3), {"a": 1}), f(T(3), {"b": 1})


def test_a_key_comes(known_ledger):
    """A key that was asked for and was not there."""
    with known_ledger(AGAIN, [("dict", "d['a']", "absent", "present")], [1, 1]) as c:
        f = c(lookup)
        f(T(3), {"b": T(3)}), f(T(3), {"a": T(3)})


def test_an_attribute_comes(known_ledger):
    """hasattr decides."""
    with known_ledger(AGAIN, [("attribute", "o.k", "absent", "present")], [1, 1]) as c:
        f, o = c(attribute), type("Empty", (), {})()
        f(T(3), o)
        o.k = 2
        f(T(3), o)


def test_module_float(known_ledger):
    """A float on a module is a constant."""
    with known_ledger(AGAIN, [("value", "self.k", "1.0", "2.0")], [1, 1]) as c:
        model = Net(k=1.0)
        f = c(model)
        f(T(2, 4))
        model.k = 2.0
        f(T(2, 4))


def test_module_step_counter(known_ledger):
    """An int on a module is a constant too: a step counter recompiles in every step."""
    with known_ledger([*AGAIN, "recompile"], [("value", "self.k", "1", "2"), ("value", "self.k", "2", "3")],
                      [1, 1, 1]) as c:
        model = Net(k=1)
        f = c(model)
        for k in (1, 2, 3):
            model.k = k
            f(T(2, 4))


def test_train_then_eval(known_ledger):
    """Dropout reads it."""
    with known_ledger(AGAIN, [("training_mode", "self[1].training", "True", "False")], [1, 1]) as c:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        f = c(model)
        f(T(2, 4))
        model.eval()
        f(T(2, 4))


def test_a_layer_more(known_ledger):
    """A module list that grows."""
    with known_ledger(AGAIN, [("length", "len(self.layers)", "1", "2")], [1, 1]) as c:
        model = Stack()
        f = c(model)
        f(T(2, 4))
        model.layers.append(nn.Linear(4, 4))
        f(T(2, 4))


def test_bias_removed(known_ledger):
    """A parameter that becomes None, in a module of torch's own."""
    with known_ledger(AGAIN, [("none", "self.bias", "a tensor", "None")], [1, 1]) as c:
        model = nn.Linear(4, 4)
        f = c(model)
        f(T(2, 4))
        model.bias = None
        f(T(2, 4))


def test_no_grad(known_ledger):
    """Warm-up with gradients, then without."""
    with known_ledger(AGAIN, [("grad_mode", "grad_mode", "True", "False")], [1, 1]) as c:
        f = c(add)
        f(T(3))
        with torch.no_grad():
            f(T(3))


def test_autocast(known_ledger):
    """Warm-up without autocast."""
    what = since((2, 11), "autocast(cpu)_enabled", "autocast")
    with known_ledger(AGAIN, [("autocast", what, "False", "True")], [1, 1]) as c:
        f = c(add)
        f(T(3))
        with torch.autocast("cpu", torch.bfloat16):
            f(T(3))


def test_deterministic(known_ledger):
    """A switch of the process."""
    with known_ledger(AGAIN, [("global_state", "deterministic_algorithms", "False", "True")], [1, 1]) as c:
        f = c(add)
        f(T(3))
        torch.use_deterministic_algorithms(True)
        try:
            f(T(3))
        finally:
            torch.use_deterministic_algorithms(False)


def test_default_dtype(known_ledger):
    """Another switch; what it was, torch does not say."""
    with known_ledger(AGAIN, [("global_state", "default_dtype", "", "torch.float64")], [1, 1]) as c:
        f, x = c(add), T(3)
        f(x)
        torch.set_default_dtype(torch.float64)
        try:
            f(x)
        finally:
            torch.set_default_dtype(torch.float32)


def test_global_number(known_ledger):
    """A global is a constant."""
    with known_ledger(AGAIN, [("value", "SCALE", "1", "2")], [1, 1]) as c:
        global SCALE
        f = c(scaled)
        f(T(3))
        SCALE = 2
        try:
            f(T(3))
        finally:
            SCALE = 1


def test_two_closures(known_ledger):
    """Two functions of one code share a cache: the first call of the second recompiles."""
    with known_ledger(AGAIN, [("closure", "k", "1", "2")], [1, 1]) as c:
        c(made(1))(T(3)), c(made(2))(T(3))


def test_another_function(known_ledger):
    """A function as an argument."""
    was = since((2, 13), "builtin_function_or_method", "")
    with known_ledger(AGAIN, [("closure", "f", was, "function _VariableFunctionsClass.cos")], [1, 1]) as c:
        f = c(apply)
        f(T(3), torch.sin), f(T(3), torch.cos)


def test_another_module(known_ledger):
    """A module as an argument."""
    was = since((2, 10), "Linear", "")
    with known_ledger(AGAIN, [("type", "type(f)", was, "ReLU")], [1, 1]) as c:
        f = c(apply)
        f(T(2, 4), nn.Linear(4, 4)), f(T(2, 4), nn.ReLU())


def test_grad_mode_then_size(known_ledger):
    """Two entries: the one last used fails because of the grad mode first, but that mode is compiled too."""
    recompiles = [("grad_mode", "grad_mode", "True", "False"), ("shape", "x.size(0)", "3", "4")]
    with known_ledger([*AGAIN, "recompile"], recompiles, [1, 1, 1], dynamic=False) as c:
        f = c(add)
        f(T(3))
        with torch.no_grad():
            f(T(3))
        f(T(4))


def test_known_size_new_number(known_ledger):
    """Three entries: one differs in size and number, two in the number alone."""
    recompiles = [("value", "self.k", "1", "2"), ("shape", "x.size(0)", "2", "3"), ("value", "self.k", "2", "3")]
    with known_ledger([*AGAIN, "recompile", "recompile"], recompiles, [1, 1, 1, 1], dynamic=False) as c:
        model = Net(k=1)
        f = c(model)
        for k, rows in ((1, 2), (2, 2), (1, 3), (3, 2)):
            model.k = k
            f(T(rows, 4))


def test_second_instance(known_ledger):
    """An equal second instance of a class compiles nothing."""
    with known_ledger(FIRST, [], [2]) as c:
        for model in (Net(), Net()):
            c(model)(T(2, 4))


def test_other_options(known_ledger):
    """A second torch.compile with other options has an entry of its own; no guard failed."""
    with known_ledger(["first", "instance"], [], [1, 1]) as c:
        torch.compile(add, backend="eager")(T(3))
        c(add, options=None, dynamic=True)(T(3))


def decorated(function):
    """As libraries put around the forward of each of their models."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x):
        return x.sin()


def test_a_forward_behind_a_decorator_is_called_by_its_module():
    """It was called "wrapper", like that of every other model."""
    compiled = torch.compile(Decorated(), backend="eager")
    with observe() as seen:
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    assert [found.function for found in seen.compiles] == ["Decorated.forward"] * 2
