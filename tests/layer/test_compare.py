"""compare(): what it calls wrong, what it lets pass, and that it leaves everything as it was."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pytest_torchcompile import CompileConfig, assert_equivalent, compare
from pytest_torchcompile.errors import UsageError

pytestmark = pytest.mark.needs_torch


class Net(nn.Module):
    """Two layers, batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x):
        return self.down(torch.dropout(torch.relu(self.norm(self.up(x))), 0.2, self.training))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def found(backend, model=None, calls=None, **options):
    """The kinds of problems that are found, each with its places."""
    config = options.pop("config", None) or CompileConfig(backend=backend)
    options.setdefault("locate", False)
    result = compare(model or Net(), calls or [torch.randn(4, 6)], config, **options)
    print(result)  # shown where a test fails
    kinds = {}
    for problem in result.problems:
        kinds.setdefault(problem.kind, []).append(problem.where)
    return kinds


def honest(graph, inputs):
    return graph.forward


def changed(change):
    """A backend that runs the graph and hands its outputs on through ``change``."""

    def backend(graph, inputs):
        return lambda *args: tuple(change(o) if isinstance(o, torch.Tensor) else o for o in graph(*args))

    return backend


scaled = changed(lambda out: out * 1.001)
scaled.__name__ = "scaled"


def test_a_healthy_compiler():
    """Nothing wrong, everything exact, and the text says what was compared."""
    result = compare(Net(), [torch.randn(4, 6), torch.randn(7, 6)], CompileConfig(backend="aot_eager"), steps=2)
    assert result.ok
    assert result.noise == 0
    assert str(result).startswith("equivalent: ")
    assert_equivalent(Net(), [torch.randn(4, 6)], CompileConfig(backend=honest))


def test_rounding_is_no_problem():
    """Outputs that went through float64 differ in rounding; that is measured, and passes."""
    exact = changed(lambda out: (out.double() * 3).float() / 3)
    result = compare(Net(), [torch.randn(4, 6)], CompileConfig(backend=exact))
    assert result.ok, str(result)
    assert 0 < result.noise < 4


def test_a_problem_in_words():
    """What differs, where, by how much, in which calls, and from which stage on."""
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(Net(), [torch.randn(4, 6), torch.randn(7, 6)], CompileConfig(backend=scaled))
    text = str(caught.value)
    assert "value: output: error is " in text
    assert " times the rounding noise" in text
    assert "eager " in text
    assert "compiled " in text
    assert "in call 1, and in 5 more call(s)" in text
    assert "gradient: gradient of up.weight: " in text
    assert "stages: backend eager agrees, aot_eager agrees; scaled is the first that does not" in text


def kept_by_shape(graph, inputs):
    kept = {}

    def run(*args):
        key = tuple(a.shape for a in args if isinstance(a, torch.Tensor))
        return tuple(out.clone() for out in kept.setdefault(key, graph(*args)))

    return run


def frozen(graph, inputs):
    first = {}

    def run(*args):
        first.update({i: a.detach().clone() for i, a in enumerate(args)
                      if isinstance(a, nn.Parameter) and i not in first})
        return graph(*(first.get(i, a) for i, a in enumerate(args)))

    return run


def one_buffer(graph, inputs):
    buffers = {}

    def run(*args):
        outs = graph(*args)
        return tuple(buffers.setdefault((i, out.shape), torch.empty_like(out)).copy_(out) for i, out in enumerate(outs))

    return run


def sets_something(graph, inputs):
    torch.set_float32_matmul_precision("medium")
    return graph.forward


@pytest.mark.parametrize(("backend", "kind"), [
    (kept_by_shape, "value"), (frozen, "value"), (one_buffer, "alias"), (sets_something, "mutation"),
    (changed(torch.zeros_like), "vacuous"),
])  # fmt: skip
def test_what_a_repeated_call_would_hide(backend, kind):
    """One batch, no gradients: results and parameters of the first call, memory used again, settings, constants."""
    assert kind in found(backend, Net().eval(), train=False)


def test_code_that_never_ran():
    """Silently eager code is told, whatever it computes: nothing compiled, or an error in compiling hidden."""
    def fails(graph, inputs):
        raise RuntimeError("not today")

    net = Net()
    net.forward = torch.compiler.disable(net.forward)
    assert found("eager", net) == {"vacuous": ["compiled code"]}
    with torch._dynamo.config.patch(suppress_errors=True):
        assert set(found(fails)) == {"vacuous"}
    with torch.compiler.set_stance("force_eager"):
        assert found("eager") == {}  # it runs as in a fresh process


