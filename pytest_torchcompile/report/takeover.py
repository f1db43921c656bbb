"""A run of a part of the matrix, taken over into the report that is kept: nothing that it did not judge is lost.

Cells of the part replace those of the report. Where the part judged only some checks of a cell, its other verdicts
stay, with the sections of its observation that they came from. What is kept says so in the cell::

    "kept": [{"checks": ["equivalence"], "started": ..., "finished": ..., "git": {...}, "sources": "same"}]

that is: these verdicts are of an earlier run, with its time and commit. The gate judges only what is of one commit.
Pure functions of plain data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.observation import BAD, worst
from pytest_torchcompile.report.provenance import cell_fingerprint, head_fingerprint
from pytest_torchcompile.report.record import gate_verdicts

__all__ = ["SAME", "is_whole", "judged_cells", "judges_all_cells", "not_mergeable", "take_over"]

Block = dict[str, Any]
Cell = dict[str, Any]
BLOCK: Final = "compile_matrix"
SAME: Final = "same"
EDITED: Final = "edited"
UNKNOWN: Final = "unknown"
"""What became of the files that the run of a kept verdict had imported. Unknown: nobody told which they are."""


def is_whole(block: Mapping[str, Any]) -> bool:
    """Was all to be judged that there is? Tests that use our fixtures may have been deselected too."""
    return judges_all_cells(block) and not (block["run"] or {}).get("tests_deselected")


def judges_all_cells(block: Mapping[str, Any]) -> bool:
    """Was every check of every cell to be judged, with no ``-k``, node id or ``--compile-checks``?"""
    for cell in block["cells"]:
        # ``-k`` and ``--compile-checks`` leave out checks that the plan has.
        if not cell["selected"] or not set(cell["planned"]["checks"]) <= set(cell["checks"]):
            return False
    return True


def judged_cells(block: Mapping[str, Any]) -> list[str]:
    """Cells of which at least one verdict came."""
    return [cell["id"] for cell in block["cells"] if _judged_checks(cell)]


def not_mergeable(kept: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Why cells of the part have no place in the report that is kept; empty if they do."""
    if kept["schema_version"] != part["schema_version"]:
        return f"is of schema {kept['schema_version']}"
    if kept["matrix"] != part["matrix"]:
        return "is of another matrix"
    if kept["shard"] != part["shard"]:
        return f"is of shard {kept['shard']['index']} of {kept['shard']['of']}"
    if (kept["run"] or {}).get("plugin") != part["run"]["plugin"]:
        return "was written by another version of pytest-torchcompile"
    return ""


def take_over(kept: Mapping[str, Any], part: Mapping[str, Any], edited: bool = False) -> dict[str, Any]:
    """The content of the report with what the part judged in the place of what was there.

    Both are whole contents of report files, whose blocks :func:`not_mergeable` has nothing against. ``edited``: a file
    that earlier runs had imported is not any more as it was.
    """
    content = {**part, BLOCK: _merge_blocks(kept[BLOCK], part[BLOCK], edited)}
    if "tests" in kept and "tests" in part:
        _merge_pytest_report(content, kept["tests"], part["tests"])
    return content


def _merge_pytest_report(content: dict[str, Any], kept: Iterable[Block], part: Iterable[Block]) -> None:
    """In pytest-json-report's own part of the file, list the tests of both and count them anew."""
    tests: dict[Any, Block] = {}
    for test in (*kept, *part):
        # Of a test that is in both the result of the part counts, at the place where the test stood.
        tests[test.get("nodeid")] = test
    outcomes = Counter(str(test.get("outcome")) for test in tests.values())
    content["tests"] = list(tests.values())
    content["summary"] = {**outcomes, "total": len(tests), "collected": len(tests)}


def _merge_blocks(kept: Block, part: Block, edited: bool) -> Block:
    environment = part["environment"] or kept["environment"]
    earlier = _describe_run(kept, environment, edited)
    if edited:
        kept = _mark_as_edited(kept)
    new_cells = {cell["id"]: cell for cell in part["cells"]}
    cells = [_merge_cell(cell, new_cells.get(cell["id"], cell), earlier) for cell in kept["cells"]]
    tests = _merge_tests(kept, part, earlier)
    run = _merge_runs(kept, part, tests["tests"])
    run["exit_status"] = _exit_status(kept, part, cells, tests["tests"])
    block = {
        **kept, **part, **tests, "environment": environment, "cells": cells,
        "run": run,
        "finished": part["finished"] and not _any_verdict_missing(cells),
        "gates": gate_verdicts(kept["matrix"]["checks"], cells),
    }
    return {**block, "head_sha256": head_fingerprint(block)}


