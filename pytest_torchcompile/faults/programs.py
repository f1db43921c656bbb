"""The models that faults are planted in: small, and each with something that compilers get wrong."""

# ruff: noqa: N803 -- dims have capital letters
# ruff: noqa: D102 -- the class says what its forward does
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, nn

from pytest_torchcompile.faults.fault_parts import Program

__all__ = [
    "ATTENTION", "CONVOLUTION", "DROPPING", "FUSED", "HALF_PERCEPTRON", "INTEGERS", "NAMED", "NORMS", "PERCEPTRON",
    "POINTWISE", "REDUCTIONS", "THREE_SIZES", "TIED", "TOKENS", "TWO_BATCHES", "VIEWS", "Attention", "Casts",
    "Convolution", "Dropping", "GroupUp", "Peak", "Perceptron", "Pointwise", "Reductions", "Shares", "Tiny", "Writes",
    "images", "large_rows", "rows", "rows_and_cache", "rows_and_one_of_them", "rows_without_gradient", "sequences",
    "turned_rows", "whole_rows",
]  # fmt: skip


class Perceptron(nn.Module):
    """Three layers. (B, 12) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Any:
        return self.c(F.gelu(self.b(torch.tanh(self.a(x)))))


class Tied(nn.Module):
    """One weight used twice, so that its gradient has two terms; a second one is frozen. (B, 12) -> (B, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 12) / 3)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.w) @ self.w + self.frozen


class Pointwise(nn.Module):
    """What is computed element by element. (B, 12) -> (B, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Any:
        y = (x - self.shift) * 0.7
        bell = torch.exp(-y.square()) / torch.sqrt(y.square() + 0.5)
        return bell + torch.log(y.abs() + 1.5) * torch.sigmoid(y) + F.silu(x)


class Tiny(nn.Module):
    """log1p and expm1 of small numbers: what they are there for. (B, 12) -> (B, 12)."""

    def forward(self, x: Tensor) -> Any:
        return torch.log1p(x.square() * 1e-6) + torch.expm1(x.abs() * 1e-5)


class Attention(nn.Module):
    """Causal attention in its parts. (B, 6, 12) -> (B, 6, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * 12**-0.5
        future = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1) > 0
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ self.v(x)


class Fused(nn.Module):
    """Causal attention as one operator. (B, 6, 12) -> (B, 6, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Norms(nn.Module):
    """Layer norm, then root mean square. (B, 12) -> (B, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(12), nn.Parameter(1 + torch.randn(12) / 10)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x) + x
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * self.scale


class Convolution(nn.Module):
    """Convolution without bias, batch norm, relu, pooling, in channels_last. (B, 4, 8, 8) -> (B, 8, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        return F.max_pool2d(self.norm(self.conv(x)) - 1.0, 2)


class Dropping(nn.Module):
    """Dropout between two layers. (B, 12) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class Reductions(nn.Module):
    """Sums of many numbers. (B, 300) -> (B,) five times."""

    def forward(self, x: Tensor) -> Any:
        return {"sum": x.sum(-1), "mean": x.mean(-1), "var": x.var(-1), "lse": x.logsumexp(-1),
                "running": x.cumsum(-1)[:, -1]}


class Peak(nn.Module):
    """Softmax' first half: where a maximum is stored rounded and its operand computed anew, nothing equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(1 + 0.1 * torch.randn(64))

    def forward(self, x: Tensor) -> Any:
        y = x * self.w
        return (y - y.amax(-1, keepdim=True)).exp()


class GroupUp(nn.Module):
    """Group norm and upsampling: PyTorch's group norm backward mixes memory formats up. (B, 16, 10, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Any:
        return F.interpolate(F.softplus(self.norm(x)), scale_factor=2, mode="nearest")


class Tokens(nn.Module):
    """An embedding in which tokens occur more than once, and a sum by token. (B, 6) ids -> (B, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)

    def forward(self, ids: Tensor) -> Any:
        counts = torch.zeros(10, 12, device=ids.device, dtype=self.table.weight.dtype)
        return self.table(ids).mean(1) + counts.index_add(0, ids[:, 0], self.table(ids[:, -1]))[ids[:, -1]]


class Integers(nn.Module):
    """Whole numbers, which nothing rounds. (B, 6) int64 and (B, 6) floats."""

    def forward(self, n: Tensor, x: Tensor) -> Any:
        return {"floor": n.div(3, rounding_mode="floor"), "best": x.argmax(-1), "less": n < n.flip(-1),
                "sum": (n * 1_000_000_000).sum(-1), "count": 3, "last": x[:, -1], "sign": torch.sign(n)}


class Named(nn.Module):
    """A dictionary of two floats of one shape, one of them without gradient, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return {"y": y, "z": self.b(x), "still": y.detach().clone(), "n": 3}