def test_the_compiled_model_raises():
    """Alone, it is an error of the compiler, with its text and the stage."""
    def fails(graph, inputs):
        raise RuntimeError("not today")

    result = compare(Net(), [torch.randn(4, 6)], CompileConfig(backend=fails))
    (problem,) = result.problems
    assert (problem.kind, problem.where) == ("error", "forward")
    assert "eager did not: backend='fails' raised: RuntimeError: not today" in problem.message
    assert result.stages.endswith("fails is the first that does not: look at the backend itself")


def refuses(x):
    if x.shape[0] == 7:
        raise ValueError("seven")
    return x.sin()


def test_eager_raises():
    """Then compiled has to raise too; a model that always raises proves nothing."""
    assert found("eager", refuses, [torch.randn(4, 6), torch.randn(7, 6)]) == {}
    assert found("eager", refuses, [torch.randn(7, 6)]) == {"vacuous": ["eager"]}


def test_what_eager_raises_in_every_call_is_told():
    """The user's mistake in one line, and no count of values where there were none."""
    told = str(compare(refuses, [torch.randn(7, 6)], CompileConfig(backend="eager")))
    assert told.splitlines()[:2] == [
        "not equivalent",
        "vacuous: eager raises in every call, so nothing was compared; the first: ValueError in forward: seven",
    ]


def test_a_model_that_is_not_deterministic():
    """It is told so, and not blamed on the compiler."""
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(0)
            return x * len(calls)

    assert set(found("eager", Counting())) == {"nondeterministic"}


def test_zero_initialised_outputs():
    """A head that begins at zero can be compared: in the second pass it is not zero."""
    net = Net()
    nn.init.zeros_(net.down.weight)
    nn.init.zeros_(net.down.bias)
    assert found("aot_eager", net, train=False) == {}
    assert "value" in found(scaled, net, train=False)


def test_training_steps():
    """Each step and what it leaves is compared; a compiler that is right in each call may still train wrong."""
    def third_backward(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def backward(graph, inputs):
            runs = []

            def run(args):
                runs.append(0)
                outs = graph(*args)
                args.clear()
                return [o * 1.01 if isinstance(o, torch.Tensor) and len(runs) > 4 else o for o in outs]

            run._boxed_call = True
            return run

        def forward(graph, inputs):
            def run(args):
                return graph(*args)

            run._boxed_call = True
            return run

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)

    assert found(third_backward) == {}
    kinds = found(third_backward, steps=3)
    assert all(where.startswith(("step 2", "step 3")) for where in kinds["gradient"])
    # The weights say what the gradients have said.
    assert "mutation" not in kinds
    assert found("aot_eager", steps=3) == {}


GLOBAL = Net()


def by_global(x):
    return helper(x).sin()


def helper(x):
    return GLOBAL(x)


def test_functions():
    """Closures, globals, methods and partials: the modules that they reach are compared, and copied."""
    net = Net()
    for function, name in ((lambda x: net(x) * 2, "net"), (by_global, "GLOBAL"), (net.forward, "self"),
                           (functools.partial(lambda m, x: m(x), net), "argument 0")):
        assert found("eager", function) == {}
        assert f"gradient of {name}.up.weight" in found(scaled, function)["gradient"]
    assert all(p.grad is None for p in (*net.parameters(), *GLOBAL.parameters()))


def test_a_patched_forward():
    """A forward on the instance is copied with the module that it is bound to."""
    net = Net()
    original = net.forward
    net.forward = lambda x: original(x) * 2
    assert found("aot_eager", net, steps=2) == {}
    assert {"value", "gradient"} <= set(found(scaled, net))