def _merge_runs(kept: Block, part: Block, tests: Sequence[Block]) -> dict[str, Any]:
    """The run of the part, with what earlier runs imported and left out: whoever takes over again looks at each."""
    before, run = kept["run"] or {}, {**part["run"]}
    if "sources" in before and "sources" in run:
        run["sources"] = {**before["sources"], **run["sources"]}
    deselected = dict.fromkeys((*before.get("tests_deselected", ()), *run.pop("tests_deselected", ())))
    # A test that was left out and has a verdict now, of whichever run, is not left out any more.
    if names := _without(deselected, _ids(tests)):
        run["tests_deselected"] = names
    return run


def _mark_as_edited(kept: Block) -> Block:
    """The block, in which no kept verdict is of the same sources any more."""
    cells = []
    for cell in kept["cells"]:
        if "kept" in cell:
            cell = {**cell, "kept": _without_same_sources(cell["kept"])}
        cells.append(cell)
    return {**kept, "cells": cells, "tests_kept": _without_same_sources(kept.get("tests_kept", []))}


def _without_same_sources(runs: Sequence[Block]) -> list[Block]:
    marked = []
    for run in runs:
        if run.get("sources") == SAME:
            run = {**run, "sources": EDITED}
        marked.append(run)
    return marked


def _merge_tests(kept: Block, part: Block, earlier: Mapping[str, Any]) -> Block:
    """Tests that use our fixtures: those that the part did not run, and behind them those of the part."""
    gone = _ids(part["tests"])
    # Where the part was of all cells, a test that was neither run nor deselected may be there no more.
    if judges_all_cells(part):
        gone |= _ids(kept["tests"]) - set(part["run"].get("tests_deselected", ()))
    left = [test for test in kept["tests"] if test["id"] not in gone]
    names = [test["id"] for test in left]
    before = kept.get("tests_kept", [])
    tests_kept = _leave_out_names(before, "tests", _names_in(before, "tests") - set(names))
    if own := _without(names, _names_in(before, "tests")):
        tests_kept.append({"tests": own, **earlier})
    planned = [*names, *_without(part["tests_planned"], set(names))]
    return {"tests_planned": planned, "tests": [*left, *part["tests"]], "tests_kept": tests_kept}


def _ids(tests: Iterable[Block]) -> set[str]:
    return {test["id"] for test in tests}


def _without(names: Iterable[str], others: Collection[str]) -> list[str]:
    return [name for name in names if name not in others]


def _names_in(runs: Iterable[Block], key: str) -> set[str]:
    """The cells, checks or tests of which earlier runs are kept, under ``key``."""
    names: set[str] = set()
    for run in runs:
        names.update(run[key])
    return names


def _leave_out_names(runs: Iterable[Block], key: str, others: Collection[str]) -> list[Block]:
    """Earlier runs, less some of the names under ``key``; a run of which none is left goes."""
    left: list[Block] = []
    for run in runs:
        if names := _without(run[key], others):
            left.append({**run, key: names})
    return left


def _describe_run(kept: Block, environment: Mapping[str, Any], edited: bool) -> dict[str, Any]:
    """What a verdict that is kept says of its run; the environment only where it is another one."""
    run = kept["run"] or {}
    description = {"started": run.get("started"), "finished": run.get("finished"), "git": run.get("git"),
                   "sources": SAME}
    # Reports of earlier versions do not tell what was imported.
    if "sources" not in run:
        description["sources"] = UNKNOWN
    elif edited or run.get("sources_edited"):
        description["sources"] = EDITED
    if kept["environment"] and kept["environment"] != environment:
        description["environment"] = kept["environment"]
    return description


