"""Beside us: what other pytest plugins would do to the cells of a matrix, and what we do about it.

A cell is run once, in a process of its own, and each of its checks is an item that judges that run. Plugins that
repeat, time or fork items mean test functions, which run something whenever they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pytest_torchcompile.errors import UsageError

__all__ = ["TIMES_ITEMS", "is_rerun", "refuse_options"]

TIMES_ITEMS: Final = "timeout"
"""pytest-timeout, by the name of its plugin and of its marker. It would end the waiting for a cell, not the cell."""
_REFUSED: Final = {
    "forked": "--forked ends the process of an item with it, so a cell could not be run once for all of its checks; "
              "leave it out: every cell has a process of its own",
    "flake_finder_enable": "--flake-finder repeats test functions, and a check of a cell is none; leave it out, or run "
                           "the tests without --compile-matrix",
}
"""Destination of another plugin's option to why it can't go with a matrix, and what to do."""


def refuse_options(option: Callable[[str, Any], Any]) -> None:
    """Refuse what can't go with a matrix. ``option``: gives an option of the run, or the default handed to it.

    Raises :class:`~pytest_torchcompile.errors.UsageError`.
    """
    for name, text in _REFUSED.items():
        if option(name, False):
            raise UsageError(text)


def is_rerun(report: Any) -> bool:
    """Will pytest-rerunfailures run the item again? Then this report is not its last, and not its verdict."""
    return str(report.outcome) == "rerun"
