"""The command ``pytest-torchcompile upgrade``: two environments, the matrix in both by turns, one page."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_torchcompile.adoption.stale_rules import StaleRule, find_stale_rules
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plan.matrix_path import default_matrix, find_matrix, has_name_only
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.code_changes import store_of
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.safe_output import harmless_text, write_output
from pytest_torchcompile.upgrade import FOLDER_OF_UPGRADES
from pytest_torchcompile.upgrade.environments import Environment, Environments, PackageVersion, execute
from pytest_torchcompile.upgrade.first_bad import FaultSearch, versions_between
from pytest_torchcompile.upgrade.matrix_runs import MatrixRun, progress, run_matrix
from pytest_torchcompile.upgrade.outline import Outline, environment_differences, make_outline
from pytest_torchcompile.upgrade.paired_reports import compare_versions
from pytest_torchcompile.upgrade.upgrade_page import markdown, terminal_lines, upgrade_page

__all__ = ["run_command"]

_PACKAGE = "torch"


@dataclass
class _Upgrade:
    """One call of the command."""

    old: PackageVersion
    new: PackageVersion
    matrix: str
    environments: Environments
    folder: Path
    """Where runs and pages are."""
    arguments: tuple[str, ...] = ()
    """What pytest is given besides."""

    def run(self, name: str, python: str, cells: Sequence[str] = ()) -> MatrixRun:
        """Run the matrix; ``name``: of the report."""
        return run_matrix(python, self.matrix, self.folder / f"{name}.json", cells=cells,
                          arguments=self.arguments)


def run_command(given: argparse.Namespace) -> int:
    """Run both versions and write the page. Returns 0, or 1 where something is worse.

    :raises UsageError: versions or matrix are none, or an environment cannot be made.
    :raises ReportError: a run left no report.
    :raises NothingToJudge: no cell was judged with both versions.
    """
    old, new = _versions_of(given)
    if given.runs < 1:
        raise UsageError(f"--runs {given.runs}: expected 1 or more runs of each version")
    matrix = given.matrix or str(default_matrix().path)
    # Runs of another matrix stay where they are.
    stem = Path(matrix.replace(":", "-")).stem
    folder = Path(FOLDER_OF_UPGRADES, f"{old.name}..{new.version}-{stem}")
    environments = Environments(Path(given.environments or Path(FOLDER_OF_UPGRADES, "environments")).absolute())
    upgrade = _Upgrade(old, new, matrix, environments, folder, tuple(_arguments_of_pytest(given)))
    cells = len(load_matrix(_find(matrix), shown=matrix).cells)
    for wanted in dict.fromkeys((old, new)):
        progress(environments.outlook(wanted))
    chosen = ", less those that -k and -m leave out" if given.words or given.marks else ""
    progress(f"{count(cells, 'cell')} of {matrix}{chosen}, {count(2 * given.runs, 'run')}: {given.runs} of each "
             "version, in turn; the first tells how long one takes")
    if given.dry_run:
        return 0
    both = [environments.get(old), environments.get(new)]
    runs = _run_in_turn(upgrade, both, given.runs)
    old_runs = [run.merged for run in runs[0]]
    new_runs = [run.merged for run in runs[1]]
    found = compare_versions(old_runs, new_runs)
    outline = _empty_outline(upgrade, both, old_runs[0], new_runs[0])
    stale, outline.edit = _stale_rules(upgrade, *runs)
    outline = make_outline(outline, found, new_runs[0], stale, store_of(str(runs[1][0].report)))
    if given.bisect and outline.code:
        versions = versions_between(old, new, pre=given.pre, run=execute)
        search = FaultSearch(old.package, environments, old_runs[0], upgrade.run)
        outline = search.bisect(outline, versions)
    _write(outline, Path(given.output or folder), force=given.force)
    if given.json:
        print(json.dumps(outline.record(), indent=1))
    else:
        for line in terminal_lines(outline):
            print(line)
        print(f"\n{Path(given.output or folder) / 'upgrade.html'}, upgrade.md and upgrade.json written")
    return outline.code


def _versions_of(given: argparse.Namespace) -> tuple[PackageVersion, PackageVersion]:
    """The two versions that the command line names."""
    if given.package is not None:
        if given.versions:
            raise UsageError("upgrade: --package names the versions; leave out those of torch")
        name, equals, old = given.package[0].partition("==")
        if not equals:
            raise UsageError(f"--package {given.package[0]}: expected NAME==OLD NEW, such as transformers==5.20 5.23")
        return PackageVersion.parse(name, old), PackageVersion.parse(name, given.package[1])
    if len(given.versions) != 2:
        raise UsageError(f"upgrade: {count(len(given.versions), 'version')} given; expected the old and the new one, "
                         "as in `pytest-torchcompile upgrade 2.12.1 2.13.0`")
    old, new = given.versions
    return PackageVersion.parse(_PACKAGE, old), PackageVersion.parse(_PACKAGE, new)


def _arguments_of_pytest(given: argparse.Namespace) -> Iterator[str]:
    """What chooses cells and checks."""
    if given.words:
        yield from ("-k", given.words)
    if given.marks:
        yield from ("-m", given.marks)
    if given.checks:
        yield f"--compile-checks={given.checks}"


def _find(matrix: str) -> Path:
    # A shipped one is found by its name.
    return Path(matrix) if has_name_only(matrix) else find_matrix(matrix, (Path.cwd(),))


def _run_in_turn(upgrade: _Upgrade, both: Sequence[Environment], times: int) -> tuple[list[MatrixRun], list[MatrixRun]]:
    """Old, new, old, new: what slows the machine down for a while then hits both."""
    sides: tuple[list[MatrixRun], list[MatrixRun]] = ([], [])
    left = 2 * times
    for number in range(1, times + 1):
        for name, environment, side, version in (("old", both[0], sides[0], upgrade.old),
                                                 ("new", both[1], sides[1], upgrade.new)):
            side.append(upgrade.run(f"{name}-{number}", environment.python))
            left -= 1
            took = side[-1].seconds
            rest = f", about {readable_seconds(left * took)} for the {count(left, 'run')} left" if left else ""
            progress(f"{version.requirement}, run {number}: {readable_seconds(took)}{rest}")
    return sides


def _empty_outline(upgrade: _Upgrade, both: Sequence[Environment], old: Merged, new: Merged) -> Outline:
    """What is known before anything is compared."""
    environment = new.environment
    machine = (f"Python {environment.get('python')}, {environment.get('platform')}, {environment.get('cpu')}, "
               f"{environment.get('cores')} cores, {', '.join(environment.get('devices', ()))}")
    differences = environment_differences(both[0].versions, both[1].versions)
    for key in ("cuda", "driver", "compiler"):
        if old.environment.get(key) != environment.get(key):
            differences.append((key, str(old.environment.get(key) or ""), str(environment.get(key) or "")))
    return Outline(upgrade.old.package, upgrade.old.version, upgrade.new.version, upgrade.matrix, 0, (0, 0), machine,
                   differences=differences)


def _stale_rules(upgrade: _Upgrade, olds: Sequence[MatrixRun],
                 news: Sequence[MatrixRun]) -> tuple[list[StaleRule], str]:
    """The rules that no run of the new version needs, and the command that takes them out of a file of the user's."""
    shown: str = news[0].merged.matrix["path"]
    matrix = load_matrix(_find(upgrade.matrix), shown=shown)
    text = matrix.path.read_bytes().decode("utf-8-sig")
    found: list[list[StaleRule]] = []
    try:
        for old, new in itertools.product(olds, news):
            found.append(find_stale_rules(text, matrix, shown, old.merged, new.merged))
    # Rules are a help at the end of hours of runs: that they cannot be told must not cost the comparison.
    except UsageError as error:
        progress(harmless_text(str(error)))
        return [], ""
    # What one run needs and another of the same version does not is a flake, and its rule has to stay.
    stale = found[0]
    for rules in found:
        places = {rule.where for rule in rules}
        stale = [rule for rule in stale if rule.where in places]
    # The command goes by the first pair of runs, and would take out more.
    if not stale or stale != found[0] or has_name_only(shown):
        return stale, ""
    return stale, f"pytest-torchcompile accept {news[0].report} --since {olds[0].report}"


def _write(outline: Outline, folder: Path, *, force: bool) -> None:
    write_output(folder / "upgrade.html", upgrade_page(outline), force=force)
    write_output(folder / "upgrade.md", markdown(outline), force=force)
    write_output(folder / "upgrade.json", json.dumps(outline.record(), indent=1), force=force)
    sys.stdout.flush()
