"""Transcripts: draws of noise that run a program's operators alone are, bit by bit, those that run the program."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from transcript_programs import (
    PROGRAMS,
    Checkpointed,
    Convolutions,
    Copies,
    HiddenState,
    LeavesOut,
    WritesToViews,
    draw,
    first_output,
    hidden_write,
    images,
    reference_of,
    rows,
)

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Recording, noisy_runs
from pytest_torchcompile.oracle.recording import Fault
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.oracle.transcript import Transcript

pytestmark = pytest.mark.needs_torch


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The first draw makes a transcript."""
    monkeypatch.setattr(noisy_runs, "_BEFORE", 0)


def make_transcript(runs, rest=True):
    """Made in the first of two draws, and tried before the second."""
    for number in (8, 9):
        draw(runs, number, rest=rest)
    return runs._noisy_runs.made_of


def draws_of(runs, number, rest=True):
    """The values of a draw by the transcript, and by the program itself."""
    if runs._noisy_runs.made_of is None:
        make_transcript(runs)
    by_transcript = draw(runs, number, rest=rest)
    assert runs._noisy_runs.made_of is not None, "the program was run"
    runs._dice.begin_sequence(number)
    return by_transcript, runs._run_with(1.0, rest).values_by_name()


def are_same(one, other):
    if not isinstance(other, torch.Tensor):
        return one == other
    return torch.equal(one, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_draws_are_those_of_the_program(name):
    make, inputs, loss = PROGRAMS[name]
    torch.manual_seed(1)
    runs = reference_of(make(), inputs(), loss=loss)
    for number in (0, 5):
        by_transcript, by_program = draws_of(runs, number)
        assert by_transcript.keys() == by_program.keys()
        for leaf, value in by_program.items():
            assert are_same(by_transcript[leaf], value), leaf
    exact = runs.estimates["loss"].value
    assert not torch.equal(by_program["loss"], exact)


def test_the_pass_through_outputs_that_are_left_out_is_made_where_it_is_asked_for():
    torch.manual_seed(1)
    runs = reference_of(LeavesOut(), rows(), loss=first_output)
    whole, _ = draws_of(runs, 1)
    left, _ = draws_of(runs, 1, rest=False)
    assert len(whole) == len(left) + 6  # a gradient of each parameter
    assert all(are_same(whole[name], value) for name, value in left.items())


def test_steps_of_training_have_a_transcript():
    """Parameters are written to: each draw begins with those from before the steps."""
    torch.manual_seed(1)
    training = Training(Convolutions(), None, None, 0.1)
    values = steps_of([Batch.of(images()), Batch.of(images() * 2)]).value
    runs = reference_of(training, values, loss=no_loss)
    for number in (0, 1):
        by_transcript, by_program = draws_of(runs, number)
        assert any(name.endswith("after the call") for name in by_transcript)
        for leaf, value in by_program.items():
            assert are_same(by_transcript[leaf], value), leaf


class Looks(nn.Module):
    """Does something with what it has computed."""

    def __init__(self, look):
        super().__init__()
        self.layer, self.look = nn.Linear(8, 8), look

    def forward(self, x):
        hidden = self.layer(x)
        return self.look(hidden) + hidden


def _in_place_of_a_kernel(hidden):
    made = torch.empty(8)
    hidden_write(made)
    return made


def _raises(hidden):
    try:
        return functional.embedding((hidden.detach()[0, :1].abs() * 0 + 9).long(), torch.ones(4, 8)).sum()
    except IndexError:
        return 0


def _writes_to_an_array(hidden):
    kept = torch.zeros(6, 8, dtype=torch.float64)
    array = kept.numpy()
    kept.copy_(hidden.detach())
    return float(array[0, 0])


class Subclass(torch.Tensor):
    """A tensor of another kind."""


OTHER = torch.ones(3).as_subclass(Subclass)

LOOKS = {
    "it calls __float__()": lambda hidden: torch.tensor([each.detach() for each in hidden[0]]).softmax(0).sum(),
    "an operator raises (embedding)": _raises,
    "numbers are written to an array of Python's": _writes_to_an_array,
    "it asks for a number (_local_scalar_dense)": lambda hidden: 1.0 if hidden.sum().item() > 0 else 2.0,
    "it calls tolist()": lambda hidden: sum(hidden.detach()[0].tolist()),
    "it calls numpy()": lambda hidden: float(hidden.detach().numpy().sum()),
    "it calls data_ptr()": lambda hidden: 0 * (hidden.data_ptr() % 2),
    "it asks for a number (index)": lambda hidden: hidden[hidden > -9].sum(),
    "it asks for a number (nonzero)": lambda hidden: hidden.nonzero().sum(),
    "memory is read that no operator has written to": _in_place_of_a_kernel,
}


@pytest.mark.parametrize("why", LOOKS)
def test_a_program_that_looks_at_numbers_is_run_itself(why):
    torch.manual_seed(1)
    runs, transcript = reference_of(Looks(LOOKS[why]), rows()), Transcript()
    runs._run_with(1.0, listener=transcript)
    assert transcript.why == why
    assert not transcript.held_tensors()
    values = [draw(runs, number)["loss"] for number in range(3)]
    assert runs._noisy_runs.made_of is None
    assert len({float(value) for value in values}) == 3


def test_other_tensors_than_plain_ones_have_no_transcript():
    runs, transcript = reference_of(Looks(lambda hidden: hidden.detach().to_sparse().sum()), rows()), Transcript()
    runs._run_with(1.0, listener=transcript)
    assert transcript.why == "it has other tensors than plain ones"


def test_a_run_in_which_no_operator_is_seen_has_no_transcript():
    transcript = Transcript()
    transcript.end()
    assert transcript.why == "it was told of no operator"


class Masked(nn.Module):
    """Writes to its input where noise says so: here nowhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.layer(x.clone())
        x.masked_fill_(hidden > 99, 3.0)
        return hidden


def test_what_is_written_only_with_some_noise_has_no_transcript():
    runs, transcript = reference_of(Masked(), rows()), Transcript()
    runs._run_with(1.0, listener=transcript)
    assert transcript.why == "it writes to a tensor what is there already"


class LooksFirst(nn.Module):
    """At a tensor of another kind."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        factor = sum(OTHER.tolist())
        return self.layer(x) * factor


def test_other_tensors_may_be_looked_at_before_any_operator():
    """What goes wrong in the transcript is no error of the program."""
    runs, transcript = reference_of(LooksFirst(), rows()), Transcript()
    assert runs._run_with(1.0, listener=transcript).error is None
    assert transcript.why == "it has other tensors than plain ones"


def _branches_in_a_derivative(hidden):
    def branched(row):
        return row.sum() if row.sum() > 0 else (row * 2).sum()

    return torch.func.grad(branched)(hidden[0]).sum()


def test_what_goes_wrong_in_a_look_is_no_error_of_the_program():
    """A tensor of torch.func has no memory of its own to be told by."""
    runs, transcript = reference_of(Looks(_branches_in_a_derivative), rows()), Transcript()
    assert runs._run_with(1.0, listener=transcript).error is None
    assert transcript.why.startswith("NotImplementedError: ")


def test_copies_made_while_it_runs_are_other_tensors():
    torch.manual_seed(1)
    runs = reference_of(Copies(), rows())
    transcript = Transcript()
    assert runs._run_with(1.0, listener=transcript).error is None
    values = [draw(runs, number)["loss"] for number in range(4)]
    runs._dice.begin_sequence(3)
    assert torch.equal(values[3], runs._run_with(1.0).values_by_name()["loss"])


def in_a_thread(hidden):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: hidden.detach().sin() * 2).result().sum()


