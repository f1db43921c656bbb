"""Is torch.compile correct, stable, worth it and safe for your models?

Public names are loaded on first use (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_torchcompile.cell import Cell
    from pytest_torchcompile.fixtures import StateLeakWarning
    from pytest_torchcompile.instruments import Ledger, observe
    from pytest_torchcompile.layer.config import BucketConfig
    from pytest_torchcompile.layer.shapes import ShapeStabilizer
    from pytest_torchcompile.matrix import Matrix, load_matrix

__all__ = ["BucketConfig", "Cell", "Ledger", "Matrix", "ShapeStabilizer", "StateLeakWarning", "load_matrix", "observe"]
__version__ = "0.1.0"

_EXPORTS = {
    "BucketConfig": "layer.config",
    "Cell": "cell",
    "Ledger": "instruments",
    "Matrix": "matrix",
    "ShapeStabilizer": "layer.shapes",
    "StateLeakWarning": "fixtures",
    "load_matrix": "matrix",
    "observe": "instruments",
}


def __getattr__(name: str) -> object:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
