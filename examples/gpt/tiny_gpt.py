"""A GPT of two blocks: what a training job and a server would import."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, time, width) to the same."""
        batch, time, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_forward(self.before_forward(x))


class TinyGPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, vocabulary: int = 128, width: int = 32, heads: int = 4, blocks: int = 2, longest: int = 64,
                 ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.end = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """From (batch, time) to (batch, time, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return self.end(x) @ self.tokens.weight.T
