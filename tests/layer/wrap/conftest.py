"""What the tests of maybe_compile share."""

from __future__ import annotations

import pytest


@pytest.fixture
def attempts(caplog):
    """The log records of maybe_compile so far, as plain data: ``attempts()``, or one key of each, ``attempts(key)``."""
    import torch

    caplog.set_level("INFO", "pytest_torchcompile")

    def found(key=None):
        records = [r.torchcompile for r in caplog.records if hasattr(r, "torchcompile")]
        return [r[key] for r in records] if key else records

    torch.compiler.reset()
    yield found
    torch.compiler.reset()
