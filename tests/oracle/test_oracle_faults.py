"""Planted faults: every one has to be called what it is, and the same run without it has to pass."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, problem, record, reference
from pytest_torchcompile.state.snapshot import StateSnapshot

# Torch's own: Inductor's first import.
pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]


class Model(nn.Module):
    """Convolution, batch norm, dropout; writes to an input; returns a view, an index and a number."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x, cache):
        """Return a dict of six leaves."""
        y = self.norm(self.conv(x))
        cache.mul_(0.5)
        out = {"y": y, "view": cache[1:], "index": y.mean((2, 3)).argmax(1), "n": 3}
        return {**out, "dropped": F.dropout(y, 0.2, True), "t": y.detach().clone()}


class Backward(torch.autograd.Function):
    """The identity, with a factor in its backward."""

    @staticmethod
    def forward(ctx, x, factor):
        """Pass on a copy."""
        ctx.factor = factor
        return x.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx, gradient):
        """Multiply."""
        return gradient * ctx.factor, None


def case(dtype=torch.float32):
    """A model in channels_last and its batch."""
    torch.manual_seed(0)
    model = Model().to(dtype=dtype, memory_format=torch.channels_last)
    x = torch.randn(4, 4, 10, 10).to(dtype=dtype, memory_format=torch.channels_last).requires_grad_()
    return model, Batch.of((x, torch.randn(3, 5, dtype=dtype)))


def found(model, batch, call, **options):
    """Leaves that are wrong when ``call`` stands in for the compiled model: ``{name: leaf}``."""
    snapshot, tape = StateSnapshot(model), Tape()
    eager = record(model, model, batch, mode=tape, **options)
    snapshot.restore()
    wrong = record(call, model, batch, **options)
    snapshot.restore()
    leaves = compare(eager, wrong, lambda: reference(model, batch, tape=tape, **options))
    return {leaf.name: leaf for leaf in leaves if problem(leaf)}


def changed(key, change):
    """A fault that replaces one entry of the output."""

    def make(model):
        def call(x, cache):
            out = model(x, cache)
            out[key] = change(out)
            return out

        return call

    return make


def one_element(y, index, factor):
    """``y`` with one element multiplied (NaN: replaced)."""
    mask = (torch.arange(y.numel()) == index).view(y.shape)
    return torch.where(mask, y * factor, y)


def lost_write(model):
    """The write to the second input goes to a copy."""
    return lambda x, cache: {**model(x, cache.clone()), "view": cache[1:] * 0.5}


def stale_statistics(model):
    """Batch norm's running statistics stay as they were."""

    def call(x, cache):
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        out = model(x, cache)
        for name, buffer in model.named_buffers():
            buffer.data.copy_(kept[name])
        return out

    return call


def one_more_draw(model):
    """The generator advances once more."""

    def call(x, cache):
        out = model(x, cache)
        torch.rand(1)
        return out

    return call


def renamed(model):
    """A key of the output is another one."""
    return lambda x, cache: {("z" if key == "y" else key): value for key, value in model(x, cache).items()}


DEFECTS = {
    "channels_last lost": (changed("y", lambda o: o["y"].contiguous()), "output['y']", "stride"),
    "float64 returned": (changed("y", lambda o: o["y"].double()), "output['y']", "dtype"),
    "output detached": (changed("y", lambda o: o["y"].detach()), "output['y']", "requires_grad"),
    "constant needs grad": (changed("t", lambda o: o["y"].clone()), "output['t']", "requires_grad"),
    "view is a copy": (changed("view", lambda o: o["view"].clone()), "output['view'] and input[1]", "alias"),
    "outputs share memory": (changed("t", lambda o: o["y"].detach()), "output['t'] and output['y']", "alias"),
    "write to an input lost": (lost_write, "input[1] after the call", "mutation"),
    "statistics not updated": (stale_statistics, "buffer norm.running_mean", "buffer"),
    "one random number more": (one_more_draw, "random generator", "rng"),
    "key renamed": (renamed, "output structure", "structure"),
    "dict became a tuple": (lambda m: lambda x, c: tuple(m(x, c).values()), "output structure", "structure"),
    "one index off": (changed("index", lambda o: torch.cat([(o["index"][:1] + 1) % 8, o["index"][1:]])),
                      "output['index']", "value"),
    "another number": (changed("n", lambda o: 4), "output['n']", "value"),
    "one NaN": (changed("y", lambda o: one_element(o["y"], 7, float("nan"))), "output['y']", "value"),
    "one element 1 % off": (changed("y", lambda o: one_element(o["y"], 777, 1.01)), "output['y']", "value"),
    "gradient 1 % off": (lambda m: lambda x, c: m(Backward.apply(x, 1.01), c),
                         "gradient of input[0]", "gradient"),
    "shape": (changed("y", lambda o: o["y"][None]), "output['y']", "shape"),
    "raises": (lambda m: lambda x, c: m(x[0, 0], c), "error", "error"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_and_called_by_its_name(defect):
    """The leaf that is wrong, and the kind of wrong."""
    make, name, kind = DEFECTS[defect]
    model, batch = case()
    wrong = found(model, batch, make(model))
    assert name in wrong, sorted(wrong)
    assert wrong[name].kind == kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_found_without_a_defect(dtype):
    """The same model against itself."""
    model, batch = case(dtype)
    assert found(model, batch, model) == {}


class Perceptron(nn.Module):
    """Three layers; the middle one is spoilt by the tests."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x, spoil=lambda y: y):
        """Apply the layers; ``spoil`` works on the middle."""
        return self.c(F.gelu(spoil(self.b(torch.tanh(self.a(x))))))


def perceptron():
    """The model and a batch."""
    torch.manual_seed(0)
    return Perceptron(), Batch.of(torch.randn(16, 32, requires_grad=True))


@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-4, 1e-5])
def test_a_wrong_constant_in_float32_is_found(error):
    """A relative error of one operator in the middle, down to 1e-5, in output and gradients."""
    model, batch = perceptron()
    wrong = found(model, batch, lambda x: model(x, lambda y: y * (1 + error)))
    assert {"output", "gradient of a.weight", "gradient of b.weight"} <= set(wrong)


def test_rounding_in_the_same_place_is_not():
    """One more rounding is no fault."""
    model, batch = perceptron()
    assert found(model, batch, lambda x: model(x, lambda y: (y * 3.1) / 3.1)) == {}


class Scaled(torch.autograd.Function):
    """What it is given, and a multiple of its gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01], ids=["zero", "negated", "x1.01"])
