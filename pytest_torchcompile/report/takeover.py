"""A run of a part of the matrix, taken over into the report that is kept: nothing that it did not judge is lost.

Cells of the part replace those of the report. Where the part judged only some checks of a cell, its other verdicts
stay, with the sections of its observation that they came from. What is kept says so in the cell::

    "kept": [{"checks": ["equivalence"], "started": ..., "finished": ..., "git": {...}, "sources": "same"}]

that is: these verdicts are of an earlier run, with its time and commit. The gate judges only what is of one commit.
Pure functions of plain data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.observation import BAD, worst
from pytest_torchcompile.report.evidence import cell_fingerprint, head_fingerprint
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
    return all(cell["selected"] and set(cell["planned"]["checks"]) <= set(cell["checks"]) for cell in block["cells"])


def judged_cells(block: Mapping[str, Any]) -> list[str]:
    """Cells of which at least one verdict came."""
    return [cell["id"] for cell in block["cells"] if _verdicts(cell)]


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
    block = _block(kept[BLOCK], part[BLOCK], edited)
    content = {**part, BLOCK: block}
    if "tests" in kept and "tests" in part:
        tests = {test.get("nodeid"): test for test in (*kept["tests"], *part["tests"])}
        outcomes = Counter(str(test.get("outcome")) for test in tests.values())
        content["tests"] = list(tests.values())
        content["summary"] = {**outcomes, "total": len(tests), "collected": len(tests)}
    return content


def _block(kept: Block, part: Block, edited: bool) -> Block:
    environment = part["environment"] or kept["environment"]
    told = _told(kept, environment, edited)
    if edited:
        kept = _doubted(kept)
    news = {cell["id"]: cell for cell in part["cells"]}
    cells = [_cell(cell, news.get(cell["id"], cell), told) for cell in kept["cells"]]
    tests = _tests(kept, part, told)
    block = {
        **kept, **part, **tests, "environment": environment, "cells": cells,
        "run": {**_run(kept, part, tests["tests"]), "exit_status": _exit_status(kept, part, cells, tests["tests"])},
        "finished": part["finished"] and not _any_waits(cells),
        "gates": gate_verdicts(kept["matrix"]["checks"], cells),
    }
    return {**block, "head_sha256": head_fingerprint(block)}


def _run(kept: Block, part: Block, tests: Sequence[Block]) -> dict[str, Any]:
    """The run of the part, with what earlier runs imported and left out: whoever takes over again looks at each."""
    before, run = kept["run"] or {}, {**part["run"]}
    if "sources" in before and "sources" in run:
        run["sources"] = {**before["sources"], **run["sources"]}
    there = {test["id"] for test in tests}
    left_out = dict.fromkeys((*before.get("tests_deselected", ()), *run.pop("tests_deselected", ())))
    if names := [name for name in left_out if name not in there]:
        run["tests_deselected"] = names
    return run


def _doubted(kept: Block) -> Block:
    """The block, in which no kept verdict is of the same sources any more."""
    def doubt(before: Sequence[Block]) -> list[Block]:
        return [{**each, "sources": EDITED} if each.get("sources") == SAME else each for each in before]

    cells = [{**cell, "kept": doubt(cell["kept"])} if "kept" in cell else cell for cell in kept["cells"]]
    return {**kept, "cells": cells, "tests_kept": doubt(kept.get("tests_kept", []))}


def _tests(kept: Block, part: Block, told: Mapping[str, Any]) -> Block:
    """Tests that use our fixtures: those of the part, and behind them those that it did not run."""
    news = {test["id"] for test in part["tests"]}
    left = [test for test in kept["tests"] if test["id"] not in news]
    if judges_all_cells(part):  # then a test that was neither run nor deselected may be there no more
        left = [test for test in left if test["id"] in part["run"].get("tests_deselected", ())]
    names = [test["id"] for test in left]
    before = []
    for each in kept.get("tests_kept", []):
        if still := [name for name in each["tests"] if name in names]:
            before.append({**each, "tests": still})
    known = {name for each in before for name in each["tests"]}
    if own := [name for name in names if name not in known]:
        before.append({"tests": own, **told})
    planned = [*names, *(name for name in part["tests_planned"] if name not in names)]
    return {"tests_planned": planned, "tests": [*left, *part["tests"]], "tests_kept": before}


def _told(kept: Block, environment: Mapping[str, Any], edited: bool) -> dict[str, Any]:
    """What a verdict that is kept says of its run; the environment only where it is another one."""
    run = kept["run"] or {}
    told: dict[str, Any] = {key: run.get(key) for key in ("started", "finished", "git")}
    told["sources"] = SAME
    if "sources" not in run:
        told["sources"] = UNKNOWN
    elif edited or run.get("sources_edited"):
        told["sources"] = EDITED
    if kept["environment"] and kept["environment"] != environment:
        told["environment"] = kept["environment"]
    return told


def _cell(old: Cell, new: Cell, told: Mapping[str, Any]) -> Cell:
    judged = _verdicts(new)
    if new is old or not judged:
        return _kept(old, told)
    if not _verdicts(old) or judged >= set(old["checks"]):
        return new
    if old["planned"]["outcome"] == "xfail":
        return _kept(old, told)  # such a cell is as expected, or not, as a whole: a part of it says neither
    if not _fit_together(old, new, told):
        return new
    return _overlaid(_kept(old, told), new)


def _kept(cell: Cell, told: Mapping[str, Any]) -> Cell:
    """The cell, of which each verdict says the run that it is of."""
    before = cell.get("kept", [])
    known = {check for each in before for check in each["checks"]}
    own = sorted(set(cell["checks"]) - known)
    if not own:
        return cell
    return {**cell, "kept": [*before, {"checks": own, **told}]}


def _fit_together(old: Cell, new: Cell, told: Mapping[str, Any]) -> bool:
    """Can verdicts of two runs stand in one cell? Not where one has no result, or ran in another environment."""
    before, after = old["observation"], new["observation"]
    if not before or not after or before["failure"] or after["failure"] or "environment" in told:
        return False
    if any("environment" in each for each in (before, after, *old.get("kept", []))):
        return False
    ranks = before.get("ranks", []), after.get("ranks", [])
    if len(ranks[0]) != len(ranks[1]) or any(rank["failure"] for both in ranks for rank in both):
        return False
    return bool(old["evidence_sha256"] == cell_fingerprint(old))


def _overlaid(old: Cell, new: Cell) -> Cell:
    """The old cell, with the verdicts of the new one and the sections of its observation that they came from."""
    judged = _verdicts(new)
    observation = _sections(old["observation"], new["observation"])
    ranks = zip(old["observation"].get("ranks", []), new["observation"].get("ranks", []), strict=True)
    if merged := [_sections(before, after) for before, after in ranks]:
        observation["ranks"] = merged
    checks = {**old["checks"], **{name: new["checks"][name] for name in judged}}
    kept = []
    for each in old["kept"]:
        if left := [name for name in each["checks"] if name not in judged]:
            kept.append({**each, "checks": left})
    cell = {**new, "kept": kept, "checks": checks, "observation": observation,
            "status": worst([check["verdict"] for check in checks.values()])}
    return {**cell, "evidence_sha256": cell_fingerprint(cell)}


def _sections(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {**old, **new, "sections": {**old["sections"], **new["sections"]}}


def _verdicts(cell: Mapping[str, Any]) -> set[str]:
    return {name for name, check in cell["checks"].items() if check["verdict"] != "not_run"}


def _any_waits(cells: Sequence[Cell]) -> bool:
    return any(_waits(cell) for cell in cells)


def _waits(cell: Mapping[str, Any]) -> bool:
    return any(check["verdict"] == "not_run" for check in cell["checks"].values())


def _exit_status(kept: Block, part: Block, cells: Sequence[Cell], tests: Sequence[Block]) -> int | None:
    """The exit status that one run with these verdicts would have had.

    What an earlier run ended with for a reason that its cells do not show is not forgotten.
    """
    status: int | None = part["run"]["exit_status"]
    if status not in (0, 1):
        return status
    failed = any(check["verdict"] in BAD for cell in cells for check in cell["checks"].values())
    failed = failed or any(test["verdict"] in BAD for test in tests)
    before = (kept["run"] or {}).get("exit_status")
    shown = before == 0 or not judges_all_cells(kept) or _any_waits(kept["cells"])
    if before == 1:
        shown = shown or any(check["verdict"] in BAD for cell in kept["cells"] for check in cell["checks"].values())
        shown = shown or any(test["verdict"] in BAD for test in kept["tests"])
    if not shown:
        return before
    return 1 if failed or _any_waits(cells) else status
