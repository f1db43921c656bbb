"""Short scripts: they do what the fuzzer does, with torch alone, and show what was found."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import replace

import contract_programs
import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.history_run import offered_choices
from pytest_torchcompile.contract.mutation import NAMES, mutation
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.contract.specialised import specialised_lines
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, call

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore")]


def layers():
    """Layers for which each mutation has choices."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Linear(6, 6))


def images(B):
    """Two inputs would be one more than the layers take."""
    return (torch.randn(B, 4, 6, 6),)


def run(script):
    """Run a script here, as a module that Dynamo finds."""
    torch.compiler.reset()
    module = sys.modules["script"] = types.ModuleType("script")
    try:
        exec(compile(script, "script", "exec"), vars(module))
    finally:
        del sys.modules["script"]


def of_choice(name, choice, **also):
    """The script of a call with one mutation."""
    history = (call(B=2), DrawnCall((("B", 2),), None, ((name, choice),)))
    return written_script(Shown("value: output: off", layers, images, None, history, {"backend": "eager"}, **also))


ALL = [(name, choice) for name, choices in offered_choices(layers(), Batch.of(images(2)), NAMES).items()
       for choice in choices if name not in ("torch_settings", "backend_options")]


@pytest.mark.parametrize(("name", "choice"), ALL, ids=lambda each: each.replace(" ", "-"))
def test_a_script_of_each_choice(name, choice):
    """It runs, and finds nothing where nothing is wrong; what eager refuses it refuses."""
    script = of_choice(name, choice, kind="gradient", where="gradient of 0.weight")
    assert "pytest_torchcompile" not in script
    if name == "dtypes":
        with pytest.raises(RuntimeError):
            run(script)
    else:
        run(script)


@pytest.mark.parametrize("name", ["torch_settings", "backend_options"])
def test_settings_in_a_script(name):
    for choice in mutation(name).choices(None, None)[:2]:
        run(of_choice(name, choice))


def test_a_layer_of_one_line():
    """Twenty lines show what a hunt finds: nothing of the mutation's other choices is there."""
    shown = Shown("crash: the eager side ended", contract_programs.group_norm, images, None,
                  (call(B=2, memory_format="channels_last 0"),), {"backend": "aot_eager"}, kind="crash", where="eager")
    script = written_script(shown)
    assert sum(map(bool, script.splitlines())) <= 16
    assert "module = nn.GroupNorm(2, 4)" in script
    assert "tensors = [torch.randn(2, 4, 6, 6)]" in script
    assert "tensors[0] = tensors[0].detach().contiguous(memory_format=torch.channels_last)\n" in script


def learning_images(B):
    """They want a gradient, which a mutation must hand on."""
    return torch.randn(B, 4, 6, 6, requires_grad=True)


@pytest.mark.parametrize(("inputs", "mutations", "is_handed_on"), [
    (images, {}, False), (learning_images, {}, True), (images, {"requires_grad": "flipped 0"}, True),
])
def test_a_gradient_that_nobody_wants_is_not_handed_on(inputs, mutations, is_handed_on):
    history = (call(B=2, special_values="nan 0", **mutations),)
    script = written_script(Shown("value: output: off", layers, inputs, None, history, {"backend": "eager"}))
    assert ("requires_grad_(tensors[0].requires_grad)" in script) == is_handed_on
    assert ("    tensors[0] = changed\n" in script) == (not is_handed_on)
    run(script)


@pytest.mark.parametrize(("kind", "where"), [("value", "output"), ("gradient", "gradient of 2.weight")])
def test_a_script_shows_it(kind, where, monkeypatch):
    """The planted backend is wrong where an input is not contiguous."""
    shown = Shown("value: output: off", layers, images, None, (call(B=2, strides="transposed 0"),),
                  {"backend": "wrong_where_transposed"}, kind=kind, where=where)
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "wrong_where_transposed",
                        contract_programs.wrong_where_transposed)
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "wrong_where_transposed", None)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        run(written_script(shown))


def chosen(tensors, choice):
    """A function with choices."""
    kind, place = choice.split()
    value: float = 3.0
    if kind == "largest":
        value = float("inf")
    elif tensors:
        value = {"small": 1.0}[kind] + value
    for each in (1, 2):
        place = each
    tensors[int(place)] = value


