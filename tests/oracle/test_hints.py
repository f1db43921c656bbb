"""Torch's hints about graph breaks are tried before they are passed on."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.diagnosis import try_hints
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch
HINT = "Set `torch._dynamo.config.capture_scalar_outputs = True`"


class Asks(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Decides(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def tried(model):
    """What is said of the hint at the one break of a model."""

    def make(settings):
        return Side(model if settings is None else torch.compile(model, **settings), model)

    trial = Trial(make, model, {"backend": "eager"}, [Call(0, Batch.of(torch.ones(3)), {})],
                  TrialOptions(train=False))
    with isolated([]):
        trial.run()
        breaks = trial.compiled.seen["graph_breaks"]
        assert len(breaks) == 1
        return try_hints(trial, [found | {"hint": HINT} for found in breaks])


def test_a_hint_that_helps():
    assert tried(Asks()) == {0: "capture_scalar_outputs = True was tried: this break is gone with it"}


def test_a_hint_that_does_not_help():
    assert tried(Decides()) == {0: "capture_scalar_outputs = True was tried and does not help here"}
