"""Draws by CUDA graphs, on a GPU. Skipped where there is none; test_draw_graph.py emulates graphs there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draw_graph_checks import (
    CountsInPython,
    check_memory,
    check_noise,
    check_training,
    draw_by_graph,
    sizes_of_noise,
    waits,
    with_memory_that_nobody_names,
)
from torch import nn
from transcript_programs import PROGRAMS, Convolutions, LeavesOut, draw, first_output, images, reference_of, rows

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges import graph_recording
from pytest_torchcompile.oracle import Tape, compare, record
from pytest_torchcompile.oracle.draw_graph import DrawGraph
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

# Python asks for numbers, torch.func wraps its tensors, and cuDNN keeps a state of its own.
NOT_RECORDED = ("looks at lengths", "curvature", "recurrent")


def on_cuda(value):
    return value.cuda() if isinstance(value, torch.Tensor) else {key: each.cuda() for key, each in value.items()}


def runs_on_gpu(model, inputs, loss=None, taped=True):
    torch.manual_seed(1)
    return reference_of(model().cuda().train(), on_cuda(inputs), loss=loss, taped=taped)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_RECORDED])
def test_noise_is_as_large_as_that_of_the_program(name):
    make, inputs, loss = PROGRAMS[name]
    check_noise(runs_on_gpu(make, inputs(), loss))


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


def test_the_same_sequence_is_the_same_noise():
    runs = runs_on_gpu(Convolutions, images())
    draw(runs, 8)
    first, other, again = (draw_by_graph(runs, sequence)["loss"] for sequence in (1, 2, 1))
    assert torch.allclose(first, again, rtol=1e-13)
    assert not torch.allclose(first, other, rtol=1e-13)


def test_the_second_pass_is_launched_where_it_is_asked_for():
    runs = runs_on_gpu(LeavesOut, rows(), first_output)
    draw(runs, 8)
    whole, left = draw_by_graph(runs, 1), draw_by_graph(runs, 1, rest=False)
    assert len(whole) == len(left) + 6  # a gradient of each parameter
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(whole[name], value, rtol=1e-12), name


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


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_what_is_known_to_wait_is_not_recorded(name):
    make, inputs, loss = PROGRAMS[name]
    runs = runs_on_gpu(make, inputs(), loss)
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert not graph_recording.has_failed_on(torch.device("cuda", 0))


def test_memory_that_nobody_names_is_kept_and_put_back():
    torch.manual_seed(1)
    check_memory(reference_of(with_memory_that_nobody_names("cuda"), rows().cuda()), "cuda")


def test_a_graph_that_does_not_repeat_the_exact_run_is_not_used():
    runs = runs_on_gpu(CountsInPython, rows())
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert runs._noisy_runs.why_no_graph == "it does not repeat the exact run"


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


@pytest.mark.parametrize(("factory", "batch"), [(Convolutions, images()), (LeavesOut, rows())])
def test_a_graph_gives_the_exact_run_again(factory, batch):
    runs = runs_on_gpu(factory, batch)
    assert runs.more()
    assert [name for name in runs.estimates if not runs.is_repeated_by_graph(name)] == []


def test_without_room_for_another_run_there_is_no_graph(monkeypatch):
    runs = runs_on_gpu(Convolutions, images())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 30))
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None


def test_steps_of_training_are_recorded():
    """Parameters are written to: each launch begins with those from before the steps."""
    torch.manual_seed(1)
    training = Training(Convolutions().cuda(), None, None, 0.1)
    values = steps_of([Batch.of(images().cuda()), Batch.of(images().cuda() * 2)]).value
    check_training(reference_of(training, values, loss=no_loss))
