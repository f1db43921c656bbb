"""What an eager step lets expect of compiling: its parts, measured, and the prediction, by hand beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_torchcompile import zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.speed_prediction import predict_speed
from pytest_torchcompile.gauges.step_parts import StepParts, measure_parts
from pytest_torchcompile.gauges.step_work import OperatorWork, StepWork, measure_work

pytestmark = pytest.mark.needs_torch
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})


# ---------------------------------------------------------------------------------------------------------- parts
def test_a_forward_pass_is_the_model_alone():
    parts = measure_parts(zoo.feed_forward(), Batch.of(zoo.vector_batch(4)), None)
    assert parts.work.calls == 9
    assert parts.model_seconds > 0
    assert (parts.gradients, parts.model_share) == (0, pytest.approx(1.0, abs=0.2))


def test_the_loss_is_no_part_of_the_model():
    """Three operators of a loss, and those of its backward pass, are in the step and not in the model's work."""
    model, batch = zoo.feed_forward(), Batch.of(zoo.vector_batch(4))

    def loss(output, _):
        return (output * 2).sin().mean()

    parts = measure_parts(model, batch, loss, list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    step = measure_work(lambda: loss(model(*batch.args), batch.value).backward())
    names = {operator.name for operator in parts.work.operators}
    assert {"native_layer_norm", "native_layer_norm_backward", "gelu_backward"} <= names
    assert names.isdisjoint({"sin", "cos", "mean", "neg"})
    assert 0 < parts.work.calls < step.calls
    assert parts.rest_seconds > 0
    # The batch wants one too.
    assert parts.gradients == len(list(model.parameters())) + 1


def test_a_model_that_computes_its_loss_has_no_rest():
    """All of the backward pass is the model's."""

    class WithLoss(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return {"logits": logits, "loss": logits.sin().mean()}

    model, batch = WithLoss(4, 3), Batch.of(torch.randn(2, 4))
    parts = measure_parts(model, batch, lambda output, _: output["loss"])
    whole = measure_work(lambda: model(*batch.args)["loss"].backward())
    assert parts.work.calls >= whole.calls - 2          # gradients that are there are added to
    assert "cos" in {operator.name for operator in parts.work.operators}


def test_a_loss_of_two_outputs_of_which_one_is_made_of_the_other():
    """The graph between them is needed by the loss and by the model."""

    class Twice(torch.nn.Linear):
        def forward(self, x):
            first = super().forward(x)
            return first, first.sin()

    parts = measure_parts(Twice(4, 3), Batch.of(torch.randn(2, 4)), lambda output, _: (output[0] + output[1]).sum())
    assert "cos" in {operator.name for operator in parts.work.operators}


@pytest.mark.parametrize("output", [lambda x: x.detach(), lambda x: None], ids=["detached", "nothing"])
def test_an_output_without_a_gradient_leaves_the_forward_pass(output):
    model = torch.nn.Linear(4, 3)
    held = []

    def call(x):
        held.append(model(x))
        return output(held[-1])

    parts = measure_parts(call, Batch.of(torch.randn(2, 4)), lambda *_: held[-1].sum())
    assert {operator.name for operator in parts.work.operators} == {"addmm"}


# ----------------------------------------------------------------------------------------------------- prediction
def chain(calls, size):
    """So many cheap operators in a row on tensors of a size."""
    return StepWork([OperatorWork("sin", "float32", calls, 0, 2 * calls * size)], 2 * size, 2 * size, 1)


def alone(work, seconds):
    """A step that is nothing but the model."""
    return StepParts(seconds, 0.0, 0, work)


def test_large_tensors_are_predicted_by_their_bytes():
    """Ten operators that move what one has to."""
    work = chain(10, 10**8)
    found = predict_speed(work, alone(work, 2.0), PEAKS, eager_seconds=2.0)
    assert found.speedup == pytest.approx(10, rel=0.01)
    assert found.bytes_saved == pytest.approx(0.9)
    assert found.launch_share < 0.01


def test_small_steps_are_predicted_by_their_calls():
    """A hundred calls of a microsecond become one, and what is fixed."""
    work, short = chain(100, 8), chain(3, 8)
    found = predict_speed(work, alone(work, 100e-6), PEAKS, eager_seconds=100e-6)
    assert found.launch_share == pytest.approx(1.0)
    assert found.speedup == pytest.approx(100 / 21, rel=0.1)
    assert predict_speed(short, alone(short, 3e-6), PEAKS, eager_seconds=3e-6).speedup < 0.2


def test_what_stays_eager_is_not_faster():
    """By a graph break, and as the loss does."""
    work = chain(10, 10**8)
    whole = predict_speed(work, alone(work, 2.0), PEAKS, eager_seconds=2.0)
    half = predict_speed(work, alone(work, 2.0), PEAKS, eager_seconds=2.0, coverage=0.5)
    assert half.speedup == pytest.approx(1 / (0.5 / whole.speedup + 0.5))
    step = StepWork([*work.operators, *chain(10, 10**8).operators], work.least_bytes, work.fused_bytes, 1)
    lossy = predict_speed(step, StepParts(1.0, 1.0, 0, work), PEAKS, eager_seconds=2.0)
    assert lossy.rest_share == pytest.approx(0.5)
    assert lossy.speedup == pytest.approx(half.speedup, rel=0.01)


LIBRARY = StepWork([OperatorWork("mm", "float32", 10, 10**6, 10**4, library=True)], 10**4, 10**4, 0)


def test_a_gpu_that_waits_for_its_host_gains_by_graphs():
    parts = alone(LIBRARY, 200e-6)
    given = {"eager_seconds": 200e-6, "busy_seconds": 22e-6}
    by_calls = predict_speed(LIBRARY, parts, PEAKS, **given)
    assert by_calls.speedup < predict_speed(LIBRARY, parts, PEAKS, **given, replayed=True).speedup
    # As many calls as before, each as dear as before, what is fixed, and the part of the GPU's work that shows.
    assert by_calls.speedup == pytest.approx(200 / (200 + 10 + 22 / 4))


def test_a_busy_gpu_is_predicted_by_its_work():
    """Half of its work is the loss, which stays; of the rest fusion leaves a tenth."""
    work = chain(10, 10**8)
    step = StepWork([*work.operators, *work.operators], work.least_bytes, work.fused_bytes, 1)
    found = predict_speed(step, StepParts(1e-4, 1e-4, 0, work), PEAKS, eager_seconds=4.0, busy_seconds=4.0)
    assert found.speedup == pytest.approx(4 / (2 + 0.2), rel=0.01)


def test_gradients_of_a_replayed_graph_cost_the_host():
    few, many = StepParts(200e-6, 0.0, 1, LIBRARY), StepParts(200e-6, 0.0, 40, LIBRARY)
    given = {"eager_seconds": 200e-6, "busy_seconds": 22e-6, "replayed": True, "trains": True}
    assert predict_speed(LIBRARY, few, PEAKS, **given).speedup > predict_speed(LIBRARY, many, PEAKS, **given).speedup


def test_a_convolution_on_a_gpu_needs_a_copy_of_its_weight():
    """Ten products stay ten calls; ten convolutions become twenty."""
    convolutions = StepWork([OperatorWork("convolution", "float32", 10, 10**6, 10**4, library=True)], 10**4, 10**4, 0)
    given = {"eager_seconds": 200e-6, "busy_seconds": 22e-6}
    found = predict_speed(convolutions, alone(convolutions, 200e-6), PEAKS, **given)
    assert found.speedup == pytest.approx(200 / (2 * 200 + 10 + 22 / 4))


def test_a_slow_kernel_of_eagers_becomes_one_at_the_memorys_speed():
    """One operator that fusion saves no byte of, but that takes eager four times what its bytes take."""
    norm = chain(1, 10**8)
    at_peak = 2 * 10**8 / PEAKS.bandwidth
    slow = predict_speed(norm, alone(norm, 1e-5), PEAKS, eager_seconds=4 * at_peak, busy_seconds=4 * at_peak)
    assert slow.speedup == pytest.approx(4, rel=0.01)
    fast = predict_speed(norm, alone(norm, 1e-5), PEAKS, eager_seconds=at_peak, busy_seconds=at_peak)
    assert fast.speedup == pytest.approx(1, rel=0.01)


def test_products_on_a_gpu_take_what_they_took():
    """Three quarters of the GPU's time are a library's on both sides; of the last one fusion leaves a tenth."""
    work = chain(10, 10**8)
    given = {"eager_seconds": 8.0, "busy_seconds": 8.0, "product_seconds": 6.0}
    assert predict_speed(work, alone(work, 1e-4), PEAKS, **given).speedup == pytest.approx(8 / 6.2, rel=0.01)


def test_a_gpu_profiled_longer_than_a_step_takes_was_disturbed():
    """Its seconds, and those of its products, are scaled together."""
    work = chain(10, 10**8)
    given = {"eager_seconds": 8.0, "busy_seconds": 16.0, "product_seconds": 12.0}
    assert predict_speed(work, alone(work, 1e-4), PEAKS, **given).speedup == pytest.approx(8 / 6.2, rel=0.01)


@torch.library.custom_op("speed_prediction::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_custom_operator_is_no_part_of_a_fused_group():
    counted = measure_work(lambda: doubled(torch.randn(8).sin()).cos())
    assert {operator.name: operator.library for operator in counted.operators} == {
        "randn": False, "sin": False, "doubled": True, "cos": False}
    assert counted.groups == 2


def test_a_recurrent_layer_is_the_librarys():
    layer = torch.nn.LSTM(4, 5)
    with torch.no_grad():
        counted = measure_work(lambda: layer(torch.randn(3, 2, 4)))
    assert [operator.library for operator in counted.operators if "rnn" in operator.name] == [True]


def test_a_host_timed_longer_than_the_whole_step_was_disturbed():
    """Seconds of the host were measured apart from those of the step."""
    given = {"eager_seconds": 200e-6, "busy_seconds": 22e-6}
    quiet = predict_speed(LIBRARY, alone(LIBRARY, 200e-6), PEAKS, **given)
    assert predict_speed(LIBRARY, alone(LIBRARY, 300e-6), PEAKS, **given).speedup == pytest.approx(quiet.speedup)


def test_functions_stay_what_they_are():
    """Fusion saves what a chain of sines moves; computing them takes as long as before."""
    work = chain(10, 10**6)
    for operator in work.operators:
        operator.flops = 10 * 10**6
    hopeful = predict_speed(work, alone(work, 2.0), PEAKS, eager_seconds=2.0)
    found = predict_speed(work, alone(work, 2.0), replace(PEAKS, functions=1e8), eager_seconds=2.0)
    # Its bytes take 20 ms, of which fusion saves nine tenths, and its functions 100 ms.
    assert hopeful.speedup > 8
    assert found.speedup == pytest.approx((0.02 + 0.1) / (0.002 + 0.1), rel=0.01)
