"""Sums whose rounding errors point one way: many terms of one sign, and terms that repeat."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.faults.fault_parts import change_output
from pytest_torchcompile.oracle.call_rounding import (
    disturb_alike,
    one_way_roundings,
    shift_means,
    sums_repeated,
    takes_means_off,
)
from pytest_torchcompile.oracle.operator_rounding import operator_facts, sum_roundings

pytestmark = pytest.mark.needs_torch
ATEN = torch.ops.aten
MEAN, SUM = operator_facts(ATEN.mean.dim), operator_facts(ATEN.sum.dim_IntList)


class Means(nn.Module):
    """Over the outer axes of ``(B, S, D)``: a loop of Inductor's adds them up one by one."""

    def forward(self, x):
        return x.mean((0, 1)), (x * 0.3 + 0.1).mean((0, 1)), (x * x).sum(0)


class Normalised(nn.Module):
    """A convolution and a normalisation of its image ``(N, 3, H, W)``."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))


def all_equal(*shape):
    return torch.full(shape, 0.3)


# ------------------------------------------------------------------------------------------- right compilers are silent
@pytest.mark.parametrize("fill", [torch.rand, torch.ones, all_equal])
def test_sums_over_many_terms_are_no_false_alarm(fill):
    """Inductor was 11 roundings of the noise off for random numbers, and 440 for ones."""
    torch.manual_seed(0)
    comparison = compare(Means(), [(fill(16, 256, 64),)], CompileConfig(enabled=True, backend="inductor"))
    assert comparison.ok, comparison.problems


def test_normalising_an_image_of_zeros_is_no_false_alarm():
    """The convolution makes its bias of zeros. The deviation is zero, so an error of the mean grows."""
    torch.manual_seed(0)
    model = Normalised(nn.BatchNorm2d(8))
    comparison = compare(model, [(torch.zeros(8, 3, 32, 32),)], CompileConfig(enabled=True, backend="inductor"))
    assert comparison.ok, comparison.problems


# ------------------------------------------------------------------------------------------------ wrong ones are caught
@pytest.mark.parametrize(("fill", "off"), [(torch.rand, 1e-4), (torch.ones, 1e-3), (all_equal, 1e-3)])
def test_a_wrong_sum_is_caught(fill, off):
    """By a ten-thousandth where terms differ, by a thousandth where they repeat."""
    torch.manual_seed(0)
    wrong = change_output(lambda y: y * (1 + off))()
    comparison = compare(Means(), [(fill(16, 256, 64),)], CompileConfig(enabled=True, backend=wrong))
    assert "value" in {problem.kind for problem in comparison.problems}


# --------------------------------------------------------------------------------------------------- which calls count
def test_a_sum_repeats_where_most_of_its_own_terms_are_equal():
    """Along the axes that it adds up; those of another sum don't matter, and zeros add nothing."""
    by_channel = torch.rand(8).expand(64, 8).contiguous()
    assert sums_repeated(SUM, (by_channel, [0]))
    assert not sums_repeated(SUM, (torch.rand(64).expand(8, 64).contiguous(), [1]))
    assert not sums_repeated(SUM, (torch.rand(64, 8), [0]))
    assert not sums_repeated(SUM, (torch.zeros(64, 8), [0]))
    assert sums_repeated(MEAN, (torch.arange(4096).remainder(7).div(7).view(64, 64),))


@pytest.mark.parametrize("terms", [
    torch.ones(64, 8, dtype=torch.bfloat16), torch.ones(64, 8, dtype=torch.int64), torch.ones(8, 64),
    torch.ones(64, 8, device="meta"), torch.tensor(1.0), "no tensor",
])  # fmt: skip
def test_what_is_no_long_float32_sum_on_a_cpu_does_not_count(terms):
    """Narrower dtypes, whole numbers, few terms, other devices."""
    assert not sums_repeated(SUM, (terms, [0]))


def test_products_do_not_count():
    """Compiled code calls the library that eager calls."""
    assert not sums_repeated(operator_facts(ATEN.mm.default), (torch.ones(64, 64), torch.ones(64, 64)))


# ------------------------------------------------------------------------------------------------------ how large it is
def test_the_bound_holds_a_loop_over_equal_terms():
    """A loop in float32 over 64 to 4,096 equal terms; the root mean square of a number drawn up to the bound is above
    a quarter of its error, which is what the limits of a comparison allow."""
    for terms in (64, 1024, 4096):
        numbers = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.5
        total = torch.zeros(200)
        for _ in range(terms):
            total += numbers
        right = numbers.double() * terms
        off = (total.double() - right).div(right).square().mean().sqrt() * 2**24
        assert off < 4 * 0.58 * one_way_roundings(terms)
        assert off > 0.02 * one_way_roundings(terms)


