"""Which scheduler spreads cells over workers: ours, if this pytest-xdist has what it is made of; else xdist's own.

What ours takes from inside of pytest-xdist is looked for before it is used, so that no version is refused. Seen in
pytest-xdist 3.6 to 3.8 (``xdist/scheduler/load.py``, ``xdist/workermanage.py``); none of it is a stable API.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pytest_torchcompile.plan.expansion import PlannedCell

__all__ = ["choose_scheduler", "missing_internals"]

_OF_SCHEDULER: Final = ("nodes", "node2collection", "node2pending", "pending", "log", "config", "add_node",
                        "add_node_collection", "mark_test_complete", "_check_nodes_have_same_collection")
"""What an instance of ``LoadScheduling`` has, and ``CellScheduling`` uses."""
_OF_WORKER: Final = ("send_runtest_some", "shutdown", "shutting_down")
"""What ``WorkerController`` has."""


def choose_scheduler(config: pytest.Config, log: Any, seconds: Mapping[str, float],
                     graphs: Mapping[str, Collection[str]], planned: Iterable[PlannedCell]) -> Any:
    """The scheduler of this run; where it is not ours, one line says why.

    :param seconds: what each cell took in an earlier run.
    :param graphs: the graphs that it shared with other cells then.
    """
    missing = missing_internals(config, log)
    if not missing:
        from pytest_torchcompile.plugin.scheduling import CellScheduling, cell_families

        return CellScheduling(config, log, seconds, cell_families(planned), graphs)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"note: this pytest-xdist lacks {', '.join(missing)}, of which the scheduler for cells is "
                            "made; cells are spread as by --dist loadscope, and the longest do not start first")
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it has no py.typed

    # The scope of an item is its node id up to the last `::`: its cell, which so stays whole.
    return LoadScopeScheduling(config, log)


def missing_internals(config: pytest.Config, log: Any) -> list[str]:
    """What is not there, by its name; empty where ``CellScheduling`` can work."""
    try:
        from xdist.scheduler.load import LoadScheduling  # type: ignore[import-untyped]  # it has no py.typed
        from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

        scheduler = LoadScheduling(config, log)
    # Another version may have moved it, or want other arguments.
    except (ImportError, AttributeError, TypeError) as error:
        return [f"{type(error).__name__}: {error}"]
    missing = []
    for holder, words, names in ((scheduler, "LoadScheduling", _OF_SCHEDULER),
                                 (WorkerController, "WorkerController", _OF_WORKER)):
        missing += [f"{words}.{name}" for name in names if not hasattr(holder, name)]
    return missing
