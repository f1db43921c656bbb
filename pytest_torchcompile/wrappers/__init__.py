"""WRAPPERS: how a model is wrapped or made parallel before it is compiled.

To add one: a file in this folder, and its line here. A wrapper of your own needs no line: name it
``module:attribute`` in the matrix.
"""

from __future__ import annotations

from typing import Final

__all__ = ["WRAPPERS"]

WRAPPERS: Final[dict[str, str]] = {
    "none": "pytest_torchcompile.wrappers.none:NONE",
    "autocast": "pytest_torchcompile.wrappers.autocast:AUTOCAST",
    "checkpoint": "pytest_torchcompile.wrappers.checkpoint:CHECKPOINT",
    "regional": "pytest_torchcompile.wrappers.regional:REGIONAL",
}
"""Name in a matrix to where the wrapper is; loaded in the rank process that needs it."""
