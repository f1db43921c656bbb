"""A draw of many leaves leaves the same estimates as the draw of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_torchcompile.oracle import draw_rows
from pytest_torchcompile.oracle import estimate as estimate_module
from pytest_torchcompile.oracle.draw_rows import add_draw
from pytest_torchcompile.oracle.estimate import Estimate, small_ones_to_cpu
from pytest_torchcompile.oracle.noise_levels import Levels

pytestmark = pytest.mark.needs_torch
INFINITY = float("inf")


def noisy(exact: torch.Tensor, share: float = 2.0**-20) -> torch.Tensor:
    return exact * (1 + share * torch.randn_like(exact))


def usual() -> torch.Tensor:
    return torch.randn(40, 5, dtype=torch.float64)


def with_zeros() -> torch.Tensor:
    return usual() * (torch.rand(40, 5) > 0.5)


def of_other_sizes() -> torch.Tensor:
    return usual() * torch.logspace(-30, 3, 200, dtype=torch.float64).view(40, 5)


def huge() -> torch.Tensor:
    return usual() * 1e38


def with_infinity() -> torch.Tensor:
    exact = usual()
    exact[3, 3] = INFINITY
    return exact


def pairs() -> torch.Tensor:
    return torch.randn(40, 5, dtype=torch.complex128)


def narrow() -> torch.Tensor:
    return usual().float()


def whole() -> torch.Tensor:
    return torch.arange(200)


KINDS: list[Callable[[], torch.Tensor]] = [usual, with_zeros, of_other_sizes, huge, with_infinity, pairs, narrow, whole]


def compare_levels(one: Levels | None, other: Levels | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert (one.top, one.typical, one.relative) == (other.top, other.typical, other.relative)
    if one.by_bin is None or other.by_bin is None:
        assert one.by_bin is other.by_bin
        return
    assert torch.equal(one.by_bin, other.by_bin)


def both_ways(exacts: list[torch.Tensor], largest: float = INFINITY, draws: int = 3) -> None:
    """Draw for each alone and for all together, also with a share, and compare all that an estimate holds."""
    alone = [Estimate(exact.clone(), largest) for exact in exacts]
    together = [Estimate(exact.clone(), largest) for exact in exacts]
    for number in range(draws):
        share = 0.5 if number == 1 else 1.0
        drawn = [noisy(exact) if exact.is_floating_point() or exact.is_complex() else exact for exact in exacts]
        for estimate, value in zip(alone, drawn, strict=True):
            estimate.add(value.clone(), share)
        add_draw(list(zip(together, drawn, strict=True)), share)
    for one, other in zip(alone, together, strict=True):
        assert (one.draws, one.odd, one.flipped) == (other.draws, other.odd, other.flipped)
        for name in ("spread", "reach", "flips", "brink"):
            mine, theirs = getattr(one, name), getattr(other, name)
            if mine is None:
                assert theirs is None
                continue
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0.0)
        compare_levels(one.levels, other.levels)
        for name in ("mean_squares", "along_values", "along_constant"):
            assert getattr(one.noise, name) == pytest.approx(getattr(other.noise, name), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_one_kind(kind: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    both_ways([kind() for _ in range(5)])


@pytest.mark.parametrize("other", KINDS)
def test_another_leaf_among_usual_ones(other: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    both_ways([usual(), other(), usual(), usual()])


@pytest.mark.parametrize("length", [1, 2, 70_000, 200_000])
def test_lengths(length: int) -> None:
    torch.manual_seed(0)
    both_ways([torch.randn(length, dtype=torch.float64) for _ in range(3)])


def test_the_end_of_a_range() -> None:
    """As of float16: draws beyond it are noted for each leaf."""
    torch.manual_seed(0)
    both_ways([usual() * 30_000 for _ in range(3)], largest=65504.0)


def test_a_draw_that_is_not_finite() -> None:
    torch.manual_seed(0)
    exacts = [usual() for _ in range(3)]
    alone, together = ([Estimate(exact) for exact in exacts] for _ in range(2))
    drawn = [noisy(exact) for exact in exacts]
    drawn[1][7, 2] = float("nan")
    for estimate, value in zip(alone, drawn, strict=True):
        estimate.add(value, 1.0)
    add_draw(list(zip(together, drawn, strict=True)), 1.0)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.spread, other.spread)
        assert one.draws == other.draws == 1


def test_other_shapes_and_what_is_missing_are_odd() -> None:
    torch.manual_seed(0)
    estimates = [Estimate(usual()) for _ in range(4)]
    add_draw(list(zip(estimates, [noisy(estimates[0].value), torch.zeros(3, dtype=torch.float64), None,
                                  noisy(estimates[3].value)], strict=True)), 1.0)
    assert [estimate.odd for estimate in estimates] == [0, 1, 1, 0]
    assert [estimate.draws for estimate in estimates] == [1, 0, 0, 1]


def test_leaves_of_one_length_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    add_rows = draw_rows._add_rows

    def counted(rows, share):
        taken.append(len(rows))
        return add_rows(rows, share)

    monkeypatch.setattr(draw_rows, "_add_rows", counted)
    exacts = [torch.randn(9, dtype=torch.float64) for _ in range(6)] + [torch.randn(4, dtype=torch.float64)] * 2
    both_ways(exacts, draws=2)
    assert taken == [6, 2, 6, 2]


def test_small_tensors_of_a_gpu_come_to_the_cpu_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "_belongs_on_cpu", lambda tensor: tensor.numel() <= 4)
    values = {"wide": torch.arange(4.0).view(2, 2).t(), "number": 3.5, "long": torch.arange(9.0), "none": None,
              "whole": torch.arange(3), "point": torch.tensor(2.0), "empty": torch.zeros(0, 3),
              "sparse": torch.eye(2).to_sparse(), "pair": torch.tensor([1 + 2j])}
    moved = small_ones_to_cpu(values)
    assert list(moved) == list(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert moved[name].dtype == value.dtype
            torch.testing.assert_close(moved[name], value, rtol=0.0, atol=0.0)
        else:
            assert moved[name] is value
    assert moved["long"] is values["long"]
    assert moved["wide"].data_ptr() != values["wide"].data_ptr()
