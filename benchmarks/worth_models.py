"""Models for benchmarks/worth_cuda.yaml: one for each cause why compiling does not pay, and one that it pays for."""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor, nn

__all__ = ["again", "copying", "healthy", "numbers", "outside", "product", "reading", "sleeping", "sorting", "tiny"]

_STEPS = itertools.count(1)


@torch._dynamo.disable
def _next_step() -> int:
    return next(_STEPS) % 300 + 1


class Healthy(nn.Module):
    """A long row of cheap operators: one kernel instead of twelve."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x * 1.5).relu()
        return x


class Outside(nn.Module):
    """Compiles two operators, and leaves twelve to eager."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(x) * 2)

    @torch._dynamo.disable
    def rest(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.sin(x)
        return x


class Again(nn.Module):
    """Another size in every step, for which static shapes compile again."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x.new_zeros(_next_step()).sum()


class Sorting(nn.Module):
    """Sorts: a library does it, compiled or not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=0).values


class Tiny(nn.Module):
    """Two hundred products of 8 by 8."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(200):
            x = x @ x
        return x


class Copying(nn.Module):
    """One operator on much memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Product(nn.Module):
    """One large product."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x


class Reading(nn.Module):
    """Takes a number out of a tensor in every step, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum().item()
        for _ in range(9):
            x = torch.sin(x)
        return x * scale


class Sleeping(nn.Module):
    """Loads something in forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return torch.tanh(x) * 2


def _compile_often() -> None:
    torch._dynamo.config.recompile_limit = 1000


def healthy() -> nn.Module:
    """No cause."""
    return Healthy()


def outside() -> nn.Module:
    """Little is compiled."""
    return Outside()


def again() -> nn.Module:
    """Compiles in the timed steps."""
    _compile_often()
    return Again()


def sorting() -> nn.Module:
    """As many kernels as before."""
    return Sorting()


def tiny() -> nn.Module:
    """Bound by launches."""
    return Tiny()


def copying() -> nn.Module:
    """At the memory's bandwidth."""
    return Copying()


def product() -> nn.Module:
    """At the peak of matrix products."""
    return Product()


def reading() -> nn.Module:
    """The host waits for the GPU."""
    return Reading()


def sleeping() -> nn.Module:
    """The GPU waits for Python."""
    return Sleeping()


def numbers(rows: int, width: int) -> Tensor:
    """Small random numbers, (rows, width)."""
    return torch.randn(rows, width) / width
