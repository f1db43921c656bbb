"""Run noise, unit by unit: what two runs of one version differ by is the yardstick for two versions."""

from __future__ import annotations

import pytest

from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.upgrade.run_noise import MARGIN, is_beyond_noise


def run_of(**seconds: float) -> dict[str, JudgedCell]:
    """A run: cell to the seconds that compiling took."""
    cells = {}
    for name, value in seconds.items():
        sections = {"compiles": {"compiles": [{"seconds": value}], "eager_frames": []}}
        cells[name] = JudgedCell(name, {}, {}, sections, None, compiled=True)
    return cells


def slower(*cells: str) -> Change:
    return Change("slower", "", cells, metric="compile_seconds")


@pytest.mark.parametrize(("factor", "beyond"), [(1.0, False), (1.1, False), (1.25, True), (0.75, True)])
def test_all_cells_together_are_held_against_the_shift_between_runs(factor, beyond):
    """Runs of one version differ by 5 %, so a version has to differ by more than twice that, in whatever direction."""
    befores = [run_of(a=1.0, b=2.0, c=3.0), run_of(a=1.05, b=2.1, c=3.15)]
    afters = [run_of(a=factor, b=2 * factor, c=3 * factor)] * 2
    assert is_beyond_noise(slower("a", "b", "c"), befores, afters) is beyond


@pytest.mark.parametrize(("factor", "beyond"), [(1.0, False), (2.0, True)])
def test_one_cell_is_held_against_what_the_others_do_not_explain(factor, beyond):
    """The whole run is slower, the machine's doing: only what one cell has beyond that counts."""
    befores = [run_of(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0), run_of(a=1.02, b=1.0, c=1.0, d=1.0, e=1.0)]
    afters = [run_of(a=3 * factor, b=3.0, c=3.0, d=3.0, e=3.0)] * 2
    assert is_beyond_noise(slower("a"), befores, afters) is beyond


def test_an_outlier_in_any_cell_makes_one_cell_say_less():
    """Such an outlier might have come in this cell as well."""
    befores = [run_of(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0), run_of(a=1.0, b=1.0, c=1.0, d=1.9, e=1.0)]
    afters = [run_of(a=2.0, b=1.0, c=1.0, d=1.0, e=1.0)] * 2
    assert not is_beyond_noise(slower("a"), befores, afters)


def test_the_edge_itself_is_not_beyond():
    """Twice the noise, to the last bit: powers of two have exact logarithms to compare."""
    assert MARGIN == 2.0
    befores, afters = [run_of(a=1.0, b=1.0), run_of(a=2.0, b=2.0)], [run_of(a=8.0, b=8.0)] * 2
    assert not is_beyond_noise(slower("a", "b"), befores, afters)
    assert is_beyond_noise(slower("a", "b"), befores, [run_of(a=8.1, b=8.1)] * 2)


def test_a_cell_without_the_figure_in_some_run_is_left_aside():
    """Also one whose figure is nothing, which has no logarithm."""
    befores = [run_of(a=1.0, b=1.0, lost=1.0, zero=0.0), run_of(a=1.0, b=1.0, zero=1.0)]
    afters = [run_of(a=2.0, b=2.0, lost=900.0, zero=900.0)] * 2
    assert is_beyond_noise(slower("a", "b"), befores, afters)
