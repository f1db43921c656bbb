"""The loss that is made up where the user has none: alone it accuses nobody, unless the outputs drown in noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_programs import of_rows
from torch import nn

from pytest_torchcompile.contract.history_run import run_history
from pytest_torchcompile.fuzz.drawn_call import call
from pytest_torchcompile.oracle.comparison import compare

pytestmark = pytest.mark.needs_torch


class Uneven(nn.Module):
    """A one, and 999 numbers of a millionth: an eps of the one is a tenth of each. (B, 4) -> (B, 1000)."""

    def __init__(self):
        super().__init__()
        self.sizes = nn.Parameter(torch.full((1000,), 1e-6))
        with torch.no_grad():
            self.sizes[0] = 1.0

    def forward(self, x):
        """Nearly the same for every input."""
        return self.sizes * torch.tanh(x.square().sum(1, keepdim=True) + 9)


def shifted(by):
    """A backend whose first result is larger by so much, but for its largest element."""
    def backend(module, example_inputs):
        def run(*arguments):
            first, *others = module(*arguments)
            return torch.where(first == first.max(), first, first + by), *others

        return run

    return backend


def weighted_mean(output, batch):
    """A loss of the user's own, and what it says is what counts."""
    return (output * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).mean()


def problem_of(kind, backend, loss=None):
    """What a call in evaluation shows."""
    came = run_history(of_rows(kind, backend, loss), (call(B=3, training=False),), lambda index, side: None)
    assert came.calls == 1
    return came.problem


def test_it_accuses_nobody_alone():
    """The outputs are right by every rule, each within an eps of the largest; their mean is off by more than it rounds.
    """
    assert problem_of(Uneven, shifted(8e-8)) is None


def test_a_loss_of_the_users_own_does():
    """The same fault: now it is what the user computes."""
    problem = problem_of(Uneven, shifted(8e-8), weighted_mean)
    assert problem is not None
    assert problem.where == "loss"


@pytest.mark.parametrize("by", [1e-6, 1e-3])
def test_wrong_outputs_are_told_beside_it(by):
    """The excuse is for a loss alone."""
    problem = problem_of(Uneven, shifted(by))
    assert problem is not None
    assert problem.where == "output"


def test_it_counts_where_the_outputs_say_nothing(monkeypatch):
    """Outputs that drown in their noise are not right, they are undecided."""
    def drowned(leaf):
        if leaf.name == "output":
            leaf = replace(leaf, blind=leaf.numel)
        return leaf

    def compare_drowned(*given):
        return [drowned(leaf) for leaf in compare(*given)]

    monkeypatch.setattr("pytest_torchcompile.contract.history_run.compare", compare_drowned)
    problem = problem_of(Uneven, shifted(8e-8))
    assert problem is not None
    assert problem.where == "loss"
