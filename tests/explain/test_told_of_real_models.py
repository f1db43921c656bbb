"""What explanations of real models told wrongly, each as a small program: found by reading them beside their code."""

from __future__ import annotations

import pytest
import torch
from explain.generated_code import differences
from torch import nn

from pytest_torchcompile import CompileConfig
from pytest_torchcompile.explain import explain

pytestmark = pytest.mark.needs_torch


def explained(model, *args):
    with torch.no_grad():
        found = explain(model, (args, {}), CompileConfig(), train=False)
    assert not found.error
    assert differences(found) == []
    return found


def read_bytes(kernel):
    return {tensor.name: tensor.bytes for tensor in kernel.reads}


def modulated(x, shifts):
    """A block of dit: the gate is read for the mean, for the variance and for the result."""
    gate, scale, shift = shifts[:, None].chunk(6, -1)[:3]
    return nn.functional.layer_norm(x * gate + x, (32,)) * (1 + scale) + shift


def test_what_several_loops_read_is_read_once():
    (kernel,) = explained(modulated, torch.randn(5, 16, 32), torch.randn(5, 192)).kernels
    assert sorted(read_bytes(kernel).values()) == [5 * 3 * 32 * 4, 5 * 16 * 32 * 4]


def test_rows_that_several_loops_look_up_are_read_once():
    model = nn.Sequential(nn.Embedding(5000, 32), nn.LayerNorm(32))
    (kernel,) = explained(model, torch.randint(0, 5000, (4, 6))).kernels
    assert 4 * 6 * 32 * 4 in read_bytes(kernel).values()


def pairs(rows, numbers):
    return rows[numbers[:, 0]] + rows[numbers[:, 1]]


def looked_up_twice(rows, numbers):
    """Two loops that reduce: the numbers of each are others."""
    first, second = rows[numbers[:, 0]], rows[numbers[:, 1]]
    return first.sum(1, keepdim=True) * second + second.sum(1, keepdim=True) * first


@pytest.mark.parametrize(("model", "most"), [(pairs, 2), (looked_up_twice, 4)])
def test_rows_of_other_numbers_are_other_rows(model, most):
    """At least both; which numbers a loop of several looks up by is not known, so that it may tell them again."""
    found = explained(model, torch.randn(5000, 32), torch.randint(0, 5000, (4, 2)))
    rows = 0
    for kernel in found.kernels:
        rows += sum(tensor.bytes for tensor in kernel.reads if tensor.shape == (5000, 32))
    assert 2 * 4 * 32 * 4 <= rows <= most * 4 * 32 * 4


def joined(x, y):
    return nn.functional.layer_norm(torch.cat([x, y.relu()], 1), (32,))


def test_a_concatenation_that_the_kernel_makes_itself_is_not_read():
    """It writes the parts, and reads the whole, which is what it has written."""
    (kernel,) = explained(joined, torch.randn(3, 1, 32), torch.randn(3, 16, 32)).kernels
    assert set(read_bytes(kernel)) == {"arg0_1", "arg1_1"}
    assert kernel.bytes_read == 3 * 17 * 32 * 4


def test_what_is_copied_for_a_library_is_written_and_not_kept_inside():
    found = explained(nn.Conv2d(4, 32, 2, 2), torch.randn(5, 4, 8, 8))
    copies = next(kernel for kernel in found.kernels if kernel.source)
    assert [operator.target for operator in copies.operators] == ["copy", "copy"]
    assert copies.kept_inside == ()
    assert copies.bytes_kept_inside == 0


def test_the_code_of_a_kernel_has_its_name():
    """And nothing of the name that torch puts there first."""
    (kernel,) = explained(joined, torch.randn(3, 1, 32), torch.randn(3, 16, 32)).kernels
    assert f" {kernel.name}(" in kernel.source
    assert "Placeholder" not in kernel.source


@torch.library.custom_op("told_of_real_models::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kjl->il", x, weight)


@product.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[-1])


class Gated(nn.Module):
    """Experts of mixtral: a library is given a gated product, and a weight that is permuted."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 64))

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return product(nn.functional.silu(gate) * up, self.weight.transpose(-2, -1))


def test_what_is_made_for_a_library_is_not_told_as_its_other_input():
    found = explained(Gated(), torch.randn(72, 128))
    gated = next(kernel for kernel in found.kernels if kernel.source)
    assert [tensor.of for tensor in gated.writes] == ["mul"]
    assert {"exp", "div", "mul"} <= {operator.node.partition("_")[0] for operator in gated.operators}
