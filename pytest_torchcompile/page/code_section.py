"""Generated code: how many graphs and kernels are others than in the baseline, and what differs in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.page.markup import Html, cut, tag
from pytest_torchcompile.report.code_changes import (
    SHOWN_CHANGES,
    CodeChanges,
    CodeStore,
    change_difference,
    change_summary,
    change_title,
    compare_code,
)
from pytest_torchcompile.report.merging import Merged

__all__ = ["code_section"]

_MOST: Final = 100
"""Changes that are listed."""


def code_section(now: Merged, before: Merged | None, stores: tuple[CodeStore, CodeStore] | None = None) -> Html | None:
    """None without a baseline, and where no cell of both has recorded its code.

    :param stores: where the code of the baseline and of this run is kept; None shows no difference.
    """
    if before is None:
        return None
    found = compare_code(before.cells.values(), now.cells.values())
    if not found.compared:
        return None
    changes = tag("ul", list(_changes(found, stores))) if found.changes else None
    return tag("section", tag("h2", "Generated code"), tag("p", change_summary(found), " since the baseline."), changes,
               class_="code-changes")


def _changes(found: CodeChanges, stores: tuple[CodeStore, CodeStore] | None) -> Iterator[Html]:
    for number, change in enumerate(found.changes[:_MOST]):
        title = change_title(change)
        if stores is None or number >= SHOWN_CHANGES:
            yield tag("li", title)
            continue
        difference = cut("\n".join(change_difference(change, *stores)))
        yield tag("li", tag("details", tag("summary", title), tag("pre", difference)))
    if len(found.changes) > _MOST:
        yield tag("li", f"and {len(found.changes) - _MOST} more; pytest-torchcompile code has all of them")
