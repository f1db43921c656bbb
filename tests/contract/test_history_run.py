"""One history: a module with state of its own is on both sides, and for the reference, what it was before a call."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from contract_programs import of_rows
from torch import nn

from pytest_torchcompile.contract.history_run import run_history
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.fuzz.drawn_call import call
from pytest_torchcompile.gauges import autotune

pytestmark = pytest.mark.needs_torch


class Counting(nn.Module):
    """What it computes follows from how often it was called, eager refusing the call or not."""

    def __init__(self):
        super().__init__()
        self.linear, self.count, self.seen = nn.Linear(4, 4), 0, []

    def forward(self, x):
        """(B, 4) -> the same."""
        self.count += 1
        self.seen.append(self.count)
        return torch.tanh(self.linear(x)) * len(self.seen)


class Reassigning(nn.Module):
    """It has another buffer after each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("hidden", torch.zeros(4))

    def forward(self, x):
        """(B, 4) -> the same."""
        y = torch.tanh(self.linear(x)) + self.hidden
        self.hidden = (self.hidden * 0.9 + y.detach().mean(0)).detach()
        return y


class Remembering(nn.Module):
    """It keeps what it computed: in a list, and as an expanded tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.last = nn.Linear(4, 4), [], None

    def forward(self, x):
        """(B, 4) -> the same."""
        y = torch.tanh(self.linear(x))
        self.seen.append((y.detach() + 1000).mean(0) - 1000)
        self.last = y.detach().mean().expand(4)
        return y


class Wavering(nn.Module):
    """It draws from what nobody seeds."""

    def __init__(self):
        super().__init__()
        self.linear, self.random = nn.Linear(4, 4), random.SystemRandom()

    def forward(self, x):
        """(B, 4) -> the same."""
        return torch.tanh(self.linear(x)) * self.random.random()


class WithExtraState(nn.Linear):
    """Its state dict holds more than tensors."""

    def __init__(self):
        super().__init__(4, 4)

    def get_extra_state(self):
        """No tensor."""
        return {"scale": 1}

    def set_extra_state(self, state):
        """The same comes back."""
        assert state == {"scale": 1}


def slightly_off(module, example_inputs):
    """A backend whose first result is a little wrong."""
    def run(*arguments):
        first, *others = module(*arguments)
        return first * 1.00001, *others

    return run


def run(kind, backend, *history):
    """Run a history of a model with a backend."""
    return run_history(of_rows(kind, backend), history, lambda index, side: None)


def test_a_call_that_eager_refuses_leaves_no_counter_behind():
    """Else the eager side is one call ahead, and a right compiled side is told as wrong."""
    came = run(Counting, "eager", call(B=3, dtypes="float64 0"), call(B=3))
    assert (came.problem, came.refused, came.calls) == (None, 1, 1)


class Expanding(nn.Module):
    """What it keeps is expanded, and a refused call is to leave it as it was."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), torch.zeros(1).expand(4)

    def forward(self, x):
        """(B, 4) -> the same."""
        return torch.tanh(self.linear(x)) + self.last


def test_an_expanded_tensor_is_put_back_after_a_refused_call():
    """Torch writes to no tensor that has one place in memory twice."""
    came = run(Expanding, "eager", call(B=3, dtypes="float64 0"), call(B=3))
    assert (came.problem, came.refused, came.calls) == (None, 1, 1)


def test_counters_are_what_they_were_for_the_reference():
    """Else it computes something else, and rounding is measured by eager alone."""
    came = run(Counting, slightly_off, call(B=3))
    assert came.problem is not None
    assert "expected comes from a float64 run)" in came.problem.message


def wrong_in_another_thread(module, example_inputs):
    """A backend that is right in the main thread alone."""
    def run(*arguments):
        first, *others = module(*arguments)
        if threading.current_thread() is not threading.main_thread():
            first = first + 1
        return first, *others

    return run


