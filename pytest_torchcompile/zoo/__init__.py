"""The models that ``matrix/default.yaml`` runs: small, deterministic, each hard to compile in its own way.

A factory returns a new module in float32 on the CPU, an inputs function one batch; both draw from torch's
global generator, so whoever calls them seeds it. Sizes are as small as keeps the shape of the real thing,
because each kernel that Inductor writes costs most of a second of g++.
"""

# mypy: disable-error-code="no-any-return"
# (what a module returns when called is Any to a type checker)
from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pytest_torchcompile.errors import Unavailable

__all__ = [
    "annotated_head", "conv_net", "conv_net_aligned", "encoder", "feed_forward", "image_batch", "lm_loss", "mini_gpt",
    "mini_gpt_aligned", "moe_lite", "padded_batch", "residual_outside", "tiny_head", "token_batch", "triton_op",
    "vector_batch",
]

VOCABULARY = 97
LONGEST = 128


# ------------------------------------------------------------------------------------------------ tiny_head
class TinyHead(nn.Module):
    """A classifier's last layer: a product and a softmax over many classes. (B, hidden) -> (B, classes)."""

    tp_plan: ClassVar = {"linear": "colwise_gather"}

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(dim=-1)


def tiny_head(hidden: int = 64, classes: int = 600) -> nn.Module:
    """One linear layer and a softmax: the least that is worth compiling."""
    return TinyHead(hidden, classes)


class AnnotatedHead(TinyHead):
    """The same with its softmax annotated for ``compiler: regional_inductor``.

    ``torch.fx.traceback.annotate`` and what reads it are of torch 2.10 and newer.
    """

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x)
        with torch.fx.traceback.annotate({"compile_with_inductor": {}}):
            return logits.softmax(dim=-1)


def annotated_head(hidden: int = 64, classes: int = 600) -> nn.Module:
    """:func:`tiny_head` with a region for Inductor, in a graph that is torch's operators else."""
    return AnnotatedHead(hidden, classes)


# ------------------------------------------------------------------------------------------------- mini_gpt
class Attention(nn.Module):
    """Multi-head self-attention through ``scaled_dot_product_attention``; causal unless given a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block. (B, S, width) -> (B, S, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class MiniGPT(nn.Module):
    """A decoder: token ids (B, S) -> logits (B, S, vocabulary)."""

    tp_plan: ClassVar = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def stage(self, index: int, count: int) -> nn.Module:
        """Part ``index`` of ``count`` of a pipeline: an equal share of the blocks, and what is before or after them."""
        return GPTStage(self, index, count)


class GPTStage(nn.Module):
    """A part of a :class:`MiniGPT`: the first takes token ids, each other what the one before it gave."""

    def __init__(self, model: MiniGPT, index: int, count: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        # Rounded at both ends, so that all blocks are in one stage, also if they can't be shared evenly.
        share = len(model.blocks) / count
        self.blocks = nn.ModuleList(model.blocks[round(share * index):round(share * (index + 1))])
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def mini_gpt(width: int = 64, heads: int = 4, layers: int = 2) -> nn.Module:
    """A GPT of two blocks: embeddings, causal attention, and a loss over the next token (:func:`lm_loss`)."""
    return MiniGPT(width, heads, layers, VOCABULARY)


def mini_gpt_aligned(width: int = 64, heads: int = 4, layers: int = 2) -> nn.Module:
    """The same with a vocabulary padded to a multiple of 8, as one does for tensor cores."""
    return MiniGPT(width, heads, layers, -(-VOCABULARY // 8) * 8)


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy of each position's logits with the token that follows it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ------------------------------------------------------------------------------------------------- conv_net
class ConvBlock(nn.Module):
    """Convolution, batch norm and a residual. No bias: batch norm would take it out again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """An image classifier with state (batch norm) and randomness (dropout). (B, 3, H, W) -> (B, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean(dim=(2, 3))))


def conv_net(channels: int = 8) -> nn.Module:
    """Convolutions with batch norm, whose buffers a compiled forward must update, and dropout."""
    return ConvNet(channels, classes=10)


def conv_net_aligned(channels: int = 8) -> nn.Module:
    """:func:`conv_net` with 16 classes, a multiple of 8, so that Inductor does not pad its last product on a GPU."""
    return ConvNet(channels, classes=16)


# -------------------------------------------------------------------------------------------------- encoder
class Encoder(nn.Module):
    """A text classifier: token ids and attention mask, both (B, S) -> (B, 5)."""

    tp_plan: ClassVar = MiniGPT.tp_plan

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, heads)])
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.bool()
        # A row that is all padding attends to all of it: a softmax over nothing would be NaN.
        seen = real | ~real.any(dim=1, keepdim=True)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, seen[:, None, None, :])
        kept = real.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1))


def encoder(width: int = 32, heads: int = 2) -> nn.Module:
    """A padded, masked transformer block, pooled over the tokens that are none of the padding."""
    return Encoder(width, heads)


# ------------------------------------------------------------------------------------------------- moe_lite
class Expert(nn.Module):
    """Two linear layers. (tokens, width) -> (tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.silu(self.widen(x)))