def test_nothing_is_left_changed():
    """The model, its gradients and buffers, random state and torch's settings are as before, also after a failure."""
    net, x = Net(), torch.randn(4, 6)
    net(x).sum().backward()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    gradient, state = net.up.weight.grad.clone(), torch.get_rng_state()
    for backend in ("aot_eager", sets_something, kept_by_shape):
        found(backend, net, [x], steps=2)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(net.up.weight.grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch._inductor.config.fallback_random
    assert net.training


class NoCopies(Net):
    def __deepcopy__(self, memo):
        raise TypeError("not copied")


def test_a_model_that_cannot_be_copied():
    """It runs itself, is put back, and the text says what that costs."""
    net = NoCopies()
    net(torch.randn(4, 6)).sum().backward()
    mean, gradient = net.norm.running_mean.clone(), net.up.weight.grad
    result = compare(net, [torch.randn(4, 6)], CompileConfig(backend="aot_eager"))
    assert result.ok
    assert "note: eager and compiled ran on one object, which can't be copied (TypeError: not copied)" in str(result)
    assert "value" in found(scaled, net)
    assert torch.equal(net.norm.running_mean, mean)
    assert net.up.weight.grad is gradient


def test_parts_of_a_model():
    """allowlist compiles parts; wrap says what is called in the model's place."""
    assert found(None, config=CompileConfig(backend="aot_eager", allowlist=("up", "down"))) == {}
    assert "value" in found(None, config=CompileConfig(backend=scaled, allowlist=("down",)))

    def twice(model, settings):
        call = model if settings is None else torch.compile(model, **settings)
        return lambda x: call(x) * 2

    assert found("aot_eager", wrap=twice) == {}
    assert "value" in found("aot_eager", wrap=lambda m, s: m if s is None else lambda x: torch.compile(m, **s)(x) * 2)


@pytest.mark.parametrize(("change", "text"), [
    ({"model": 3}, "model is 3, expected a torch.nn.Module or a function"),
    ({"model": Net}, "expected a torch.nn.Module or a function"),
    ({"model": nn.LazyLinear(3)}, r"model has no shape yet for 'weight' \(a lazy module\): call it once"),
    ({"model": torch.compile(Net())}, r"model is compiled already \(OptimizedModule\)"),
    ({"calls": torch.ones(2, 6)}, r"calls is Tensor, expected a list with a batch for each call, like \[batch\]"),
    ({"calls": (torch.ones(2, 6),)}, "calls is tuple, expected a list"),
    ({"calls": []}, "calls is empty: nothing would be compared"),
    ({"config": {"backend": "eager"}}, r"expected a CompileConfig, like CompileConfig\(backend='inductor'\)"),
    ({"steps": 0}, "steps is 0, expected a whole number from 1 on"),
    ({"loss": lambda out, batch: out}, r"loss .*lambda.* returned a tensor of shape \(4, 3\)"),
])  # fmt: skip
def test_mistakes(change, text):
    """Each is told in one line."""
    given = {"model": Net(), "calls": [torch.ones(4, 6)], "config": CompileConfig(backend="eager"), **change}
    with pytest.raises(UsageError, match=text):
        compare(given.pop("model"), given.pop("calls"), given.pop("config"), **given)


def test_a_pattern_that_matches_nothing():
    """What the layer says of a config, compare says too."""
    with pytest.raises(ValueError, match="allowlist: 'nowhere' matches no module of Net"):
        compare(Net(), [torch.ones(4, 6)], CompileConfig(backend="eager", allowlist=("nowhere",)))


def test_parts_that_ran_eagerly_are_named():
    """A graph break is no difference, but what ran outside of the graphs was not judged."""
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    result = compare(broken, [torch.randn(4, 6)], CompileConfig(backend="eager"))
    assert result.ok
    assert any(note.startswith("graph break at ") and "test_compare.py" in note for note in result.notes)


def test_long_lists_are_cut():
    """Many problems are counted, not printed one by one."""
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(10)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    result = compare(Many(), [torch.randn(4, 6)], CompileConfig(backend=scaled), locate=False)
    assert len(result.problems) == 22
    assert str(result).count("times the rounding noise (limit") == 12
    assert "and 10 more: 10 gradient" in str(result)


def test_the_stance_before_is_in_force_afterwards():
    """The comparison itself compiles; a stance of the user's around it comes back with all that was set with it."""
    from torch._dynamo import eval_frame

    with torch.compiler.set_stance("eager_on_recompile", skip_guard_eval_unsafe=True):
        before = eval_frame._stance
        result = compare(nn.Linear(3, 2), [torch.ones(2, 3)], CompileConfig(backend="eager"), train=False)
        assert result.ok, str(result)
        assert eval_frame._stance == before
    assert eval_frame._stance.stance == "default"


@pytest.mark.parametrize("before", [None, "meta"])
def test_a_default_device_that_was_left_is_taken_off(before):
    """It is a mode on torch's stack: where there was none before there is none afterwards, not one for the CPU."""
    from torch.overrides import _get_current_function_mode_stack

    from pytest_torchcompile.state.torch_state import isolated

    torch.set_default_device(before)
    leaks = []
    try:
        with isolated(leaks):
            torch.set_default_device("cpu" if before else "meta")
        assert [mode.device.type for mode in _get_current_function_mode_stack()] == ([before] if before else [])
    finally:
        torch.set_default_device(None)
    assert leaks == ["default device: meta -> cpu" if before else "default device: cpu -> meta"]


class Drops(torch.nn.Linear):
    """Draws random numbers."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5)


def test_what_only_production_compiles_is_tried_outside_of_a_matrix(monkeypatch):
    """Under `fallback_random` all is right, and with Inductor's own numbers the compile raises; a clean twin passes."""
    from torch._inductor.fx_passes import joint_graph

    config, batches = CompileConfig(backend="inductor"), [torch.randn(4, 8)]
    clean = compare(Drops(8, 8), batches, config, train=False)
    assert clean.ok, str(clean)

    torchs_own = joint_graph.replace_random_passes

    def planted(graph):
        if torchs_own(graph):
            raise ValueError("planted: no code for random numbers")
        return 0

    monkeypatch.setattr(joint_graph, "replace_random_passes", planted)
    # Else the planted pass is never asked of what the clean run has compiled. Not by monkeypatch: the setting is only
    # another name of one of torch.compiler's, and putting it back so deletes it.
    with torch._inductor.config.patch(force_disable_caches=True):
        found = compare(Drops(8, 8), batches, config, train=False)
    assert not found.ok
    assert not found.wrong_numbers
    assert "with Inductor's own random numbers, as in production, the compiled run raised" in str(found)
    assert "planted: no code for random numbers" in str(found)
    assert compare(torch.nn.Linear(8, 8), batches, config, train=False).ok


class Narrow(nn.Module):
    """Returns 8-bit floats, of which torch has next to no arithmetic."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.linear = dtype, nn.Linear(6, 5)

    def forward(self, x):
        return self.linear(x).to(self.dtype)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_outputs_of_8_bits(dtype, train):
    calls = [torch.randn(4, 6)]
    assert found("aot_eager", Narrow(dtype), calls, train=train) == {}
    half_as_large_again = changed(lambda out: (out.float() * 1.5).to(out.dtype))
    assert "value" in found(half_as_large_again, Narrow(dtype), calls, train=train)


class Averaged(nn.Module):
    """Can't be copied, for it holds a lock, and each call moves a buffer. (B, 8) -> (B, 4)."""

    def __init__(self, wrong=1.0):
        super().__init__()
        self.layer, self.wrong, self.lock = nn.Linear(8, 4), wrong, threading.Lock()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        hidden = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(hidden.mean(0))
        found = torch.tanh(hidden - self.mean)
        return found * self.wrong if torch.compiler.is_compiling() else found


def test_a_model_that_can_not_be_copied_is_judged_from_its_first_state():
    """The state of the calls before was taken for its first one. So eager did not repeat itself: all was excused."""
    torch.manual_seed(0)
    assert compare(Averaged(), [torch.randn(20, 8)], CompileConfig(backend="aot_eager"), steps=2).ok
    found = compare(Averaged(wrong=1.01), [torch.randn(20, 8)], CompileConfig(backend="aot_eager"), locate=False)
    assert "output" in {problem.where for problem in found.problems}


class LateBackend:
    """Its results are wrong from the fourth run of the backward graph on: in the steps of training."""

    def __init__(self):
        self.runs = 0

    def __call__(self, module, inputs):
        def backward(graph, inputs):
            def run(*arguments):
                self.runs += 1
                factor = 1.5 if self.runs > 3 else 1.0
                return [each * factor if isinstance(each, torch.Tensor) else each for each in graph(*arguments)]
            return run
        return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)(module, inputs)


class Locked(nn.Module):
    """Can't be copied. (B, 8) -> (B, 4)."""

    def __init__(self):
        super().__init__()
        self.layer, self.lock = nn.Linear(8, 4), threading.Lock()

    def forward(self, x):
        return torch.tanh(self.layer(x))


def test_the_training_of_a_model_that_can_not_be_copied_starts_from_its_first_state():
    torch.manual_seed(0)
    found = compare(Locked(), [torch.randn(20, 8)], CompileConfig(backend=LateBackend()), steps=3, locate=False)
    assert "step 1: gradient of layer.weight" in {problem.where for problem in found.problems}


class NeverTrains(nn.Module):
    """Raises once its weight has moved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("first", torch.ones(4))

    def forward(self, x):
        torch._assert_async((self.weight == self.first).all())
        return x * self.weight


def test_a_model_that_does_not_train_eagerly_is_told():
    """Silence would say that steps were compared."""
    found = compare(NeverTrains(), [torch.randn(2, 4)], CompileConfig(backend="aot_eager"), steps=2)
    assert "note: no step of training was compared, as eager raises in them: RuntimeError in forward: " in str(found)
