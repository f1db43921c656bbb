"""Programs whose draws are made by a transcript, and their references."""

from __future__ import annotations

import copy
import math

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, record
from pytest_torchcompile.oracle.reference_runs import reference


def reference_of(model, *args, loss=None, taped=True):
    """A reference that has drawn nothing yet; not ``taped``: nobody knows what random numbers eager draws."""
    batch, tape = Batch.of(args[0] if isinstance(args[0], dict) else args), Tape()
    module = model if isinstance(model, nn.Module) else None
    recording = record(model, module, batch, loss=loss, mode=tape)
    assert recording.error is None, recording.error
    return reference(model, batch, loss=loss, tape=tape if taped else None, draw=False)


def draw(runs, sequence, noise=1.0, rest=True):
    """The values of a draw, which raises nothing."""
    values, error = runs._noisy_runs.draw(sequence, noise, rest)
    assert error is None
    return values


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
        return hidden.sin(), self.other(hidden).cos() + torch.rand(8, device=x.device)


@torch.library.custom_op("transcripts::hidden_write", mutates_args=())
def hidden_write(x: torch.Tensor) -> torch.Tensor:
    """Writes to what it is given, and does not say so."""
    x.detach().add_(1)
    return torch.zeros(1)


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


def buckets(edge: float | list[float] = 0.0, device: str = "cpu") -> torch.Tensor:
    """Distances sorted by a logarithm, as T5 does: at 16, 32 and 64 rounding decides. ``edge``: what is added."""
    distances = torch.arange(1, 128, device=device)
    if isinstance(edge, list):
        edge = torch.tensor(edge, device=device)
    large = torch.log(distances.float() / 8) / math.log(16) * 8 + edge
    return torch.where(distances < 8, distances, 8 + large.to(torch.int64)).clamp(max=15)


class Biased(nn.Module):
    """Adds a number for each bucket."""

    edge = 0.0

    def __init__(self):
        super().__init__()
        self.bias, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x[:, None] + self.bias(buckets(self.edge, x.device)).sin())


def first_output(output, batch):
    return output[0].square().mean()


TOKENS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [0, 0, 0, 0]])
PROGRAMS = {
    "convolutions": (Convolutions, images, None),
    "writes to views": (WritesToViews, rows, None),
    "checkpoint": (Checkpointed, rows, None),
    "looks at lengths": (LooksAtLengths, lambda: TOKENS, None),
    "curvature": (Curvature, rows, None),
    "buckets": (Biased, rows, None),
    "leaves out": (LeavesOut, rows, first_output),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: rows()[None], None),
    "recurrent": (lambda: nn.LSTM(8, 4, 2, batch_first=True), lambda: rows()[None], None),
}
