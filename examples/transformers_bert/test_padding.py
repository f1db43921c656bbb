"""What is padded must not change a sentence's class, compiled or not."""

from __future__ import annotations

import pytest
import torch
from classifier import SentenceClassifier, sentences


@pytest.fixture
def model():
    return SentenceClassifier().eval()


@pytest.mark.compile_modes("default", backend="aot_eager")
def test_padding_changes_nothing(compiled_model):
    batch = sentences(2, 16)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][-1, 8:] = 7
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(**batch)[-1], compiled_model(**other)[-1])
