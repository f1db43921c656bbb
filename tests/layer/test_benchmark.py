"""benchmark(): what is timed, counted and concluded, by a planted clock: no verdict hangs on the machine."""

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, benchmark, maybe_compile
from pytest_torchcompile.layer import step_runner as module

pytestmark = pytest.mark.needs_torch


class Clock:
    """Time that passes only when somebody says so, with noise."""

    def __init__(self):
        self.now, self.draw = 0.0, random.Random(3)

    def perf_counter(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds * self.draw.lognormvariate(0, 0.05)


@pytest.fixture
def clock(monkeypatch):
    torch.compiler.reset()
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    yield clock
    torch.compiler.reset()


class Net(nn.Module):
    """A second a step, eagerly."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.linear, self.norm = [clock], nn.Linear(4, 3), nn.BatchNorm1d(4)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.clock[0].pass_(1.0)
        return self.linear(self.norm(x))


def backend(clock, seconds, compiling=10.0):
    def compiler(graph, example):
        clock.pass_(compiling)

        def run(*args):
            clock.pass_(seconds)
            return graph(*args)

        return run

    return compiler


def captures_backward(clock):
    """As ``aot_eager`` does; a forward pass takes a second."""
    captures = torch._dynamo.lookup_backend("aot_eager")

    def compiler(graph, example):
        captured = captures(graph, example)

        def run(*args):
            clock.pass_(1.0)
            return captured(*args)

        return run

    return compiler


def batch():
    return torch.randn(5, 4)


def on(compiler, **more):
    return CompileConfig(enabled=True, backend=compiler, **more)


@pytest.mark.parametrize(("seconds", "verdict"), [(1.3, "slower"), (1.0, "no difference"), (0.7, "faster")])
def test_the_verdict(clock, seconds, verdict):
    """A planted difference of 30 % is seen either way, and none is seen where there is none."""
    found = benchmark(Net(clock).eval(), on(backend(clock, seconds)), batch)
    assert found.verdict == verdict
    assert found.speedup == pytest.approx(1 / seconds, rel=0.05)
    assert found.ratio.low <= found.ratio.value <= found.ratio.high


def test_eager_against_eager(clock):
    """A config that is not enabled compares eager with eager: 100 runs, and no difference in at least 95."""
    net = Net(clock).eval()
    verdicts = [benchmark(net, CompileConfig(), batch, rounds=8, warmup=1).verdict for _ in range(100)]
    assert verdicts.count("no difference") >= 95


def test_what_is_measured(clock):
    """First step with the compiler in it, steady steps without; items by the first dimension, or as one says."""
    found = benchmark(Net(clock).eval(), on(backend(clock, 0.5)), batch)
    assert found.eager.first_seconds == pytest.approx(1, rel=0.2)
    assert found.compiled.first_seconds == pytest.approx(10.5, rel=0.2)
    assert (found.eager.median, found.compiled.median) == pytest.approx((1, 0.5), rel=0.05)
    assert found.eager.low < found.eager.median < found.eager.high
    assert found.eager.items_per_second == pytest.approx(5, rel=0.05)
    assert (found.repeats, found.compiles, found.recompiles, found.late_compiles) == (1, 1, 0, 0)
    assert found.pays_after == pytest.approx(20, abs=3)
    found = benchmark(Net(clock).eval(), CompileConfig(), batch, items=torch.numel)
    assert str(found).startswith("not enabled, so both sides are eager: ")
    assert found.eager.items_per_second == pytest.approx(20, rel=0.05)


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, input_ids, decoder_input_ids=None):
        return self.table(input_ids)


IDS = torch.ones(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(("given", "count", "unit"), [
    (IDS, 15, "tokens"), ({"input_ids": IDS, "decoder_input_ids": IDS[:, :2]}, 21, "tokens"), ((IDS,), 15, "tokens"),
    (IDS[0], 5, "items"),
])  # fmt: skip
def test_of_a_batch_of_tokens_tokens_are_counted(given, count, unit):
    """Unless somebody says what to count."""
    found = benchmark(Embeds().eval(), CompileConfig(), lambda: given, rounds=8)
    assert found.unit == found.to_dict()["unit"] == unit
    assert found.eager.items_per_second == pytest.approx(count / found.eager.median)
    assert f"{unit} per second" in str(found)
    asked = benchmark(Embeds().eval(), CompileConfig(), lambda: given, rounds=8, items=lambda batch: 2)
    assert (asked.unit, asked.eager.items_per_second) == ("items", pytest.approx(2 / asked.eager.median))


def test_features_are_no_tokens():
    found = benchmark(nn.Linear(4, 4).eval(), CompileConfig(), lambda: torch.randn(3, 4), rounds=8)
    assert (found.unit, found.eager.items_per_second) == ("items", pytest.approx(3 / found.eager.median))


def test_the_kernels_of_both_are_counted(clock):
    """The backend calls eager's own operators: a linear layer and a batch norm."""
    found = benchmark(Net(clock).eval(), on(backend(clock, 1.0)), batch, rounds=8)
    assert (found.eager.kernels, found.compiled.kernels, found.kernels_share) == (2, 2, 1)
    assert found.profile.kernels_in_graphs == 2


def test_a_noisy_machine_gets_more_rounds_and_then_no_verdict(clock):
    """What one round in three takes three times as long is no difference, and nobody can say that it is none."""
    net = Net(clock).eval()
    net.clock[0] = type("Busy", (), {"pass_": lambda self, seconds: clock.pass_(clock.draw.choice([1, 1, 3]))})()
    found = benchmark(net, CompileConfig(), batch, rounds=8, warmup=1)
    assert found.ratio.rounds > 8
    net.clock[0] = type("Wild", (), {"pass_": lambda self, seconds: clock.pass_(clock.draw.lognormvariate(0, 1.5))})()
    found = benchmark(net, CompileConfig(), batch, rounds=8, warmup=1)
    assert found.ratio.rounds == 24
    assert found.verdict == "could not be told"
    assert str(found).startswith("not enabled, so both sides are eager: could not be told")


def test_steps_too_short_to_time_are_repeated(clock):
    """A timing takes at least two milliseconds."""
    net = Net(clock).eval()
    net.clock[0] = type("Fast", (), {"pass_": lambda self, seconds: clock.pass_(seconds * 1e-4)})()
    found = benchmark(net, CompileConfig(), batch)
    assert 15 <= found.repeats <= 25
    assert found.eager.median == pytest.approx(1e-4, rel=0.05)


def test_a_slow_side_is_timed_no_longer_than_a_fast_one(clock):
    """Eager takes 0.1 ms and is repeated 20 times; compiled takes 10 ms, and one step of it fills a timing."""
    net = Net(clock).eval()
    net.clock[0] = type("Fast", (), {"pass_": lambda self, seconds: clock.pass_(seconds * 1e-4)})()
    found = benchmark(net, on(backend(clock, 1e-2, compiling=0.0)), batch, rounds=8, warmup=1)
    assert found.verdict == "slower"
    # Two series of 8 rounds with three timings of each side take 0.6 s; repeated like eager it would be 10 s.
    assert clock.now < 1.5


def test_recompiles_are_counted(clock):
    """Those of the warm-up, and those that make the steady state none."""
    sizes = iter([5, 5, 5, 6, 7, *range(8, 99)])
    made = {}

    def by_round(number):
        return made.setdefault(number, torch.randn(next(sizes), 4))

    config = on(backend(clock, 1.0), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=100):
        found = benchmark(Net(clock).eval(), config, by_round, rounds=8)
    assert found.late_compiles == found.ratio.rounds >= 8
    assert found.recompiles >= 8
    assert f"{found.late_compiles} in the timed rounds" in str(found)


def test_training_steps(clock):
    """With a loss, or a model in training mode: backward too; nothing of it stays."""
    net, passes = Net(clock), []
    net.linear.weight.register_hook(lambda gradient: passes.append(1))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    benchmark(net, on(backend(clock, 1.0)), batch, rounds=8)
    assert passes
    assert net.linear.weight.grad is None
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    passes.clear()
    benchmark(net.eval(), on(backend(clock, 1.0)), batch, rounds=8)
    assert not passes
    # The backward is compiled when it is first needed, which is no second compile.
    found = benchmark(net.train(), on(captures_backward(clock)), batch, rounds=8)
    assert (found.compiles, found.late_compiles) == (1, 0)
    passes.clear()
    net.eval()
    benchmark(net, on(backend(clock, 1.0)), batch, loss_fn=lambda output: output.sum(), rounds=8)
    assert passes


def test_a_loss_without_gradients_has_no_backward_pass(clock):
    """As of a model without parameters, in a cell of phase training."""

    class Bare(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                clock.pass_(1.0)
            return x * 2

    found = benchmark(Bare(), on(backend(clock, 0.5)), batch, loss_fn=lambda output: output.sum(), rounds=8)
    assert found.verdict == "faster"


def test_a_clock_that_shows_no_time_ends(clock):
    """As many steps as nobody waits for would fill a timing of 2 ms."""
    calls = []

    class Instant(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x

    found = benchmark(Instant(), CompileConfig(), batch, rounds=8, warmup=1)
    assert found.verdict == "no difference"
    assert found.repeats == 2000
    assert len(calls) < 2 * 2000 * 3 * 9


def test_a_batch_that_is_a_dict(clock):
    """It is the model's one argument where the model names none of its keys, as for maybe_compile."""
    class TakesDict(Net):
        def forward(self, batch):
            return super().forward(batch["x"])

    found = benchmark(TakesDict(clock).eval(), on(backend(clock, 0.5)), lambda: {"x": torch.ones(6, 4)}, rounds=8)
    assert found.verdict == "faster"


def test_nothing_compiled_is_no_verdict(clock):
    """A model that only runs eagerly can be no faster."""
    net = Net(clock).eval()
    net.forward = torch._dynamo.disable(net.forward)
    found = benchmark(net, on(backend(clock, 0.5)), batch, rounds=8)
    assert found.verdict == "nothing was compiled"
    assert "ran eagerly" in str(found).splitlines()[8]


class Reads(Net):
    """A number is taken out of a tensor in each turn of a loop, so that torch gives the function up."""

    def forward(self, x):
        for _ in range(2):
            x = x * x.sum().item()
        return x


def test_why_nothing_was_compiled_is_told(clock):
    found = benchmark(Reads(clock).eval(), on(backend(clock, 0.5)), batch, rounds=8)
    assert found.verdict == "nothing was compiled"
    assert "torch gave up Reads.forward (" in found.not_compiled
    assert ", where a number is taken out of a tensor (`.item()`, `float()`)" in str(found)


def test_seconds_from_a_cache_are_told_as_that(clock):
    """They stand beside those of a cold compile, and are none."""
    found = benchmark(Net(clock).eval(), on(backend(clock, 0.5)), batch)
    assert "cache served" not in str(found)
    assert "compiling pays after" in str(replace(found, cached=1))
    assert ", with 1 of 1 compiles from a cache; a cache served what was compiled, so the compiled first step is no "\
        "cold one" in str(replace(found, cached=1))


def test_what_others_did_meanwhile_is_told(clock):
    found = benchmark(Net(clock).eval(), on(backend(clock, 0.5)), batch, rounds=8)
    told = replace(found, others_load="other processes kept 1.5 of 2 processors busy")
    assert str(told).endswith("other processes kept 1.5 of 2 processors busy: seconds are too long, and both sides may "
                              "suffer unequally")


class Counts(Net):
    """A number that grows with each call: eight compiles, then Dynamo gives the function up."""

    def __init__(self, clock, at_most):
        super().__init__(clock)
        self.n, self.at_most = 0, at_most

    def forward(self, x):
        self.n = min(self.at_most, self.n + 1)
        return super().forward(x) * self.n


def test_what_hit_the_recompile_limit_before_the_timed_steps_did_not_run_compiled(clock):
    """The first steps ran graphs, and none that was timed did; the function, what changed, and the remedy are told."""
    found = benchmark(Counts(clock, 1000).eval(), on(backend(clock, 1.0)), batch, rounds=8, warmup=8)
    assert (found.verdict, found.late_compiles) == ("nothing was compiled", 0)
    [over] = found.over_limit
    assert over.function == "Counts.forward"
    assert over.what == "self.n"
    assert "test_benchmark.py:" in over.at
    assert "register self.n as a buffer" in over.advice
    assert f"Counts.forward ({over.file}:{over.line}) hit Dynamo's recompile limit because of self.n" in str(found)
    json.dumps(found.to_dict())


class CountsBehindABreak(Net):
    """Only the rest behind the break, of two operators in twenty-odd, is given up."""

    def __init__(self, clock):
        super().__init__(clock)
        self.n = 0

    def forward(self, x):
        for _ in range(10):
            x = torch.tanh(x).sigmoid()
        torch._dynamo.graph_break()
        self.n += 1
        return super().forward(x) * self.n


def test_the_rest_behind_a_break_that_hit_the_limit_is_told_as_that(clock):
    """The function runs compiled up to the break, so it is not said to run eagerly; the share that does is measured."""
    found = benchmark(CountsBehindABreak(clock).eval(), on(backend(clock, 1.0)), batch, rounds=8, warmup=8)
    [over] = found.over_limit
    assert over.resumed_at == line_of_break()
    assert 0.8 < found.coverage < 1
    assert f"the rest of CountsBehindABreak.forward after line {over.resumed_at} (" in str(found)
    assert "% of the operator calls run eagerly in all)" in str(found)


def line_of_break():
    code = CountsBehindABreak.forward.__code__
    return code.co_firstlineno + 3


def test_coverage_is_that_of_the_timed_steps(clock):
    """What was compiled before the limit says nothing of what was timed."""
    found = benchmark(Counts(clock, 1000).eval(), on(backend(clock, 1.0)), batch, rounds=8, warmup=8)
    assert found.coverage == 0.0
    assert benchmark(Net(clock).eval(), on(backend(clock, 1.0)), batch, rounds=8).coverage == 1.0


def test_what_settles_below_the_recompile_limit_runs_compiled(clock):
    found = benchmark(Counts(clock, 5).eval(), on(backend(clock, 1.0)), batch, rounds=8, warmup=8)
    assert (found.verdict, found.over_limit) == ("no difference", [])


def test_its_text_and_data(clock):
    """A table for people, plain data for files."""
    found = benchmark(Net(clock).eval(), on(backend(clock, 0.5)), batch)
    lines = str(found).splitlines()
    assert lines[0].startswith(("faster: 1.9", "faster: 2.0"))
    assert "99 % interval" in lines[0]
    assert [line[:16].strip() for line in lines[2:8]] == [
        "first step", "step, median", "8 of 10 steps", "items per second", "memory of a step", "kernels of a ste"]
    assert "1 compile(s), 0 of them from a cache, 0 recompile(s); compiling pays after" in lines[8]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["verdict"] == "faster"
    assert data["compiled"]["median"] == found.compiled.median


@pytest.mark.parametrize("given", [{"rounds": 7}, {"warmup": 0}])
def test_too_little(clock, given):
    """Fewer rounds allow no verdict; the first step is never a steady one."""
    with pytest.raises(ValueError, match="expected at least 8 rounds and 1 before"):
        benchmark(Net(clock), CompileConfig(), batch, **given)


def test_the_models_own_error(clock):
    """Is raised as it is."""
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        benchmark(broken, CompileConfig(), batch)


def around(compiled):
    return lambda x: compiled(x)


def allowed(net):
    return maybe_compile(net, CompileConfig(enabled=True, backend="eager", allowlist=("Linear",)))


@pytest.mark.parametrize(("make", "part"), [
    (lambda net: torch.compile(net, backend="eager"), "OptimizedModule"),
    (lambda net: torch.compile(net.forward, backend="eager"), "function"),
    (lambda net: maybe_compile(net, CompileConfig(enabled=True, backend="eager")), "Net"),
    (lambda net: nn.Sequential(torch.compile(net, backend="eager")), "0 in Sequential"),
    (lambda net: net.compile(backend="eager") or net, "Net, in place"),
    (lambda net: net.linear.compile(backend="eager") or (lambda x: net(x)), "linear in Net in function"),
    (lambda net: around(torch.compile(net, backend="eager")), "in function"),
])  # fmt: skip
def test_what_is_compiled_already(clock, make, part):
    """There would be no eager side: compiled would be held against compiled."""
    with pytest.raises(ValueError, match=f"it runs compiled already .*{part}\\), so there is no eager side"):
        benchmark(make(Net(clock)), on("eager"), batch)


def test_a_model_whose_parts_another_has_compiled(clock):
    """The original of an allowlist runs those parts compiled as long as what was returned lives, and no longer."""
    net = Net(clock)
    parts = allowed(net)
    with pytest.raises(ValueError, match="it runs compiled already"):
        benchmark(net, on("eager"), batch)
    del parts
    gc.collect()
    assert benchmark(net, on(backend(clock, 0.7)), batch).verdict == "faster"