def _merge_cell(old: Cell, new: Cell, earlier: Mapping[str, Any]) -> Cell:
    judged = _judged_checks(new)
    # The part had no item of this cell, or was ended before one was judged.
    if new is old or not judged:
        return _keep_cell(old, earlier)
    # Nothing of the old cell would be left.
    if not _judged_checks(old) or judged >= set(old["checks"]):
        return new
    # A cell that should fail is as expected, or not, as a whole: a part of it says neither.
    if old["planned"]["outcome"] == "xfail":
        return _keep_cell(old, earlier)
    if not _fit_together(old, new, earlier):
        return new
    return _overlay(_keep_cell(old, earlier), new)


def _keep_cell(cell: Cell, earlier: Mapping[str, Any]) -> Cell:
    """The cell, of which each verdict says the run that it is of."""
    kept = cell.get("kept", [])
    own = sorted(set(cell["checks"]) - _names_in(kept, "checks"))
    if not own:
        return cell
    return {**cell, "kept": [*kept, {"checks": own, **earlier}]}


def _fit_together(old: Cell, new: Cell, earlier: Mapping[str, Any]) -> bool:
    """Can verdicts of two runs stand in one cell? Not where one has no result, or ran in another environment."""
    before, after = old["observation"], new["observation"]
    if not before or not after or before["failure"] or after["failure"] or "environment" in earlier:
        return False
    if any("environment" in each for each in (before, after, *old.get("kept", []))):
        return False
    ranks_before, ranks_after = before.get("ranks", []), after.get("ranks", [])
    if len(ranks_before) != len(ranks_after):
        return False
    if any(rank["failure"] for rank in (*ranks_before, *ranks_after)):
        return False
    # What was damaged must not get a fingerprint that holds, as part of a cell that is put together anew.
    return bool(old["evidence_sha256"] == cell_fingerprint(old))


def _overlay(old: Cell, new: Cell) -> Cell:
    """The old cell, with the verdicts of the new one and the sections of its observation that they came from."""
    observation = _overlay_sections(old["observation"], new["observation"])
    ranks = zip(old["observation"].get("ranks", []), new["observation"].get("ranks", []), strict=True)
    if merged := [_overlay_sections(before, after) for before, after in ranks]:
        observation["ranks"] = merged
    judged = _judged_checks(new)
    checks = dict(old["checks"])
    for name in judged:
        checks[name] = new["checks"][name]
    cell = {**new, "checks": checks, "observation": observation}
    # What is older than the run says so, whichever of the two it is.
    if "reused" in old:
        cell["reused"] = old["reused"]
    cell["kept"] = _leave_out_names(old["kept"], "checks", judged)
    cell["status"] = worst(list(_verdicts([cell])))
    return {**cell, "evidence_sha256": cell_fingerprint(cell)}


def _overlay_sections(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {**old, **new, "sections": {**old["sections"], **new["sections"]}}


def _verdicts(cells: Iterable[Mapping[str, Any]], tests: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    for cell in cells:
        for check in cell["checks"].values():
            yield check["verdict"]
    for test in tests:
        yield test["verdict"]


def _judged_checks(cell: Mapping[str, Any]) -> set[str]:
    return {name for name, check in cell["checks"].items() if check["verdict"] != "not_run"}


def _any_verdict_missing(cells: Iterable[Cell]) -> bool:
    return "not_run" in _verdicts(cells)


def _any_bad(cells: Iterable[Cell], tests: Iterable[Block]) -> bool:
    return not set(BAD).isdisjoint(_verdicts(cells, tests))


def _exit_status(kept: Block, part: Block, cells: Sequence[Cell], tests: Sequence[Block]) -> int | None:
    """The exit status that one run with these verdicts would have had.

    What an earlier run ended with for a reason that its cells do not show is not forgotten.
    """
    status: int | None = part["run"]["exit_status"]
    if status not in (0, 1):
        return status
    before = (kept["run"] or {}).get("exit_status")
    # A status of 0 needs no reason. A run of a part, or one that did not come to its end, is completed by this one.
    reason_shown = before == 0 or not judges_all_cells(kept) or _any_verdict_missing(kept["cells"])
    if before == 1:
        reason_shown = reason_shown or _any_bad(kept["cells"], kept["tests"])
    if not reason_shown:
        return before
    if _any_bad(cells, tests) or _any_verdict_missing(cells):
        return 1
    return status
