"""The verdict of a benchmark: no difference where there is none, and a slowdown is seen, whatever the noise is like."""

from __future__ import annotations

import random
from math import exp
from statistics import median

import pytest

from pytest_torchcompile.layer.benchmark_result import Ratio, quantile, ratio_of

LEAST = 0.02


def noise(kind, draw):
    """A factor on a timing: how laptops, shared machines and busy ones lie."""
    if kind == "quiet":
        return exp(draw.gauss(0, 0.01))
    if kind == "loud":
        return exp(draw.gauss(0, 0.3))
    if kind == "tails":
        return 1 + draw.paretovariate(1.2) / 20
    if kind == "two speeds":
        return draw.choice([1.0, 1.0, 1.0, 3.0]) * exp(draw.gauss(0, 0.02))
    raise ValueError(kind)


def rounds(kind, factor, draw, count=24, turns=3):
    """Shortest timings of both sides, round by round, as benchmark() takes them, on a machine that drifts."""
    ones, others, drift = [], [], 0.0
    for _ in range(count):
        drift += draw.gauss(0, 0.05)
        ones.append(min(factor * exp(drift) * noise(kind, draw) for _ in range(turns)))
        others.append(min(exp(drift) * noise(kind, draw) for _ in range(turns)))
    return ones, others


KINDS = ["quiet", "loud", "tails", "two speeds"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_where_there_is_none(kind):
    """Of 300 runs of equal sides more than 95 % say so: 99 % by construction."""
    draw = random.Random(f"null {kind}")
    wrong = sum(ratio_of(*rounds(kind, 1.0, draw)).differs(LEAST) for _ in range(300))
    assert wrong <= 300 * 0.025


@pytest.mark.parametrize(("kind", "least"), [("quiet", 100), ("tails", 100), ("two speeds", 100), ("loud", 60)])
@pytest.mark.parametrize("factor", [1.3, 1 / 1.3])
def test_a_planted_difference_is_seen(kind, least, factor):
    """30 % either way, in nearly every of 100 runs, and in the right direction."""
    draw = random.Random(f"planted {kind}")
    found = [ratio_of(*rounds(kind, factor, draw)) for _ in range(100)]
    seen = [ratio for ratio in found if ratio.differs(LEAST)]
    assert len(seen) >= least * 0.97
    assert all((ratio.value > 1) == (factor > 1) for ratio in seen)
    assert median(ratio.value for ratio in found) == pytest.approx(factor, rel=0.05)


def test_what_is_too_small_to_count():
    """A difference below `least` is none, however sure."""
    draw = random.Random(2)
    ones = [1.01 * exp(draw.gauss(0, 1e-4)) for _ in range(20)]
    ratio = ratio_of(ones, [1.0] * 20)
    assert ratio.low > 1
    assert not ratio.differs(LEAST)
    assert ratio.differs(0.005)


def test_the_interval_by_hand():
    """The order statistics of the tables: the extremes of 8, the 4th of 20, the 8th of 30."""
    for count, rank in ((8, 1), (11, 1), (20, 4), (30, 8), (100, 37)):
        ratio = ratio_of([exp(n / 100) for n in range(count)], [1.0] * count)
        assert (ratio.low, ratio.high) == pytest.approx((exp((rank - 1) / 100), exp((count - rank) / 100))), count


@pytest.mark.parametrize(("ones", "others"), [([1.0] * 7, [1.0] * 7), ([1.0] * 9, [1.0] * 8)])
def test_too_few(ones, others):
    """Fewer than 8 can't hold the median with that confidence."""
    with pytest.raises(ValueError, match="expected as many of each, and at least 8"):
        ratio_of(ones, others)


def test_quantiles():
    """Interpolated between neighbours."""
    assert [quantile([3, 1, 2], share) for share in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_two_series_agree_on_nothing_where_there_is_nothing(kind):
    """Of 1000 runs of equal sides none ends in faster or slower."""
    draw = random.Random(f"twice {kind}")
    for _ in range(1000):
        first = ratio_of(*rounds(kind, 1.0, draw))
        assert not (first.differs(LEAST) and first.agrees(ratio_of(*rounds(kind, 1.0, draw)), LEAST))


@pytest.mark.parametrize(("low", "value", "high", "confirmed", "verdict"), [
    (0.7, 0.8, 0.9, True, "faster"), (1.1, 1.2, 1.3, True, "slower"), (1.01, 1.015, 1.02, True, "no difference"),
    (1.01, 1.1, 1.2, False, "no difference"), (0.9, 1.0, 1.1, True, "no difference"),
    (0.79, 1.0, 1.1, True, "could not be told"), (0.9, 1.0, 1.26, True, "could not be told"),
    (1.1, 1.2, 1.3, False, "could not be told"),
])  # fmt: skip
def test_the_words_of_a_verdict(low, value, high, confirmed, verdict):
    """Faster or slower only where it was seen twice; no difference only where a large one is ruled out."""
    assert Ratio(value, low, high, 24).verdict(LEAST, confirmed) == verdict


def test_on_a_machine_that_is_not_quiet_the_interval_is_wider():
    """Steps that take twice as long as themselves leave a ratio of 1.5 open, but not one of 5."""
    assert Ratio(1.5, 1.4, 1.6, 24).verdict(LEAST, confirmed=True) == "slower"
    assert Ratio(1.5, 1.4, 1.6, 24).widened(2).verdict(LEAST, confirmed=True) == "could not be told"
    assert Ratio(5.0, 4.5, 5.5, 24).widened(2).verdict(LEAST, confirmed=True) == "slower"
    assert Ratio(1.5, 1.4, 1.6, 24).widened(2).speedup_interval == pytest.approx((1 / 3.2, 1 / 0.7))
