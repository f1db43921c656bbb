"""allowlist and blocklist: which modules are compiled, which are not, and the model as before when it is over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, maybe_compile

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
X = torch.linspace(-1, 1, 12).view(3, 4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.proj(x), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.up = Attention(), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.up(self.attn(x).exp())) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), nn.Linear(4, 2)
        self.tied = self.embed

    def forward(self, x):
        x = self.embed(x)
        x = self.layers[0](x)
        x = self.layers[1](x)
        return self.head(x)


class Seen:
    """A backend that notes the operators of each graph."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([getattr(node.target, "__name__", node.target) for node in graph.graph.nodes
                            if node.op.startswith("call")])  # fmt: skip
        return graph.forward


BLOCK = ["linear", "softmax", "exp", "linear", "tanh", "add"]


@pytest.mark.parametrize(("allow", "block", "graphs"), [
    ([], [], [["linear", *BLOCK, *BLOCK, "linear"]]),
    (["*"], [], [["linear", *BLOCK, *BLOCK, "linear"]]),
    (["Model"], [], [["linear", *BLOCK, *BLOCK, "linear"]]),
    (["layers.0"], [], [BLOCK]),
    (["layers.*"], [], [BLOCK]),  # both run the code that was compiled for the first
    (["layers"], [], [BLOCK]),  # a list has no forward: what is in it
    (["Block"], [], [BLOCK]),
    (["Bl*k"], [], [BLOCK]),
    (["layers.1.attn", "head"], [], [["linear", "softmax"], ["linear"]]),
    (["layers.*.attn", "layers.1"], [], [["linear", "softmax"], BLOCK]),
    (["tied"], [], [["linear"]]),
    ([], ["head"], [["linear", *BLOCK, *BLOCK]]),
    ([], ["layers"], [["linear"], ["linear"]]),
    ([], ["Attention", "head"], [["linear"], ["exp", "linear", "tanh", "add"]]),
    (["layers.*"], ["*.attn"], [["exp", "linear", "tanh", "add"]]),
    (["layers.0"], ["head"], [BLOCK]),  # what is blocked is not in what is allowed: nothing to block
    (["layers.*"], ["layers.1"], [BLOCK]),
])  # fmt: skip
def test_what_is_compiled(attempts, allow, block, graphs):
    seen, model = Seen(), Model()
    expected = copy.deepcopy(model)(X)
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=seen, allowlist=allow, blocklist=block))
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
    assert sorted(seen.graphs) == sorted(graphs)
    assert attempts("result") == ["deferred", "compiled"]


@pytest.mark.parametrize(("block", "graphs"), [
    (["Block"], [["linear"], ["linear", "softmax"], ["linear"]]),
    (["Block", "Attention"], [["linear"], ["linear"]]),  # an inner one that is named too is not compiled either
    (["Attention"], [["linear"], ["exp", "linear", "tanh", "add"]]),
])  # fmt: skip
def test_of_a_blocked_module_only_its_own_forward(attempts, block, graphs):
    """With recursive=True the attention inside of a blocked block is not compiled."""
    backend, model = Seen(), Model()
    expected = model(X)
    given = CompileConfig(enabled=True, backend=backend, blocklist=block, blocklist_recursive=False)
    compiled = maybe_compile(model, given)
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
    assert sorted({tuple(graph) for graph in backend.graphs}) == sorted({tuple(graph) for graph in graphs})
    del compiled
    assert {type(part) for part in model.modules()} == {type(part) for part in Model().modules()}
    assert attempts("result") == ["deferred", "compiled"]


@pytest.mark.parametrize(("allow", "block", "text"), [
    (["encoder.*"], [], r"allowlist: 'encoder.\*' matches no module of Model, by name or by class; "),
    (["layer"], [], r"allowlist: 'layer' matches no module of Model, by name or by class; did you mean 'layers'\?"),
    ([], ["Atention"], r"blocklist: 'Atention' matches no module of Model, .*did you mean 'Attention'\?"),
    ([], ["*"], "blocklist leaves nothing to compile: it matches the model, or all of allowlist"),
    ([], ["Model"], "blocklist leaves nothing to compile"),
    (["layers.0"], ["layers.*"], "blocklist leaves nothing to compile"),
    (["layers.0.attn"], ["Block"], "blocklist leaves nothing to compile"),
])  # fmt: skip
@pytest.mark.parametrize("policy", ["fallback_eager", "raise"])
def test_patterns_that_say_nothing_are_refused(attempts, allow, block, text, policy):
    config = CompileConfig(enabled=True, backend="eager", allowlist=allow, blocklist=block, fail_policy=policy)
    with pytest.raises(ValueError, match=text):
        maybe_compile(Model(), config)
    assert attempts() == []


def refuses(graph, inputs):
    raise RuntimeError("planted")


def untouched(model):
    plain = Model()
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    assert [sorted(vars(part)) for part in model.modules()] == [sorted(vars(part)) for part in plain.modules()]
    assert all(part._compiled_call_impl is None for part in model.modules())
    return True


@pytest.mark.parametrize("given", [{"allowlist": ["layers.*"]}, {"blocklist": ["*.attn"]},
                                   {"allowlist": ["layers"], "blocklist": ["Attention"]}])  # fmt: skip
def test_the_model_is_as_before_when_it_falls_back(attempts, given):
    model = Model()
    assert maybe_compile(model, CompileConfig(enabled=True, backend=refuses, **given), sample_batch=X) is model
    assert untouched(model)
    later = maybe_compile(model, CompileConfig(enabled=True, backend=refuses, **given))
    expected = copy.deepcopy(model)(X)
    torch.testing.assert_close(later(X), expected, rtol=0, atol=0)
    assert untouched(model)
    torch.testing.assert_close(later(X), expected, rtol=0, atol=0)
    assert attempts("result") == ["fallback_eager", "deferred", "fallback_eager"]


def test_the_model_is_as_before_when_nobody_has_the_compiled_one_any_more(attempts):
    model = Model()
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend="eager", allowlist=["layers.*"],
                                                  blocklist=["Attention"]))  # fmt: skip
    compiled(X)
    assert not _plain(model)
    del compiled
    assert untouched(model)


def _plain(model):
    return all(part._compiled_call_impl is None for part in model.modules())


def test_an_original_shares_its_compiled_parts(attempts):
    seen, model = Seen(), Model()
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=seen, allowlist=["layers.*"]))
    torch.testing.assert_close(model(X), compiled(X), rtol=0, atol=0)
    assert seen.graphs == [BLOCK]


def test_modules_of_torch_are_compiled_as_parts_too(attempts):
    """nn.Sequential().compile() compiles nothing: its file is among those that Dynamo skips."""
    seen = Seen()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    maybe_compile(model, CompileConfig(enabled=True, backend=seen, allowlist=["0"]))(X)
    assert len(seen.graphs) == 1


def test_a_failing_part_makes_all_parts_eager(attempts):
    seen = Seen()

    def second_fails(graph, inputs):
        if seen.graphs:
            raise RuntimeError("planted")
        return seen(graph, inputs)

    model = Model()
    expected = copy.deepcopy(model)(X)
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=second_fails, allowlist=["embed", "layers.0"]))
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
    assert untouched(model)
    assert attempts("result") == ["deferred", "fallback_eager"]
