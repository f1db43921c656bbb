"""Draws by CUDA graphs have the noise of draws by the program. What can be tried without a GPU is tried without one."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from transcript_programs import PROGRAMS, Convolutions, LeavesOut, first_output, images, reference_of, rows

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges import graph_recording
from pytest_torchcompile.oracle import Recording, Tape, compare, record
from pytest_torchcompile.oracle.dice import Dice, FixedDice
from pytest_torchcompile.oracle.draw_graph import DrawGraph, new_graph
from pytest_torchcompile.oracle.gpu_waits import is_recordable
from pytest_torchcompile.oracle.noisy_runs import NoisyRuns
from pytest_torchcompile.oracle.recording import Fault
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore")]
@torch.library.custom_op("torchcompile_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Ask the GPU for a number, which can't be recorded."""
    return x * (1.0 + 0.0 * x.sum().item())


waits.register_autograd(lambda _, grad: grad)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ------------------------------------------------------------------------------------------------------- any machine


def test_pools_stay_where_they_are_and_are_filled_anew():
    dice = FixedDice(torch.device("cpu"), torch.float64)
    tensor = torch.ones(1000, dtype=torch.float64)
    place = dice._pool(tensor.device, tensor.dtype).data_ptr()
    seen = []
    for seed, factor in ((1, 1.0), (2, 1.0), (1, 1.0), (1, 4.0), (1, 0.0)):
        dice.fill(seed, factor)
        seen.append(dice._pool(tensor.device, tensor.dtype).clone())
    assert dice._pool(tensor.device, tensor.dtype).data_ptr() == place
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[3], 4 * seen[0])
    assert 0.99 < seen[0].abs().max() < 1
    assert not seen[4].any()


def test_there_is_no_pool_of_another_dtype():
    dice = FixedDice(torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match=r"noise is asked for in torch.complex128 on cpu, and there is only torch"):
        dice.disturb(torch.ones(4, dtype=torch.complex128), 0.1)


def test_on_a_cpu_there_is_no_graph():
    runs = reference_of(Convolutions(), images())
    assert new_graph(runs.program.tensors, runs.program.tape, torch.float64) is None
    assert runs._new_graph() is None


class Stub:
    """A graph whose launches give what a function makes of the exact values, of the noise, and of how many it is."""

    is_graph, dice, why, launches, released = True, None, "", 0, False

    def __init__(self, make, exact):
        self._make, self._exact = make, exact

    def launch(self, seed, noise, rest):
        self.launches += 1
        return {"loss": self._make(self._exact, noise, self.launches)}

    def release(self):
        self.released = True

    def held_tensors(self):
        return []


def raises(*_):
    raise torch.OutOfMemoryError("planted: no room")


STUBS = {
    "": lambda exact, noise, _: exact + 1e-9 * noise,
    "it does not repeat the exact run": lambda exact, noise, number: exact * (1 + 1e-9 * number) + 1e-9 * noise,
    "OutOfMemoryError: planted: no room": raises,
}


@pytest.mark.parametrize("why", STUBS)
def test_a_graph_is_used_where_it_repeats_the_exact_run_again_and_again(why):
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    stub, by_program = Stub(STUBS[why], exact), []

    def run(noise, rest, listener):
        if listener is None:
            by_program.append(noise)
        return Recording(outputs={}, loss=exact + 5e-9)

    runs = NoisyRuns(Dice(0), torch.float64, lambda: {"loss": exact}, lambda: stub, run, None)
    values, error = runs.draw(0, 1.0, True)
    assert error is None
    assert runs.why_no_graph == why
    assert (runs.made_of is stub) == (not why)
    assert stub.released == bool(why)
    assert by_program == ([1.0] if why else [])
    assert torch.equal(values["loss"], exact + (5e-9 if why else 1e-9))
    runs.release()
    assert runs.made_of is None


