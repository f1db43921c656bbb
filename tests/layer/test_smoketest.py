"""CompileSmoketest: True for what works end to end, False with the reason for what does not, and nothing is left."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import random

import numpy
import pytest
import torch
from functorch.compile import make_boxed_func, nop
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pytest_torchcompile import CompileConfig, CompileSmoketest, maybe_compile
from pytest_torchcompile.layer.preservation import DeepSnapshot


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return super().forward(self.norm(x))


class Dropped(Net):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class Structured(Net):
    def forward(self, x):
        y = super().forward(x)
        return {"out": Output(y, (x * 2, None)), "n": 3}


class Masked(Net):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(4) > 1, float("-inf"))


class Counting(Net):
    """Counts its calls in Python, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.detach())
        return super().forward(x) * self.calls


class Wavering(Net):
    """Another result in each call, without any random generator."""

    def __init__(self):
        super().__init__()
        self.source = random.Random(1)

    def forward(self, x):
        return super().forward(x) * self.drawn()

    @torch._dynamo.disable
    def drawn(self):
        return 1 + random.SystemRandom().random() / 10


class Disabled(Net):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, x):
        return self.table((x.abs() * 6).long().clamp(max=19))


class Regional(Net):
    def __init__(self):
        super().__init__()
        self.first = Net()
        self.first.compile(backend="aot_eager")
        self.inner = nn.Linear(4, 16)

    def forward(self, x):
        return super().forward(self.first(x))


def frozen(all_of_it=False):
    net = Net()
    (net if all_of_it else net.inner).requires_grad_(False)
    return net


pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]  # Dynamo asks for it, torch 2.13


def batch(dtype=torch.float32):
    return torch.randn(5, 8, dtype=dtype)


def outcome(model, sample=None, *rest, steps=2):
    """The result of a smoketest, of which True or False was returned."""
    test = CompileSmoketest(steps)
    returned = test.run(model, batch() if sample is None else sample, *rest)
    assert returned is test.last_result.ok
    assert test.last_result.seconds > 0
    return test.last_result


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(1)
    yield
    torch.compiler.reset()


def compiled(model, backend="aot_eager"):
    return torch.compile(model, backend=backend)


TRAINED = "2 step(s) of forward, loss, backward and step ran compiled and agree with eager"
FORWARD = "2 step(s) of forward ran compiled and agree with eager"


@pytest.mark.parametrize("model", [
    Net(), Normed(), Dropped(), Tied(), Structured(), Masked(), Counting(), frozen(), Sparse(), nn.Linear(8, 4),
], ids=lambda m: type(m).__name__)  # fmt: skip
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_what_trains_is_true(model, backend):
    """Batch norm, dropout, tied and frozen parameters, any output, -inf in outputs, a model that counts in Python."""
    result = outcome(compiled(copy.deepcopy(model), backend))
    assert (result.ok, result.reason) == (True, TRAINED), result
    assert result.graphs
    assert result.compiles
    assert not result.phase


@pytest.mark.parametrize("make", [
    lambda net: compiled(lambda x: net(x) * 2),
    lambda net: compiled(net.forward),
    lambda net: nn.Sequential(compiled(net)),
    lambda net: net.compile(backend="aot_eager") or net,
    lambda net: Regional(),
], ids=["closure", "method", "inside another", "in place", "regional"])  # fmt: skip
def test_however_it_was_compiled(make):
    """A function over a model, a method, a part of something larger: the eager twin keeps every wrapper in place."""
    net = Net()
    before = copy.deepcopy(net.state_dict())
    assert outcome(make(net)).reason == TRAINED
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_half_precision():
    """Rounding noise of bfloat16 is no difference."""
    assert outcome(compiled(Net(torch.bfloat16)), batch(torch.bfloat16)).reason == TRAINED


