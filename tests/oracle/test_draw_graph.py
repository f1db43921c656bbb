"""Draws by CUDA graphs have the noise of draws by the program; tried without a GPU, by graphs that are emulated."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import emulated_graphs
import pytest
import torch
from draw_graph_checks import (
    CountsInPython,
    check_memory,
    check_noise,
    check_training,
    draw_by_graph,
    with_memory_that_nobody_names,
)
from torch import nn
from transcript_programs import (
    PROGRAMS,
    Convolutions,
    HiddenState,
    LeavesOut,
    draw,
    first_output,
    images,
    reference_of,
    rows,
)

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Recording, Tape, compare, problem, record
from pytest_torchcompile.oracle.dice import Dice, FixedDice
from pytest_torchcompile.oracle.draw_graph import DrawGraph, new_graph
from pytest_torchcompile.oracle.gpu_waits import is_recordable
from pytest_torchcompile.oracle.noisy_runs import NoisyRuns
from pytest_torchcompile.oracle.recording import Fault
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore")]


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


# ------------------------------------------------------------------------------------------------------------ emulated


@pytest.fixture
def emulated(monkeypatch):
    """References whose draws are made by graphs of a CPU."""
    emulated_graphs.emulate(monkeypatch)

    def made(model, *inputs, loss=None, taped=True):
        torch.manual_seed(1)
        runs = reference_of(model, *inputs, loss=loss, taped=taped)
        runs._noisy_runs._new_graph = emulated_graphs.new_graph
        return runs

    return made


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "looks at lengths"])
def test_emulated_noise_is_as_large_as_that_of_the_program(emulated, name):
    make, inputs, loss = PROGRAMS[name]
    torch.manual_seed(1)
    check_noise(emulated(make(), inputs(), loss=loss))


def test_emulated_steps_of_training(emulated):
    training = Training(Convolutions(), None, None, 0.1)
    values = steps_of([Batch.of(images()), Batch.of(images() * 2)]).value
    check_training(emulated(training, values, loss=no_loss))


def test_emulated_memory_that_nobody_names(emulated):
    """It is kept, and put back before each launch."""
    runs = emulated(with_memory_that_nobody_names("cpu"), rows())
    check_memory(runs, "cpu")


@pytest.mark.parametrize("hidden", [CountsInPython, HiddenState])
def test_emulated_state_that_no_launch_puts_back(emulated, hidden):
    runs = emulated(hidden(), rows())
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert runs._noisy_runs.why_no_graph == "it does not repeat the exact run"


def test_an_operator_that_is_given_functions_is_not_recorded(emulated):
    runs = emulated(lambda x: torch.cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (x,)), rows())
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert runs._noisy_runs.why_no_graph.startswith("cond")


def test_what_is_recorded_takes_no_part_in_the_estimates_of_others(emulated):
    """A comparison that makes draws by graphs finds what one by the program finds."""
    torch.manual_seed(1)
    model, batch = Convolutions(), Batch.of((images(),))
    before = StateSnapshot(model)
    eager = record(model, model, batch)
    before.restore()
    compiled = record(model, model, batch)
    before.restore()
    compiled.gradients["gradient of first.weight"].view(-1)[0] += 1e-3
    by_program, by_graph = reference_of(model, images()), emulated(model, images())
    expected, found = (compare(eager, compiled, runs) for runs in (by_program, by_graph))
    wrong = [[leaf.name for leaf in leaves if problem(leaf)] for leaves in (expected, found)]
    assert wrong[0] == wrong[1] != []
    assert by_graph._noisy_runs._made == 1
    assert by_graph._noisy_runs.made_of is None, "it is given back"


class OnTheEdge(nn.Module):
    """A gate that noise turns on and off: then a second eager run is asked whether the program repeats itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("edge", self.layer(rows())[0, 0].detach().clone())

    def forward(self, x):
        return (self.layer(x) - self.edge).relu()


