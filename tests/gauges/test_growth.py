"""What each further call leaves behind: a leak is seen, and what is freed is not taken for one."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.gauges.memory import memory_growth

pytestmark = pytest.mark.needs_torch
MIB = 2**20


def test_a_leak_is_measured():
    """Four MiB stay with every call."""
    kept = []
    assert memory_growth(lambda: kept.append(torch.ones(MIB)), calls=2) == 4 * MIB


def test_what_is_freed_is_no_leak():
    """Four MiB are used by every call, and what the first calls keep is not counted either."""
    cache = {}

    def call():
        cache.setdefault("table", torch.ones(4 * MIB))
        torch.ones(MIB).sum()

    assert memory_growth(call, calls=2) == 0
