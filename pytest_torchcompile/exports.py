"""Public names of a package that are loaded on first use (PEP 562), so that importing the package costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["on_first_use"]


def on_first_use(
    package: str, namespace: dict[str, Any], exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, which ``namespace`` is the globals of.

    :param exports: public name to the module below the package that holds it.
    """

    def load(name: str) -> Any:
        try:
            module = exports[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = namespace[name] = getattr(import_module(f"{package}.{module}"), name)
        return value

    return load, lambda: sorted({*namespace, *exports})