def test_a_recording_that_was_refused_is_no_run():
    runs = reference_of(Convolutions(), images())._noisy_runs
    stub = Stub(None, None)
    runs._new_graph = lambda: stub
    runs._run = lambda *_: Recording(error=Fault("RuntimeError", "planted", "recording"))
    assert runs._record_graph(0, 1.0, True) is None
    assert runs.why_no_graph == "RuntimeError in recording: planted"
    assert stub.released
    runs._new_graph = raises
    assert runs._record_graph(0, 1.0, True) is None
    assert runs.why_no_graph == "OutOfMemoryError: planted: no room"


GPU = torch.empty(3, device="meta")
CPU = torch.empty(3)
NUMBER = torch.tensor(2.0)
ATEN = torch.ops.aten


@pytest.mark.parametrize(("func", "args", "out", "can_be"), [
    (ATEN.sin.default, (GPU,), GPU, True),
    (ATEN.mul.Tensor, (GPU, NUMBER), GPU, True),
    (ATEN.mul.Tensor, (CPU, NUMBER), CPU, True),
    (ATEN.index.Tensor, (GPU, [GPU.long()]), GPU, True),
    (ATEN.index.Tensor, (GPU, [GPU.bool()]), GPU, False),
    (ATEN.index_put_.default, (GPU, [GPU.bool()], GPU), GPU, False),
    (ATEN.index_put_.default, (GPU, [None, GPU.long()], GPU), GPU, True),
    (ATEN.nonzero.default, (GPU,), GPU, False),
    (ATEN._local_scalar_dense.default, (GPU,), 1.0, False),
    (ATEN._local_scalar_dense.default, (CPU,), 1.0, True),
    (ATEN._to_copy.default, (GPU,), CPU, False),
    (ATEN._to_copy.default, (NUMBER,), GPU, False),
    (ATEN.copy_.default, (GPU, NUMBER), GPU, False),
    (ATEN.lift_fresh.default, (GPU,), GPU, False),
    (ATEN.linalg_inv_ex.default, (GPU,), (GPU, GPU), False),
    (ATEN._cudnn_rnn.default, (GPU,), (GPU,), False),
    (torch.ops.torchcompile_tests.waits.default, (GPU,), GPU, False),
])
def test_what_can_be_recorded(func, args, out, can_be):
    """Tensors without memory stand for those of a GPU."""
    assert is_recordable(func, args, {}, out) == can_be


@pytest.mark.parametrize(("look", "can_be"), [
    (lambda x: x * int((x > 0).sum()), True), (torch.sin, True),
    (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), False),
])
def test_a_tape_knows_what_cannot_be_recorded(look, can_be):
    """On a CPU all can, but for operators that are given functions."""
    with Tape() as tape:
        look(torch.randn(5))
    assert tape.is_recordable == can_be


# ---------------------------------------------------------------------------------------------------------- on a GPU

# Python asks for numbers, for the state of the generator, or cuDNN for something.
NOT_RECORDED = ("looks at lengths", "checkpoint", "recurrent")


def on_cuda(value):
    return value.cuda() if isinstance(value, torch.Tensor) else {key: each.cuda() for key, each in value.items()}


def runs_on_gpu(model, inputs, loss=None, taped=True):
    torch.manual_seed(1)
    return reference_of(model().cuda().train(), on_cuda(inputs), loss=loss, taped=taped)


def draw(runs, sequence, noise=1.0, rest=True):
    values, error = runs._noisy_runs.draw(sequence, noise, rest)
    assert error is None
    return values


def draw_by_graph(runs, sequence, noise=1.0, rest=True):
    values = draw(runs, sequence, noise, rest)
    assert isinstance(runs._noisy_runs.made_of, DrawGraph), runs._noisy_runs.why_no_graph
    return values


def sizes_of_noise(runs, draws):
    """The root mean square of what draws change, for each leaf of floating numbers."""
    sizes = {}
    for name, estimate in runs.estimates.items():
        if estimate.continuous:
            errors = [values[name].double().cpu() - estimate.value.double().cpu() for values in draws]
            sizes[name] = float(torch.stack(errors).square().mean().sqrt())
    return sizes


