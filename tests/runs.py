"""Runs made up for the tests of the gate: plan and observations go in, reports as a real run writes them come out.

Verdicts are those of the real checks, and the block is that of the real record, so that nothing contradicts itself
unless a test makes it.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pytest_torchcompile import __version__
from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.gate.judged import BAD
from pytest_torchcompile.observation import Failure, Observation
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.report.provenance import head_fingerprint
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.report.record import Record
from pytest_torchcompile.report.schema import SCHEMA_VERSION
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation
from pytest_torchcompile.wrappers.wrapping import processes_of

CHECKS = ["compiles", "graph_breaks", "recompiles"]
LIMITS = {"coverage": 1.0, "graph_breaks": 0}
ENVIRONMENT = {"torch": "2.13.0", "torch_git": "cf30", "triton": None, "python": "3.11.7", "platform": "Linux",
               "cpu": "x86_64", "cores": 2, "compiler": "g++ 12", "cuda": None, "driver": None, "devices": ["cpu"]}
BREAK = {"file": "models.py", "line": 12, "reason": "Tensor.item()", "owner": "mine", "gb_id": "gb0124",
         "hint": "don't"}

CALL = {"call": "call 1", "share": 1.0, "total": 4, "outside": 0, "sites": []}


def compiled(seconds: float = 1.0, **changes: Any) -> dict[str, Any]:
    """One compile."""
    return {"function": "Net.forward", "file": "models.py", "line": 9, "compile_id": "0/0", "kind": "first",
            "reason": "", "cause": "", "during": "call 1", "seconds": seconds, "caches": []} | changes


def recompiled(**changes: Any) -> dict[str, Any]:
    """A compile whose guards had failed."""
    return compiled(kind="recompile", cause="value", reason="self.n == 3") | changes


def stated(report: Report) -> Report:
    """The report with the fingerprint of what a test has edited in its environment, run or matrix."""
    report.block["head_sha256"] = head_fingerprint(report.block)
    return report


class Run:
    """One run; every cell is good until a test says otherwise."""

    def __init__(self, plugin: str = __version__, **axes: list[Any]) -> None:
        axes = axes or {"model": ["net", "gpt"], "backend": ["inductor", "eager"]}
        self.cells: dict[str, Cell] = {}
        for values in itertools.product(*axes.values()):
            given = {"model": "net"} | dict(zip(axes, values, strict=True))
            user = tuple((name, value) for name, value in given.items() if name not in AXES)
            cell = Cell(**{name: value for name, value in given.items() if name in AXES}, user=user)
            self.cells[cell.id] = cell
        self.planned: dict[str, dict[str, Any]] = {name: {} for name in self.cells}
        self.observations = {name: self._observation(name) for name in self.cells}
        self.environment = dict(ENVIRONMENT)
        self.plugin = plugin
        self.git: dict[str, Any] | None = None
        self.started = "2026-11-21T10:00:00+00:00"
        self.sources: dict[str, str] = {}
        self.exit_status: int | None = None
        """Of pytest; None: 1 where a cell of the shard fails, else 0."""
        self.checks = list(CHECKS)
        self.stored: dict[tuple[str, str], str] = {}
        """(cell, check) to a verdict that the report states instead of the checks'."""

    @property
    def ids(self) -> list[str]:
        return list(self.cells)

    def _observation(self, name: str) -> Observation:
        sections: dict[str, dict[str, Any]] = {
            "compiles": {"compiles": [compiled()], "graphs": [{"runs": 4}], "eager_frames": [], "lost": [],
                         "error": None, "coverage": [dict(CALL)],
                         "all_zero": [False], "eager_all_zero": [False], "seconds": 1.0},
            "graph_breaks": {"raised": None, "graphs": 1, "graph_breaks": []},
            "recompiles": {"raised": None, "graphs": 1, "recompiles": [], "sizes": 1, "special": 0, "dynamic": "auto"},
        }
        other = {"sections": json.loads(json.dumps(sections)), "failure": None, "seconds": {}, "leaks": []}
        return Observation(name, sections, seconds={"compiled": 1.0},
                           ranks=[other] * (processes_of(self.cells[name].wrapper, 1) - 1))

    def plan(self, cell: str, outcome: str, **more: Any) -> None:
        """What the matrix says of the cell."""
        self.planned[cell] = {"outcome": outcome, "reason": "known", **more}

    def breaks(self, cell: str, *found: dict[str, Any]) -> None:
        """Graph breaks were seen."""
        self.observations[cell].sections["graph_breaks"]["graph_breaks"] = [BREAK | each for each in found or ({},)]

    def recompiles(self, cell: str, count: int = 1, **changes: Any) -> None:
        """Recompiles were seen."""
        self.observations[cell].sections["recompiles"]["recompiles"] = [recompiled(**changes)] * count

    def skips(self, *cells: str, reason: str = "no GPU") -> None:
        """The machine could not run the cells."""
        for cell in cells:
            self.fails(cell, "skip", reason)

    def fails(self, cell: str, kind: str, message: str) -> None:
        """The run had no result."""
        self.observations[cell] = Observation(cell, failure=Failure(kind, message))

    def section(self, cell: str, name: str) -> dict[str, Any]:
        return self.observations[cell].sections.setdefault(name, {})

    def blocks(self, shards: int = 1) -> list[dict[str, Any]]:
        """The block of each shard: the cells dealt in turn."""
        return [self._block(index, shards) for index in range(1, shards + 1)]

    def reports(self, shards: int = 1) -> list[Report]:
        """What would be read from the files, which are not sealed."""
        return [Report(f"report-{k}.json" if shards > 1 else "report.json", json.loads(json.dumps(block)))
                for k, block in enumerate(self.blocks(shards), 1)]

    def write(self, folder: Path, shards: int = 1) -> list[str]:
        """Write the files, not sealed, and return their names."""
        paths = [folder / (f"report-{k}.json" if shards > 1 else "report.json") for k in range(1, shards + 1)]
        for path, block in zip(paths, self.blocks(shards), strict=True):
            path.write_text(json.dumps({"compile_matrix": block}))
            read_report(path)
        return [str(path) for path in paths]

    def _block(self, index: int, of: int) -> dict[str, Any]:
        mine = [name for k, name in enumerate(self.cells) if k % of == index - 1]
        record = Record({
            "schema_version": SCHEMA_VERSION,
            "run": {"plugin": self.plugin, "git": self.git, "ci": {}, "started": self.started},
            "matrix": {"path": "matrix/smoke.yaml", "sha256": "6c" * 32, "cells_planned": self.ids,
                       "checks": self.checks, "excluded": {}},
            "shard": {"index": index, "of": of},
            "cells": [{"id": name, "axes": self.cells[name].axes, "planned": self._planned(name)} for name in mine],
        })
        record.sources = self.sources
        record.expected = {name: list(self.checks) for name in mine}
        for name in mine:
            for carried in self._carried(name):
                record.add_verdict(carried)
        failed = any(record.status(name) in BAD for name in mine)
        record.finish(int(failed) if self.exit_status is None else self.exit_status, "2026-11-21T10:20:00+00:00")
        return record.block()

    def _planned(self, name: str) -> dict[str, Any]:
        return {"outcome": "run", "reason": "", "issue": "", "until": "", "expected": [], "limits": LIMITS, "rule": "",
                "checks": list(self.checks)} | self.planned[name]

    def _carried(self, name: str) -> list[dict[str, Any]]:
        plan = self._planned(name)
        planned = PlannedCell(self.cells[name], plan["outcome"], plan["reason"], plan["issue"], plan["until"],
                              tuple(plan["expected"]), plan["limits"], plan["rule"])
        observation = self.observations[name]
        observation.environment = self.environment
        judgements = apply_xfail(judge_observation(observation, self.checks, planned.limits), planned)
        carried = [{"cell": name, "check": check, **judgement.to_dict()} for check, judgement in judgements.items()]
        carried[0] |= {"observation": observation.to_dict(), "seconds": 2.0}
        return [each | ({"verdict": self.stored[name, each["check"]]} if (name, each["check"]) in self.stored else {})
                for each in carried]
