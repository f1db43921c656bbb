"""Means of models that draw random numbers: what is only rounding noise tells nothing."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.oracle.mean_comparison import compare_means
from pytest_torchcompile.oracle.recording import Recording

pytestmark = pytest.mark.needs_torch


def recorded(noise_mean, weight=1e-3, shift=0.0):
    """Runs of a model: a gradient that is drawn at random, and one that is rounding noise around ``noise_mean``."""

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(16, generator=generator)
        noise = torch.randn(8, generator=generator)
        return Recording(gradients={"weight": weight * (drawn + shift), "key.bias": 1e-13 * (noise + noise_mean)})

    return run


def test_rounding_noise_far_below_the_largest_gradient_is_no_difference():
    """The noise of the two sides has other means; beside a gradient of 1e-3 that is nothing."""
    found = compare_means(recorded(0.0), recorded(10.0))
    assert found.random == {"weight", "key.bias"}
    assert found.differing == {}


def test_the_same_numbers_beside_nothing_larger_are_a_difference():
    """A model whose gradients are all small is no noise."""
    found = compare_means(recorded(0.0, weight=1e-13), recorded(10.0, weight=1e-13))
    assert set(found.differing) == {"key.bias"}


def test_noise_that_one_side_alone_has_grown_is_a_difference():
    """Eager's gradient is noise, the compiled one is as large as a gradient of the model."""
    found = compare_means(recorded(0.0), recorded(1e9))
    assert set(found.differing) == {"key.bias"}


def test_another_mean_of_a_drawn_gradient_is_a_difference():
    """And it does not depend on how small the others are."""
    found = compare_means(recorded(0.0), recorded(0.0, shift=2.0))
    assert set(found.differing) == {"weight"}
    assert "times as far apart as the random draws explain" in found.differing["weight"]
