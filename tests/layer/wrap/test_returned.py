"""maybe_compile: what it returns, what it logs, and that nothing else has changed."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import pickle
import types

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

from pytest_torchcompile import CompileConfig, CompileFailed, maybe_compile

# torch 2.13 itself asks for it where a graph break's resume function is traced
pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
X = torch.linspace(-1, 1, 24).view(6, 4)


class Net(nn.Module):
    """A model with all that has state: parameters, a buffer, batch statistics, an attribute, dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.seen.add_(1)
        return self.down(torch.relu(self.norm(self.up(x))))

    def generate(self, x):
        return self(x) * 2


def refuses(graph, inputs):
    raise RuntimeError("planted: this backend compiles nothing")


def boxed(graph, inputs):
    return make_boxed_func(graph.forward)


def adds_one(graph, inputs):
    """A backend whose result is wrong."""
    return lambda *args: [out + 1 if isinstance(out, torch.Tensor) else out for out in graph(*args)]


def raises_when_run(graph, inputs):
    def run(*args):
        raise RuntimeError("planted: it raises when it runs")

    return run


def on(backend="aot_eager", **given):
    return CompileConfig(enabled=True, backend=backend, **given)


def everything(model):
    """All that an attempt must leave as it was."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [p.grad if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()],
        "training": [part.training for part in model.modules()],
        "attributes": {name: value for name, value in vars(model).items() if isinstance(value, int)},
        "random": torch.get_rng_state(),
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
    }


def assert_same(before, after):
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_disabled_is_the_same_object_untouched(attempts):
    model = Net()
    before = set(vars(model))
    assert maybe_compile(model, CompileConfig(backend=refuses, blocklist=["nothing"]), None, X) is model
    assert set(vars(model)) == before
    assert type(model) is Net
    assert attempts() == []


def test_disabled_leaves_one_record_for_who_asks(attempts, caplog):
    caplog.set_level(logging.DEBUG, "pytest_torchcompile")
    maybe_compile(Net(), CompileConfig(backend=refuses), None, X)
    (record,) = attempts()
    assert record == {
        "model": "Net", "enabled": False, "backend": "refuses", "mode": "default", "dynamic": None, "fullgraph": False,
        "result": "disabled", "phase": "build", "seconds": 0.0, "compile_seconds": 0.0, "healthcheck_seconds": 0.0,
        "reason": "", "exception": None,
    }  # fmt: skip
    assert caplog.records[-1].levelno == logging.DEBUG


@pytest.mark.parametrize("make", [
    lambda slow: aot_autograd(fw_compiler=slow), lambda slow: aot_autograd(fw_compiler=boxed, bw_compiler=slow),
])  # fmt: skip
def test_seconds_of_the_compiler_and_of_the_healthcheck_are_told_apart(attempts, monkeypatch, make):
    """A clock that only the compiler moves."""
    clock = [0.0]

    def slow(graph, inputs):
        clock[0] += 1000.0
        return boxed(graph, inputs)

    for each in ("wrap", "dynamo", "backward"):
        module = importlib.import_module(f"pytest_torchcompile.layer.{each}")
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    maybe_compile(Net(), on(make(slow)), sample_batch=X)
    (record,) = attempts()
    assert record["enabled"] is True
    assert record["seconds"] == record["compile_seconds"] == clock[0] > 0
    assert record["healthcheck_seconds"] == 0


def test_a_healthcheck_takes_longer_than_the_compiler(attempts):
    maybe_compile(Net(), on(), sample_batch=X)
    (record,) = attempts()
    assert record["compile_seconds"] > 0
    assert record["healthcheck_seconds"] > 0
    assert abs(record["seconds"] - record["compile_seconds"] - record["healthcheck_seconds"]) < 1e-5


def test_a_model_that_passes_is_returned_compiled(attempts):
    model = Net()
    model.up.weight.grad = torch.ones(8, 4)
    batch = X.clone()
    before = everything(model)
    compiled = maybe_compile(model, on(), sample_batch=batch)
    assert compiled is not model
    assert_same(everything(model), before)
    assert_same(batch, X)
    assert vars(batch) == {}, "a mark of torch's would change what is compiled for this very tensor"
    (record,) = attempts()
    assert record["result"] == "compiled"
    assert record["phase"] == "healthcheck"
    assert record["seconds"] > 0


def test_what_passed_is_compiled_already(attempts):
    compiled = maybe_compile(Net(), on(), sample_batch=X)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(X).sum().backward()


@pytest.mark.parametrize(("backend", "reason"), [
    (refuses, "planted: this backend compiles nothing"), (raises_when_run, "planted: it raises when it runs"),
    (adds_one, "times the rounding noise"),
])  # fmt: skip
def test_a_model_that_does_not_work_is_returned_itself(attempts, backend, reason):
    model = Net()
    before = everything(model)
    assert maybe_compile(model, on(backend), sample_batch=X) is model
    assert_same(everything(model), before)
    (record,) = attempts()
    assert record["result"] == "fallback_eager"
    assert reason in json.dumps(record)


def test_the_record_of_a_failure(attempts, caplog):
    maybe_compile(Net(), on(refuses, dynamic=True, fullgraph=True), sample_batch=X)
    (record,) = attempts()
    assert {key: record[key] for key in ("model", "backend", "mode", "dynamic", "fullgraph", "result", "phase")} == {
        "model": "Net", "backend": "refuses", "mode": "default", "dynamic": True, "fullgraph": True,
        "result": "fallback_eager", "phase": "healthcheck"}  # fmt: skip
    assert record["exception"]["type"] == "BackendCompilerFailed"
    assert "in refuses" in record["exception"]["stack"]
    assert json.loads(json.dumps(record)) == record
    (logged,) = [r for r in caplog.records if r.name == "pytest_torchcompile"]
    assert logged.levelno == logging.WARNING
    assert logged.exc_info[1].__class__.__name__ == "BackendCompilerFailed"
    assert logged.getMessage().startswith(
        "torch.compile of Net (backend refuses, mode default, dynamic True, fullgraph True): fallback_eager after ")


def test_any_logger_gets_the_record(attempts, caplog):
    caplog.set_level("INFO", "mine")
    adapter = logging.LoggerAdapter(logging.getLogger("mine"), {"job": 7})
    maybe_compile(Net(), on(refuses), adapter, X)
    (record,) = [r for r in caplog.records if r.name == "mine"]
    assert record.job == 7
    assert record.torchcompile["result"] == "fallback_eager"


@pytest.mark.parametrize("backend", [refuses, raises_when_run, adds_one])
def test_fail_policy_raise(attempts, backend):
    model = Net()
    before = everything(model)
    with pytest.raises(CompileFailed, match="Net is not used compiled: "):
        maybe_compile(model, on(backend, fail_policy="raise"), sample_batch=X)
    assert_same(everything(model), before)
    assert attempts("result") == ["raised"]


@pytest.mark.parametrize("given", [{}, {"fail_policy": "raise"}, {"fullgraph": True}])
@pytest.mark.parametrize("batch", [torch.ones(6, 5), torch.ones(0)])
def test_an_exception_of_the_model_is_the_users(attempts, given, batch):
    model = Net()
    with pytest.raises(RuntimeError) as eager:
        model(batch)
    before = everything(model)
    with pytest.raises(RuntimeError) as caught:
        maybe_compile(model, on(**given), sample_batch=batch)
    assert (type(caught.value), str(caught.value)) == (type(eager.value), str(eager.value))
    assert_same(everything(model), before)
    assert attempts("result") == ["user_error"]


class TakesDict(nn.Module):
    """Its one argument is a dict, as a data loader's batches are."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, batch):
        return self.inner(batch["x"])


