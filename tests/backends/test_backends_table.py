"""The table of backends, which needs no torch, against the torch that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, installed

pytestmark = pytest.mark.needs_torch


def test_every_registered_backend_is_known():
    """A name that torch takes is in the table, or left out of it on purpose.

    A process of its own is asked: other tests register backends in this one.
    """
    program = "import torch; print(*torch.compiler.list_backends(exclude_tags=()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    registered = set(done.stdout.split())
    assert registered <= {*BACKENDS, *NOT_ALONE, *installed()}
    assert {"inductor", "aot_eager", "eager", "cudagraphs"} <= registered
