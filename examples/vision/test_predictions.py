"""Predictions do not depend on whether the network is compiled."""

from __future__ import annotations

import pytest
import torch
from tiny_resnet import channels_last, images


@pytest.fixture
def model():
    return channels_last().eval()


@pytest.mark.compile_modes("default", backend="aot_eager")
def test_classes(model, compiled_model):
    batch = images(4, 16)
    with torch.no_grad():
        assert torch.equal(compiled_model(batch).argmax(1), model(batch).argmax(1))
