"""The table of backends, which needs no torch, against the torch that is installed."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, installed

pytestmark = pytest.mark.needs_torch


def test_every_registered_backend_is_known():
    """A name that torch takes is in the table, or left out of it on purpose."""
    registered = set(torch.compiler.list_backends(exclude_tags=()))
    assert registered <= {*BACKENDS, *NOT_ALONE, *installed()}
    assert {"inductor", "aot_eager", "eager", "cudagraphs"} <= registered