def recorded_on_the_edge(wrong):
    """The model, eager's recording and one whose gradients are off by roundings; and ``wrong`` in one element."""
    torch.manual_seed(1)
    model, batch = OnTheEdge(), Batch.of(rows())
    eager, compiled = record(model, model, batch), record(model, model, batch)
    for gradient in compiled.gradients.values():
        gradient.add_(torch.randn_like(gradient) * 2e-7 * gradient.abs().max())
    compiled.gradients["gradient of layer.weight"][1, 1] += wrong
    return model, eager, compiled


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_a_graph_speaks_for_leaves_that_are_right(emulated, wrong):
    """It was recorded in a second run, and gives the values of the first. An accusation asks eager itself."""
    model, eager, compiled = recorded_on_the_edge(wrong)
    by_program, by_graph = reference_of(model, rows()), emulated(model, rows())
    for runs in (by_program, by_graph):
        leaves = compare(eager, compiled, runs)
        assert [leaf.name for leaf in leaves if problem(leaf)] == ["gradient of layer.weight"] * bool(wrong)
    assert by_program._twin is not None
    assert (by_graph._twin is not None) == bool(wrong)
    assert by_graph._launched is None, "its values are given back"


class Changes(nn.Module):
    """Computes something else each time, but not in the first two runs in float64: a graph is recorded in the second.

    A program that reads memory before it writes there may do so.
    """

    runs: ClassVar = Counter()

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        Changes.runs[x.dtype] += 1
        run = Changes.runs[x.dtype]
        shift = 0.0 if x.dtype == torch.float64 and run <= 2 else 0.1 * run
        return self.layer(x) + shift


def test_a_program_that_changes_after_its_graph_is_not_accused(emulated):
    torch.manual_seed(1)
    model, batch = Changes(), Batch.of(rows())
    eager, compiled = record(model, model, batch), record(model, model, batch)
    Changes.runs.clear()
    runs = emulated(model, rows())
    leaves = compare(eager, compiled, runs)
    assert runs._noisy_runs._made == 1
    assert not any(map(problem, leaves))
    assert "nondeterministic" in {leaf.kind for leaf in leaves}


class FillsCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, cache):
        cache["key"] = self.layer(x)
        return cache["key"].tanh()


def test_what_is_put_into_a_dict_is_drawn_too(emulated):
    runs = emulated(FillsCache(), rows(), {})
    check_noise(runs)
    assert any(name.endswith("after the call") for name in runs.estimates)


def test_a_graph_that_lacks_a_leaf_is_not_used(emulated, monkeypatch):
    keep = DrawGraph.keep
    monkeypatch.setattr(DrawGraph, "keep", lambda graph, name, value: name == "loss" or keep(graph, name, value))
    runs = emulated(Convolutions(), images())
    draw(runs, 1)
    assert runs._noisy_runs.made_of is None
    assert runs._noisy_runs.why_no_graph == "it does not repeat the exact run"


def test_what_wavers_is_asked_again_where_graphs_are_tried(emulated):
    torch.manual_seed(1)
    model, batch = CountsInPython(), Batch.of(rows())
    eager, compiled = record(model, model, batch), record(model, model, batch)
    runs = emulated(model, rows())
    leaves = compare(eager, compiled, runs)
    assert not any(map(problem, leaves))
    assert "nondeterministic" in {leaf.kind for leaf in leaves}
    assert runs._twin is not None


def test_without_its_second_pass_a_graph_says_nothing_of_other_leaves(emulated):
    runs = emulated(LeavesOut(), rows(), loss=first_output)
    draw(runs, 1, rest=False)
    assert runs._noisy_runs.can_launch
    assert runs._noisy_runs.launch_exactly() is None
    assert not runs.is_repeated_by_graph("loss")
    # It is recorded again where the second pass is asked for.
    draw_by_graph(runs, 1)
    assert runs._noisy_runs.launch_exactly()


def test_leaves_are_looked_at_less_often_where_draws_are_launches(emulated):
    by_graph, by_program = emulated(Convolutions(), images()), reference_of(Convolutions(), images())
    looks = []
    for runs in (by_graph, by_program):
        looks.append([])
        while runs.more(["loss"]):
            looks[-1].append(runs.estimates["loss"].offered)
    assert looks == [[1, 4, 12, 36], [1, 2, 3, 4, 6, 8, 12, 16, 24, 36]]


def test_a_launch_that_fails_says_nothing(emulated, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("planted: no room")

    runs = emulated(Convolutions(), images())
    draw(runs, 1)
    monkeypatch.setattr(DrawGraph, "launch", full)
    assert runs._noisy_runs.launch_exactly() is None
    assert not runs.is_repeated_by_graph("loss")
    assert runs.repeats("loss")
