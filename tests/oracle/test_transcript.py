"""Transcripts: draws of noise that run a program's operators alone are, bit by bit, those that run the program."""

from __future__ import annotations

import copy
import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, noisy_runs, record
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of
from pytest_torchcompile.oracle.transcript import Transcript

pytestmark = pytest.mark.needs_torch


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The second draw makes a transcript."""
    monkeypatch.setitem(noisy_runs._BEFORE, "cpu", 1)


def reference_of(model, *args, loss=None):
    """A reference that has drawn nothing yet."""
    batch, tape = Batch.of(args[0] if isinstance(args[0], dict) else args), Tape()
    recording = record(model, model, batch, loss=loss, mode=tape)
    assert recording.error is None, recording.error
    return reference(model, batch, loss=loss, tape=tape, draw=False)


def drawn(runs, number, rest=True):
    values, error = runs._noisy_runs.draw(number, 1.0, rest)
    assert error is None
    return values


def make_transcript(runs, rest=True):
    for number in (8, 9):
        drawn(runs, number, rest)
    return runs._noisy_runs.transcript


def draws_of(runs, number, rest=True):
    """The values of a draw by the transcript, and by the program itself."""
    if runs._noisy_runs.transcript is None:
        make_transcript(runs)
    by_transcript = drawn(runs, number, rest)
    assert runs._noisy_runs.transcript is not None, "the program was run"
    runs._dice.begin_sequence(number)
    return by_transcript, runs._run_with(1.0, rest).values_by_name()


def are_same(one, other):
    if not isinstance(other, torch.Tensor):
        return one == other
    return torch.equal(one, other)


def images():
    torch.manual_seed(0)
    return torch.randn(4, 3, 8, 8)


def rows():
    torch.manual_seed(0)
    return torch.randn(6, 8)


class Convolutions(nn.Module):
    """Running statistics, dropout, a residual, and gradients that are added up."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        hidden = self.norm(self.first(x)).relu()
        hidden = functional.dropout(hidden, 0.25, self.training) + self.second(hidden)
        return self.last(hidden.mean((2, 3)))


class WritesToViews(nn.Module):
    """To its input, to a part of a buffer, and to a view of what it has computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x):
        x.mul_(1.5)
        hidden = self.layer(x).exp() + 1
        hidden[:, ::2].mul_(0.5)
        self.seen[1].add_(hidden.detach().mean(0))
        return hidden * self.seen.sum()


class Square(torch.autograd.Function):
    """Keeps what it returns for its backward pass."""

    @staticmethod
    def forward(context, x):
        y = x * x
        context.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(context, gradient):
        x, y = context.saved_tensors
        return gradient * 2 * x + 0 * y


class Checkpointed(nn.Module):
    """Computes a part again in the backward pass, and has a function with a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self._part, x, use_reentrant=False)
        return Square.apply(self.other(hidden)).sigmoid()

    def _part(self, x):
        return functional.dropout(self.layer(x).tanh(), 0.5, self.training)


class LooksAtLengths(nn.Module):
    """Asks for numbers that nothing rounds: of whole numbers, and of a constant."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        longest = int((tokens != 0).sum(1).max())
        kept = tokens[:, :longest][tokens[:, 0] > 0]
        assert kept.tolist()
        assert self.scale.item() == 2
        return self.table(kept) * self.scale


class Copies(nn.Module):
    """Changes the shape of its input, and copies tensors and modules while it runs."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        x.unsqueeze_(0)
        hidden = self.layer(x[0])
        other = copy.deepcopy(self.norm)
        return other(hidden) + copy.deepcopy(hidden.detach()).mul_(2)


