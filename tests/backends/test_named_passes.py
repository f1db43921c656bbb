"""Passes with a name: what each changes, that nothing else does, and what a careless one would break."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pytest_torchcompile import judge_passes
from pytest_torchcompile.backends import collective_buckets, constant_nodes, graph_passes
from pytest_torchcompile.backends.toolkit import Toolkit

pytestmark = pytest.mark.needs_torch


class Masked(nn.Module):
    """A mask and positions that depend on no input, some that the caller gets, and random numbers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        places = torch.arange(6, dtype=x.dtype) * 0.5 + 1
        mask = torch.ones(6, 6).tril() == 0
        scores = (self.up(x) * places).masked_fill(mask, -1.0)
        return scores.tanh(), (torch.arange(4) * 2).view(2, 2), torch.rand(3) + scores.mean()


def test_constants_are_folded():
    """Nothing but what the caller gets is computed from constants any more; the oracle is silent."""
    torch.manual_seed(0)
    seen = []

    def look(module):
        seen.append([str(node.target) for node in module.graph.nodes])

    found = judge_passes(Masked(), [torch.randn(6, 6)], ["constant_folding", look])
    assert found.ok, str(found)
    assert not any("constant_folding" in told for told in found.unused)
    assert any(name.startswith("_folded_constant") for name in seen[-1])
    assert not any("tril" in name for name in seen[-1])
    # The one that is returned is still made for each call.
    assert sum("aten.arange" in name for name in seen[-1]) == 1


def test_inductor_takes_folded_constants():
    """They go through the partitioner and generated code, forward and backward."""
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(6, 6)
    expected = model(x)[0]
    expected.sum().backward()
    gradient = model.up.weight.grad
    model.up.weight.grad = None
    backend = Toolkit(passes="constant_folding", compiler="inductor", decompositions="inductor")
    found = torch.compile(model, backend=backend, fullgraph=True)(x)[0]
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.up.weight.grad, gradient)
    assert "constant_folding" in backend.notes[0].changed


@pytest.mark.parametrize("settings", [{}, {"capture": "joint"}], ids=["as Dynamo's graph", "whole"])
def test_what_the_forward_draws_is_not_drawn_again_backward(settings):
    """With fallback_random the default partitioner copies such draws, and nothing reads them there."""
    model, states = Masked(), []
    for run in (model, torch.compile(model, backend=Toolkit(compiler="eager", **settings), fullgraph=True)):
        with torch._inductor.config.patch(fallback_random=True), torch.random.fork_rng():
            torch.manual_seed(0)
            found = run(torch.ones(6, 6))
            (found[0].sum() + found[2].sum()).backward()
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


def shared_answers():
    """Two results of one memory: what the second shows after the caller has written to the first; two calls."""
    torch.compiler.reset()

    def count(x):
        found = torch.arange(4) * 2
        return found, found.view(2, 2), x + 1

    run = torch.compile(count, backend=Toolkit(passes="constant_folding", compiler="eager"), fullgraph=True)
    shown = []
    for value in (9, 8):
        one, other, _ = run(torch.ones(2))
        shown.append(other.tolist())
        one.fill_(value)
        shown.append(other.tolist())
    return shown


def test_what_the_caller_gets_is_left_alone(monkeypatch):
    """A pass without that care would part two results that share memory."""
    made = [[0, 2], [4, 6]]
    assert shared_answers() == [made, [[9, 9], [9, 9]], made, [[8, 8], [8, 8]]]
    monkeypatch.setattr(constant_nodes, "_handed_out", lambda module: set())
    assert shared_answers()[1] == made


def test_products_are_marked_to_be_kept():
    """Beside a pass that computes the rest anew, which leaves the marks."""
    from torch.utils.checkpoint import CheckpointPolicy

    marks = {}

    def look(module):
        marks.update({str(node.target): node.meta.get("recompute") for node in module.graph.nodes})

    found = judge_passes(Masked(), [torch.randn(6, 6)], ["save_products", "recompute_pointwise", look])
    assert found.ok, str(found)
    assert marks["aten.addmm.default"] == CheckpointPolicy.MUST_SAVE
    assert marks["aten.tanh.default"] == CheckpointPolicy.PREFER_RECOMPUTE


@pytest.fixture
def group(tmp_path):
    """A group of one rank."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reduced(x, group):
    from torch.distributed._functional_collectives import all_reduce

    one, other = all_reduce(x * 2, "sum", group), all_reduce(x.sum(0) + 1, "sum", group)
    # The third waits for the first; the fourth is of another kind.
    third = all_reduce(one.tanh(), "sum", group)
    return torch.rand(2) + third.sum() + all_reduce(x + 3, "max", group).sum(), other, torch.rand(2) + one.mean()


def all_reduces(module):
    return [node for node in module.graph.nodes if "all_reduce" in str(node.target)]


def test_all_reduces_are_bucketed(group):
    """Two of four become one; values, results' memory and random numbers stay."""
    counts = []
    found = judge_passes(lambda x: reduced(x, group), [torch.randn(3, 4), torch.randn(5, 4)],
                         [lambda module: counts.append(len(all_reduces(module))), "bucket_collectives",
                          lambda module: counts.append(len(all_reduces(module)))], train=False)
    assert found.ok, str(found)
    assert not any("bucket_collectives" in told for told in found.unused)
    assert {4, 3} == set(counts)


def hand_made(depends):
    """Two all-reduces, the second of what the first gave or not."""
    graph = fx.Graph()
    ops = torch.ops._c10d_functional
    value = torch.empty(4)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    x = graph.placeholder("x")
    x.meta["val"] = value
    first = call(ops.wait_tensor.default, call(ops.all_reduce.default, x, "sum", "0"))
    doubled = call(torch.ops.aten.mul.Tensor, first if depends else x, 2)
    second = call(ops.wait_tensor.default, call(ops.all_reduce.default, doubled, "sum", "0"))
    graph.output((first, second))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("depends", [True, False])
def test_dependent_ones_stay_apart(depends, monkeypatch):
    """The order of the graph is valid after; without a look at what waits for what there is none."""
    module = hand_made(depends)
    graph_passes.PASSES["bucket_collectives"](module)
    module.graph.lint()
    assert len(all_reduces(module)) == 1 + depends
    if depends:
        monkeypatch.setattr(collective_buckets, "_joinable_before",
                            lambda graph, wanted: {node: set() for node in wanted})
        # No order has the product before and behind the joined one; it must not run forever.
        assert len(collective_buckets._first_bucket(module.graph, dict.fromkeys(all_reduces(module)))) == 2
