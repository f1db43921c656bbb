"""Failures after maybe_compile has returned: state as if nothing had been compiled, one record, eager for good."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pytest_torchcompile import CannotFallBack, CompileConfig, CompileFailed, maybe_compile, observe
from pytest_torchcompile.layer.graph_effects import effects_of

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]


class Net(nn.Module):
    """Writes to a buffer, draws random numbers, and breaks the graph in the middle if asked to."""

    def __init__(self, breaks=True):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.breaks = breaks

    def forward(self, x):
        self.seen.add_(1)
        y = self.norm(self.layer(x)) + self.seen + torch.rand(())
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.relu(y) * torch.rand(())


class Pure(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x))


def rows(count):
    return torch.linspace(-1, 1, count * 4).view(count, 4)


class Refuses:
    """A backend that compiles all graphs but one."""

    def __init__(self, number):
        self.number, self.count = number, 0

    def __call__(self, graph, inputs):
        self.count += 1
        if self.count == self.number:
            raise RuntimeError("planted: does not compile")
        return graph.forward


class RaisesWhenRun:
    """A backend whose graphs raise in one of their runs, when everything has been computed and written."""

    def __init__(self, run, error=RuntimeError):
        self.run, self.error = run, error

    def __call__(self, graph, inputs):
        runs = []

        def compiled(*args):
            runs.append(1)
            result = graph(*args)
            if len(runs) == self.run:
                raise self.error("planted: raises when run")
            return result

        return compiled


def on(backend, **given):
    return CompileConfig(enabled=True, backend=backend, **given)


def run_beside_eager(model, compiled, batches, backward=False):
    """Call both; whatever the model has, gives and draws must be the same bits."""
    eager = copy.deepcopy(model)
    for number, batch in enumerate(batches):
        found = []
        for each in (eager, compiled):
            torch.manual_seed(number)
            output = each(batch.clone())
            if backward:
                output.sum().backward()
            found.append((output, each.state_dict(), [p.grad for p in each.parameters()], torch.get_rng_state()))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


SHAPES = [rows(n) for n in (2, 3, 3, 5, 2)]


@pytest.mark.parametrize("backend", [Refuses(n) for n in (1, 2, 3, 4)], ids=lambda b: f"graph{b.number}")
def test_a_graph_that_does_not_compile(attempts, backend):
    """The second graph of a call too, when the first has written and drawn already; and for the second shape."""
    compiled = maybe_compile(model := Net(), on(backend))
    run_beside_eager(model, compiled, SHAPES)
    assert attempts("result")[-1] == "fallback_eager"
    assert attempts("result").count("fallback_eager") == 1
    assert attempts()[-1]["phase"] == "call"
    assert "planted: does not compile" in attempts("reason")[-1]
    assert "in __call__" in attempts()[-1]["exception"]["stack"]
    assert backend.count == backend.number, "after the failure nothing is compiled any more"


def test_it_runs_eagerly_for_good(attempts):
    compiled = maybe_compile(Net(), on(Refuses(1)))
    compiled(rows(2))
    with observe() as seen:
        compiled(rows(2))
        compiled(rows(7))
    assert not seen.compiles
    assert not seen.graphs


def test_fullgraph_and_a_graph_break(attempts):
    compiled = maybe_compile(model := Net(), on("eager", fullgraph=True))
    run_beside_eager(model, compiled, SHAPES)
    assert attempts("result") == ["deferred", "fallback_eager"]
    assert "graph_break" in attempts("reason")[-1]


def test_fullgraph_in_which_nothing_is_compiled(attempts):
    """torch 2.13 raises here when all has run."""
    compiled = maybe_compile(nn.Identity(), on("eager", fullgraph=True))
    assert compiled(3) == 3
    assert attempts("result") == ["deferred", "nothing_compiled"]


@pytest.mark.parametrize("breaks", [True, False])
def test_the_first_run_of_a_compiled_graph_raises(attempts, breaks):
    """What it has written and drawn is put back."""
    compiled = maybe_compile(model := Net(breaks), on(RaisesWhenRun(1)))
    run_beside_eager(model, compiled, SHAPES)
    assert attempts("result") == ["deferred", "fallback_eager"]


def test_the_first_run_for_another_shape_raises(attempts):
    good, bad = RaisesWhenRun(0), RaisesWhenRun(1)

    def backend(graph, inputs):
        return (bad if attempts("result")[-1] == "compiled" else good)(graph, inputs)

    compiled = maybe_compile(model := Net(breaks=False), on(backend))
    run_beside_eager(model, compiled, SHAPES)
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]


def test_a_later_run_of_a_graph_without_effects_raises(attempts):
    compiled = maybe_compile(model := Pure(), on(RaisesWhenRun(3)))
    run_beside_eager(model, compiled, [rows(2)] * 5)
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_later_run_with_batch_norm_and_random_numbers_is_rewound(attempts, run, dynamic):
    """Its statistics are small, so they are copied before each run."""
    compiled = maybe_compile(model := Net(breaks=False), on(RaisesWhenRun(run), dynamic=dynamic))
    run_beside_eager(model, compiled, [rows(3)] * 5, backward=True)
    assert attempts("result")[-1] == "fallback_eager"


class Grows(nn.Module):
    """Writes to an input whose size is not the same in every call."""

    def forward(self, x):
        x.add_(1)
        return x * 2


@pytest.mark.parametrize("run", [2, 3, 4])
def test_what_is_written_may_have_another_size_in_each_call(attempts, run):
    compiled = maybe_compile(Grows(), on(RaisesWhenRun(run), dynamic=True))
    for count in (2, 3, 4, 5, 6):
        given, expected = rows(count), rows(count) + 1
        assert compiled(given).equal(expected * 2)
        assert given.equal(expected), "written once"
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]


class Caches(nn.Module):
    """Writes to a cache of more than 4 MiB."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2**20 + 1))

    def forward(self, x):
        self.cache.add_(1)
        return x + self.cache[0]