class Curvature(nn.Module):
    """A derivative of a derivative: forward derivatives have zeros without memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.layer(x)
        return hidden * torch.func.hessian(lambda row: (row**3).sum())(hidden[0]).sum()


class LeavesOut(nn.Module):
    """Its second output is left out by the loss."""

    def __init__(self):
        super().__init__()
        self.layer, self.other, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = functional.dropout(self.norm(self.layer(x)), 0.5, self.training)
        return hidden.sin(), self.other(hidden).cos() + torch.rand(8)


def first_output(output, batch):
    return output[0].square().mean()


TOKENS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [0, 0, 0, 0]])
PROGRAMS = {
    "convolutions": (Convolutions, images, None),
    "writes to views": (WritesToViews, rows, None),
    "checkpoint": (Checkpointed, rows, None),
    "looks at lengths": (LooksAtLengths, lambda: TOKENS, None),
    "curvature": (Curvature, rows, None),
    "leaves out": (LeavesOut, rows, first_output),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: rows()[None], None),
    "recurrent": (lambda: nn.LSTM(8, 4, 2, batch_first=True), lambda: rows()[None], None),
}


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


@torch.library.custom_op("transcripts::hidden_write", mutates_args=())
def hidden_write(x: torch.Tensor) -> torch.Tensor:
    """Writes to what it is given, and does not say so."""
    x.detach().add_(1)
    return torch.zeros(1)


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
    "a shape depends on numbers (index)": lambda hidden: hidden[hidden > -9].sum(),
    "a shape depends on numbers (nonzero)": lambda hidden: hidden.nonzero().sum(),
    "memory is read that no operator has written to": _in_place_of_a_kernel,
}


@pytest.mark.parametrize("why", LOOKS)
def test_a_program_that_looks_at_numbers_is_run_itself(why):
    torch.manual_seed(1)
    runs, transcript = reference_of(Looks(LOOKS[why]), rows()), Transcript()
    runs._run_with(1.0, transcript=transcript)
    assert transcript.why == why
    assert not transcript.held_tensors()
    values = [drawn(runs, number)["loss"] for number in range(3)]
    assert runs._noisy_runs.transcript is None
    assert len({float(value) for value in values}) == 3


def test_other_tensors_than_plain_ones_have_no_transcript():
    runs, transcript = reference_of(Looks(lambda hidden: hidden.detach().to_sparse().sum()), rows()), Transcript()
    # With noise it raises: torch rounds no sparse tensor.
    runs._run_with(0.0, transcript=transcript)
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
    runs._run_with(1.0, transcript=transcript)
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
    assert runs._run_with(1.0, transcript=transcript).error is None
    assert transcript.why == "it has other tensors than plain ones"


def _branches_in_a_derivative(hidden):
    def branched(row):
        return row.sum() if row.sum() > 0 else (row * 2).sum()

    return torch.func.grad(branched)(hidden[0]).sum()


def test_what_goes_wrong_in_a_look_is_no_error_of_the_program():
    """A tensor of torch.func has no memory of its own to be told by."""
    runs, transcript = reference_of(Looks(_branches_in_a_derivative), rows()), Transcript()
    assert runs._run_with(1.0, transcript=transcript).error is None
    assert transcript.why.startswith("NotImplementedError: ")


def test_copies_made_while_it_runs_are_other_tensors():
    torch.manual_seed(1)
    runs = reference_of(Copies(), rows())
    transcript = Transcript()
    assert runs._run_with(1.0, transcript=transcript).error is None
    values = [drawn(runs, number)["loss"] for number in range(4)]
    runs._dice.begin_sequence(3)
    assert torch.equal(values[3], runs._run_with(1.0).values_by_name()["loss"])


def in_a_thread(hidden):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: hidden.detach().sin() * 2).result().sum()


def by_ctypes(hidden):
    values = hidden.detach().contiguous()
    return ctypes.c_double.from_address(values.untyped_storage().data_ptr()).value


@pytest.mark.parametrize("unseen", [in_a_thread, by_ctypes])
def test_what_no_operator_was_seen_to_do_shows_with_other_noise(unseen):
    """With its own noise a transcript would give again what it has taken for a constant."""
    torch.manual_seed(1)
    runs, transcript = reference_of(Looks(unseen), rows()), Transcript()
    runs._run_with(1.0, transcript=transcript)
    assert not transcript.why
    assert make_transcript(runs) is None


class HiddenState(nn.Module):
    """An operator writes to its state, and nobody sees that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        # Whole numbers, which get no noise: of others the operator would be given a copy.
        self.register_buffer("state", torch.ones(8, dtype=torch.int64))

    def forward(self, x):
        result = self.layer(x) * self.state
        return result + hidden_write(self.state)


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min])
def test_one_huge_value_hides_nothing(mask):
    torch.manual_seed(1)
    model = HiddenState()
    model.register_buffer("mask", torch.full((4,), mask))
    assert make_transcript(reference_of(model, rows())) is None


def test_a_transcript_that_does_not_repeat_the_run_is_not_used():
    torch.manual_seed(1)
    runs, transcript = reference_of(HiddenState(), rows()), Transcript()
    runs._run_with(1.0, transcript=transcript)
    transcript.end()
    assert not transcript.why
    assert make_transcript(runs) is None
    values = drawn(runs, 0)
    runs._dice.begin_sequence(0)
    assert torch.equal(values["loss"], runs._run_with(1.0).values_by_name()["loss"])


def test_what_only_a_draw_raises_is_left_to_the_program(monkeypatch):
    torch.manual_seed(1)
    runs = reference_of(Checkpointed(), rows())
    _, by_program = draws_of(runs, 3)

    def fails(*_):
        raise RuntimeError("planted: no memory")

    monkeypatch.setattr(runs._noisy_runs.transcript, "run", fails)
    values = drawn(runs, 3)
    assert runs._noisy_runs.transcript is None
    assert torch.equal(values["loss"], by_program["loss"])


def test_a_transcript_without_the_rest_is_asked_for_no_rest():
    torch.manual_seed(1)
    runs = reference_of(LeavesOut(), rows(), loss=first_output)
    make_transcript(runs, rest=False)
    left = drawn(runs, 1, rest=False)
    whole = drawn(runs, 1, rest=True)
    assert runs._noisy_runs.transcript is not None
    assert len(whole) == len(left) + 6
    assert all(are_same(whole[name], value) for name, value in left.items())


def test_few_draws_make_no_transcript(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(1)
    runs = reference_of(Convolutions(), images())
    for number in range(4):
        drawn(runs, number)
        assert bool(runs._noisy_runs.held_tensors()) == (number == 3), "the fourth is kept for the fifth"
    assert runs._noisy_runs.transcript is None
    drawn(runs, 4)
    assert runs._noisy_runs.transcript is not None


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
    drawn(runs, 8)
    kept = runs._noisy_runs.held_tensors()
    assert sum(tensor.nbytes for tensor in kept) < 300 * 400 * 8 / 2
    by_transcript, by_program = draws_of(runs, 3)
    assert all(are_same(by_transcript[name], value) for name, value in by_program.items())
