"""Output files of the commands."""

from __future__ import annotations

from pathlib import Path

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.report.files import replace

__all__ = ["write"]


def write(path: str | Path, text: str) -> None:
    """Write a file whole or not at all, its folder too if need be. Raises UsageError where that cannot be done."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace(Path(path), text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
