"""First bad: which version, of those that the index has between two, is the first with a failure of an outline."""

from __future__ import annotations

import datetime
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from packaging.version import Version

from pytest_torchcompile.errors import TorchcompileError, UsageError
from pytest_torchcompile.gate.baseline import find_changes
from pytest_torchcompile.gate.gate import judge_cells
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.upgrade.bisection import Answer, FirstBad, find_first_bad
from pytest_torchcompile.upgrade.environments import Environments, Execute, PackageVersion, execute
from pytest_torchcompile.upgrade.matrix_runs import MatrixRun, progress
from pytest_torchcompile.upgrade.outline import Outline, OutlineLine

__all__ = ["FaultSearch", "versions_between"]

_AVAILABLE: Final = re.compile(r"^Available versions: (.*)$", re.MULTILINE)
_SECONDS: Final = 300
_NOT_TOLD: Final = ("skip", "not_run", "error")
"""Verdicts that say nothing of the fault."""


def versions_between(old: PackageVersion, new: PackageVersion, *, pre: bool, run: Execute = execute) -> list[str]:
    """The versions that the user's index has, from the old to the new one, both of them included.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where pip cannot tell.
    """
    # `pip index` asks whatever index the user's pip is set up for, private ones too.
    command = [sys.executable, "-m", "pip", "index", "versions", old.package, *["--pre"] * pre]
    try:
        done = run(command, _SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--bisect: `{' '.join(command)}` cannot be run: {error}") from None
    match = _AVAILABLE.search(done.stdout)
    if done.returncode or match is None:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise UsageError(f"--bisect: `{' '.join(command)}` tells no versions of {old.package}: {said}")
    first, last = Version(old.version), Version(new.version)
    found = {first, last}
    for text in match[1].split(","):
        version = Version(text.strip())
        # A build for another machine (`+cpu`) is the same version.
        if first < version < last and Version(version.public) not in found:
            found.add(Version(version.public))
    return [str(version) for version in sorted(found)]


@dataclass
class FaultSearch:
    """Bisects the failures of an outline; a version is installed and run once for all of them."""

    package: str
    environments: Environments
    old_run: Merged
    """What does not have the faults."""
    run: Callable[[str, str, Sequence[str]], MatrixRun]
    """Runs some cells: (name of the run, python, cells)."""
    cells: tuple[str, ...] = ()
    """Those of all faults that are looked for."""
    runs: dict[str, Merged | None] = field(default_factory=dict)
    """Version to its run; None where there is none."""

    def bisect(self, outline: Outline, versions: Sequence[str]) -> Outline:
        """The outline, with what was found at each line that fails."""
        faults = [line for line in outline.lines if line.fails and line.check]
        self.cells = tuple(dict.fromkeys(itertools.chain.from_iterable(line.cells for line in faults)))
        lines = []
        for line in outline.lines:
            if line in faults:
                found = find_first_bad(versions, self._question_of(line))
                line = replace(line, first_bad=in_words(self.package, found))
            lines.append(line)
        return replace(outline, lines=lines)

    def _question_of(self, fault: OutlineLine) -> Callable[[str], Answer]:
        def has_fault(version: str) -> Answer:
            run = self._run_of(version)
            return "unknown" if run is None else answer_of(fault, run, self.old_run)

        return has_fault

    def _run_of(self, version: str) -> Merged | None:
        if version not in self.runs:
            self.runs[version] = self._run_version(PackageVersion.parse(self.package, version))
        return self.runs[version]

    def _run_version(self, version: PackageVersion) -> Merged | None:
        """The run of the faults' cells; None where this version cannot be had, or judges nothing."""
        progress(f"bisect: {version.requirement}, {count(len(self.cells), 'cell')}")
        environment = None
        try:
            environment = self.environments.get(version)
            return self.run(f"bisect-{version.version}", environment.python, self.cells).merged
        # One version that cannot be installed or run must not end the search: it is passed over.
        except TorchcompileError as error:
            progress(f"bisect: {version.requirement}: cannot be told: {str(error).partition(chr(10))[0]}")
            return None
        finally:
            # Each of them takes gigabytes, and who bisects again asks other versions.
            if environment is not None and environment.was_made:
                shutil.rmtree(Path(self.environments.folder, version.name), ignore_errors=True)


def answer_of(fault: OutlineLine, run: Merged, old: Merged) -> Answer:
    """Has the run the fault, as the comparison with the old version says?

    ``yes`` where every cell of the fault has it, ``no`` where none has; else, or where a cell was not judged, it is
    unknown. A failure of the same check counts as the same fault.
    """
    today = datetime.date.today()
    now, then = judge_cells(run, Policy(), today), judge_cells(old, Policy(), today)
    # The file alone: lines move between versions of the user's own code.
    file = fault.place.rpartition(":")[0]
    faulty: set[str] = set()
    for change in find_changes(now, then, comparable=False):
        # A place has its kind where a check would have its name.
        of_check = change.check == fault.check
        of_place = change.kind == fault.check and file in ("", change.file)
        if of_check or of_place:
            faulty.update(change.cells)
    answers = set()
    for cell in fault.cells:
        verdict = "not_run"
        if cell in now:
            verdict = str(now[cell].verdicts.get(fault.check, {}).get("verdict", "not_run"))
        if verdict in _NOT_TOLD:
            return "unknown"
        answers.add(cell in faulty)
    # Some cells have it and others not: it came in two steps, or it is another fault.
    if len(answers) != 1:
        return "unknown"
    return "yes" if answers.pop() else "no"


def in_words(package: str, found: FirstBad[str]) -> str:
    """``since torch 2.12.1; 2.12.0 does not have it (2 runs)``."""
    runs = count(len(found.answers), "run")
    if not found.between:
        return f"since {package} {found.first_bad}; {found.last_good} does not have it ({runs})"
    return (f"{package} {found.last_good} does not have it and {found.first_bad} has it; between them "
            f"{', '.join(found.between)} could not be told ({runs})")
