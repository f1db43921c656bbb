"""What a pass may be, and put into a graph: constants, partials, torch's own passes, dtypes that it brings in."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from pytest_torchcompile.backends import graph_passes
from pytest_torchcompile.backends.constant_nodes import real_tensors
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import UsageError

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten
Failed = torch._dynamo.exc.BackendCompilerFailed


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outcome(backend=None):
    """Output and gradients of a small net."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(3, 4)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    found = run(x)
    found.sum().backward()
    return [found.detach(), *[each.grad for each in model.parameters()]]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected)


HALF = torch.full((8,), 0.5)


def put_in(make, name="a_half"):
    """A pass that multiplies tanh by 0.5 and by 2, the half being a constant of the module."""
    def twice_and_half(module):
        constant = make()
        if constant is not None:
            module.register_buffer(name, constant)
        for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
            with module.graph.inserting_after(node):
                held = module.graph.get_attr(name)
            with module.graph.inserting_after(held):
                half = module.graph.call_function(aten.mul.Tensor, (node, held))
            with module.graph.inserting_after(half):
                twice = module.graph.call_function(aten.mul.Tensor, (half, 2.0))
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, half=half: user is not half)

    return twice_and_half


def made_inside():
    with real_tensors():
        return torch.full((8,), 0.5)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("make", [lambda: HALF, made_inside])
def test_a_pass_may_put_in_a_constant(make, compiler):
    """Made outside of the pass, or without fake tensors; no notes are needed."""
    table = "inductor" if compiler == "inductor" else "none"
    backend = Toolkit(passes=[put_in(make), "constant_folding"], compiler=compiler, decompositions=table)
    assert_close(outcome(backend), outcome())


def with_a_tensor(module):
    node = module.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    node.args = (HALF,)


def reads_values(module):
    float(torch.ones(2).sum())


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(("function", "text"), [
    (put_in(lambda: torch.full((8,), 0.5)), "has put a fake tensor into the graph, 'a_half'; a pass runs in torch's "
     "fake mode, and a tensor that it makes or reads there has no values: make it outside of the pass, or inside of "
     "`with real_tensors():` of pytest_torchcompile.backends.constant_nodes, or by an operator such as aten.full"),
    (put_in(lambda: None, "gone"), "left the node gone, which reads 'gone', and the module has no such attribute; "
     "write module.register_buffer('gone', tensor)"),
    (with_a_tensor, "a tensor for an argument; put it into the graph as a node: module.register_buffer(name, tensor), "
     "then graph.get_attr(name)"),
    (reads_values, "; a pass runs in torch's fake mode, and a tensor that it makes or reads there has no values"),
])
def test_constants_without_values_are_refused(function, text):
    """One sentence with the fix."""
    with pytest.raises(Failed, match=re.escape(text)):
        outcome(Toolkit(passes=[function]))


def scaled(module, factor, *, by=1.0):
    """Takes options."""


def test_partials_are_told_apart_and_keep_what_is_said():
    """Two of one function have two names; attributes are those of the function."""
    one, other = functools.partial(scaled, factor=2.0), functools.partial(scaled, factor=3.0)
    first, second = graph_passes.read_passes([one, functools.partial(other, by=2)])
    assert (first.name, second.name) == ("scaled(factor=2.0)", "scaled(factor=3.0, by=2)")
    islands = functools.partial(graph_passes.bf16_islands)
    assert graph_passes.read_passes([islands])[0].brings_in == torch.bfloat16
    assert [each.name for each in graph_passes.read_passes(["dead_code, no_op_views", scaled])] == [
        "dead_code", "no_op_views", "scaled"]
    assert graph_passes.read_passes(scaled)[0].name == "scaled"


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", torch.float32])
def test_a_dtype_that_is_brought_in_may_be_a_text(dtype):
    """As in a matrix."""
    def narrow(module):
        pass

    narrow.brings_in = dtype
    assert str(Toolkit(passes=[narrow]).brings_in).endswith(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, "float8_e5m2", torch.int8, 3])
def test_a_dtype_that_would_hide_everything_is_refused(dtype):
    """Its noise is as large as the values."""
    def narrow(module):
        pass

    narrow.brings_in = dtype
    text = (f"narrow is {dtype!r}; expected a dtype: bfloat16, float16, float32. In the rounding noise of a narrower "
            "one no error would be seen: hold such a pass against a tolerance of your own")
    with pytest.raises(UsageError, match=re.escape(text)):
        Toolkit(passes=[narrow])


class Views(PassBase):
    """A pass as torch's own are."""

    def call(self, graph_module):
        return PassResult(graph_module, True)


def test_what_torchs_own_passes_return():
    """A PassResult."""
    assert_close(outcome(Toolkit(passes=["dead_code", Views()])), outcome())