def test_lines_of_a_choice():
    """What is decided is decided; a name that gets another value later is no longer known."""
    assert specialised_lines(chosen, {"choice": "largest 0"}, {"tensors": "given"}) == [
        "for each in (1, 2):", "    place = each", "given[int(place)] = float('inf')"]
    # What `tensors` is nobody knows.
    assert specialised_lines(chosen, {"choice": "small 0"}, {"tensors": "given"}) == [
        "if given:", "    value = 4.0", "for each in (1, 2):", "    place = each", "given[int(place)] = value"]


def ends_early(choice):
    """Its last line is not the only one that returns."""
    if torch.is_grad_enabled():
        return 1
    return 2


def test_a_function_that_ends_early():
    assert specialised_lines(ends_early, {"choice": ""}, {}) is None


def layers_of(channels=4, bias=True):
    return nn.Sequential(nn.Conv2d(channels, channels, 1, bias=bias))


def test_what_a_factory_has_defaults_for_is_no_name_in_the_script():
    """A one-line factory is written where it is called: its parameters are not there."""
    shown = Shown("value: off", layers_of, images, None, (call(B=2),), {"backend": "eager"},
                  keywords={"factory": {"bias": False}}, kind="value", where="output")
    script = written_script(shown)
    assert "module = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False))" in script
    run(script)


class Kind(str, enum.Enum):
    FAST = "fast"


def layers_of_a_kind(kind=Kind.FAST):
    return layers() if kind == Kind.FAST else nn.Identity()


def layers_or_nothing(wide=True):
    return layers() if wide else nn.Identity()


@pytest.mark.parametrize(("factory", "made"), [
    (layers_of_a_kind, "module = layers_of_a_kind().to('cpu:0')"),
    (layers_or_nothing, "module = (layers() if True else nn.Identity()).to('cpu:0')"),
])
def test_what_is_not_one_plain_call(factory, made):
    """A default that is no plain value stays the function's; and all of an expression is moved."""
    shown = Shown("value: off", factory, images, None, (call(B=2),), {"backend": "eager"}, device="cpu:0")
    script = written_script(shown)
    assert made in script
    run(script)


def one_twice(B):
    """The same tensor in two places."""
    x = torch.randn(B, 4, 6, 6).requires_grad_()
    return x, x


class Sum(nn.Module):
    def forward(self, x, y):
        return x.square() + y


def test_the_same_tensor_twice_is_moved_once():
    """As the batch that was called had it."""
    shown = Shown("value: off", Sum, one_twice, None, (call(B=2),), {"backend": "eager"}, device="cpu:0")
    script = written_script(shown)
    assert "moved[id(leaf)]" in script
    run(script + "\nargs, _ = arguments(one_twice(2), torch.float32)\nassert args[0] is args[1]\n")


def loss(output, batch):
    """Named as what it returns is in most scripts."""
    return output.square().mean()


def mean_of_squares(output, batch):
    return output.square().mean()


MOVED = (DrawnCall((("B", 2),), None, (("autocast", "bfloat16"),)), call(B=3))


def leaves_wanted(B):
    """An input that wants a gradient, and is a leaf."""
    return (torch.randn(B, 4, 6, 6).requires_grad_(),)


@pytest.mark.parametrize("own_loss", [None, loss], ids=["short", "long"])
def test_a_script_for_another_device(own_loss):
    """``cpu:0`` is another name of the only device that is here: the script moves what it would move to a GPU."""
    shown = Shown("gradient: off", layers, leaves_wanted, own_loss, MOVED, {"backend": "eager"}, device="cpu:0",
                  kind="gradient", where="gradient of input[0]")
    script = written_script(shown)
    assert "to('cpu:0'" in script
    assert "autocast('cpu', " in script.replace('device_type=', '') or "'bfloat16', 'cpu')" in script
    run(script)
    on_gpu = written_script(replace(shown, device="cuda:1"))
    assert on_gpu.replace("cuda:1", "cpu:0").replace("'cuda'", "'cpu'") == script


@pytest.mark.parametrize("own_loss", [None, mean_of_squares], ids=["short", "long"])
def test_a_script_of_a_gpu_runs_there(own_loss):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shown = Shown("gradient: off", layers, leaves_wanted, own_loss, MOVED, {"backend": "aot_eager"}, device="cuda",
                  kind="gradient", where="gradient of input[0]")
    run(written_script(shown))