@on_gpu
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_RECORDED])
def test_noise_is_as_large_as_that_of_the_program(name):
    make, inputs, loss = PROGRAMS[name]
    runs = runs_on_gpu(make, inputs(), loss)
    by_graph = [draw_by_graph(runs, sequence) for sequence in range(40)]
    by_program = []
    for sequence in range(40):
        runs._dice.begin_sequence(sequence)
        by_program.append(runs._run_with(1.0).values_by_name())
    assert by_graph[0].keys() == by_program[0].keys()
    mine, theirs = sizes_of_noise(runs, by_graph), sizes_of_noise(runs, by_program)
    for leaf, size in theirs.items():
        assert mine[leaf] == pytest.approx(size, rel=0.5, abs=1e-16), leaf
    assert len({float(values["loss"]) for values in by_graph}) == 40


@on_gpu
def test_no_noise_is_the_exact_run_and_more_noise_is_more():
    runs = runs_on_gpu(Convolutions, images())
    draw(runs, 8)
    draws = {noise: [draw_by_graph(runs, number, noise) for number in range(20)] for noise in (1.0, 4.0)}
    usual, loud = sizes_of_noise(runs, draws[1.0]), sizes_of_noise(runs, draws[4.0])
    assert loud["loss"] == pytest.approx(4 * usual["loss"], rel=0.5)
    exact = draw_by_graph(runs, 0, 0.0)
    for name, estimate in runs.estimates.items():
        if estimate.continuous:
            far = (exact[name].cpu().double() - estimate.value.cpu().double()).abs().max()
            assert far <= 1e-12 * (1 + estimate.value.abs().max()), name


@on_gpu
def test_the_same_sequence_is_the_same_noise():
    runs = runs_on_gpu(Convolutions, images())
    draw(runs, 8)
    first, other, again = (draw_by_graph(runs, sequence)["loss"] for sequence in (1, 2, 1))
    assert torch.allclose(first, again, rtol=1e-13)
    assert not torch.allclose(first, other, rtol=1e-13)


@on_gpu
def test_the_second_pass_is_launched_where_it_is_asked_for():
    runs = runs_on_gpu(LeavesOut, rows(), first_output)
    draw(runs, 8)
    whole, left = draw_by_graph(runs, 1), draw_by_graph(runs, 1, rest=False)
    assert len(whole) == len(left) + 6  # a gradient of each parameter
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(whole[name], value, rtol=1e-12), name


@on_gpu
def test_random_numbers_of_its_own_are_those_of_the_program():
    """The tape has none for them: its generator is seeded before each launch."""
    runs = runs_on_gpu(Convolutions, images())
    runs.program = replace(runs.program, tape=Tape())
    values = runs._run_with(0.0).values_by_name()
    runs._noisy_runs._exact = lambda: values
    exact = values["loss"]
    for sequence in (3, 4):
        drawn = draw_by_graph(runs, sequence)["loss"]
        # Other numbers for the dropout would move it by a part of itself.
        assert 0 < (drawn - exact).abs() < 1e-2 * exact.abs()


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return waits(self.layer(x))


