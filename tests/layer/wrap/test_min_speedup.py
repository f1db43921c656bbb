"""min_speedup: what is surely too slow runs eagerly, as if it had never been compiled; nothing else changes.

By a planted clock: no verdict hangs on the machine.
"""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, maybe_compile
from pytest_torchcompile.errors import CompileFailed
from pytest_torchcompile.layer import step_runner

pytestmark = pytest.mark.needs_torch
X = torch.randn(4, 8)


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self):
        self.now, self.stretched = 0.0, cycle([1.0])

    def perf_counter(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds * next(self.stretched)


CLOCK = Clock()


@pytest.fixture(autouse=True)
def planted_clock(monkeypatch):
    CLOCK.stretched = cycle([1.0])
    monkeypatch.setattr(step_runner, "time", CLOCK)


class Net(nn.Module):
    """Takes so long where Dynamo traces nothing of it."""

    def __init__(self, seconds=0.001):
        super().__init__()
        self.linear, self.norm, self.seconds = nn.Linear(8, 8), nn.BatchNorm1d(8), seconds

    def forward(self, x):
        if not torch.compiler.is_compiling():
            CLOCK.pass_(self.seconds)
        return self.norm(self.linear(x))


def taking(seconds):
    """A backend whose code takes so long."""

    def compiler(graph, example_inputs):
        def run(*args):
            CLOCK.pass_(seconds)
            return graph(*args)

        return run

    return compiler


SLOW = taking(0.01)


def on(backend, **more):
    return CompileConfig(enabled=True, backend=backend, **more)


def test_what_is_slower_runs_eagerly_as_if_it_had_never_been_compiled(attempts):
    net = Net()
    before, random_state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    assert maybe_compile(net, on(SLOW, min_speedup=1.0), sample_batch=X) is net
    (record,) = attempts()
    assert (record["result"], record["phase"]) == ("fallback_eager", "benchmark")
    assert record["reason"].startswith("0.")
    assert record["reason"].endswith("at least 1 wanted (min_speedup)")
    assert record["exception"]["type"] == "CompileFailed"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_is_faster_stays_compiled(attempts):
    net = Net(0.01).eval()
    compiled = maybe_compile(net, on(taking(0.001)), sample_batch=X, min_speedup=1.5)
    assert compiled is not net
    (record,) = attempts()
    assert record["result"] == "compiled"
    assert "times as fast compiled (99 % interval " in record["reason"]
    # A copy has no sample batch to be timed on, and is compiled all the same.
    copy.deepcopy(compiled)(X)


def test_where_the_machine_is_busy_nothing_is_told_and_it_stays_compiled(attempts):
    """A step takes once as long as the next, so that the interval reaches what is wanted."""
    CLOCK.stretched = cycle([1.0, 1.0, 3.0, 1.0, 4.0, 1.0, 1.0])
    net = Net(0.01).eval()
    assert maybe_compile(net, on(SLOW, min_speedup=1.1), sample_batch=X) is not net
    (record,) = attempts()
    assert record["result"] == "compiled"
    assert "whether it is 1.1 times as fast could not be told, for the machine is busy: " in record["reason"]


def test_the_eager_side_of_an_allowlist_is_eager(attempts):
    """Its parts are compiled in place: held against themselves they would be as fast."""
    net = nn.Sequential(Net(), nn.ReLU()).eval()
    config = on(SLOW, allowlist=("Net",), min_speedup=1.0)
    assert maybe_compile(net, config, sample_batch=X) is net
    assert attempts("phase") == ["benchmark"]
    net(X)


def test_the_policy_raise_raises(attempts):
    with pytest.raises(CompileFailed, match=r"Net is not used compiled: 0\.\d+ times as fast compiled .* at least 1 "):
        maybe_compile(Net(), on(SLOW, min_speedup=1.0, fail_policy="raise"), sample_batch=X)
    assert attempts("result") == ["raised"]


def test_nothing_is_timed_unless_asked(attempts, monkeypatch):
    monkeypatch.setattr("pytest_torchcompile.layer.step_runner.StepRunner.time_steps", None)
    assert maybe_compile(Net(), on("eager"), sample_batch=X) is not None
    assert attempts("result") == ["compiled"]


def test_a_timing_that_fails_leaves_what_works(attempts, monkeypatch):
    """Our own mistake is nobody else's: the healthcheck's word stands."""
    monkeypatch.setattr("pytest_torchcompile.layer.step_runner.StepRunner.time_steps", None)
    net = Net()
    assert maybe_compile(net, on("eager", min_speedup=1.0), sample_batch=X) is not net
    (record,) = attempts()
    assert record["result"] == "compiled"
    assert "its speed was not measured: TypeError" in record["reason"]


def test_without_a_sample_batch_it_cannot_be_asked():
    with pytest.raises(ValueError, match=r"min_speedup=1.1 is measured on a sample batch, and maybe_compile was given"):
        maybe_compile(Net(), on("eager"), min_speedup=1.1)


@pytest.mark.parametrize(("given", "message"), [
    ({"min_speedup": 0}, r"min_speedup=0: expected a number above 0, such as 1\.1, or None"),
    ({"min_speedup": True}, "min_speedup=True: expected a number above 0"),
    ({"min_speedup": float("inf")}, "min_speedup=inf: expected a number above 0"),
    ({"min_speedup": 1.1, "healthcheck": False}, "needs healthcheck=True: wrong numbers that come fast are no gain"),
])
def test_what_the_config_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        CompileConfig(**given)


def test_it_is_read_from_the_environment():
    assert CompileConfig.from_env({"TORCHCOMPILE_MIN_SPEEDUP": "1.1"}).min_speedup == 1.1