def test_a_long_sum_rounds_as_a_whole():
    """By the root of its terms; other operators, products and short sums do not."""
    long, short = torch.ones(1024, 2), torch.ones(4, 2)
    assert sum_roundings("sum", (long, [0])) == 8
    assert sum_roundings("sum", (short, [0])) == 0
    assert sum_roundings("mm", (long.T, long)) == 0
    assert sum_roundings("mse_loss", (long, long)) > 0
    assert sum_roundings("mse_loss_backward", (long, long, long)) == 0
    assert sum_roundings("native_layer_norm", (long, [2])) == 0
    assert sum_roundings("native_layer_norm_backward", (long, long, [2])) == 0


def test_equal_numbers_get_equal_noise_and_others_others():
    """Also where they are equal but for rounding; zeros stay."""
    pool = torch.linspace(-1, 1, 1009, dtype=torch.float64)
    numbers = torch.tensor([1.0, 1.0 + 1e-7, 0.3, 0.3, 0.0], dtype=torch.float64)
    disturbed = disturb_alike(numbers, 1e-3, pool, start=5)
    moved = (disturbed / numbers - 1)[:4]
    assert abs(moved[0] - moved[1]) < 1e-12
    assert abs(moved[2] - moved[3]) < 1e-12
    assert abs(moved[0] - moved[2]) > 1e-6
    assert disturbed[4] == 0
    assert float(moved.abs().max()) <= 1e-3


# ------------------------------------------------------------------------------------------------------ normalisations
def _moved_by_hand(norm, data, shifts):
    """The normalisation written out, with other means."""
    samples, channels = data.shape[:2]
    if isinstance(norm, nn.BatchNorm2d):
        seen = data.transpose(0, 1).reshape(1, channels, -1)
    else:
        seen = data.reshape(samples, norm.num_groups, -1)
    means = seen.mean(2, keepdim=True)
    variance = seen.var(2, keepdim=True, unbiased=False)
    seen = (seen - means * (1 + shifts)) / (variance + norm.eps).sqrt()
    if isinstance(norm, nn.BatchNorm2d):
        seen = seen.reshape(channels, samples, *data.shape[2:]).transpose(0, 1)
    seen = seen.reshape(data.shape)
    return seen * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
def test_means_that_are_off_move_what_depends_on_them(norm):
    """Held against the normalisation written out with such means; running means too."""
    norm = norm.double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    data = torch.rand(3, 4, 5, 5, dtype=torch.float64)

    def disturb(means):
        means.mul_(1.25)

    if isinstance(norm, nn.BatchNorm2d):
        running = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        args = (data, norm.weight, norm.bias, *running, True, 0.1, norm.eps)
        operator = ATEN.native_batch_norm.default
    else:
        args = (data, norm.weight, norm.bias, 3, 4, 25, 2, norm.eps)
        operator = ATEN.native_group_norm.default
    with torch.no_grad():
        out = operator(*args)
        shift_means(operator_facts(operator), args, out, disturb)
        torch.testing.assert_close(out[0], _moved_by_hand(norm, data, 0.25))
    if isinstance(norm, nn.BatchNorm2d):
        torch.testing.assert_close(running[0], 0.1 * 1.25 * data.mean((0, 2, 3)))


@pytest.mark.parametrize("operator", [ATEN.native_batch_norm_backward.default, ATEN.native_group_norm_backward.default])
def test_backward_the_means_of_the_weighted_gradient_are_off(operator):
    """The gradient of the input moves by their share; of a constant gradient they are all of it."""
    data, gradient = torch.rand(3, 4, 5, 5), torch.ones(3, 4, 5, 5)
    weight = torch.full((4,), 2.0)
    if "batch" in operator._schema.name:
        means, deviations = data.mean((0, 2, 3)), data.var((0, 2, 3), unbiased=False).rsqrt()
        args = (gradient, data, weight, None, None, means, deviations, True, 0.0, [True, True, True])
    else:
        grouped = data.view(3, 2, -1)
        means, deviations = grouped.mean(2), grouped.var(2, unbiased=False).rsqrt()
        args = (gradient, data, means, deviations, weight, 3, 4, 25, 2, [True, True, True])
    out = operator(*args)
    before = out[0].clone()
    shift_means(operator_facts(operator), args, out, lambda means: means.mul_(1.5))
    moved = before - out[0]
    over = deviations.view(1, 4, 1, 1) if deviations.dim() == 1 else deviations.repeat_interleave(2, 1)[..., None, None]
    torch.testing.assert_close(moved, over.expand(moved.shape) * (2 * 0.5))


def test_batch_norm_in_evaluation_takes_no_mean():
    """Its statistics are buffers, and stay."""
    data, running = torch.rand(3, 4, 5, 5), torch.rand(4)
    args = (data, None, None, running, torch.ones(4), False, 0.1, 1e-5)
    operator = ATEN.native_batch_norm.default
    out = operator(*args)
    before = out[0].clone()
    shift_means(operator_facts(operator), args, out, lambda means: means.mul_(2))
    assert torch.equal(out[0], before)
    assert takes_means_off(operator_facts(operator))
    assert not takes_means_off(MEAN)
