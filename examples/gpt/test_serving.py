"""What the server does with the model: batches of any length, padded to a few."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt import TinyGPT


@pytest.fixture
def model():
    return TinyGPT().eval()


@pytest.mark.compile_modes("default", backend="aot_eager", dynamic="auto")
def test_three_lengths_take_two_compiles(compiled_model, recompile_counter):
    """The second length makes the length dynamic, and the third one is free."""
    for length in (16, 32, 64):
        compiled_model(torch.randint(0, 128, (2, length)))
    assert recompile_counter.count <= 1, recompile_counter.explain()
