"""How the layer judges the first steps of a training that it compares with eager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.layer import step_comparison
from pytest_torchcompile.oracle.leaf_limits import Leaf, problem

pytestmark = pytest.mark.needs_torch


def gradient(name, numel, peak):
    return Leaf(f"gradient of {name}", "gradient", numel, dtype="float32", rms=1.0, bias=1.0, peak=peak)


@pytest.mark.parametrize(("peak", "wrong"), [(18.0, 0), (40.0, 1)])
def test_all_leaves_of_a_step_are_looked_at_together(monkeypatch, peak, wrong):
    """The comparison draws no noise of a worst element that passes among all gradients: it has to pass here, too."""
    leaves = [gradient("bias", 2048, peak), gradient("weight", 1 << 22, 5.0)]
    monkeypatch.setattr(step_comparison, "compare", lambda *_: leaves)
    step = SimpleNamespace(eager=None, compiled=None)
    assert problem(leaves[0])
    assert len(step_comparison._differences(step, lambda: None, False).wrong) == wrong