def by_ctypes(hidden):
    values = hidden.detach().contiguous()
    return ctypes.c_double.from_address(values.untyped_storage().data_ptr()).value


@pytest.mark.parametrize("unseen", [in_a_thread, by_ctypes])
def test_what_no_operator_was_seen_to_do_shows_without_noise(unseen):
    """With its own noise a transcript would give again what it has taken for a constant."""
    torch.manual_seed(1)
    runs, transcript = reference_of(Looks(unseen), rows()), Transcript()
    runs._run_with(1.0, listener=transcript)
    assert not transcript.why
    assert make_transcript(runs) is None


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min])
def test_one_huge_value_hides_nothing(mask):
    torch.manual_seed(1)
    model = HiddenState()
    model.register_buffer("mask", torch.full((4,), mask))
    assert make_transcript(reference_of(model, rows())) is None


def test_a_transcript_that_does_not_repeat_the_run_is_not_used():
    torch.manual_seed(1)
    runs, transcript = reference_of(HiddenState(), rows()), Transcript()
    runs._run_with(1.0, listener=transcript)
    transcript.end()
    assert not transcript.why
    assert make_transcript(runs) is None
    values = draw(runs, 0)
    runs._dice.begin_sequence(0)
    assert torch.equal(values["loss"], runs._run_with(1.0).values_by_name()["loss"])