def test_a_later_run_that_may_have_written_much_is_not_guessed(attempts):
    compiled = maybe_compile(Caches(), on(RaisesWhenRun(2)))
    compiled(rows(2))
    with pytest.raises(CannotFallBack, match=r"Caches, compiled, failed .*planted: raises when run.*, and to go on "
                       r"eagerly could give other results .* it writes to 4\.0 MiB of its inputs, of which no "):
        compiled(rows(2))
    assert attempts("result") == ["deferred", "compiled", "cannot_fall_back"]
    before = compiled._orig_mod.cache[0].item()
    assert compiled(rows(2)).equal(rows(2) + before + 1), "the next step runs eagerly"
    assert len(attempts()) == 3


def test_a_graph_whose_writes_nobody_can_tell_is_not_guessed(attempts, monkeypatch):
    """As with an operator that has no schema."""
    monkeypatch.setattr("pytest_torchcompile.layer.graphs.effects_of", lambda graph, args: None)
    compiled = maybe_compile(Pure(), on(RaisesWhenRun(2)))
    compiled(rows(2))
    with pytest.raises(CannotFallBack, match="it writes to what cannot be told, and part of that may have happened"):
        compiled(rows(2))


@pytest.mark.parametrize(("make", "effects"), [
    (lambda: nn.BatchNorm1d(4), {"written"}), (lambda: nn.Dropout(), {"draws"}), (lambda: nn.RReLU(), {"draws"}),
    (lambda: nn.BatchNorm1d(4).eval(), set()), (lambda: nn.Dropout().eval(), set()), (lambda: nn.LayerNorm(4), set()),
    (lambda: nn.MultiheadAttention(4, 2, dropout=0.5), {"draws"}), (lambda: nn.MultiheadAttention(4, 2), set()),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_effects_are_known_by_the_operators(attempts, monkeypatch, make, effects, dynamic):
    inner, found = make(), []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            several = isinstance(self.inner, nn.MultiheadAttention)
            return self.inner(x, x, x)[0] if several else self.inner(x)

    def noted(graph, args):
        found.append(effects_of(graph, args))
        return found[-1]

    monkeypatch.setattr("pytest_torchcompile.layer.graphs.effects_of", noted)
    model = Model()
    run_beside_eager(model, maybe_compile(model, on(RaisesWhenRun(2), dynamic=dynamic)), [rows(3)] * 3)
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]
    assert found[0] is not None
    assert {"written"} & effects == ({"written"} if found[0].mutated else set())
    assert found[0].draws is ("draws" in effects)


def boxed(graph, inputs):
    return make_boxed_func(graph.forward)


def does_not_compile(graph, inputs):
    raise RuntimeError("planted: the backward pass does not compile")


def raises_in_backward(graph, inputs):
    def run(args):
        args.clear()  # as Inductor does, to free memory early
        raise RuntimeError("planted: the backward pass raises")

    run._boxed_call = True
    return run


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backward", [does_not_compile, raises_in_backward])
@pytest.mark.parametrize("make", [Net, Pure])
def test_a_backward_pass_that_fails(attempts, dynamic, backward, make):
    """A backward pass compiles when it is first needed; a try around the forward pass never sees that."""
    model = make()
    compiled = maybe_compile(model, on(aot_autograd(fw_compiler=boxed, bw_compiler=backward), dynamic=dynamic))
    run_beside_eager(model, compiled, SHAPES, backward=True)
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]
    assert attempts("phase")[-1] == "backward"
    assert "planted: the backward pass" in attempts("reason")[-1]


