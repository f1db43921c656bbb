"""Every pass with a name has a careless twin here, which the oracle names by number and value; the pass is silent."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pytest_torchcompile import judge_passes
from pytest_torchcompile.backends import PASS_NAMES, collective_buckets
from pytest_torchcompile.backends.bf16_islands import bf16_islands

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten


class Net(nn.Module):
    """Something for each pass: a buffer, dropout, a mask, a square layer, a view that does nothing, a waste."""

    def __init__(self):
        super().__init__()
        self.up, self.square, self.down = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = self.norm(self.up(x)).view(-1, 16)
        hidden = torch.tanh(self.square(hidden)) + torch.tanh(self.square(hidden))
        # Not at a whole number: noise would decide which side an element is on.
        mask = torch.ones(16).cumsum(0) > 3.5
        hidden = hidden.masked_fill(mask, 0.25)
        kept = nn.functional.dropout(hidden, 0.5) + nn.functional.dropout(hidden, 0.5)
        return self.down(kept)


def calls_of(module, target):
    return module.graph.find_nodes(op="call_function", target=target)


def drops_a_new_buffer(module):
    """Dead code: what the running mean becomes, which no output needs."""
    output = module.graph.output_node()
    results = list(output.args[0])
    for number, each in enumerate(output.meta["desc"]):
        if each is not None and "norm.running_mean" in each.expr() and "mutation" in each.expr():
            results[number] = next(node for node in module.graph.find_nodes(op="placeholder")
                                   if node.meta["desc"].expr() == each.mutated_input.expr())
    output.args = (results,)
    module.graph.eliminate_dead_code()


def joins_draws(module):
    """Common subexpressions: dropout's random numbers are drawn from the same arguments, and are not the same."""
    first, second = [node for node in module.graph.nodes if torch.Tag.nondeterministic_seeded
                     in getattr(node.target, "tags", ())][:2]
    second.replace_all_uses_with(first)
    module.graph.erase_node(second)


def drops_a_transpose(module):
    """No-op views: a square matrix has the same sizes when it is turned."""
    turned = next(node for node in calls_of(module, aten.t.default) if node.meta["val"].shape == (16, 16))
    turned.replace_all_uses_with(turned.args[0])
    module.graph.erase_node(turned)


def folds_to_another_constant(module):
    """Constant folding: a mask from numbers of an earlier build."""
    mask = calls_of(module, aten.gt.Scalar)[0]
    mask.args = (mask.args[0], 4.5)


def used_backward(module):
    """The first tanh, and what of it the backward pass reads."""
    product = calls_of(module, aten.tanh.default)[0]
    backward = [user for user in product.users if user.target in (aten.detach.default, aten.tanh_backward.default)]
    return product, backward


def computes_something_else(module):
    """Recomputation: tanh for the backward pass, of what is a thousandth larger."""
    product, backward = used_backward(module)
    with module.graph.inserting_before(product):
        larger = module.graph.call_function(aten.mul.Tensor, (product.args[0], 1.001))
        again = module.graph.call_function(aten.tanh.default, (larger,))
    for user in backward:
        user.replace_input_with(product, again)


def saves_in_few_bits(module):
    """What is saved for the backward is rounded to bfloat16 on the way."""
    product, backward = used_backward(module)
    with module.graph.inserting_after(product):
        narrow = module.graph.call_function(aten._to_copy.default, (product,), {"dtype": torch.bfloat16})
    with module.graph.inserting_after(narrow):
        wide = module.graph.call_function(aten._to_copy.default, (narrow,), {"dtype": torch.float32})
    for user in backward:
        user.replace_input_with(product, wide)


def wide_islands(module):
    """Islands: one product is scaled, as if to keep it in range, and never scaled back."""
    bf16_islands(module)
    product = calls_of(module, aten.mm.default)[0]
    with module.graph.inserting_before(product):
        larger = module.graph.call_function(aten.mul.Tensor, (product.args[0], 2.0))
    product.args = (larger, product.args[1])


wide_islands.brings_in = torch.bfloat16

TWINS = {
    "dead_code": (drops_a_new_buffer, r"buffer norm\.running_mean"),
    "common_subexpressions": (joins_draws, r"output"),
    "no_op_views": (drops_a_transpose, r"output|gradient of \S+"),
    "constant_folding": (folds_to_another_constant, r"output"),
    "recompute_pointwise": (computes_something_else, r"gradient of \S+"),
    "save_products": (saves_in_few_bits, r"gradient of \S+"),
    "bf16_islands": (wide_islands, r"output|gradient of \S+"),
}


def judged(passes):
    torch.manual_seed(0)
    return judge_passes(Net(), [torch.randn(8, 6)], passes)


@pytest.mark.parametrize("name", TWINS)
def test_the_twin_is_named_and_the_pass_is_not(name):
    """Second of three, by its number, its name and what it changed; the pass behind it has something to change."""
    twin, worst = TWINS[name]
    found = judged(["dead_code", twin, name])
    (problem,) = found.problems
    assert re.match(rf"pass 2 of 3 \({twin.__name__}\) changed ({worst})( \(|:)", problem), problem
    # Nobody left dead code, and behind its twin all products are in bfloat16 already.
    if name not in ("dead_code", "bf16_islands"):
        assert not any(f"({name})" in told for told in found.unused)


def test_a_bucket_cut_at_the_wrong_place(tmp_path, monkeypatch):
    """Of two parts of one size each gets the other's."""
    from torch.distributed._functional_collectives import all_reduce

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)

    def both(x):
        return all_reduce(x * 2, "sum", dist.group.WORLD) + 0, all_reduce(x + 1, "sum", dist.group.WORLD) + 0

    def swapped(module):
        collective_buckets.bucket_collectives(module)
        first, second = calls_of(module, aten.slice.Tensor)
        first.args, second.args = second.args, first.args

    try:
        x = torch.randn(3, 4)
        assert judge_passes(both, [x], ["bucket_collectives"], train=False).ok
        (problem,) = judge_passes(both, [x], ["dead_code", swapped], train=False).problems
    finally:
        dist.destroy_process_group()
    assert re.match(r"pass 2 of 2 \(.*swapped\) changed output\[[01]\] \([\d.e+]+ times the rounding noise\)", problem)


def test_every_pass_has_a_twin():
    """cuda_graphs has its own on a GPU: tests/backends/test_whole_graph.py."""
    assert {*TWINS, "bucket_collectives", "cuda_graphs"} == set(PASS_NAMES)
