"""CellReuse: a cell's result of an earlier run, if its key is unchanged, and the keeping of new ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.matrix import PlannedCell
from pytest_torchcompile.reuse.cell_key import (
    cell_folder,
    is_settled,
    key_parts,
    names_lines,
    source_use,
    why_untraceable,
)
from pytest_torchcompile.reuse.machine_facts import environment_digest
from pytest_torchcompile.reuse.result_store import ResultStore
from pytest_torchcompile.reuse.run_inputs import (
    RunInputs,
    files_differ,
    installed_differ,
    modules_differ,
    places_of_names,
)
from pytest_torchcompile.run.imported import edited_since, hash_of

__all__ = ["VERSION", "CellReuse", "EarlierResult", "why_always_run"]

VERSION: Final = 1
"""Of an entry's content: one of another version is not read."""
_TIMED: Final = "worth"
_SHARED: Final = ("installed", "names")
"""What the inputs of most cells have in common, and a file of its own holds."""


@dataclass(frozen=True)
class EarlierResult:
    """What an earlier run observed."""

    observation: Observation
    seconds: float
    """Wall seconds that the cell took then."""
    origin: dict[str, Any]
    """``run`` (when that run began), ``commit`` (None without git), ``changed`` (files differed from the commit), and
    ``age`` (seconds since the cell ran)."""


def why_always_run(planned: PlannedCell, job: Job) -> str:
    """Why a cell is run each time, whatever is unchanged; empty for one that need not be."""
    if planned.outcome != "run":
        return f"a cell with a rule `{planned.outcome}` always runs"
    if _TIMED in job.checks:
        return f"a cell that is timed (check {_TIMED}) always runs"
    return ""


class CellReuse:
    """Of one process. ``describe_run`` gives ``run``, ``commit`` and ``changed``; it is called when first needed."""

    def __init__(self, folder: Path, describe_run: Callable[[], dict[str, Any]]) -> None:
        self.store = ResultStore(folder)
        self._describe_run = describe_run
        self._run: dict[str, Any] | None = None
        self._variables = dict(os.environ)
        self._same_installed: dict[str, str] = {}

    def look_up(self, planned: PlannedCell, job: Job) -> EarlierResult | str:
        """The result of an earlier run that still holds; or why there is none, in words."""
        if why := why_always_run(planned, job):
            return why
        if not self._environment_is_steady():
            return "the environment variables changed while pytest ran"
        reason = ""
        for entry in self.store.entries(cell_folder(job)):
            try:
                changed = self._what_changed(entry, job)
                if not changed:
                    self.store.mark_used(entry)
                    return _earlier_result(entry, Path(job.root))
            # What another version has written, or somebody by hand.
            except (KeyError, TypeError, AttributeError, ValueError):
                continue
            reason = reason or changed
        return reason or "no result of it is kept"

    def _what_changed(self, entry: Mapping[str, Any], job: Job) -> str:
        """What is not as it was when the entry was made; empty where all is."""
        if entry["version"] != VERSION:
            return "the kept result is of another version"
        shared = self.store.read_list(entry["shared"])
        if shared is None:
            return "a part of the kept result is gone"
        root = Path(job.root)
        inputs = RunInputs.from_dict({**entry["inputs"], **shared})
        if elsewhere := modules_differ(inputs, root):
            return elsewhere
        try:
            use = source_use(inputs, job, entry["whole_text"])
        except (OSError, SyntaxError, ValueError) as error:
            return f"the code of its model can't be read: {error}"
        now, then = key_parts(job, use, os.environ), entry["parts"]
        for part in {**then, **now}:
            if now.get(part) != then.get(part):
                return f"{part} changed"
        if file := self._installed_differ(entry["shared"], inputs):
            return f"{file} changed"
        if file := files_differ(inputs, root):
            return f"{file} changed"
        return ""

    def _installed_differ(self, name: str, inputs: RunInputs) -> str:
        # Thousands of files, which most cells have in common.
        if name not in self._same_installed:
            self._same_installed[name] = installed_differ(inputs.installed)
        return self._same_installed[name]

    def keep(
        self, planned: PlannedCell, job: Job, observation: Observation, seconds: float, read: list[Mapping[str, Any]]
    ) -> str:
        """Keep what a run observed of a cell that passed. ``read``: what each of its ranks told of what it read.

        Returns why it is not kept; empty where it is.
        """
        root = Path(job.root)
        if why := why_always_run(planned, job):
            return why
        content = observation.to_dict()
        if not is_settled(content):
            return "a model whose runs differ is always run"
        if not self._environment_is_steady():
            return "the environment variables changed while pytest ran"
        inputs = RunInputs.of_ranks(read)
        inputs.places = places_of_names(inputs, root)
        if edited_since(root, observation.sources or {}):
            return "its code was edited while it ran"
        whole_text = names_lines(content)
        try:
            use = source_use(inputs, job, whole_text)
        except (OSError, SyntaxError, ValueError) as error:
            return f"the code of its model can't be read: {error}"
        if why := modules_differ(inputs, root) or why_untraceable(inputs, use, job):
            return why
        told = inputs.to_dict()
        shared = self.store.keep_list({name: told.pop(name) for name in _SHARED})
        entry = {
            "version": VERSION,
            "inputs": told,
            "shared": shared,
            "whole_text": whole_text,
            "parts": key_parts(job, use, os.environ),
            "observation": content,
            "seconds": seconds,
            "run": self._this_run(),
            "at": time.time(),
        }
        if not shared or not self.store.keep(cell_folder(job), entry):
            return f"{self.store.folder} can't be written"
        return ""

    def _this_run(self) -> dict[str, Any]:
        if self._run is None:
            self._run = self._describe_run()
        return self._run

    def _environment_is_steady(self) -> bool:
        """Rank processes have the variables of when they were started."""
        return environment_digest(os.environ, ()) == environment_digest(self._variables, ())


def _earlier_result(entry: Mapping[str, Any], root: Path) -> EarlierResult:
    observation = Observation.from_dict(entry["observation"])
    # Comments may be others: the report tells the files on which the verdict rests as they are now.
    observation.sources = {name: hash_of(root / name) for name in observation.sources or {}}
    age = max(0, round(time.time() - entry["at"]))
    return EarlierResult(observation, float(entry["seconds"]), {**entry["run"], "age": age})
