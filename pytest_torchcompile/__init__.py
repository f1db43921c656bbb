"""Is torch.compile correct, stable, worth it and safe for your models?

Public names are loaded on first use (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_torchcompile.cell import Cell as Cell
    from pytest_torchcompile.matrix import Matrix as Matrix
    from pytest_torchcompile.matrix import load_matrix as load_matrix

__version__ = "0.1.0"

_EXPORTS = {
    "Cell": "cell",
    "Matrix": "matrix",
    "load_matrix": "matrix",
}
__all__ = [*sorted(_EXPORTS)]  # noqa: PLE0605 -- a list, if not a literal one


def __getattr__(name: str) -> object:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
