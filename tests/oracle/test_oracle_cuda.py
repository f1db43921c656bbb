"""The oracle on a GPU: noise, generators, TF32, CUDA graphs, dropout. Skipped where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, noisy_runs, problem, record, reference
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.expected import eager_is_near
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.operator_rounding import input_units
from pytest_torchcompile.oracle.transcript import Transcript
from pytest_torchcompile.state.snapshot import StateSnapshot

# Torch's own: imports, TF32 advice, generators of NumPy seeds.
pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


class Model(nn.Module):
    """Convolution, batch norm, attention, dropout, a write to an input."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 16)

    def forward(self, x, cache):
        """Return values and a view of the cache."""
        y = F.gelu(self.norm(self.conv(x))).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.out(F.dropout(y, 0.2, True))
        cache.copy_(y.detach().float())
        return y, cache[1:]


def case(dtype):
    """A model and its batch on the GPU."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 20, device="cuda", dtype=dtype).requires_grad_()
    return Model().to("cuda", dtype), Batch.of((x, torch.zeros(4, 20, 16, device="cuda")))


@pytest.fixture(autouse=True)
def _same_draws():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import config
    torch.compiler.reset()
    with config.patch(fallback_random=True):
        yield
    torch.compiler.reset()


def found(model, batch, call, times=1):
    """Leaves that are wrong, over ``times`` calls, and the reference."""
    snapshot, tape = StateSnapshot(model), Tape()
    eager = record(model, model, batch, mode=tape)
    snapshot.restore()
    expected = reference(model, batch, tape=tape)
    wrong = {}
    for _ in range(times):
        recording = record(call, model, batch)
        snapshot.restore()
        wrong |= {leaf.name: leaf for leaf in compare(eager, recording, expected) if problem(leaf)}
    return wrong, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_correct_models_raise_no_alarm(mode, dtype):
    """Inductor with and without CUDA graphs; the recording survives later replays."""
    model, batch = case(dtype)
    wrong, expected = found(model, batch, torch.compile(model, mode=mode), times=4)
    assert expected.kind == "float64"
    assert not expected.estimates["output[0]"].value.is_cuda  # 1,280 numbers are looked at on the CPU
    assert expected.twin().outputs["output[0]"].value.is_cuda
    assert {name: problem(leaf) for name, leaf in wrong.items()} == {}


@pytest.mark.parametrize("error", [1e-2, 1e-3])
def test_a_wrong_constant_is_found(error):
    """As on a CPU."""
    model, batch = case(torch.float32)

    def call(x, cache):
        y, view = model(x, cache)
        return y * (1 + error), view

    assert "output[0]" in found(model, batch, call)[0]


def test_the_generator_of_the_device_is_watched():
    """One number more drawn on the GPU."""
    model, batch = case(torch.float32)

    def call(x, cache):
        out = model(x, cache)
        torch.rand(1, device="cuda")
        return out

    wrong, _ = found(model, batch, call)
    assert "differs on cuda:0" in problem(wrong["random generator"])


def test_tf32_products_are_noise_and_no_error():
    """With TF32 allowed a product is as far off as its inputs; without it that is an error."""
    model = nn.Linear(256, 256, bias=False).cuda()
    batch = Batch.of(torch.randn(64, 256, device="cuda"))

    def rounded(x):
        # what the tensor cores do to their inputs: ten bits of mantissa
        bits = model.weight.detach().view(torch.int32)
        weight = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
        return F.linear(x, model.weight + (weight - model.weight.detach()))

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert "mm" not in input_units([model.weight], 2.0**-24)
        assert "output" in found(model, batch, rounded)[0]
        torch.set_float32_matmul_precision("high")
        assert input_units([model.weight], 2.0**-24)["mm"] == 2.0**-11
        assert "output" not in found(model, batch, rounded)[0]
    finally:
        torch.set_float32_matmul_precision(before)


class Attention(nn.Module):
    """Attention whose weights are dropped within a fused operator, between two dropouts that are operators."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.qkv, self.out, self.factor = nn.Linear(32, 96), nn.Linear(32, 16), factor

    def forward(self, x):
        """Return values of the last layer."""
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(F.dropout(x, 0.1)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)
        if torch.compiler.is_compiling():
            y = y * self.factor
        return self.out(F.dropout(y, 0.1))


@pytest.mark.parametrize("length", [20, 65])
def test_dropout_of_a_fused_attention_is_replayed(length):
    """Its mask is made again for the float64 run: eager is near, and what is compared is measured from float64."""
    torch.manual_seed(0)
    model, batch = Attention().cuda(), Batch.of(torch.randn(4, length, 32, device="cuda"))
    wrong, expected = found(model, batch, torch.compile(model, backend="aot_eager_decomp_partition"))
    assert not wrong, wrong
    eager = record(model, model, batch)
    assert len(expected.estimates) > 4
    for name, _, value in eager.values():
        assert eager_is_near(value, expected.estimates[name]), name


def test_a_wrong_compiler_behind_a_fused_attention():
    torch.manual_seed(0)
    model, batch = Attention(1 + 2.0**-15).cuda(), Batch.of(torch.randn(4, 20, 32, device="cuda"))
    wrong, _ = found(model, batch, torch.compile(model, backend="aot_eager"))
    assert {leaf.against for leaf in wrong.values()} == {"float64"}
    assert "output" in wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_made_by_a_transcript(dtype, monkeypatch):
    """Two runs of a GPU may add up in other orders, which float64 hardly shows."""
    model, batch = case(dtype)
    tape = Tape()
    record(model, model, batch, mode=tape)
    runs = reference(model, batch, tape=tape, draw=False)
    monkeypatch.setattr(noisy_runs, "_BEFORE", 0)
    runs._noisy_runs._tries_graph = False
    for sequence in (8, 9):
        runs._noisy_runs.draw(sequence, 1.0, True)
    assert isinstance(runs._noisy_runs.made_of, Transcript)
    by_transcript, error = runs._noisy_runs.draw(0, 1.0, True)
    assert error is None
    runs._dice.begin_sequence(0)
    by_program = runs._run_with(1.0).values_by_name()
    assert by_transcript.keys() == by_program.keys()
    for name, value in by_program.items():
        exact = runs.estimates[name].value.to(value.device)
        noise = (value.double() - exact).abs().amax()
        assert noise > 0 or not value.is_floating_point() or "cache" in name, name
        assert (by_transcript[name] - value).abs().amax() <= 1e-6 * noise + 1e-30, name


def test_a_whole_number_is_not_rounded_and_not_waited_for():
    """It may be a size; any other number gets its noise."""
    one = torch.ones((), dtype=torch.float64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Wide(torch.float64, None, dice=Dice(0), factor=1.0, unit=2.0**-10, accumulator=2.0**-10):
            whole, other = one * 3, one * 3.5
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert whole == 3
    assert 0 < abs(float(other) - 3.5) <= 3.5 * 2.0**-10
