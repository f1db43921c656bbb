"""What the tests of maybe_compile share."""

from __future__ import annotations

import sys

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


@pytest.fixture
def count_calls():
    """``count_calls(file, run)``: how many functions the code of a file of the layer calls while ``run()`` runs."""

    def counted(file, run):
        found = []

        def note(frame, event, argument):
            if event == "c_call" and frame.f_code.co_filename.endswith(f"layer/{file}"):
                found.append(argument)

        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        return len(found)

    return counted
