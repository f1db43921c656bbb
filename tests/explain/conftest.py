"""Explanations that many tests look at: each is one compile."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def head():
    """A product and a softmax, with their backward pass."""
    import torch

    from pytest_torchcompile import zoo
    from pytest_torchcompile.explain import explain

    torch.manual_seed(0)
    return explain(zoo.tiny_head(), torch.randn(4, 64), name="head")
