"""Sequences of calls with known ledgers: what changes is a Python value, a module, or the process."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
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


@sequence([*AGAIN, "recompile"], [("value", "y", "2", "3"), ("value", "y", "3", "4")], [1, 1, 1],
          dynamic=False)
def numbers_static(c):
    """dynamic=False: each number is a graph."""
    f = c(add)
    f(T(3), 2), f(T(3), 3), f(T(3), 4)


@sequence(AGAIN, [("value", "y", "2", "3")], [1, 2])
def numbers_auto(c):
    """The second number makes it symbolic."""
    f = c(add)
    f(T(3), 2), f(T(3), 3), f(T(3), 4)


@sequence(AGAIN, [("value", "y", "2", "2.5")], [1, 1])
def int_then_float(c):
    """A number of another type."""
    f = c(add)
    f(T(3), 2), f(T(3), 2.5)


@sequence(AGAIN, [("value", "y", "nan", "3.0")], [1, 1], dynamic=False)
def nan_then_float(c):
    """Not a number equals nothing, and has a guard of its own."""
    f = c(add)
    f(T(3), float("nan")), f(T(3), 3.0)


@sequence(AGAIN, [("value", "flag", "True", "False")], [2, 1])
def another_flag(c):
    """A bool; going back costs nothing."""
    f = c(branch)
    f(T(3), True), f(T(3), False), f(T(3), True)


@sequence(AGAIN, [("value", "y", "'a'", "'b'")], [1, 1])
def another_text(c):
    """A string."""
    f = c(add)
    f(T(3), "a"), f(T(3), "b")


@sequence(AGAIN, [("value", "p.a", "1", "3")], [1, 1], dynamic=False)
def named_tuple_field(c):
    """A field of a named tuple."""
    f = c(lambda x, p: x + p.a)
    f(T(3), Point(1, 2)), f(T(3), Point(3, 2))


@sequence(AGAIN, [("value", "o.k", "1", "2")], [1, 1], dynamic=False)
def dataclass_field(c):
    """A field of a dataclass."""
    f = c(attribute)
    f(T(3), Config(1)), f(T(3), Config(2))


@sequence(AGAIN, [("value", "f.keywords['other']", "1", "2")], [1, 1], dynamic=False)
def partial_argument(c):
    """A number inside functools.partial."""
    f = c(apply)
    for other in (1, 2):
        f(T(3), functools.partial(torch.add, other=other))


@sequence(AGAIN, [("length", "len(y)", "1", "2")], [1, 1])
def longer_list(c):
    """One item more."""
    f = c(add)
    f(T(3), [1]), f(T(3), [1, 2])


@sequence(AGAIN, [("length", "len(y)", "0", "2")], [1, 1])
def empty_list(c):
    """Empty at first."""
    f = c(add)
    f(T(3), []), f(T(3), [1, 2])


@sequence(AGAIN, [("dict", "y['a']", "present", "absent")], [1, 1])
def another_key(c):
    """A key that goes."""
    f = c(add)
    f(T(3), {"a": 1}), f(T(3), {"b": 1})


@sequence(AGAIN, [("dict", "d['a']", "absent", "present")], [1, 1])
def a_key_comes(c):
    """A key that was asked for and was not there."""
    f = c(lookup)
    f(T(3), {"b": T(3)}), f(T(3), {"a": T(3)})


@sequence(AGAIN, [("attribute", "o.k", "absent", "present")], [1, 1])
def an_attribute_comes(c):
    """hasattr decides."""
    f, o = c(attribute), type("Empty", (), {})()
    f(T(3), o)
    o.k = 2
    f(T(3), o)


@sequence(AGAIN, [("value", "self.k", "1.0", "2.0")], [1, 1])
def module_float(c):
    """A float on a module is a constant."""
    model = Net(k=1.0)
    f = c(model)
    f(T(2, 4))
    model.k = 2.0
    f(T(2, 4))


@sequence([*AGAIN, "recompile"], [("value", "self.k", "1", "2"), ("value", "self.k", "2", "3")], [1, 1, 1])
def module_step_counter(c):
    """An int on a module is a constant too: a step counter recompiles in every step."""
    model = Net(k=1)
    f = c(model)
    for k in (1, 2, 3):
        model.k = k
        f(T(2, 4))


@sequence(AGAIN, [("training_mode", "self[1].training", "True", "False")], [1, 1])
def train_then_eval(c):
    """Dropout reads it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    f = c(model)
    f(T(2, 4))
    model.eval()
    f(T(2, 4))


@sequence(AGAIN, [("length", "len(self.layers)", "1", "2")], [1, 1])
def a_layer_more(c):
    """A module list that grows."""
    model = Stack()
    f = c(model)
    f(T(2, 4))
    model.layers.append(nn.Linear(4, 4))
    f(T(2, 4))