def test_what_serves_is_true():
    """In evaluation mode, without gradients to ask for, and for functions: forward passes in the caller's grad mode."""
    assert outcome(compiled(Net().eval())).reason == FORWARD
    assert outcome(compiled(frozen(all_of_it=True))).reason == FORWARD
    assert outcome(compiled(lambda x: x.sin() + 1)).reason == FORWARD
    with torch.no_grad():
        assert outcome(compiled(Net())).reason == FORWARD
    with torch.inference_mode():
        result = outcome(compiled(Net().eval()))
    assert (result.ok, result.reason) == (True, FORWARD)


def test_the_forward_pass_keeps_the_callers_grad_mode():
    """What the smoketest compiles for serving is what serving then uses: no recompile for the grad mode."""
    for grad in (True, False):
        torch.compiler.reset()
        serving = compiled(Net().eval())
        with torch.set_grad_enabled(grad):
            assert outcome(serving).compiles
            assert outcome(serving).compiles == 0


@pytest.mark.parametrize("loss", [
    lambda output, given: (output.square().mean(), {"accuracy": 1}),
    lambda output: output.square().mean(),
    lambda output, given: {"loss": output.square().mean() + given.sum()},
    nn.Flatten(0),
], ids=["tuple", "one argument", "dict", "module"])  # fmt: skip
def test_losses_of_any_convention(loss):
    """loss(output, batch) or loss(output), returning a number, or a tuple or a dict with it."""
    sample = batch()[:1]
    net = nn.Sequential(Net(), nn.Linear(4, 1))
    assert outcome(compiled(net), sample, None, loss).reason == TRAINED


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "LBFGS", "RMSprop"])
def test_the_real_optimiser(kind):
    """Any optimiser's step is taken, and undone."""
    net = Net()
    optimizer = getattr(torch.optim, kind)(net.parameters())
    sample = batch()
    before = State(net, optimizer, sample)
    assert outcome(compiled(net, "eager"), sample, optimizer).reason == TRAINED
    before.check()


def backend(forward=nop, backward=nop):
    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def raising(text):
    def compiler(graph, example):
        raise RuntimeError(text)

    return compiler


def factor(number, only=None):
    """Results off by a factor, from the n-th run on."""
    def compiler(graph, example):
        runs = iter(range(1_000_000))

        def run(*args):
            found = graph(*args)
            late = only is not None and next(runs) < only
            return [o * number if isinstance(o, torch.Tensor) and o.is_floating_point() and not late else o
                    for o in found]

        return make_boxed_func(run)

    return compiler


def exploding(graph, example):
    def run(*args):
        raise RuntimeError("no such kernel")

    return make_boxed_func(run)