def test_a_backward_pass_that_fails_in_a_later_step(attempts):
    """Compiled code has taken what the forward pass saved, and freed it."""
    runs = []

    def second_raises(graph, inputs):
        def run(args):
            runs.append(1)
            given, result = list(args), None
            args.clear()
            if len(runs) == 1:
                result = graph(*given)
            return result if len(runs) == 1 else raises_in_backward(graph, inputs)(given)

        run._boxed_call = True
        return run

    model = Pure()
    compiled = maybe_compile(model, on(aot_autograd(fw_compiler=boxed, bw_compiler=second_raises)))
    run_beside_eager(model, compiled, [rows(2)], backward=True)
    with pytest.raises(CannotFallBack, match=r"its compiled backward pass raised while it ran\. The gradients of this "
                       r"step are incomplete: drop them"):  # fmt: skip
        compiled(rows(2)).sum().backward()
    assert attempts("result")[-1] == "cannot_fall_back"
    model.zero_grad()
    run_beside_eager(model, compiled, [rows(2)], backward=True)  # the same step again, eagerly


@pytest.mark.parametrize("backend", [
    does_not_compile, RaisesWhenRun(1), aot_autograd(fw_compiler=boxed, bw_compiler=does_not_compile)
])  # fmt: skip
def test_fail_policy_raise(attempts, backend):
    compiled = maybe_compile(Pure(), on(backend, fail_policy="raise"))
    for _ in range(2):
        with pytest.raises(CompileFailed, match=r"Pure does not run compiled: .*planted") as caught:
            compiled(rows(2)).sum().backward()
        assert "planted" in str(caught.value.__cause__)
    assert attempts("result")[-1] == "raised"


