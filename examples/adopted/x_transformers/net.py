"""A small decoder of x-transformers; the library leaves sizes to its user, so that three lines make the model."""

from __future__ import annotations

from x_transformers import Decoder, TransformerWrapper


def make() -> TransformerWrapper:
    """Random weights."""
    return TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=Decoder(dim=32, depth=2, heads=2))
