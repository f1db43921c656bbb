"""Draws by CUDA graphs have the noise of draws by the program. What can be tried without a GPU is tried without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transcript_programs import PROGRAMS, Convolutions, LeavesOut, first_output, images, reference_of, rows

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, record
from pytest_torchcompile.oracle.dice import FixedDice
from pytest_torchcompile.oracle.draw_graph import DrawGraph, new_graph
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore")]
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


@pytest.mark.parametrize(("look", "asks"), [
    (lambda x: x * int((x > 0).sum()), True), (lambda x: x * x.sum().item(), True), (lambda x: x[x > 0], True),
    (lambda x: x * len(x.nonzero()), True), (torch.sin, False), (lambda x: x[torch.tensor([1, 2])], False),
])
def test_a_tape_knows_whether_python_asks_for_numbers(look, asks):
    with Tape() as tape:
        look(torch.randn(5))
    assert tape.asked_on == ({"cpu"} if asks else set())


# ---------------------------------------------------------------------------------------------------------- on a GPU


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


# Python asks for numbers, for the state of the generator, or cuDNN for something.
NOT_RECORDED = ("looks at lengths", "checkpoint", "recurrent")


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


@torch.library.custom_op("torchcompile_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Ask the GPU for a number, which can't be recorded."""
    return x * (1.0 + 0.0 * x.sum().item())


waits.register_autograd(lambda _, grad: grad)


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return waits(self.layer(x))


@on_gpu
def test_what_cannot_be_recorded_is_run_itself():
    """Nothing stays behind: the generator, the stream, and the next graph."""
    runs = runs_on_gpu(Waits, rows())
    graph = new_graph(runs.program.tensors, runs.program.tape, torch.float64)
    torch.manual_seed(5)
    expected_next = torch.rand(4, device="cuda")
    stream = torch.cuda.current_stream()
    torch.manual_seed(5)
    recording = runs._run_with(1.0, True, graph)
    assert "capture" in graph.why or recording.error is not None
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), expected_next)
    drawn = draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    runs._dice.begin_sequence(1)
    assert torch.allclose(drawn["loss"], runs._run_with(1.0).values_by_name()["loss"], rtol=1e-12)
    draw_by_graph(runs_on_gpu(Convolutions, images()), 1)


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
    leaves = compare(eager, compiled, runs)
    assert max(leaf.draws for leaf in leaves) > 4
    assert runs._noisy_runs._made == 1, "one run was recorded, and no other one made"
    assert runs._noisy_runs.made_of is None
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