class Recurrent(nn.Module):
    """An LSTM, which torch runs otherwise beside a dispatch mode."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        """(B, 4) -> the same."""
        return self.lstm(x)[0]


def test_what_torch_does_otherwise_beside_a_tape():
    """In inference mode and under autocast it is float32 then, and bfloat16 alone: that is no fault of the compiler."""
    came = run(Recurrent, "aot_eager", call(B=3, grad_mode="inference_mode", autocast="bfloat16"))
    assert (came.problem, came.calls) == (None, 1)
    came = run(Counting, slightly_off, call(B=3, grad_mode="inference_mode"))
    assert came.problem is not None


class Rounding(nn.Module):
    """Rounds to half precision on its way. Its heaviside has no derivative."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """(B, 4) -> the same."""
        y = self.linear(x)
        return (y.heaviside(y) * y).half().float()


def keeps_digits(module, example_inputs):
    """A backend that leaves casts to half precision out, as Inductor does."""
    for node in list(module.graph.nodes):
        if node.target == "half":
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module.forward


def two_percent_off(module, example_inputs):
    """A backend whose outputs are wrong beyond what half precision rounds."""
    return lambda *arguments: tuple(output * 1.02 for output in module(*arguments))


@pytest.mark.parametrize("changes", [
    {"grad_mode": "no_grad"}, {"grad_mode": "inference_mode"}, {"grad_mode": "no_grad", "thread": "other"},
    {"grad_mode": "inference_mode", "thread": "other"}], ids=str)  # fmt: skip
def test_casts_that_a_dispatch_mode_does_not_see(changes):
    """In another thread, and in inference mode: who keeps more digits than they do is right there too."""
    came = run(Rounding, keeps_digits, call(B=3, **changes))
    assert (came.problem, came.calls) == (None, 1)
    came = run(Rounding, two_percent_off, call(B=3, **changes))
    assert came.problem is not None
    assert "expected comes from a float64 run)" in came.problem.message


class Double(nn.Module):
    """In float64, where no wider run is there to hold it against."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        """(B, 4) in float64 -> the same."""
        return torch.tanh(self.linear(x))


def off_by(share):
    """A backend whose first result is off by a share of its largest value, in its first element."""
    def backend(module, example_inputs):
        def run(*arguments):
            first, *others = module(*arguments)
            change = torch.zeros_like(first)
            change.view(-1)[0] = share * first.detach().abs().max()
            return first + change, *others

        return run

    return backend


@pytest.mark.parametrize(("share", "found"), [
    (2.0**-49, False), (2.0**-47, True), (1e-9, True), (1e-3, True), (0.01, True)])
def test_a_float64_leaf_may_be_off_in_its_last_digits_alone(share, found):
    """By 16 eps of its largest value, 2**-48; by more it is wrong like every other."""
    came = run(Double, off_by(share), call(B=3, dtypes="float64 0"))
    assert came.calls == 1
    assert (came.problem is not None) == found


class Narrowed(Double):
    """Its result is float32, and all before it float64."""

    def forward(self, x):
        """(B, 4) in float64 -> (B, 4) in float32."""
        return super().forward(x).float()


def test_the_last_digits_of_float64_excuse_no_other_leaf():
    """Eight eps of float32 are 2**-20 of the largest value: that is no last digit of what was computed in float64."""
    came = run(Narrowed, off_by(2.0**-20), call(B=3, dtypes="float64 0"))
    assert came.problem is not None
    assert run(Narrowed, "eager", call(B=3, dtypes="float64 0")).problem is None


def hardly_off(module, example_inputs):
    """A backend that rounds a thousand and something the other way, and so what is left of it without the thousand."""
    def run(*arguments):
        return tuple(result + 2**-15 if result.stride() == (1,) else result for result in module(*arguments))

    return run


def test_rounding_of_what_attributes_keep_does_not_add_up():
    """They are as eager's before each call: what an earlier call rounded is not told of a later one."""
    came = run(Remembering, hardly_off, call(B=3), call(B=3), call(B=3))
    assert (came.problem, came.calls) == (None, 3)
    came = run(Remembering, slightly_off, call(B=3), call(B=3))
    assert came.problem is not None