class Views(nn.Module):
    """Outputs that share memory with the input and with each other, and one that shares none."""

    def forward(self, x: Tensor) -> Any:
        y = x * 2
        return {"part": x[1:], "whole": y, "turned": y.t(), "own": x.clone(), "wide": y[:1].expand(3, -1)}


class Writes(nn.Module):
    """Writes to its second argument and to two buffers. (B, 12), (5, 12) -> (B, 12)."""

    seen: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.randn(12))

    def forward(self, x: Tensor, cache: Tensor) -> Any:
        cache.mul_(0.5)
        self.seen.add_(1)
        self.average.lerp_(x.detach().mean(0), 0.1)
        return x * cache.sum(0) + self.average


class Shares(nn.Module):
    """Writes to an argument that shares its memory with the other one. (B, 12) and a row of it -> (B, 12)."""

    def forward(self, x: Tensor, row: Tensor) -> Any:
        x.mul_(2)
        return x + row


class Casts(nn.Module):
    """One layer under autocast, one outside. (B, 12) -> (B, 24) in bfloat16, (B, 6) in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(x)
        return y, self.b(y.float())


def rows(B: int, width: int = 12) -> Tensor:
    """Standard normal rows, (B, width), that want a gradient."""
    return torch.randn(B, width).requires_grad_()


def rows_without_gradient(B: int, width: int = 12) -> Tensor:
    """Standard normal rows, (B, width)."""
    return torch.randn(B, width)


def turned_rows(B: int, turned: int) -> Tensor:
    """Rows, (B, 12); if turned, as the transpose of a matrix of 12 rows."""
    if turned:
        return torch.randn(12, B).t().requires_grad_()
    return torch.randn(B, 12).requires_grad_()


def rows_and_one_of_them(B: int) -> tuple[Tensor, Tensor]:
    """Rows, and the third of them: a view."""
    x = torch.randn(B, 12)
    return x, x[2]


def large_rows(B: int) -> Tensor:
    """Rows of numbers around 1000, (B, 12)."""
    return (torch.randn(B, 12) * 1000).requires_grad_()


def whole_rows(B: int) -> Tensor:
    """Rows of whole numbers, of which several are equal, (B, 12)."""
    return torch.randn(B, 12).round().requires_grad_()


def sequences(B: int, S: int = 6, scale: int = 1) -> Tensor:
    """Sequences of vectors, (B, S, 12)."""
    return (torch.randn(B, S, 12) * scale).requires_grad_()


def images(B: int, C: int = 4, H: int = 8, last: int = 1) -> Tensor:
    """Images, (B, C, H, H), in channels_last if ``last``."""
    drawn = torch.randn(B, C, H, H)
    if last:
        drawn = drawn.to(memory_format=torch.channels_last)
    return drawn.requires_grad_()


def token_ids(B: int) -> Tensor:
    """Ids of ten tokens, (B, 6)."""
    return torch.randint(10, (B, 6))


def integers(B: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from -9 to 9 and floats, both (B, 6)."""
    return torch.randint(-9, 10, (B, 6)), torch.randn(B, 6)


def rows_and_cache(B: int) -> tuple[Tensor, Tensor]:
    """Rows, and a cache that the model writes to."""
    return rows(B), torch.randn(5, 12)


# The programs that several files of faults share. What only one of them needs stands there.
PERCEPTRON = Program(Perceptron, rows)
HALF_PERCEPTRON = Program(Perceptron, rows, dtype=torch.bfloat16)
# A second size makes torch compile anew, with symbolic sizes; the third one reuses that graph.
THREE_SIZES = Program(Perceptron, rows, ({"B": 4}, {"B": 7}, {"B": 6}))
TWO_BATCHES = Program(Perceptron, rows, ({"B": 8}, {"B": 8}))
POINTWISE = Program(Pointwise, rows)
TIED = Program(Tied, rows)
NAMED = Program(Named, rows)
VIEWS = Program(Views, rows)
NORMS = Program(Norms, rows)
ATTENTION = Program(Attention, sequences, ({"B": 2},))
FUSED = Program(Fused, sequences, ({"B": 2},))
CONVOLUTION = Program(Convolution, images, ({"B": 4},))
# With fewer rows two masks could be equal by chance.
DROPPING = Program(Dropping, rows, ({"B": 32},))
# Sums of 12 numbers would be rounded too little for any order of theirs to show.
REDUCTIONS = Program(Reductions, rows, ({"B": 4, "width": 300},))
TOKENS = Program(Tokens, token_ids)
INTEGERS = Program(Integers, integers)
