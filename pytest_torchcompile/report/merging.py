"""Reports of the shards of one run, merged: every planned cell once, of one matrix, in one environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.observation import worst
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.record import merge_tests

__all__ = ["ONE_RUN", "VARYING", "Merged", "merge_reports"]

VARYING: Final = frozenset({"cores", "cpu", "platform"})
"""What may differ between shards, because hosted runners are not all alike: it changes no verdict, only speed."""
ONE_RUN: Final = frozenset({"GITHUB_RUN_ID", "CI_PIPELINE_ID", "BUILDKITE_BUILD_NUMBER"})
"""CI's numbers that all shards of a run share, also when some are run again; one with another is left from before."""


@dataclass(frozen=True)
class Merged:
    """One run."""

    reports: tuple[Report, ...]
    environment: dict[str, Any]
    matrix: dict[str, Any]
    """As the block has it."""
    cells: dict[str, dict[str, Any]]
    """By id, in the order of the plan."""
    origin: dict[str, str]
    """Cell to the file that it came from."""
    sealed: frozenset[str]
    """Files that are, to the last byte, as the run wrote them."""
    gates: dict[str, dict[str, Any]]
    git: dict[str, Any] | None
    plugin: str
    """Version of this package that wrote the reports; empty for reports of schema 1.0."""
    missing: tuple[str, ...]
    """Planned cells that no report has, or that a report has without having been asked to judge them."""
    problems: tuple[str, ...]
    """Why this is not the whole run; empty if it is."""
    notes: tuple[str, ...]
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tests that use our fixtures, by node id."""

    @property
    def unjudged(self) -> str:
        """The problem that names the missing cells; empty where none is missing."""
        return _unjudged_text(self.missing, len(self.matrix["cells_planned"]))

    @property
    def partial(self) -> bool:
        """Is this only a part of the run?"""
        return bool(self.problems)


def merge_reports(reports: Sequence[Report], varying: frozenset[str] = VARYING) -> Merged:
    """Merge the reports of all shards of one run; a run without shards is one report.

    ``varying``: keys of the environment that may differ. What is missing is told in ``problems``.
    Raises :class:`~pytest_torchcompile.errors.ReportError` for what can't be one run: another matrix, environment,
    commit or number of shards, a shard or a cell that is there twice, a cell that was not planned.
    """
    if not reports:
        raise ReportError("no report is given")
    first = reports[0]
    # Each is held against the first: what all have in common with it, they have in common with each other.
    for report in reports[1:]:
        _require_same_run(first, report)
        _require_same_sources(first, report)
    _require_each_shard_once(reports)
    environment, notes = _merge_environments(reports, varying)
    cells, origin = _collect_cells(reports)
    planned: list[str] = first.block["matrix"]["cells_planned"]
    in_order: dict[str, dict[str, Any]] = {}
    missing: list[str] = []
    for name in planned:
        if name in cells:
            in_order[name] = cells[name]
        # A report has a row for each planned cell, also for those that its run was not asked to judge.
        if name not in cells or not cells[name]["selected"]:
            missing.append(name)
    run = first.block["run"] or {}
    return Merged(
        reports=tuple(reports),
        environment=environment,
        matrix=first.block["matrix"],
        cells=in_order,
        origin=origin,
        sealed=frozenset(report.name for report in reports if report.sealed),
        gates=_merge_gates(reports),
        git=run.get("git"),
        plugin=run.get("plugin", ""),
        missing=tuple(missing),
        problems=tuple(_find_problems(reports, missing)),
        notes=notes,
        tests=merge_tests(report.block for report in reports),
    )


def _require_same_run(first: Report, other: Report) -> None:
    ours, theirs = _run_identity(first), _run_identity(other)
    for what, value in ours.items():
        if theirs[what] == value:
            continue
        # Lists of cells and whole matrices are too long to be shown.
        values = f": {value} and {theirs[what]}" if isinstance(value, (str, int)) else ""
        raise ReportError(f"{first.name} and {other.name} are not of one run: their {what} differ{values}; "
                          f"give the shards of one run, and judge each run by itself")


def _require_same_sources(first: Report, other: Report) -> None:
    """Shards may import different files, but a file that both imported has to be the same."""
    # Reports of schema 1.0 name no sources, and agree with any.
    ours, theirs = ((report.block["run"] or {}).get("sources", {}) for report in (first, other))
    differing = sorted(name for name in ours if theirs.get(name, ours[name]) != ours[name])
    if differing:
        raise ReportError(f"{first.name} and {other.name} are not of one run: they imported different contents of "
                          f"{first_names(differing)}; give the shards of one run, and judge each run by itself")


def _run_identity(report: Report) -> dict[str, Any]:
    """What all shards of one run have in common, by the words in which a difference is told."""
    run = report.block["run"] or {}
    matrix = dict(report.block["matrix"])
    # Each shard may have been started in another folder, or on another system.
    path = PurePath(matrix.pop("path").replace("\\", "/")).name
    git = run.get("git") or {}
    # Jobs of one pipeline have numbers of their own too, which may differ.
    ci = {name: number for name, number in run.get("ci", {}).items() if name in ONE_RUN}
    return {"matrix files (sha256)": matrix["sha256"], "planned cells": matrix["cells_planned"],
            "names of the matrix": path, "matrices": matrix, "numbers of shards": report.shard[1],
            "commits": git.get("commit", "unknown"),
            "states of the working tree": (git.get("changed"), git.get("diff_sha256"), git.get("untracked_sha256")),
            "CI runs": ", ".join(ci.values()), "versions of pytest-torchcompile": run.get("plugin", "unknown")}


def _require_each_shard_once(reports: Sequence[Report]) -> None:
    seen: dict[int, str] = {}
    for report in reports:
        index, of = report.shard
        if index > of:
            raise ReportError(f"{report.name}: says that it is shard {index} of {of}")
        if index in seen:
            what = f"shard {index} of {of}" if of > 1 else "the whole run"
            raise ReportError(f"{seen[index]} and {report.name} are both {what}; give each shard once")
        seen[index] = report.name


def _merge_environments(reports: Sequence[Report], varying: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The environment of them all; that of a report in which nothing ran is empty and agrees with each."""
    merged: dict[str, Any] = {}
    origin = ""
    notes = []
    for report in reports:
        for where, environment in _environments_of(report):
            # Where nothing ran no environment is known, and that agrees with each.
            if not environment:
                continue
            if not merged:
                merged, origin = environment, where
            if environment.keys() != merged.keys():
                # Not a difference in a value but in the version that wrote it, so one key is example enough.
                odd = sorted(environment.keys() ^ merged.keys())[0]
                raise ReportError(f"mixed environments: only one of {origin} and {where} tells {odd}")
            for key, theirs in environment.items():
                ours = merged[key]
                if ours == theirs:
                    continue
                text = f"{key} is {_value_text(ours)} in {origin} and {_value_text(theirs)} in {where}"
                if key not in varying:
                    raise ReportError(f"mixed environments: {text}; a verdict holds for one environment")
                notes.append(text)
    return merged, tuple(dict.fromkeys(notes))