def test_what_only_a_draw_raises_is_left_to_the_program(monkeypatch):
    torch.manual_seed(1)
    runs = reference_of(Checkpointed(), rows())
    _, by_program = draws_of(runs, 3)

    def fails(*_):
        raise RuntimeError("planted: no memory")

    monkeypatch.setattr(runs._noisy_runs.made_of, "run", fails)
    values = draw(runs, 3)
    assert runs._noisy_runs.made_of is None
    assert torch.equal(values["loss"], by_program["loss"])


def test_a_transcript_without_the_rest_is_asked_for_no_rest():
    torch.manual_seed(1)
    runs = reference_of(LeavesOut(), rows(), loss=first_output)
    make_transcript(runs, rest=False)
    left = draw(runs, 1, rest=False)
    whole = draw(runs, 1, rest=True)
    assert runs._noisy_runs.made_of is not None
    assert len(whole) == len(left) + 6
    assert all(are_same(whole[name], value) for name, value in left.items())


def test_few_draws_make_no_transcript(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(1)
    runs = reference_of(Convolutions(), images())
    for number in range(4):
        draw(runs, number)
        assert not runs._noisy_runs.held_tensors()
    assert runs._noisy_runs.made_of is None
    draw(runs, 4)
    assert runs._noisy_runs._repeater.noisy
    draw(runs, 5)
    assert runs._noisy_runs.made_of is not None
    assert runs._noisy_runs._repeater.noisy is None


def test_a_draw_that_raises_makes_no_transcript():
    """The next one does."""
    torch.manual_seed(1)
    runs = reference_of(Convolutions(), images())
    runs._noisy_runs._run = lambda *_: Recording(error=Fault("RuntimeError", "planted", "forward"))
    assert runs._noisy_runs.draw(0, 1.0, True)[1] is not None
    assert runs._noisy_runs.made_of is None
    runs._noisy_runs._run = runs._run_with
    assert make_transcript(runs) is not None


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_nan_of_noise_hides_nothing(lost):
    """A value that became NaN by noise was not moved far by it."""
    runs = reference_of(Convolutions(), images())._noisy_runs
    runs._exact = lambda: {"loss": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    noisy = {"loss": torch.tensor([lost, 2 + 1e-9], dtype=torch.float64)}
    assert runs._are_near(runs._exact(), noisy, True)
    assert not runs._are_near({"loss": torch.tensor([1, 2 + 1e-9], dtype=torch.float64)}, noisy, True)


def test_nothing_stays_behind():
    """Torch's own methods are there again, and tensors from before the run are as they were."""
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "data_ptr", "__dlpack__")}
    torch.manual_seed(1)
    model, x = WritesToViews(), rows()
    runs = reference_of(model, x)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    draws_of(runs, 0)
    assert torch.equal(x, rows())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert before == {name: getattr(torch.Tensor, name) for name in before}
    assert "numpy" not in vars(torch.Tensor)


def test_little_is_kept_of_long_values():
    torch.manual_seed(1)
    model = nn.Linear(300, 400)
    runs = reference_of(model, torch.randn(4, 300))
    draw(runs, 8)
    kept = runs._noisy_runs._repeater.noisy.values()
    assert sum(tensor.nbytes for tensor in kept) < 300 * 400 * 8 / 2
    by_transcript, by_program = draws_of(runs, 3)
    assert all(are_same(by_transcript[name], value) for name, value in by_program.items())
