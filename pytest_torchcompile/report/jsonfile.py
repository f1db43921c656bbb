"""The report file: written at once, so that a kill never leaves a part of it, and sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_torchcompile.report.files import replace
from pytest_torchcompile.report.seal import sealed
from pytest_torchcompile.report.strictjson import dumps

__all__ = ["save_whole"]


def save_whole(config: Any) -> None:
    """Have pytest-json-report write its file at once: it writes it bit by bit, and a kill would leave a part of it."""
    plugin, indent = config._json_report, config.option.json_report_indent
    plugin.save_report = lambda path: replace(Path(path), sealed(dumps(plugin.report, indent)))