class Users(nn.Module):
    """Raises in ways of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, index):
        self.seen.add_(1)
        if x.shape[0] == 3:
            raise ValueError("mine")
        if x.shape[0] == 4:
            return x @ torch.ones(7, 7)
        return self.layer(x) + self.table(index)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("policy", ["fallback_eager", "raise"])
def test_exceptions_of_the_user_come_through_unchanged(attempts, backend, fullgraph, policy):
    """Raised by hand, found while tracing, found while compiled code runs: nothing failed, and nothing falls back."""
    model = Users()
    compiled, eager = maybe_compile(model, on(backend, fullgraph=fullgraph, fail_policy=policy)), copy.deepcopy(model)
    for count, index in ((2, 1), (3, 1), (4, 1), (2, 2), (2, 9)):
        found = []
        for each in (eager, compiled):
            try:
                found.append(each(rows(count), torch.tensor(index)).tolist())
            except Exception as error:
                found.append((type(error), str(error), error.__cause__, error.__context__))
        assert found[0] == found[1]
        if index != 9:  # compiled code that raises while it runs may not have written yet what eager has
            torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=0, atol=0)
    assert attempts("result") == ["deferred", "compiled"]


def test_what_the_program_asks_torch_to_raise_is_raised(attempts):
    compiled = maybe_compile(Pure(), on("eager", dynamic=False))
    compiled(rows(2))
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(torch._dynamo.exc.RecompileError):
        compiled(rows(3))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        compiled(rows(3))
    assert attempts("result") == ["deferred", "compiled"]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_recompile_limit_is_reported(attempts, fullgraph):
    compiled = maybe_compile(model := Pure(), on("eager", dynamic=False, fullgraph=fullgraph))
    with torch._dynamo.config.patch(recompile_limit=2):
        run_beside_eager(model, compiled, [rows(n) for n in (2, 3, 4, 5, 2, 6)])
    if fullgraph:
        assert attempts("result") == ["deferred", "compiled", "fallback_eager"]
        assert "FailOnRecompileLimitHit" in attempts("reason")[-1]
        return
    assert attempts("result") == ["deferred", "compiled", "recompile_limit"]
    assert attempts("reason")[-1].startswith("forward (")
    assert "hit the recompile limit of 2" in attempts("reason")[-1]
    with observe() as seen:
        compiled(rows(3))
    assert sum(g.runs for g in seen.graphs) == 1, "what is compiled stays in use"


def test_nothing_of_the_process_is_changed(attempts):
    before = torch._dynamo.config.get_config_copy(), torch._functorch.config.get_config_copy()
    seen = []

    def backend(graph, inputs):
        seen.append(torch._dynamo.config.suppress_errors)
        raise RuntimeError("planted")

    maybe_compile(Pure(), on(backend))(rows(2))
    assert seen == [False]
    assert (torch._dynamo.config.get_config_copy(), torch._functorch.config.get_config_copy()) == before


@pytest.mark.parametrize("number", [1, 2])
def test_a_programs_own_suppress_errors_hides_nothing(attempts, number):
    compiled = maybe_compile(model := Net(breaks=False), on(Refuses(number), dynamic=False))
    with torch._dynamo.config.patch(suppress_errors=True):
        run_beside_eager(model, compiled, SHAPES)
    assert attempts("result") == ["deferred", *["compiled"] * (number - 1), "fallback_eager"]


def test_another_compiled_model_of_the_class_is_not_touched(attempts):
    good, bad = maybe_compile(Pure(), on("eager")), maybe_compile(Pure(), on(Refuses(1)))
    good(rows(2))
    bad(rows(2))
    with observe() as seen, torch.compiler.set_stance("fail_on_recompile"):
        good(rows(2))
    assert sum(g.runs for g in seen.graphs) == 1
    assert attempts("result") == ["deferred", "deferred", "compiled", "fallback_eager"]


def test_models_with_one_config_share_compiled_code(attempts):
    """Or a dozen equal blocks, each wrapped, would run into the recompile limit."""
    blocks = [maybe_compile(Pure(), on("eager")) for _ in range(12)]
    with observe() as seen:
        for block in blocks:
            block(rows(2))
    assert len(seen.compiles) == 1
    assert not seen.eager_frames
    assert attempts("result").count("compiled") == 12


def test_a_graph_that_two_models_share_fails_for_each_of_them(attempts):
    backend = RaisesWhenRun(3)
    models = [Pure(), Pure()]
    first, second = (maybe_compile(model, on(backend)) for model in models)
    run_beside_eager(models[0], first, [rows(2)])
    run_beside_eager(models[1], second, [rows(2)])
    run_beside_eager(models[0], first, [rows(2)] * 2)
    assert attempts("result").count("fallback_eager") == 1
    run_beside_eager(models[1], second, [rows(2)] * 2)
    assert attempts("result").count("fallback_eager") == 2


def test_calls_of_several_threads_fall_back_once(attempts):
    compiled = maybe_compile(model := Pure(), on(Refuses(1)))
    found, expected = [], model(rows(2))
    threads = [threading.Thread(target=lambda: found.append(compiled(rows(2)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [expected] * 8, rtol=0, atol=0)
    assert attempts("result").count("fallback_eager") == 1


def test_a_stance_is_no_failure(attempts):
    compiled = maybe_compile(Pure(), on("eager"))
    with torch.compiler.set_stance("force_eager"):
        compiled(rows(2))
    assert attempts("result") == ["deferred"]
    compiled(rows(2))
    assert attempts("result") == ["deferred", "compiled"]


def test_an_interrupt_goes_through(attempts):
    compiled = maybe_compile(Pure(), on(RaisesWhenRun(1, KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        compiled(rows(2))
    assert attempts("result") == ["deferred"]


def test_records_have_their_level(attempts, caplog):
    maybe_compile(Pure(), on(Refuses(1)))(rows(2))
    levels = [r.levelno for r in caplog.records if r.name == "pytest_torchcompile"]
    assert levels == [logging.INFO, logging.WARNING]


def test_nobody_else_sees_how_effects_are_found_out(attempts):
    packed = []

    def pack(tensor):
        packed.append(type(tensor))
        return tensor

    compiled = maybe_compile(Pure(), on("eager"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(rows(2))
        first, packed[:] = list(packed), []
        compiled(rows(2))
    assert first == packed


class Inner(nn.Module):
    def forward(self, x):
        return x * 3 + 1


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x.sin())


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle = Middle()

    def forward(self, x):
        return self.middle(x.cos())


def test_what_others_have_compiled_has_no_part_in_a_fallback(attempts):
    """Below a function that has hit the recompile limit Dynamo runs whatever code there is, of any backend."""
    model, ran = Outer(), []

    def others(graph, inputs):
        def run(*given):
            ran.append(len(given))
            return graph(*given)

        return run

    torch.compile(model.middle.inner, backend=others, dynamic=False)(rows(1))
    middle = torch.compile(model.middle, backend=others, dynamic=False)
    for count in range(2, torch._dynamo.config.recompile_limit + 4):
        middle(rows(count))
    assert ran
    ran.clear()
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=Refuses(1)))
    assert torch.equal(compiled(rows(1)), model(rows(1)))
    assert attempts("result") == ["deferred", "fallback_eager"]
    assert not ran