@on_gpu
def test_a_recording_that_fails_leaves_nothing_behind(monkeypatch):
    """The generator, also in graphs that have it, the stream, the allocator, and the next graph are as before."""
    monkeypatch.setattr(graph_recording, "_DEVICES", {})
    x, earlier = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(earlier):
        x.uniform_()
    runs = runs_on_gpu(Waits, rows())
    assert not runs.program.tape.is_recordable
    graph = DrawGraph(torch.device("cuda", 0), torch.float64)
    torch.manual_seed(5)
    expected_next = torch.rand(4, device="cuda")
    stream = torch.cuda.current_stream()
    torch.manual_seed(5)
    recording = runs._run_with(1.0, True, graph)
    assert graph.why
    assert recording.error is not None
    assert graph_recording.has_failed_on(torch.device("cuda", 0))
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), expected_next)
    torch.manual_seed(5)
    earlier.replay()
    assert torch.equal(x, expected_next)
    reserved, large = torch.cuda.memory_reserved(), torch.empty(1 << 28, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    drawn = draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    runs._dice.begin_sequence(1)
    assert torch.allclose(drawn["loss"], runs._run_with(1.0).values_by_name()["loss"], rtol=1e-12)
    following = runs_on_gpu(Convolutions, images())
    draw(following, 1)
    assert following._noisy_runs.made_of is None, "after a failure no other recording is tried"
    monkeypatch.setattr(graph_recording, "_DEVICES", {})
    draw_by_graph(runs_on_gpu(Convolutions, images()), 1)


@on_gpu
@pytest.mark.parametrize("name", NOT_RECORDED)
def test_what_is_known_to_wait_is_not_recorded(name):
    make, inputs, loss = PROGRAMS[name]
    runs = runs_on_gpu(make, inputs(), loss)
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert not graph_recording.has_failed_on(torch.device("cuda", 0))


def with_memory_that_nobody_names():
    """A function with a weight, and a state that it writes to: they are neither parameters nor buffers."""
    weight, state = torch.randn(8, 8, device="cuda"), torch.zeros(8, device="cuda")

    def model(x):
        state.add_(x.mean(0))
        return (x @ weight).tanh() + state

    return model


@on_gpu
def test_memory_that_nobody_names_is_kept_and_put_back():
    torch.manual_seed(1)
    runs = reference_of(with_memory_that_nobody_names(), rows().cuda().requires_grad_())
    exact = runs.estimates["output"].value
    draw_by_graph(runs, 1)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((8, 8), 1e9, device="cuda", dtype=torch.float64) for _ in range(50)]
    for sequence in range(2, 6):
        distance = (draw_by_graph(runs, sequence)["output"].cpu() - exact.cpu()).abs().max()
        assert 0 < distance < 1e-4
    assert all(bool((other == 1e9).all()) for other in others)


class CountsInPython(nn.Module):
    """Multiplies by how often it was called, which a graph takes for a constant."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        CountsInPython.calls += 1
        return self.layer(x) * CountsInPython.calls


@on_gpu
def test_a_graph_that_does_not_repeat_the_exact_run_is_not_used():
    runs = runs_on_gpu(CountsInPython, rows())
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert runs._noisy_runs.why_no_graph == "it does not repeat the exact run"


@on_gpu
def test_a_comparison_gives_the_memory_back():
    torch.manual_seed(1)
    model = Convolutions().cuda()
    batch = Batch.of((images().cuda(),))
    runs = runs_on_gpu(Convolutions, images())
    before = StateSnapshot(model)
    eager = record(model, model, batch)
    before.restore()
    compiled = record(model, model, batch)
    compiled.gradients["gradient of first.weight"].view(-1)[0] += 1e-3
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    leaves = compare(eager, compiled, runs)
    assert max(leaf.draws for leaf in leaves) > 4
    assert runs._noisy_runs._made == 1, "one run was recorded, and no other one made"
    assert runs._noisy_runs.made_of is None
    # What cuBLAS takes for its work stays.
    assert torch.cuda.memory_reserved() <= reserved + (1 << 27)
    draw_by_graph(runs, 1)


@on_gpu
def test_without_room_for_another_run_there_is_no_graph(monkeypatch):
    runs = runs_on_gpu(Convolutions, images())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 30))
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None


@on_gpu
def test_steps_of_training_are_recorded():
    """Parameters are written to: each launch begins with those from before the steps."""
    torch.manual_seed(1)
    training = Training(Convolutions().cuda(), None, None, 0.1)
    values = steps_of([Batch.of(images().cuda()), Batch.of(images().cuda() * 2)]).value
    runs = reference_of(training, values, loss=no_loss)
    exact = {name: estimate.value for name, estimate in runs.estimates.items()}
    name = next(name for name in exact if name.endswith("weight after the call"))
    moved = []
    for sequence in (1, 2, 3):
        value = draw_by_graph(runs, sequence)[name]
        moved.append(float((value.cpu() - exact[name].cpu()).abs().max() / exact[name].abs().max()))
    assert all(0 < distance < 1e-3 for distance in moved)
    assert max(moved) < 4 * min(moved), "each draw goes on from the one before"