class MoELite(nn.Module):
    """Two experts; each row goes to the one that a router prefers. (B, width) -> (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        # A Python branch on data: the graph ends here, on purpose.
        if (choice == 0).all():
            return x + weight.unsqueeze(-1) * self.experts[0](x)
        out = x
        # A size that only the data know: and here.
        first = (choice == 0).nonzero().squeeze(-1)
        out = out.index_add(0, first, (weight[first, None] * self.experts[0](x[first])).to(x.dtype))
        # And here.
        second = (choice == 1).nonzero().squeeze(-1)
        return out.index_add(0, second, (weight[second, None] * self.experts[1](x[second])).to(x.dtype))


def moe_lite(width: int = 32) -> nn.Module:
    """Experts with data-dependent routing: three real graph breaks, and sizes that data decide."""
    return MoELite(width)


# --------------------------------------------------------------------------------------------- feed_forward
class FeedForward(nn.Module):
    """A norm and two linear layers, with or without the residual. (tokens, width) -> (tokens, width)."""

    def __init__(self, width: int, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.narrow(F.gelu(self.widen(self.norm(x))))
        return x + out if self.residual else out


class FeedForwards(nn.Module):
    """What of a transformer is not attention, between two projections. (tokens, width) -> (tokens, width).

    Under tensor parallel a rank has its part of the tokens wherever no layer is split: sequence parallel.
    """

    tp_plan: ClassVar = {
        "first.0": "colwise", "first.1": "rowwise_sequence",
        "blocks.*.norm": "sequence", "blocks.*.widen": "colwise_sequence", "blocks.*.narrow": "rowwise_sequence",
        "last.0": "colwise_sequence", "last.1": "rowwise",
    }

    def __init__(self, width: int, layers: int, inside: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.blocks = nn.ModuleList(FeedForward(width, residual=inside) for _ in range(layers))
        self.last = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if block.residual else x + block(x)
        return self.last(x)


def feed_forward(width: int = 64, layers: int = 1) -> nn.Module:
    """A transformer without attention, for sequence parallel: between split layers the ranks share the tokens."""
    return FeedForwards(width, layers, inside=True)


def residual_outside(width: int = 64, layers: int = 1) -> nn.Module:
    """The same function as :func:`feed_forward`, with each residual added outside of its block."""
    return FeedForwards(width, layers, inside=False)


# ------------------------------------------------------------------------------------------------ triton_op
def triton_op(device: str = "cuda") -> nn.Module:
    """A user-defined Triton kernel behind a custom op with its own gradient. (B, hidden) -> (B, hidden).

    On ``device="cpu"`` Triton's interpreter runs the kernel, which needs NumPy.
    Raises :class:`~pytest_torchcompile.errors.Unavailable` for any other device, and where what it needs is missing.
    """
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise Unavailable(f"triton_op is a Triton kernel for GPUs and CPUs, and this cell runs on {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unavailable("triton_op needs a GPU on device cuda, and torch.cuda.is_available() is false")
    # Imported, not looked for: what looks names up at run time rests on all code of a project.
    try:
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ModuleNotFoundError:
        raise Unavailable("triton_op needs Triton, which is not installed (pip install triton)") from None
    try:
        import numpy  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ModuleNotFoundError:
        if kind == "cpu":
            raise Unavailable(
                "triton_op needs NumPy on a CPU, for Triton's interpreter (pip install numpy)") from None
    from pytest_torchcompile.zoo.gated_unit import GatedUnit

    return GatedUnit()


# --------------------------------------------------------------------------------------------------- inputs
def vector_batch(B: int, hidden: int = 64) -> Tensor:  # noqa: N803
    """Rows of standard normal numbers, (B, hidden), float32; they want a gradient."""
    return torch.randn(B, hidden).requires_grad_()


def token_batch(B: int, S: int) -> Tensor:  # noqa: N803
    """Token ids, (B, S), int64."""
    return torch.randint(VOCABULARY, (B, S))


def image_batch(B: int, H: int = 16, W: int = 20) -> Tensor:  # noqa: N803
    """Images of three channels, (B, 3, H, W), float32; they want a gradient."""
    return torch.randn(B, 3, H, W).requires_grad_()


def padded_batch(B: int, S: int) -> dict[str, Tensor]:  # noqa: N803
    """Token ids and attention mask, both (B, S), int64: the first row is full, the last is all padding."""
    # From full length down to nothing: both ends are special cases of attention masks.
    lengths = torch.tensor([S * (B - 1 - row) // max(B - 1, 1) for row in range(B)])
    mask = torch.arange(S)[None, :] < lengths[:, None]
    return {"ids": torch.randint(VOCABULARY, (B, S)) * mask, "attention_mask": mask.long()}
