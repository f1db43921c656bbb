"""PeaksFile: where the peaks of a machine are kept (:mod:`pytest_torchcompile.gauges.machine_peaks`). No torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["PEAKS_FILE", "peaks_path"]

PEAKS_FILE: Final = "PYTEST_TORCHCOMPILE_PEAKS"
"""Environment variable: the file in which peaks are kept."""


def peaks_path() -> Path:
    """The file: as :data:`PEAKS_FILE` says, else in the user's folder for caches, else in that for temporary files."""
    named = os.environ.get(PEAKS_FILE)
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(caches) if os.access(os.path.dirname(caches) or ".", os.W_OK) else Path(tempfile.gettempdir())
    return folder / "pytest-torchcompile" / "peaks.json"
