"""Reruns share parameters only where the eager run has left them alone; programs of one model share its wide copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, record, reference
from pytest_torchcompile.oracle.calls import Call, Variants
from pytest_torchcompile.state.model_copy import copy_model

pytestmark = pytest.mark.needs_torch


class Plain(nn.Module):
    """Leaves its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.write()
        return self.inner(x)

    def write(self) -> None:
        pass


class InPlace(Plain):
    def write(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)


class ByData(Plain):
    """As version counters don't see it."""

    def write(self) -> None:
        self.inner.weight.data.mul_(0.5)


class NewData(Plain):
    def write(self) -> None:
        self.inner.weight.data = self.inner.weight.data * 0.5


class InList(Plain):
    def write(self) -> None:
        torch._foreach_mul_([self.inner.weight.data], 0.5)


class ByKeyword(Plain):
    def write(self) -> None:
        torch.mul(self.inner.weight.data, 0.5, out=self.inner.weight.data)


class OneRow(Plain):
    def write(self) -> None:
        self.inner.weight.data[1].zero_()


WRITING = [InPlace, ByData, NewData, InList, ByKeyword, OneRow]


def run_taped(model: nn.Module, batch: Batch) -> Tape:
    copy, tape = copy_model(model), Tape()
    assert record(copy, copy, batch, mode=tape).error is None
    return tape


def test_a_model_that_leaves_its_parameters_alone() -> None:
    assert run_taped(Plain(), Batch.of(torch.randn(5, 4))).spares_parameters


@pytest.mark.parametrize("kind", WRITING)
def test_a_model_that_writes_is_seen(kind) -> None:
    assert not run_taped(kind(), Batch.of(torch.randn(5, 4))).spares_parameters


@pytest.mark.parametrize("kind", [Plain, *WRITING])
def test_no_run_changes_the_model_that_is_kept(kind) -> None:
    """And each run gives what the one before gave: nothing of it is left in what they share."""
    torch.manual_seed(0)
    model, batch = kind(), Batch.of(torch.randn(5, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = reference(model, batch, tape=run_taped(model, batch), draw=False, kept={})
    first = expected.estimates["output"].value.clone()
    twins = [twin.outputs["output"].value for twin in expected.twins()]
    expected.more()
    assert expected.repeats("output")
    assert torch.equal(expected.program.run_wide(torch.float64, None).outputs["output"].value, first)
    assert all(torch.equal(twin, twins[0]) for twin in twins)
    assert torch.allclose(twins[0].double(), first, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_programs_of_one_model_share_its_wide_copy() -> None:
    model, kept = Plain(), {}
    references = []
    for size in (2, 5):
        batch = Batch.of(torch.randn(size, 4))
        references.append(reference(model, batch, tape=run_taped(model, batch), draw=False, kept=kept))
    assert list(kept) == [torch.float64]
    wide = kept[torch.float64]
    assert all(each.program.wide_copies[torch.float64] is wide for each in references)
    assert all(parameter.dtype == torch.float64 for parameter in wide.parameters())


def test_one_variant_for_all_sizes() -> None:
    variants = Variants(Plain())
    calls = [Call(index, Batch.of(torch.randn(size, 4))) for index, size in enumerate((2, 5))]
    own = {id(variants.for_call(call).model) for call in calls}
    other = {id(variants.for_call(call.with_other_values(7)).model) for call in calls}
    assert len(own) == len(other) == 1
    assert own != other


def test_hooks_of_parameters_are_carried_over() -> None:
    """To the copy's own parameters, with what they close over; a shared parameter keeps its one hook."""
    model = Plain()
    clipped = []

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        clipped.append(model)
        return gradient.clamp(-1e-3, 1e-3)

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    first, *_, last = model.parameters()
    first.register_hook(clip)
    last.register_post_accumulate_grad_hook(halve)
    batch = Batch.of(torch.randn(3, 4))
    expected = record(model, model, batch)
    copied = copy_model(model)
    found = record(copied, copied, batch)
    for name, gradient in expected.gradients.items():
        assert torch.equal(gradient, found.gradients[name])
    assert len(clipped) == 1
    shared = copy_model(model, {id(parameter): parameter for parameter in model.parameters()})
    record(shared, shared, batch)
    assert len(clipped) == 2