def test_a_model_that_eager_does_not_repeat():
    """That its calls agree within so much proves nothing."""
    came = run(Wavering, "eager", call(B=3), call(B=3))
    assert (came.problem, came.calls, came.mute) == (None, 2, 2)


def test_weights_loaded_into_a_module_with_extra_state():
    """It is no reason to say that eager refuses the call."""
    came = run(WithExtraState, "eager", call(B=3), call(B=3, module_change="load"))
    assert (came.problem, came.calls, came.refused, came.mute) == (None, 2, 0, 0)


@pytest.mark.parametrize("changes", [
    {"thread": "other", "second_copy": "copy"}, {"second_copy": "copy", "thread": "other"}], ids=list)
def test_a_copy_that_is_called_in_another_thread(changes):
    """Both are done, in whatever order they are named; the script does the same."""
    came = run(Counting, wrong_in_another_thread, call(B=3, **changes))
    assert came.problem is not None
    shown = Shown("", Counting, Counting, None, (call(B=3, **changes),), {"backend": "eager"})
    lines = [line.strip() for line in written_script(shown).splitlines()]
    copied = lines.index("part, call = second_copy(part, compile, 'copy')")
    assert lines[copied + 1] == "part, call = thread(part, compile, 'other')"


@pytest.mark.parametrize("grad_mode", ["no_grad", "inference_mode"])
def test_a_buffer_of_inference_mode(grad_mode):
    """It is compared as any other; to write to it is no mistake of the model's."""
    history = (call(B=3), call(B=3, grad_mode=grad_mode), call(B=3, training=False))
    assert run(Reassigning, "eager", *history).problem is None
    came = run(Reassigning, slightly_off, call(B=3, grad_mode=grad_mode))
    assert came.problem is not None
    assert came.problem.kind in ("value", "buffer")


class Half(nn.Module):
    """(B, 4) -> the same, in the dtype of autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """The sum is one more rounding."""
        y = self.linear(x)
        return y + y / 3


def one_step_of_bfloat16(module, example_inputs):
    """A backend whose first result is off by a rounding of bfloat16, which is eight of float16."""
    def run(*arguments):
        first, *others = module(*arguments)
        return first * (1 + 2.0**-8), *others

    return run


def test_the_coarser_of_two_autocasts_says_how_much_is_rounding():
    """What the caller enters is float16; the module enters bfloat16 within."""
    assert run(Half, one_step_of_bfloat16, call(B=3, autocast="float16")).problem is not None
    inner = call(B=3, autocast="float16", inner_autocast="bfloat16")
    assert run(Half, one_step_of_bfloat16, inner).problem is None
    # The module goes on entering it.
    later = (call(B=3, inner_autocast="bfloat16"), call(B=2, autocast="float16"))
    assert run(Half, one_step_of_bfloat16, *later).problem is None


def padded(module, example_inputs):
    """A backend whose first result has gaps between its rows."""
    def run(*arguments):
        first, *others = module(*arguments)
        return torch.nn.functional.pad(first, (0, 4))[..., :4], *others

    return run


def test_a_stride_that_a_stopwatch_decides_is_no_finding(monkeypatch):
    """On a GPU Inductor times whether to pad a matrix product: another machine has other strides."""
    assert run(Half, padded, call(B=3)).problem.message.startswith("output: stride is (4, 1) in eager, (8, 1) compiled")
    monkeypatch.setattr(autotune, "pads_by_timing", lambda settings, devices: True)
    assert run(Half, padded, call(B=3)).problem is None
    came = run(Half, lambda module, inputs: lambda *given: (module(*given)[0].mT.contiguous().mT,), call(B=4))
    assert came.problem.message.startswith("output: stride is (4, 1) in eager, (1, 4) compiled")


def test_an_autocast_of_the_module_counts_though_another_change_is_refused():
    """A hook of a parameter that is frozen is refused; the module has entered autocast all the same."""
    refused = call(B=3, inner_autocast="bfloat16", frozen="all", hooks="gradient linear.weight")
    came = run(Half, one_step_of_bfloat16, refused, call(B=2, autocast="float16", frozen="none"))
    assert (came.problem, came.refused) == (None, 1)
