"""Dice and Wide: the noise itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_torchcompile.oracle import Tape
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.operator_rounding import input_units

pytestmark = pytest.mark.needs_torch
ONES = torch.ones(400_000, dtype=torch.float64)


def wide(unit=2.0**-24, tape=None, **options):
    """A mode with noise of float32."""
    return Wide(torch.float64, tape, dice=Dice(0), factor=1.0, unit=unit, accumulator=2.0**-24, **options)


def test_factors_are_uniform_within_the_unit():
    """Mean 1, spread unit / sqrt(3), never further than the unit; no two stretches alike."""
    noise = (Dice(3).disturbed_copy(ONES, 0.25) - 1) / 0.25
    assert noise.abs().max() <= 1
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 3**-0.5) < 0.01
    one, other, *_ = noise.split(1 << 16)
    assert abs((one * other).mean()) < 0.01


def test_two_throws_are_independent_and_a_seed_repeats_them():
    """Equal dice give equal noise, the next throw another one."""
    dice, again = Dice(5), Dice(5)
    first, second = dice.disturbed_copy(ONES[:1000], 0.5), dice.disturbed_copy(ONES[:1000], 0.5)
    assert torch.equal(first, again.disturbed_copy(ONES[:1000], 0.5))
    assert abs(((first - 1) * (second - 1)).mean()) < 0.02


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[0].expand(3, 8)])
def test_any_strides_are_disturbed(view):
    """Transposed, with gaps, expanded: every element gets its factor, a copy keeps its shape."""
    x = view(torch.ones(8, 8, dtype=torch.float64))
    noise = Dice(0).disturbed_copy(x, 0.5)
    assert noise.shape == x.shape
    assert noise.unique().numel() == x.numel()


def test_views_with_gaps_are_disturbed_in_place():
    """What lies in the gaps stays."""
    x = torch.ones(4, 4, dtype=torch.float64)
    Dice(0).disturb(x[:, ::2], 0.5)
    assert (x[:, 1::2] == 1).all()
    assert (x[:, ::2] != 1).all()


def test_complex_numbers_get_noise_in_both_parts():
    """The error is relative to the magnitude, in any direction."""
    noise = Dice(0).disturbed_copy(torch.ones(1000, dtype=torch.complex128), 0.1) - 1
    assert noise.real.abs().max() <= 0.1
    assert noise.imag.std() > 0.05


def test_zeros_and_infinities_stay():
    """A relative error does not turn infinity into NaN."""
    x = torch.tensor([0.0, float("inf"), -float("inf")], dtype=torch.float64)
    assert torch.equal(Dice(0).disturbed_copy(x, 0.5), x)


def test_results_round_and_copies_do_not():
    """Operators that only move values are exact, arithmetic is not."""
    x = torch.rand(64, dtype=torch.float64)
    with wide():
        moved = torch.cat([x, x.flip(0)]).view(2, 64).t().relu().clone()
        rounded = x * 3
    assert torch.equal(moved, torch.cat([x, x.flip(0)]).view(2, 64).t())
    error = (rounded / (x * 3) - 1).abs()
    assert error.min() > 0
    assert error.max() <= 2.0**-24 * 1.001


def test_sums_are_disturbed_term_by_term():
    """A sum that cancels keeps the noise of its terms."""
    x = torch.cat([ONES[:500], -ONES[:500]])
    with wide():
        total = x.sum()
    assert 1e-6 < abs(total) < 1e-3


def test_what_is_written_to_is_rounded():
    """In-place operators, out= variants, running statistics."""
    x, out = torch.full((64,), 3.0, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    images = torch.rand(8, 4, dtype=torch.float64)
    with wide():
        x.mul_(3.0)
        torch.mul(ONES[:64], 3.0, out=out)
        F.batch_norm(images, mean, var, training=True)
    assert (x != 9).all()
    assert (out != 3).all()
    assert (mean != 0.1 * images.mean(0)).all()
    assert torch.allclose(mean, 0.1 * images.mean(0), rtol=1e-4)


def test_running_statistics_that_are_only_read_stay():
    """Also where one number stands for all channels: torch writes to no such tensor."""
    mean, var = torch.full((1,), 0.25, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    images = torch.rand(8, 4, dtype=torch.float64)
    with wide():
        F.batch_norm(images, mean.expand(4), var.expand(4), training=False)
        F.batch_norm(images, own_mean := torch.full((4,), 0.25, dtype=torch.float64), var.repeat(4), training=False)
    assert (mean == 0.25).all()
    assert (var == 1).all()
    assert (own_mean == 0.25).all()


def test_float16_underflows_absolutely():
    """Below 2**-14 the error of float16 is a part of its smallest step, not of the value; zeros stay zero."""
    x = torch.tensor([2.0**-24, 0.0] * 500, dtype=torch.float64)
    with wide(unit=2.0**-11):
        y = x * 1.5
    error = (y - x * 1.5).abs()
    assert error[::2].max() > 2.0**-27
    assert (y[1::2] == 0).all()


def test_a_tape_that_does_not_fit_is_not_played():
    """Another shape draws its own numbers."""
    tape = Tape()
    with tape:
        torch.rand_like(torch.ones(8))
    with wide(tape=tape):
        assert torch.rand_like(ONES[:4]).shape == (4,)
        assert torch.equal(torch.rand_like(ONES[:8]), tape.draws[0][1].double())


def test_products_follow_torchs_settings():
    """bfloat16 products of float32 on a CPU are asked for by 'medium'; float64 is never touched."""
    before = torch.get_float32_matmul_precision()
    x = [torch.ones(1)]
    try:
        torch.set_float32_matmul_precision("medium")
        assert input_units(x, 2.0**-24)["addmm"] == 2.0**-8
        assert input_units(x, 2.0**-53) == {}
        torch.set_float32_matmul_precision("highest")
        assert input_units(x, 2.0**-24) == {}
    finally:
        torch.set_float32_matmul_precision(before)


def test_rounded_inputs_show_in_the_result():
    """A product in TF32 is as far off as its inputs."""
    a, b = torch.rand(64, 64, dtype=torch.float64), torch.rand(64, 64, dtype=torch.float64)
    exact = a @ b

    def error(**options):
        with wide(**options):
            found = a @ b
        return float((found / exact - 1).abs().mean())

    assert error(inputs={"mm": 2.0**-11}) > 100 * error()
