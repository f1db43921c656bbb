"""CodeReuse: comparisons of earlier runs for a cell that compiles to the same code and computes the same values.

The source of a model may be another one. What its comparisons rest on is in the key of each
(:class:`~pytest_torchcompile.oracle.known_comparisons.KnownComparisons`), and found by running the cell. The machine,
packages, variables and what is asked of the cell are compared here, as for results that are reused whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.matrix import PlannedCell
from pytest_torchcompile.reuse.cell_key import cell_folder, is_settled, machine_parts
from pytest_torchcompile.reuse.cell_reuse import CellReuse, why_always_run
from pytest_torchcompile.reuse.run_inputs import RunInputs

__all__ = ["CodeReuse", "EarlierComparisons"]

_VERSION: Final = 2
"""Of an entry's content: one of another version is not read."""


@dataclass(frozen=True)
class EarlierComparisons:
    """What earlier runs of a cell have found."""

    leaves: dict[str, Any]
    """By key, as plain data."""
    entries: tuple[dict[str, Any], ...]
    """Where they are from, the last used first."""

    def origin(self, taken: Collection[str]) -> dict[str, Any]:
        """What a report tells of the oldest run of which one of these was taken."""
        sources = [entry for entry in self.entries if not entry["comparisons"].keys().isdisjoint(taken)]
        oldest = min(sources, key=lambda entry: entry["at"])
        age = max(0, round(time.time() - oldest["at"]))
        return {**oldest["run"], "age": age, "comparisons": len(taken)}


class CodeReuse:
    """Of one process; in the store of results that are reused whole."""

    def __init__(self, results: CellReuse) -> None:
        self._results = results

    def look_up(self, planned: PlannedCell, job: Job) -> EarlierComparisons:
        """The comparisons that may be taken for a cell; none of one that always runs."""
        entries: list[dict[str, Any]] = []
        leaves: dict[str, Any] = {}
        if not why_always_run(planned, job) and not self._results.unsteady_environment():
            entries += self._valid_entries(job)
        for entry in entries:
            for key, found in entry["comparisons"].items():
                leaves.setdefault(key, found)
        return EarlierComparisons(leaves, tuple(entries))

    def _valid_entries(self, job: Job) -> Iterator[dict[str, Any]]:
        parts = machine_parts(job, os.environ)
        for entry in self._results.store.entries(_folder_of(job)):
            try:
                is_same = entry["version"] == _VERSION and entry["parts"] == parts
                if is_same and not self._results.installed_change(entry["shared"]):
                    # Read here, so that an entry that somebody has written by hand is passed over.
                    _ = entry["at"] + 0, dict(entry["comparisons"]), entry["run"]["commit"]
                    yield entry
            except (KeyError, TypeError, AttributeError, ValueError):
                continue

    def mark_used(self, earlier: EarlierComparisons, taken: Collection[str]) -> None:
        """Take note of the entries that were of use."""
        for entry in earlier.entries:
            if not entry["comparisons"].keys().isdisjoint(taken):
                self._results.store.mark_used(entry)

    def keep(self, planned: PlannedCell, job: Job, observation: Observation, made: Mapping[str, Any],
             read: list[Mapping[str, Any]]) -> str:
        """Keep the comparisons of a cell that passed. Returns why they are not kept; empty where they are."""
        if why := why_always_run(planned, job):
            return why
        if not is_settled(observation.to_dict()):
            return "a model whose runs differ is always run"
        if why := self._results.unsteady_environment():
            return why
        # Only what is installed: the project's own code may have changed, for it is compiled and compared by its
        # result.
        shared, _ = self._results.keep_shared(RunInputs.of_ranks(read))
        entry = {"version": _VERSION, "parts": machine_parts(job, os.environ), "shared": shared,
                 "comparisons": dict(made), "run": self._results.this_run(), "at": time.time()}
        if not shared or not self._results.store.keep(_folder_of(job), entry):
            return f"{self._results.store.folder} can't be written"
        return ""


def _folder_of(job: Job) -> str:
    return f"{cell_folder(job)}-code"