def _environments_of(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every environment that a report tells of, and where: its own, those of kept verdicts, those of ranks."""
    yield report.name, report.block["environment"]
    for kept in report.block.get("tests_kept", ()):
        if "environment" in kept:
            yield f"an earlier run of tests of {report.name}", kept["environment"]
    for cell in report.cells:
        for kept in cell.get("kept", ()):
            if "environment" in kept:
                yield f"an earlier run of cell {cell['id']} of {report.name}", kept["environment"]
        if cell["observation"] and (own := cell["observation"].get("environment")):
            yield f"cell {cell['id']} of {report.name}", own


def _value_text(value: Any) -> str:
    if value is None:
        return "not told"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _collect_cells(reports: Sequence[Report]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The cells of all reports by id, and the file that each came from."""
    cells: dict[str, dict[str, Any]] = {}
    origin: dict[str, str] = {}
    # The gate judges each cell once, so a cell that is there twice has to be refused and not overwritten.
    for report in reports:
        planned = set(report.block["matrix"]["cells_planned"])
        for cell in report.cells:
            name = cell["id"]
            if name in cells:
                where = "twice in" if origin[name] == report.name else f"in {origin[name]} and in"
                raise ReportError(f"cell {name} is {where} {report.name}; it can be judged once only")
            if name not in planned:
                raise ReportError(f"{report.name}: cell {name} is not among the cells planned")
            cells[name], origin[name] = cell, report.name
    return cells, origin


def _merge_gates(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """A gate of the whole is the worst of the shards'; a shard in which it was not run adds nothing but that."""
    gates: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, gate in report.block["gates"].items():
            # The text of the worst verdict stays, of equal ones that of the first shard.
            known = gates.get(name)
            if known is None or worst([known["verdict"], gate["verdict"]]) != known["verdict"]:
                gates[name] = gate
    return gates


def _find_problems(reports: Sequence[Report], missing: Sequence[str]) -> Iterator[str]:
    _, of = reports[0].shard
    # Shards are counted from 1, as `--compile-shard 1/8` has them.
    absent = sorted(set(range(1, of + 1)) - {report.shard[0] for report in reports})
    if len(absent) == 1:
        yield f"shard {absent[0]} of {of} is missing"
    elif absent:
        yield f"shards {first_names(absent)} of {of} are missing"
    for report in reports:
        if report.partial:
            yield f"{report.name} is partial: {report.partial}"
    if missing:
        yield _unjudged_text(missing, len(reports[0].block["matrix"]["cells_planned"]))


def _unjudged_text(missing: Sequence[str], planned: int) -> str:
    if not missing:
        return ""
    were = "was" if len(missing) == 1 else "were"
    return f"{len(missing)} of the {count(planned, 'planned cell')} {were} not judged: {first_names(missing)}"