@pytest.mark.parametrize("given", [{}, {"min_speedup": 0.0001}])
def test_a_dict_may_be_the_one_argument(attempts, given):
    """The model takes one argument, and no key by its name; so the dict is no list of keywords."""
    model = TakesDict()
    compiled = maybe_compile(model, on(**given), sample_batch={"x": X, "labels": X})
    assert attempts("result") == ["compiled"]
    assert "not measured" not in attempts("reason")[0]
    torch.testing.assert_close(compiled({"x": X}), model({"x": X}))


def test_a_dict_of_keywords_stays_one(attempts):
    """The clean twin: a key that the model knows by name."""
    maybe_compile(Net(), on(), sample_batch={"x": X})
    assert attempts("result") == ["compiled"]


def test_keywords_that_do_not_fit_are_told(attempts):
    """The exception is the model's own; the record says what a dict means, and what to write for the other thing."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        maybe_compile(Net(), on(), sample_batch={"x": X, "labels": X})
    assert attempts("result") == ["user_error"]
    assert attempts("reason")[0].endswith(
        "unexpected keyword argument 'labels'; the batch is a dict with x, labels, and a dict is keyword arguments; "
        "for a model that takes the dict itself make it a tuple of one, `(batch,)`")


def test_what_torch_refuses_is_a_failure_too(attempts):
    model = Net()
    assert maybe_compile(model, on("inductor", options={"no_such_option": 1}), sample_batch=X) is model
    (record,) = attempts()
    assert record["phase"] == "build"
    assert "no_such_option" in record["reason"]
    with pytest.raises(CompileFailed, match="no_such_option"):
        maybe_compile(model, on("inductor", options={"no_such_option": 1}, fail_policy="raise"))


def test_no_healthcheck_no_sample_batch(attempts):
    assert maybe_compile(Net(), on(refuses, healthcheck=False), sample_batch=X) is not None
    maybe_compile(Net(), on(refuses))
    assert attempts("result") == ["deferred", "deferred"]


def test_nothing_compiled_is_said(attempts):
    model = nn.Identity()
    compiled = maybe_compile(model, on())
    assert compiled(X) is X
    assert maybe_compile(model, on(), sample_batch=X) is model
    assert attempts("result") == ["deferred", "nothing_compiled", "fallback_eager"]


def test_switched_off(attempts, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = Net()
    assert maybe_compile(model, on(), sample_batch=X) is model
    (record,) = attempts()
    assert record["result"] == "nothing_compiled"
    assert "TORCHDYNAMO_DISABLE" in record["reason"]


def test_a_failed_attempt_leaves_dynamo_as_it_was(attempts):
    """Compiled code, and the memory of sizes that decides what is compiled dynamically."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    other, sizes = torch.compile(Net(), backend="eager"), []
    other(X)
    entries = [e.compile_id for e in _debug_get_cache_entry_list(Net.forward)]
    assert maybe_compile(Net(), on(adds_one), sample_batch=X[:3]) is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        other(X)
    left = _debug_get_cache_entry_list(Net.forward)
    assert [e.compile_id for e in left if "Deleted" not in type(e.guard_manager).__name__] == entries

    def backend(graph, inputs):
        sizes.append(any(isinstance(i, torch.SymInt) for i in inputs))
        return graph.forward

    torch.compile(Net(), backend=backend)(X)
    assert sizes == [False], "the sizes of the failed attempt do not count"