@sequence(AGAIN, [("none", "self.bias", "a tensor", "None")], [1, 1])
def bias_removed(c):
    """A parameter that becomes None, in a module of torch's own."""
    model = nn.Linear(4, 4)
    f = c(model)
    f(T(2, 4))
    model.bias = None
    f(T(2, 4))


@sequence(AGAIN, [("grad_mode", "grad_mode", "True", "False")], [1, 1])
def no_grad(c):
    """Warm-up with gradients, then without."""
    f = c(add)
    f(T(3))
    with torch.no_grad():
        f(T(3))


@sequence(AGAIN, [("autocast", "autocast(cpu)_enabled", "False", "True")], [1, 1], since=(2, 13))
def autocast(c):
    """Warm-up without autocast."""
    f = c(add)
    f(T(3))
    with torch.autocast("cpu", torch.bfloat16):
        f(T(3))


@sequence(AGAIN, [("global_state", "deterministic_algorithms", "False", "True")], [1, 1])
def deterministic(c):
    """A switch of the process."""
    f = c(add)
    f(T(3))
    torch.use_deterministic_algorithms(True)
    try:
        f(T(3))
    finally:
        torch.use_deterministic_algorithms(False)


@sequence(AGAIN, [("global_state", "default_dtype", "", "torch.float64")], [1, 1])
def default_dtype(c):
    """Another switch; what it was, torch does not say."""
    f, x = c(add), T(3)
    f(x)
    torch.set_default_dtype(torch.float64)
    try:
        f(x)
    finally:
        torch.set_default_dtype(torch.float32)


@sequence(AGAIN, [("value", "SCALE", "1", "2")], [1, 1])
def global_number(c):
    """A global is a constant."""
    global SCALE
    f = c(scaled)
    f(T(3))
    SCALE = 2
    try:
        f(T(3))
    finally:
        SCALE = 1


@sequence(AGAIN, [("closure", "k", "1", "2")], [1, 1])
def two_closures(c):
    """Two functions of one code share a cache: the first call of the second recompiles."""
    c(made(1))(T(3)), c(made(2))(T(3))


@sequence(AGAIN, [("closure", "f", "builtin_function_or_method", "function _VariableFunctionsClass.cos")],
          [1, 1], since=(2, 13))
def another_function(c):
    """A function as an argument."""
    f = c(apply)
    f(T(3), torch.sin), f(T(3), torch.cos)


@sequence(AGAIN, [("type", "type(f)", "Linear", "ReLU")], [1, 1], since=(2, 13))
def another_module(c):
    """A module as an argument."""
    f = c(apply)
    f(T(2, 4), nn.Linear(4, 4)), f(T(2, 4), nn.ReLU())


@sequence([*AGAIN, "recompile"], [("grad_mode", "grad_mode", "True", "False"), ("shape", "x.size(0)", "3", "4")],
          [1, 1, 1], dynamic=False)
def grad_mode_then_size(c):
    """Two entries: the one last used fails because of the grad mode first, but that mode is compiled too."""
    f = c(add)
    f(T(3))
    with torch.no_grad():
        f(T(3))
    f(T(4))


@sequence([*AGAIN, "recompile", "recompile"],
          [("value", "self.k", "1", "2"), ("shape", "x.size(0)", "2", "3"), ("value", "self.k", "2", "3")],
          [1, 1, 1, 1], dynamic=False)
def known_size_new_number(c):
    """Three entries: one differs in size and number, two in the number alone."""
    model = Net(k=1)
    f = c(model)
    for k, rows in ((1, 2), (2, 2), (1, 3), (3, 2)):
        model.k = k
        f(T(rows, 4))


@sequence(FIRST, runs=[2])
def second_instance(c):
    """An equal second instance of a class compiles nothing."""
    for model in (Net(), Net()):
        c(model)(T(2, 4))


@sequence(["first", "instance"], runs=[1, 1])
def other_options(c):
    """A second torch.compile with other options has an entry of its own; no guard failed."""
    torch.compile(add, backend="eager")(T(3))
    c(add, options=None, dynamic=True)(T(3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_ledger_of_a_sequence(name, backend, check_ledger):
    """Exactly the compiles, reasons and graph runs that the sequence is known for; no false alarm."""
    check_ledger(*SEQUENCES[name], backend)


@pytest.mark.parametrize("name", ["another_flag", "second_instance"])
def test_ledger_of_a_sequence_on_inductor(name, check_ledger):
    """The same with code generated."""
    check_ledger(*SEQUENCES[name], "inductor")


def test_there_are_enough_sequences():
    """A guard against losing them: with those of the other file fewer than forty are no evidence."""
    assert len(SEQUENCES) >= 24
