"""Programs for the process that histories run in, which imports them by name."""

from __future__ import annotations

import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.history_run import Program


class Ends(nn.Module):
    """A layer; its process ends where the input has its channels last, eagerly already."""

    def __init__(self):
        super().__init__()
        self.stem, self.rest = nn.Conv2d(4, 4, 1), nn.Sequential(nn.Tanh(), nn.Conv2d(4, 4, 1))

    def forward(self, x):
        """(B, 4, 5, 6) -> the same."""
        if not torch.compiler.is_compiling() and not x.is_contiguous():
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.rest(self.stem(x))


def ends():
    """One of them."""
    return Ends()


def images(B):
    """(B, 4, 5, 6)."""
    return torch.randn(B, 4, 5, 6)


def seeded_images(sizes, seed):
    """A batch."""
    torch.manual_seed(seed)
    return Batch.of(images(**sizes))


def wrong_where_transposed(module, example_inputs):
    """A backend whose result is off by one where an input is not contiguous."""

    def run(*arguments):
        first, *others = module(*arguments)
        inputs = [each for each in arguments if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)]
        if any(not each.is_contiguous() for each in inputs):
            first = first + 1
        return first, *others

    return run


def layers():
    """Three layers, only one of which matters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Linear(6, 6))


def ending(data):
    """The program that ends its process."""
    return Program(ends, {"backend": "eager"}, seeded_images)


def right(data):
    """A program without a fault."""
    return Program(layers, {"backend": "eager"}, seeded_images)


def wrong(data):
    """A program with a wrong backend."""
    return Program(layers, {"backend": wrong_where_transposed}, seeded_images)


def refusing(data):
    """A program that can't be made."""
    raise RuntimeError("no weights here")


def group_norm():
    """Torch 2.13 ends the process in its backward, for an image with channels last."""
    return nn.GroupNorm(2, 4)


def widening():
    """A part that an Identity does not fit in the place of, and a layer behind it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 9), nn.Tanh()), nn.LayerNorm(9))


def wrong_widening(data):
    """The same with a wrong backend."""
    return Program(widening, {"backend": wrong_where_transposed}, seeded_images)


class Shrunk(nn.Module):
    """Softshrink, which Inductor gives 0 for NaN, among operators that are right. (B, 4) -> the same."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Three operators."""
        return F.softshrink(torch.tanh(x) + self.linear(x.nan_to_num()), 0.1)


def shrunk(data):
    """The program of one of them, with the backend that the data name."""
    return of_rows(Shrunk, data["backend"])


def of_rows(kind, backend, loss=None):
    """The program of a model that takes (B, 4), with a backend."""
    def make_model():
        torch.manual_seed(0)
        return kind()

    def batch(sizes, seed):
        torch.manual_seed(seed)
        return Batch.of((torch.randn(sizes["B"], 4),))

    return Program(make_model, {"backend": backend}, batch, loss)