@pytest.mark.parametrize("given", [{}, {"allowlist": ["up", "BatchNorm1d"]}])
def test_the_returned_module_is_the_model_for_all_who_use_it(attempts, given):
    model = Net()
    compiled = maybe_compile(model, on(**given), sample_batch=X)
    assert isinstance(compiled, Net)
    assert type(compiled).__name__ == "Net"
    assert repr(compiled) == repr(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [*map(id, compiled.parameters())] == [*map(id, model.parameters())]
    assert compiled._orig_mod is model
    compiled.eval()
    assert not model.training
    assert not model.norm.training
    compiled.calls = 5
    compiled.register_buffer("extra", torch.ones(1))
    assert model.calls == 5
    assert "extra" in model.state_dict()
    assert compiled.double()(X.double()).dtype == torch.float64
    assert model.up.weight.dtype == torch.float64


def test_methods_that_call_self_run_compiled(attempts):
    from pytest_torchcompile import observe

    model = Net()
    compiled = maybe_compile(model, on(), sample_batch=X)
    with observe() as seen:
        compiled.generate(X)
        assert sum(graph.runs for graph in seen.graphs) == 1
        model.generate(X)
        assert sum(graph.runs for graph in seen.graphs) == 1, "the model itself stays eager"


def test_hooks_are_shared_and_called_once(attempts):
    model, called = Net(), []
    compiled = maybe_compile(model, on())
    with compiled.register_forward_hook(lambda *args: called.append("own")), \
            nn.modules.module.register_module_forward_hook(
                lambda module, *args: called.append("all") if isinstance(module, Net) else None):
        compiled(X)
    assert called == ["all", "own"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("given", [{}, {"allowlist": ["up"]}, {"blocklist": ["norm"]}])
def test_copies_and_pickles_are_compiled_modules_of_their_own(attempts, duplicate, given):
    model = Net()
    compiled = maybe_compile(model, on(**given))
    twin = duplicate(compiled)
    assert isinstance(twin, Net)
    assert twin._orig_mod is not model
    assert_same(twin(X), model(X))
    assert twin.up.weight is not model.up.weight
    assert "compiled" in attempts("result")
    plain = duplicate(model)
    assert type(plain) is Net
    assert [type(part) for part in plain.modules()] == [type(part) for part in Net().modules()]
    assert plain.up._compiled_call_impl is None


def test_a_copy_of_what_fell_back_is_plain(attempts):
    compiled = maybe_compile(Net(), on(refuses))
    compiled(X)
    assert type(copy.deepcopy(compiled)) is Net
    assert type(pickle.loads(pickle.dumps(compiled))) is Net


def test_a_shallow_copy_shares_parts_and_not_attributes(attempts):
    compiled = maybe_compile(Net(), on(allowlist=["up"], blocklist=["norm"]))
    twin = copy.copy(compiled)
    twin.calls = 9
    assert compiled.calls == 0
    assert twin.up is compiled.up
    parts = compiled.up, compiled.norm
    del compiled, twin
    assert parts[0]._compiled_call_impl is None
    assert type(parts[1]) is nn.BatchNorm1d


def test_a_registry_of_classes_does_not_hear_of_it(attempts):
    known = []

    class Base(nn.Module):
        def __init_subclass__(cls, **kwargs):
            known.append(cls)

    class Model(Base):
        def forward(self, x):
            return x + 1

    maybe_compile(Model(), on())(X)
    assert known == [Model]


def test_functions(attempts):
    def double(x):
        return x * 2

    compiled = maybe_compile(double, on(), sample_batch=X)
    assert_same(compiled(X), X * 2)
    assert compiled.__name__ == "double"
    assert maybe_compile(double, on(refuses), sample_batch=X) is double
    later = maybe_compile(double, on(refuses))
    assert_same(later(X), X * 2)
    assert attempts("result") == ["compiled", "fallback_eager", "deferred", "fallback_eager"]
    with pytest.raises(ValueError, match="allowlist and blocklist choose parts of a module, and double is a function"):
        maybe_compile(double, on(allowlist=["a"]))


def test_inside_of_another_compiled_function_it_is_part_of_that(attempts):
    compiled = maybe_compile(Net(), on())
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    around = torch.compile(lambda x: compiled(x).sin(), backend=backend, fullgraph=True)
    assert_same(around(X), copy.deepcopy(compiled._orig_mod)(X).sin())
    assert len(graphs) == 1
    assert attempts("result") == ["deferred"]


@pytest.mark.parametrize(("model", "text"), [
    (lambda: torch.compile(Net()), "OptimizedModule is compiled already; give maybe_compile the original"),
    (lambda: maybe_compile(Net(), on()), "Net is compiled already"),
    (lambda: torch.compile(lambda x: x), "function is compiled already"),
    (lambda: 3, "an object of type int cannot be compiled; expected a module or a function"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused(attempts, model, text):
    with pytest.raises(ValueError, match=text):
        maybe_compile(model(), on())


def test_a_backend_that_cannot_be_looked_up_is_refused(attempts):
    with pytest.raises(ValueError, match="cannot be looked up"):
        maybe_compile(Net(), on("no_such_module:backend"))


def test_lazy_parameters(attempts):
    model = nn.Sequential(nn.LazyLinear(3))
    assert maybe_compile(model, on(), sample_batch=X) is model
    assert "not initialised yet" in attempts("reason")[0]


@pytest.mark.parametrize(("cfg", "logger", "text"), [
    ({"enabled": True}, None, "cfg is of type dict; expected a CompileConfig; CompileConfig.from_dict makes one"),
    (True, None, "cfg is of type bool; expected a CompileConfig$"),
    (CompileConfig(), X, r"logger is of type Tensor; expected a logging.Logger or None \(the sample batch is"),
])
def test_arguments_in_the_wrong_places_are_refused(cfg, logger, text):
    """Also where compiling is switched off: the mistake is the same."""
    with pytest.raises(TypeError, match=text):
        maybe_compile(Net(), cfg, logger)


class Given:
    """What a model gives, as diffusers' models do: pytree knows the class, and no names of what is in it."""

    def __init__(self, sample):
        self.sample = sample


pytree.register_pytree_node(Given, lambda given: ([given.sample], None), lambda values, context: Given(*values))


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Given(self.layer(x))


def test_an_output_of_a_class_that_pytree_knows_without_keys(attempts):
    """It was an error, and the user's: "Did not find a flatten_with_keys_fn"."""
    model = Gives()
    compiled = maybe_compile(model, on(), sample_batch=X)
    assert_same(compiled(X).sample, model(X).sample)
    assert attempts("result") == ["compiled"]


@pytest.mark.parametrize("policy", ["fallback_eager", "raise"])
def test_an_error_of_the_healthcheck_itself_is_no_error_of_the_users(attempts, monkeypatch, policy):
    def breaks(self, *given):
        raise KeyError("planted: a fault of ours")

    monkeypatch.setattr("pytest_torchcompile.layer.smoketest.CompileSmoketest.run", breaks)
    model = Net()
    before = everything(model)
    if policy == "raise":
        with pytest.raises(CompileFailed, match="Net is not used compiled: the healthcheck itself failed: KeyError"):
            maybe_compile(model, on(fail_policy=policy), sample_batch=X)
    else:
        assert maybe_compile(model, on(), sample_batch=X) is model
    assert_same(everything(model), before)
    assert attempts("result") == ["fallback_eager" if policy == "fallback_eager" else "raised"]
    assert attempts("reason")[0].startswith("the healthcheck itself failed: KeyError: 'planted: a fault of ours'")