BROKEN = {
    "does not compile": ("relu_compile_error_TESTING_ONLY", "forward", 1, "compiled it raises, eagerly it does not"),
    "raises when run": ("relu_runtime_error_TESTING_ONLY", "forward", 1, "compiled it raises, eagerly it does not"),
    "wrong result": ("relu_accuracy_error_TESTING_ONLY", "comparison", 1, "output: error is"),
    "wrong by a little": (backend(factor(1 + 1e-4)), "comparison", 1, "output: error is"),
    "not finite": (backend(factor(float("nan"))), "comparison", 1, "output: "),
    "backward does not compile": (backend(backward=raising("no backward")), "backward", 1, "no backward"),
    "backward raises": (backend(backward=exploding), "backward", 1, "no such kernel"),
    "wrong gradient": (backend(backward=factor(1.01)), "comparison", 1, "gradient of inner.weight: error is"),
    "gradient not finite": (backend(backward=factor(float("inf"))), "comparison", 1, "gradient of inner.weight: "),
    "wrong from the second step on": (backend(factor(2.0, only=1)), "comparison", 2, "output: error is"),
    "gradient wrong from the second step on": (backend(nop, factor(2.0, only=1)), "comparison", 2, "gradient of"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_is_false(fault):
    """Each says in which phase of which step, and never raises."""
    broken, phase, step, text = BROKEN[fault]
    result = outcome(compiled(Net(), broken), steps=2)
    assert not result.ok
    assert (result.phase, result.step) == (phase, step), result
    assert text in result.reason
    assert result.evidence
    assert result.user_error is None


def stale(graph, example):
    """Whatever it is given, the results of its first run."""
    kept = []

    def run(*args):
        if not kept:
            kept.append(graph(*args))
        return [each.clone() for each in kept[0]]

    return run


def static(graph, example):
    """Right results, in memory that the next run writes to."""
    memory = []

    def run(*args):
        found = graph(*args)
        if not memory:
            memory.extend(each.clone() for each in found)
        return [mine.copy_(each) for mine, each in zip(memory, found, strict=True)]

    return run


class Choosy(Net):
    """Takes only what it has always been given."""

    def __init__(self, sample):
        super().__init__()
        self.expected = sample.clone()

    def forward(self, x):
        return super().forward(self.checked(x))

    @torch._dynamo.disable
    def checked(self, x):
        if not torch.equal(x, self.expected):
            raise ValueError("unheard of")
        return x


@pytest.mark.parametrize(("model", "sample"), [
    (Net(), batch()), (nn.Embedding(9, 4), torch.randint(9, (3, 5))), (nn.Embedding(9, 4), torch.randint(9, (1, 5))),
    (nn.Embedding(9, 4), torch.arange(5)),
], ids=["floats", "ids", "one row of ids", "an id for each sample"])  # fmt: skip
def test_results_of_another_step(model, sample):
    """Serving, nothing but the batch changes: results that were kept, or that the next call overwrites, are wrong."""
    with torch.no_grad():
        result = outcome(compiled(model.eval(), stale), sample)
        assert (result.ok, result.phase, result.step) == (False, "comparison", 2)
        assert "output: " in result.reason
        result = outcome(compiled(model, static), sample)
        assert (result.ok, result.phase, result.step) == (False, "comparison", 2)
        assert result.reason == ("output: is overwritten by a later call (step 2), compiled only: who has kept it "
                                 "reads other values then")
        assert outcome(compiled(model), sample, steps=3).ok


def test_a_model_that_takes_no_other_values():
    """It is tried with its own then; so is one whose loss would be no number."""
    sample = batch()
    assert outcome(compiled(Choosy(sample), "eager"), sample, steps=3).ok
    only = lambda output, given: output.square().mean() / torch.equal(given, sample)  # noqa: E731
    assert outcome(compiled(Net()), sample, None, only, steps=3).ok


def test_an_unsupported_operation():
    """What Dynamo can't capture whole is refused with fullgraph, and told as the compiler's fault."""
    def breaking(x):
        torch._dynamo.graph_break()
        return x.sin()

    result = outcome(torch.compile(breaking, backend="eager", fullgraph=True))
    assert (result.ok, result.phase) == (False, "forward")
    assert "Unsupported" in result.reason
    result = outcome(torch.compile(breaking, backend="eager"))
    assert (result.ok, result.notes) == (True, ("1 graph break(s)",))


def silent_limit():
    net = torch.compile(Net(), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        net(batch()[:3])
        net(batch()[:4])
    return net


@pytest.mark.parametrize(("make", "text"), [
    (Net, "nothing was compiled: the forward pass ran no compiled graph"),
    (lambda: compiled(Disabled()), "nothing was compiled"),
    (lambda: torch.compile(lambda x: x, backend="eager"), "nothing was compiled"),
    (silent_limit, "nothing was compiled"),
])  # fmt: skip
def test_vacuous(make, text):
    """An eager model, a disabled one, one without operators: True would be a lie."""
    result = outcome(make())
    assert (result.ok, result.graphs) == (False, 0)
    assert text in result.reason


def test_compiled_code_elsewhere_does_not_count():
    """A compiled loss or another compiled model is none of this model's."""
    loss = torch.compile(lambda output: output.square().mean(), backend="eager")
    assert outcome(Net(), None, None, loss).reason.startswith("nothing was compiled")


class FallsBack(nn.Module):
    """What a careful wrapper does: after a failure, eager for good, and not a word."""

    def __init__(self, net, backend):
        super().__init__()
        self.net, self.compiled, self.broken = net, compiled(net, backend), []

    def forward(self, x):
        if self.broken:
            return self.net(x)
        try:
            return self.compiled(x)
        except Exception as error:
            self.broken.append(error)
            return self.net(x)


@pytest.mark.parametrize("fault", ["relu_compile_error_TESTING_ONLY", "relu_runtime_error_TESTING_ONLY"])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_falls_back_by_itself(fault, steps):
    """The results are right and nothing was raised, yet the model does not run compiled."""
    result = outcome(FallsBack(Net(), fault), steps=steps)
    assert not result.ok, result


def test_switched_off(monkeypatch):
    """Under a stance or hidden errors the compiled model runs eagerly, and nobody would know."""
    with torch.compiler.set_stance("force_eager"):
        assert outcome(compiled(Net())).reason == "a part silently ran eagerly: stance"
    with torch._dynamo.config.patch(suppress_errors=True):
        result = outcome(compiled(Net(), "relu_compile_error_TESTING_ONLY"))
    assert (result.ok, result.reason) == (False, "a part silently ran eagerly: suppressed")


def test_nothing_but_zeros_proves_nothing():
    """All outputs zero, as from a head initialised so, and no gradient to tell."""
    net = Net()
    nn.init.zeros_(net.outer.weight)
    nn.init.zeros_(net.outer.bias)
    zero = "every output and every gradient is zero or not finite"
    assert outcome(compiled(net.eval())).reason.startswith(zero)
    assert outcome(compiled(net.train()), None, None, lambda output: output.square().mean()).reason.startswith(zero)


@pytest.mark.parametrize("wrong", [None, backend(backward=factor(1.01)), backend(backward=factor(0.0))])
def test_a_head_that_begins_with_zeros(wrong):
    """Its gradient is none: right compilers pass, and wrong ones do not."""
    net = Net()
    nn.init.zeros_(net.outer.weight)
    nn.init.zeros_(net.outer.bias)
    assert outcome(compiled(net, wrong or "aot_eager")).ok is (wrong is None)


@pytest.mark.parametrize("function", [lambda x: x > 100, lambda x: x.long() // 100, lambda x: {"n": (x > 100).sum()}])
def test_whole_numbers_that_are_zero(function):
    """No is an answer."""
    def yes(graph, example):
        return lambda *args: [torch.ones_like(each) for each in graph(*args)]

    sample = batch().abs()
    assert outcome(compiled(function), sample).ok
    assert not outcome(compiled(function, yes), sample).ok


# what the user did


class Mine(Exception):
    pass


def test_the_users_own_error():
    """What eager raises too is told as such, with the very exception, in each phase."""
    def forward(x):
        raise Mine("forward")

    def loss(output):
        raise Mine("loss")

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise Mine("backward")

    class Stuck(torch.optim.SGD):
        def step(self, closure=None):
            raise Mine("step")

    net = Net()
    for phase, result in {
        "forward": outcome(compiled(forward, "eager")),
        "loss": outcome(compiled(net), None, None, loss),
        "backward": outcome(compiled(lambda x: Backward.apply(net(x)), "eager")),
        "step": outcome(compiled(net), None, Stuck(net.parameters())),
    }.items():
        assert (result.ok, result.phase, result.step) == (False, phase, 1)
        assert type(result.user_error) is Mine
        assert ("raises without torch.compile too" in result.reason) or ("eagerly too" in result.reason)


@pytest.mark.parametrize(("model", "rest", "text"), [
    (Net(), (None, lambda output: output), "expected a tensor of one element"),
    (frozen(all_of_it=True), (None, lambda output: output.mean()), FORWARD),
    (nn.LazyLinear(3), (), "it has parameters that are not initialised yet"),
])  # fmt: skip
def test_what_cannot_be_tested(model, rest, text):
    """A loss that is no number, a model whose parameters do not exist yet: said, not raised."""
    result = outcome(compiled(model), None, *rest)
    assert text in result.reason


def test_a_loss_without_gradients():
    """With an optimiser something must require a gradient."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    result = outcome(compiled(net), None, optimizer, lambda output: output.detach().mean())
    assert (result.ok, result.phase) == (False, "loss")
    assert "does not depend on anything that requires a gradient" in result.reason


def test_numbers_that_are_not_finite_eagerly_too():
    """Nothing can be compared where eager already fails; the text says whose they are."""
    result = outcome(compiled(Net()), None, None, lambda output: output.sum() / 0)
    assert (result.ok, result.reason) == (False, "the loss is not finite, eagerly too")


@pytest.mark.parametrize("steps", [0, 4, True, 2.5, "3"])
def test_steps(steps):
    """1, 2 or 3."""
    with pytest.raises(ValueError, match="expected 1, 2 or 3"):
        CompileSmoketest(steps)


def test_no_result_before_the_first_run():
    """last_result is None until there is one."""
    assert CompileSmoketest().last_result is None


# mixed precision


def under_autocast(model):
    """What a training loop calls: a function that is no module, around what torch.compile has returned."""
    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    return step


def unnormed():
    """A bias before batch norm: its gradient is nothing but rounding noise, and that of bfloat16."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def test_rounding_under_autocast_is_that_of_this_program():
    """Inductor rounds otherwise than eager, and gradients that cancel are far apart: measured, not assumed."""
    result = outcome(under_autocast(compiled(unnormed(), "inductor")), torch.randn(4, 3, 8, 8))
    assert (result.ok, result.reason) == (True, TRAINED)


def test_rounding_before_a_dropout_is_measured_too():
    """The statistics of batch norm are drawn by nobody: bfloat16 and another order of sums are why they differ."""
    model = nn.Sequential(*unnormed()[:-1], nn.Dropout(0.5), unnormed()[-1])
    result = outcome(under_autocast(compiled(model, "inductor")), torch.randn(4, 3, 8, 8))
    assert result.ok, result
    assert result.reason.startswith(TRAINED)


def test_statistics_before_a_dropout_are_compared_exactly():
    """What no draw reaches has to be what eager makes of it."""
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x):
            y = self.line(x)
            self.average += y.detach().mean(0)
            return nn.functional.dropout(y, 0.5)

    def compiler(graph, example):
        def run(*args):
            torch.rand(1)
            found = graph(*args)
            for arg in args:
                if arg.shape == (8,) and not isinstance(arg, nn.Parameter):
                    arg.mul_(1.5)
            return found

        return run

    result = outcome(under_autocast(compiled(Averages(), compiler)), torch.randn(4, 8))
    assert not result.ok
    assert "buffer average" in result.reason


@pytest.mark.parametrize("off", [backend(backward=factor(1.1)), backend(factor(1.1))])
def test_under_autocast_what_is_wrong_is_wrong(off):
    """Ten per cent are far from the rounding of bfloat16, forward or backward."""
    result = outcome(under_autocast(compiled(Net(), off)))
    assert not result.ok
    assert "float64" in result.reason


# random numbers


def drawing(scale=1.0):
    """A backend that draws other random numbers than eager, as Inductor does."""
    def compiler(graph, example):
        def run(*args):
            torch.rand(3)
            return [o * scale for o in graph(*args)]

        return run

    return compiler


def test_other_random_draws_are_no_difference():
    """Dropout with other numbers than eager's is compared by its means; a wrong scale is still seen."""
    result = outcome(compiled(Dropped(), drawing()))
    assert (result.ok, result.reason) == (True, f"{TRAINED} on average over 12 runs, as random numbers differ")
    assert result.notes == ("draws random numbers, or is not deterministic: compared by the means of 12 runs",)
    result = outcome(compiled(Dropped(), drawing(2.0)))
    assert not result.ok
    assert "over 48 runs each, the means of eager and compiled are" in result.reason


@pytest.mark.parametrize(("off", "ok"), [(1.001, False), (1.0, True)])
def test_the_same_draws_excuse_nothing(off, ok):
    """Where the outputs agree draw by draw, a gradient that is off by a little is wrong, not unlucky."""
    result = outcome(compiled(Dropped(), backend(backward=factor(off))))
    assert result.ok is ok
    assert ok or result.reason.startswith("gradient of inner.weight: error is")


def test_what_no_draw_reaches_is_compared_exactly():
    """Randomness in one output is no excuse for another."""
    class Two(Net):
        def forward(self, x):
            return super().forward(x), nn.functional.dropout(x, 0.5)

    def compiler(graph, example):
        return lambda *args: [o * (1.001 if o.shape[-1] == 4 else 1) for o in (torch.rand(1), graph(*args))[1]]

    result = outcome(compiled(Two().eval(), compiler))
    assert not result.ok
    assert result.reason.startswith("output[0]: error is")


def test_a_model_that_wavers_by_itself():
    """Two eager runs differ: neither is wrong, so means decide."""
    assert outcome(compiled(Wavering(), "eager")).ok


# nothing is left


class State:
    """Everything that a smoketest must put back."""

    def __init__(self, net, optimizer, sample):
        self.of = net, optimizer, sample
        self.saved = self.now()

    def now(self):
        net, optimizer, sample = self.of
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        return {
            "tensors": {n: (id(t), t.detach().clone(), t.requires_grad) for n, t in tensors.items()},
            "gradients": {n: (id(t.grad), None if t.grad is None else t.grad.clone()) for n, t in tensors.items()},
            "training": [part.training for part in net.modules()],
            "attributes": {n: copy.deepcopy(v) for n, v in vars(net).items() if not n.startswith("_")},
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "groups": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            "rng": (torch.get_rng_state(), random.getstate()),
            "sample": (sample.clone(), sample.grad),
            "grad mode": torch.is_grad_enabled(),
        }

    def check(self):
        assert same(self.now(), self.saved)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Stateful(Normed):
    """Buffers, a counter, a cache in a list, a random draw."""

    def __init__(self):
        super().__init__()
        self.calls, self.cache, self.last = 0, collections.deque([1], maxlen=3), None

    def forward(self, x):
        self.calls += 1
        self.last = x.detach() * 2
        self.cache.append(self.calls)
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Meter:
    def __init__(self):
        self.steps, self.inner = 0, {"seen": [[1]]}


class Wheel:
    """State of every kind, deep inside."""

    def __init__(self):
        self.meter, self.bag, self.ordered = Meter(), (set(), [{}]), collections.OrderedDict(a=collections.deque())


class Deep(Net):
    """A counter in an object, lists in a dict, generators of its own; its result depends on some."""

    def __init__(self):
        super().__init__()
        self.wheel, self.meters, self.logger = Wheel(), {"loss": []}, logging.getLogger("deep")
        self.gen, self.dice = torch.Generator().manual_seed(3), [random.Random(4)]
        self.numpys = {"new": numpy.random.default_rng(5), "old": numpy.random.RandomState(6)}

    def forward(self, x):
        return super().forward(x) * self.drawn() + torch.rand(4, generator=self.gen)

    @torch._dynamo.disable
    def drawn(self):
        wheel = self.wheel
        wheel.meter.steps += 1
        wheel.meter.inner["seen"][0].append(2)
        wheel.meter.new = 3
        wheel.bag[0].add(wheel.meter.steps)
        wheel.bag[1][0]["k"] = 1
        wheel.ordered["a"].append(1)
        wheel.ordered["b"] = 2
        self.meters["loss"].append(0)
        drawn = self.dice[0].random() + self.numpys["new"].random() + self.numpys["old"].rand()
        return drawn * wheel.meter.steps

    def state(self):
        wheel, numpys = self.wheel, self.numpys
        return repr([
            vars(wheel.meter), wheel.bag, wheel.ordered, self.meters, self.gen.get_state().tolist(),
            self.dice[0].getstate(), numpys["new"].bit_generator.state, numpys["old"].get_state()[1].tolist(),
        ])


@pytest.mark.parametrize("fault", ["eager", "aot_eager", factor(2.0), raising("no")])
def test_what_a_model_keeps_deep_inside(fault):
    """Each run starts from the same counters and generators, so that right compilers are not rejected; all returns."""
    net = Deep()
    before, wheel = net.state(), net.wheel
    result = outcome(compiled(net, fault))
    assert result.ok is isinstance(fault, str), result
    assert net.state() == before
    assert net.wheel is wheel
    config = CompileConfig(enabled=True, backend=fault)
    assert (maybe_compile(net, config, None, batch()) is not net) is isinstance(fault, str)
    assert net.state() == before


def test_what_is_not_the_models_is_left_alone():
    """A logger's handlers, threads, what torch made: restoring them would lose what others did meanwhile."""
    net = Deep()
    kept = DeepSnapshot(net)
    net.logger.manager.loggerDict["deep.er"] = 1
    try:
        assert not kept.changed()
        kept.restore()
        assert net.logger.manager.loggerDict["deep.er"] == 1
    finally:
        del net.logger.manager.loggerDict["deep.er"]


def test_what_has_changed_is_named():
    """For a report: the path of each."""
    net = Deep()
    kept = DeepSnapshot(net)
    net(batch())
    net.new = net.inner.new = 1
    assert set(kept.changed()) == {
        "new", "inner.new", "meters['loss']", "wheel.meter", "wheel.ordered", "wheel.bag[0]", "wheel.bag[1][0]",
        "wheel.ordered['a']", "wheel.meter.inner['seen'][0]", "the state of the generator in gen",
        "the state of the generator in dice", "the state of the generator in numpys",
    }
    kept.restore()
    assert not kept.changed()


FAULTS = ["eager", "aot_eager", drawing(), *(broken for broken, *_ in BROKEN.values())]


@settings(max_examples=15)
@given(fault=st.sampled_from(FAULTS), kind=st.sampled_from(["SGD", "Adam", "LBFGS"]), used=st.booleans(),
       accumulated=st.booleans(), evaluate=st.booleans(), steps=st.integers(1, 3))
def test_nothing_is_left_of_it(fault, kind, used, accumulated, evaluate, steps):
    """Parameters, buffers, gradients, attributes, optimiser, random states, sample: bitwise and object by object."""
    torch.compiler.reset()
    net, sample = Stateful().train(not evaluate), batch()
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01)
    if used:
        net(sample).sum().backward()
        optimizer.step(lambda: torch.tensor(1.0))
        optimizer.zero_grad()
    if accumulated:
        net(sample).sum().backward()
    before = State(net, optimizer, sample)
    outcome(compiled(net, fault), sample, optimizer, None, steps=steps)
    before.check()


def test_it_can_see_what_is_left():
    """The comparison above is no formality: it sees each kind of change."""
    net, sample = Stateful(), batch()
    optimizer = torch.optim.Adam(net.parameters())
    for change in (
        lambda: net.inner.weight.data.add_(1e-7 + net.inner.weight.data.abs().max() * 1e-6),
        lambda: net.norm.running_mean.add_(1),
        lambda: setattr(net, "calls", 1),
        lambda: net.cache.append(7),
        lambda: net.eval(),
        lambda: torch.rand(1),
        lambda: random.random(),
        lambda: net(sample).sum().backward(),
        lambda: optimizer.step(),
        lambda: sample.add_(1),
    ):
        before = State(net, optimizer, sample)
        with torch.enable_grad():
            change()
        with pytest.raises(AssertionError):
            before.check()
