"""Torch's hints about graph breaks are tried before they are passed on."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges import capture_cost
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.torch_hints import try_hints
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch
HINT = "Set `torch._dynamo.config.capture_scalar_outputs = True`"
RNN_HINT = "Set torch._dynamo.config.allow_rnn=True to enable experimental support"


class Asks(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Decides(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class Recurs(torch.nn.Module):
    """Torch unrolls the GRU: a graph of its own size for each length."""

    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(4, 8, batch_first=True)
        self.out = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def tried(model, example=None, hint=HINT, patience=60.0):
    """What is said of the hint at the one break of a model."""

    def make(settings):
        return Side(model if settings is None else torch.compile(model, **settings), model)

    batch = Batch.of(torch.ones(3) if example is None else example)
    trial = Trial(make, model, {"backend": "eager"}, [Call(0, batch, {})], TrialOptions(train=False))
    with isolated([]):
        trial.run()
        breaks = trial.compiled.seen["graph_breaks"]
        assert len(breaks) == 1
        return try_hints(trial, [found | {"hint": hint} for found in breaks], patience)[0]


def test_a_hint_that_helps():
    """Its cost is told, and is nothing to warn of."""
    told = tried(Asks())
    assert re.fullmatch(r"capture_scalar_outputs = True was tried: this break is gone with it \(call 1 is captured as "
                        r"\d+ traced operators in \d+\.\d s, \d+ in \d+\.\d s without it\)", told)


def test_a_hint_when_time_is_short():
    """That it helps is told, and that its cost was not measured: a failure must not become a time-out."""
    assert tried(Asks(), patience=0.0) == ("capture_scalar_outputs = True was tried: this break is gone with it; what "
                                           "it costs was not measured, for the cell's time is short")


def test_a_hint_that_does_not_help():
    assert tried(Decides()) == "capture_scalar_outputs = True was tried and does not help here"


def test_a_hint_that_costs_much():
    """An unrolled GRU: the longer, the more operators; the reader is warned with both figures."""
    told = tried(Recurs(), torch.ones(2, 12, 4), RNN_HINT)
    match = re.fullmatch(r"allow_rnn = True was tried: this break is gone with it, at a price: call 1 is captured as "
                         r"([\d,]+) traced operators in \d+\.\d s, (\d+) in \d+\.\d s without it\. Inductor's time "
                         r"grows with the operators, .*: look at the compile time before you keep it, or allow the "
                         r"break", told)
    assert match
    assert int(match[1].replace(",", "")) > 10 * int(match[2]) + 100


@pytest.mark.slow
def test_a_hint_that_costs_too_much_to_be_tried():
    """Tracing is given up, and what was seen until then is told."""
    told = tried(Recurs(), torch.ones(2, 600, 4), RNN_HINT)
    assert re.search(r"gone with it, at a price: capturing call 1 was given up after 2,000 traced operators and "
                     r"\d+\.\d s, \d+ in \d+\.\d s without it\. Inductor's time grows", told)


def test_a_hint_that_aot_autograd_refuses(monkeypatch):
    """What helps Dynamo alone is no advice for who compiles further."""
    def refuse(self, graph, inputs):
        if torch._dynamo.config.capture_scalar_outputs:
            raise NotImplementedError("not this")
        return graph.forward

    monkeypatch.setattr(capture_cost.TracedBackend, "__call__", refuse)
    assert tried(Asks()).endswith("gone with it, but capture for AOTAutograd raises "
                                  "torch._dynamo.exc.BackendCompilerFailed with it")
    monkeypatch.setattr(capture_cost.TracedBackend, "__call__", lambda *_: 1 / 0)
    assert tried(Asks()).endswith("; what it costs is not known: capture for AOTAutograd raises "
                                  "torch._dynamo.exc.BackendCompilerFailed without it too")
