"""Programs that compilers compute correctly and that tolerances get wrong: what the oracle is measured on.

Each has the numerics that one kind of model is known for; the zoo's own models are in the list too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pytest_torchcompile import zoo

__all__ = ["PROGRAMS", "Program", "draw"]


class Mlp(nn.Module):
    """Linear layers between smooth activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 24))

    def forward(self, x):
        return self.layers(x)


class Edges(nn.Module):
    """relu and max pooling without a norm: gradients that jump where rounding decides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Linear(16 * 9, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.c(x.flatten(1))


class ConvNorm(nn.Module):
    """Convolutions in front of batch norms: the gradient of a bias there is nothing but rounding noise."""

    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c, self.m = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        y = F.relu(self.n(self.a(x)))
        return F.adaptive_avg_pool2d(F.silu(self.m(self.c(self.b(y)))), 2)


class Block(nn.Module):
    """A pre-norm transformer block through scaled_dot_product_attention."""

    def __init__(self, width=48, heads=4):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.one(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.two(x))


class Llama(nn.Module):
    """RMS norm with a cast to float32, rotary embedding, attention written out, gated layers, two outputs."""

    def __init__(self, width=48, heads=4, words=64):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(words, width)
        self.w1, self.w2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down, self.head = nn.Linear(2 * width, width, bias=False), nn.Linear(width, words, bias=False)

    def norm(self, x, w):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * w

    def turn(self, t):
        half = t.shape[-1] // 2
        positions = torch.arange(t.shape[-2], dtype=torch.float32, device=t.device)
        angles = positions[:, None] / (1e4 ** (torch.arange(half, dtype=torch.float32, device=t.device) / half))
        cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
        x, y = t[..., :half], t[..., half:]
        return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)

    def forward(self, ids):
        x = self.embed(ids)
        rows, length, width = x.shape
        y = self.norm(x, self.w1)
        q, k, v = (
            layer(y).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = (self.turn(q) @ self.turn(k).transpose(-1, -2)) / math.sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(later, float("-inf"))
        x = x + self.o((weights.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))
        y = self.norm(x, self.w2)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return {"logits": self.head(x), "hidden": x}


class LanguageLoss(nn.Module):
    """Embedding, tied head, cross entropy: one number comes out, the gradients matter."""

    def __init__(self):
        super().__init__()
        self.embed, self.f = nn.Embedding(80, 32), nn.Linear(32, 32)

    def forward(self, ids, targets):
        logits = F.gelu(self.f(self.embed(ids))) @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """A gated recurrence of twelve steps: rounding feeds back."""

    def __init__(self, width=24):
        super().__init__()
        self.i, self.h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x):
        h = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        states = []
        for t in range(x.shape[1]):
            a, b = self.i(x[:, t]).chunk(3, -1), self.h(h).chunk(3, -1)
            z, r = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            h = (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h
            states.append(h)
        return torch.stack(states, 1), h


class Cancels(nn.Module):
    """Cancellation on purpose: centred moments, a variance as a difference, sums from both ends."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self, x):
        y = x * self.w + 8.0
        moment = (y - y.mean(-1, keepdim=True)).pow(3).mean(-1)
        variance = y.pow(2).mean(-1) - y.mean(-1).pow(2)
        peak = y.logsumexp(-1) - y.max(-1).values  # not amax: Inductor 2.13 has its gradient wrong in half precision
        return moment, variance, peak, y.cumsum(-1) - y.flip(-1).cumsum(-1)


class Router(nn.Module):
    """The best two of six experts, and an argmax: discrete decisions near ties."""

    def __init__(self, width=32, experts=6):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.w = nn.Parameter(torch.empty(experts, width, width))

    def forward(self, x):
        value, index = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.einsum("td,edf->tef", x, self.w)
        y = y.gather(1, index[..., None].expand(-1, -1, y.shape[-1]))
        return (y * value[..., None]).sum(1), index, y.sum(1).argmax(-1)


class GroupUp(nn.Module):
    """Group norm, enlarged."""

    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.b = nn.Conv2d(16, 4, 3, padding=1, stride=2)

    def forward(self, x):
        return self.b(F.interpolate(F.softplus(self.n(self.a(x))), scale_factor=2, mode="nearest"))


