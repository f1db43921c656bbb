"""The check `randomness` runs every size of a cell with random numbers of the compiler's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.checks import load

pytestmark = pytest.mark.needs_torch
SECTION = {"raised": None, "backend": "inductor", "graphs": 1, "random": True, "seeds": 64, "compared": 9, "wrong": []}


def raised(largest):
    """What a model raises that takes no more than so many rows, of three sizes, one of which comes twice."""
    import torch

    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.checks.randomness import _raised_by_others

    met = []

    class Picky(torch.nn.Linear):
        def forward(self, x):
            met.append(len(x))
            if len(x) > largest:
                raise RuntimeError(f"{len(x)} rows\nand more")
            return super().forward(x)

    module = Picky(2, 2)
    calls = [SimpleNamespace(batch=Batch.of(torch.ones(rows, 2)), label=f"call of {rows}") for rows in (3, 5, 3, 5, 7)]
    run = SimpleNamespace(calls=calls, loss=None, train=True, seed=0)
    found = list(_raised_by_others(run, SimpleNamespace(call=module, module=module)))
    return met, found


def test_each_further_size_is_run_once():
    assert raised(largest=9) == ([5, 7], [])


def test_what_raises_is_told():
    met, found = raised(largest=4)
    assert (met, len(found)) == ([5, 7], 2)
    assert "5 rows" in found[0]
    assert found[0].startswith("call of 5: ")
    [problem] = load("randomness").judge({**SECTION, "raises": found}, {})
    assert problem.message == ("compiled with random numbers of its own, as production compiles it, it raises in "
                               f"{found[0]}")
    assert problem.evidence == found[1]


@pytest.mark.parametrize("section", [SECTION, {**SECTION, "raises": []}])
def test_what_raises_nowhere_passes(section):
    assert list(load("randomness").judge(section, {})) == []