@pytest.mark.parametrize("name", ["a.weight", "b.bias", "c.weight"])
def test_one_wrong_gradient_is_found_alone(name, factor):
    """The gradient of one parameter is wrong, every other leaf is right."""
    model, batch = perceptron()

    def call(x):
        # No hook of the parameter: one that stays would be the reference's too.
        wrong_parameter = Scaled.apply(model.get_parameter(name), factor)
        return torch.func.functional_call(model, {name: wrong_parameter}, x)

    assert list(found(model, batch, call)) == [f"gradient of {name}"]


@pytest.mark.parametrize("kind", ["hook", "accumulated"])
def test_a_hook_that_a_call_leaves_is_found(kind):
    """The reference, which is made afterwards, does not have it."""
    model, batch = perceptron()

    def double(parameter):
        parameter.grad.mul_(2)

    def call(x):
        if kind == "hook":
            model.b.weight.register_hook(lambda gradient: gradient * 2)
        else:
            model.b.weight.register_post_accumulate_grad_hook(double)
        return model(x)

    assert list(found(model, batch, call)) == ["gradient of b.weight"]
    assert not model.b.weight._backward_hooks
    assert not model.b.weight._post_accumulate_grad_hooks


def test_a_missing_gradient_is_found():
    """A parameter cut off from the loss has None where eager has a gradient."""
    model, batch = perceptron()

    def without(x):
        return model.c(F.gelu(F.linear(torch.tanh(model.a(x)), model.b.weight, model.b.bias.detach())))

    wrong = found(model, batch, without)
    assert list(wrong) == ["gradient of b.bias"]
    assert problem(wrong["gradient of b.bias"]) == "gradient of b.bias: eager has a gradient, compiled none"


class GroupUp(nn.Module):
    """Group norm and upsampling in channels_last: PyTorch's group norm backward mixes memory formats up."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x):
        """Normalise, soften, enlarge."""
        return F.interpolate(F.softplus(self.norm(x)), scale_factor=2, mode="nearest")


class Peak(nn.Module):
    """Softmax' first half: the maximum is stored rounded, its operand recomputed unrounded."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(1 + 0.1 * torch.randn(64))

    def forward(self, x):
        """Subtract the row's maximum."""
        y = x * self.w
        return (y - y.amax(-1, keepdim=True)).exp()


def compiled(model, backend):
    """The compiled model; first imports warn about torch's own business."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(model, backend=backend)


def broken(model, call, batch):
    """Whether gradients are off so far that anybody would call them wrong; asked without the oracle."""
    gradients = []
    for function in (model, call):
        model.zero_grad()
        x = batch.clone().args[0]
        function(x).float().square().mean().backward()
        gradients.append([x.grad.float(), *(p.grad.float() for p in model.parameters())])
    pairs = zip(*gradients, strict=True)
    return any(not torch.allclose(c, e, rtol=0.1, atol=0.1 * float(e.abs().max())) for e, c in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_amax_gradients_are_found(dtype):
    """Inductor 2.13 in bfloat16 returns NaN for the gradients of an amax pattern (pytorch#186799)."""
    torch.manual_seed(0)
    model = Peak().to(dtype)
    batch = Batch.of(torch.randn(16, 64, dtype=dtype, requires_grad=True))
    call = compiled(model, "inductor")
    wrong = found(model, batch, call)
    assert bool(wrong) == broken(model, call, batch)
    if dtype is torch.bfloat16 and torch.__version__.startswith("2.13."):
        assert set(wrong) == {"gradient of w", "gradient of input[0]"}
        assert "are NaN or infinite in eager or compiled alone" in problem(wrong["gradient of w"])


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_torchs_own_group_norm_gradients_are_found(layout):
    """aot_eager 2.13 in channels_last returns gradients that are off by more than their own size."""
    torch.manual_seed(0)
    model = GroupUp()
    x = torch.randn(2, 16, 10, 10).to(memory_format=layout).requires_grad_()
    call = compiled(model, "aot_eager")
    wrong = found(model, Batch.of(x), call)
    assert bool(wrong) == broken(model, call, Batch.of(x))
    if layout is torch.channels_last and torch.__version__.startswith("2.13."):
        assert set(wrong) == {"gradient of input[0]", "gradient of norm.weight", "gradient of norm.bias"}