class Writes(nn.Module):
    """Writes to an input, to buffers and to an attribute; returns a view of an input."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(16))
        self.states = [torch.zeros(16)]

    def forward(self, x, cache):
        y = self.f(x)
        cache[:, 1:3] = y.detach()[:, :2]
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
            self.steps += 1
            self.states[0] = self.states[0].to(y) * 0.5 + y.detach().mean((0, 1))
        return y.exp() / (1 + y.exp()), cache[:, 0], y.detach() > 0


class WideRange(nn.Module):
    """Six orders of magnitude in one tensor; logits with a mask of -1e4."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(32, 32)

    def forward(self, x):
        y = self.f(x)
        scale = torch.linspace(-6, 1, 32, dtype=torch.float32, device=y.device).exp().to(y.dtype)
        masked = y.masked_fill(torch.ones(16, 32, dtype=torch.bool, device=y.device).triu(12), -1e4)
        return torch.exp(3 * y) * scale, F.log_softmax(8 * y, -1), masked * 1.1


class Chances(nn.Module):
    """Dropout, uniform noise and a Bernoulli gate."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = F.dropout(F.relu(self.a(x)), 0.25, True)
        y = y + 0.1 * torch.rand_like(y)
        return self.b(y) * torch.bernoulli(torch.full((x.shape[0], 16), 0.5, dtype=y.dtype))


class Autocast(nn.Module):
    """A convolution, a norm and an attention under a bfloat16 autocast."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(48, 20)

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.head(self.block(x))
        return y.float().log_softmax(-1)


class Mixed(nn.Module):
    """Linear layers in the model's dtype, an accurate part in float32 beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        energy = (x.float().square().sum(-1) + 1).log()
        return self.b(y), energy, torch.softmax(y.float() * energy[:, None], -1)


@dataclass(frozen=True)
class Program:
    """A model, what it is called with, and its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


def _rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).requires_grad_()


def _ids(words: int, *shape: int) -> Tensor:
    return torch.randint(words, shape)


PROGRAMS: dict[str, Program] = {
    "mlp": Program(Mlp, _rows(16, 48)),
    "edges": Program(Edges, _rows(4, 3, 12, 12)),
    "conv_norm": Program(ConvNorm, _rows(4, 3, 12, 12)),
    "block": Program(Block, _rows(2, 24, 48)),
    "llama": Program(Llama, lambda: _ids(64, 2, 20)),
    "language_loss": Program(LanguageLoss, lambda: (_ids(80, 4, 16), _ids(80, 4, 16))),
    "recurrent": Program(Recurrent, _rows(4, 12, 24)),
    "cancels": Program(Cancels, _rows(16, 64)),
    "router": Program(Router, _rows(64, 32)),
    "group_up": Program(GroupUp, _rows(2, 8, 10, 10)),
    "writes": Program(Writes, lambda: (torch.randn(4, 6, 16).requires_grad_(), torch.randn(4, 5, 16))),
    "wide_range": Program(WideRange, _rows(16, 32)),
    "chances": Program(Chances, _rows(16, 32)),
    "autocast": Program(Autocast, _rows(2, 24, 48), dtypes=("float32",)),
    "mixed": Program(Mixed, _rows(16, 48)),
    "zoo tiny_head": Program(zoo.tiny_head, lambda: zoo.vector_batch(4)),
    "zoo mini_gpt": Program(zoo.mini_gpt, lambda: zoo.token_batch(2, 16), zoo.lm_loss),
    "zoo conv_net": Program(zoo.conv_net, lambda: zoo.image_batch(4)),
    "zoo encoder": Program(zoo.encoder, lambda: zoo.padded_batch(3, 12)),
    "zoo moe_lite": Program(zoo.moe_lite, lambda: zoo.vector_batch(16, 32)),
}


def draw(module: nn.Module, seed: int) -> None:
    """New parameters and fresh buffers in place, so that one compiled graph serves all seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                p.copy_(values / math.sqrt(max(1, p[0].numel() if p.dim() != 3 else p.shape[1])))
            else:
                p.copy_((0 if "bias" in name else 1) + 0.1 * values)
        for name, buffer in module.named_buffers():
            buffer.fill_(1 if "var" in name else 0)
