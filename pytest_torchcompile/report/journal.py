"""Journal: every verdict is kept where it arrives and written at once as a JSON line; the report is made from it.

A file that is only written at the end is lost with the process, so the journal is on disk while the run goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from pytest_torchcompile.matrix import Matrix, PlannedCell
from pytest_torchcompile.observation import worst
from pytest_torchcompile.report.schema import SCHEMA_VERSION
from pytest_torchcompile.settings import Settings

__all__ = ["Journal"]


class Journal:
    """The verdicts of one run, in the process that sees them all."""

    def __init__(self, matrix: Matrix, planned: Sequence[PlannedCell], settings: Settings, path: Path) -> None:
        self.matrix, self.planned, self.settings, self.path = matrix, planned, settings, path
        self.environment: dict[str, Any] = {}
        self.exit_status: int | None = None
        self._known = {p.cell.id for p in planned}
        self._expected: dict[str, list[str]] = {}
        self._verdicts: dict[str, dict[str, dict[str, Any]]] = {}
        self._observations: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self._file: IO[str] | None = None

    # while the run goes on

    def expect(self, nodeids: Iterable[str]) -> None:
        """Take note of the items that this run will judge; each worker tells the same ones."""
        expected: dict[str, list[str]] = {}
        for nodeid in nodeids:
            cell, check = _parts(nodeid)
            if cell in self._known:
                expected.setdefault(cell, []).append(check)
        self._expected = expected

    def add(self, carried: dict[str, Any]) -> None:
        """Keep one verdict: ``cell``, ``check``, ``verdict``, ``problems``, and with the first its observation."""
        cell = carried["cell"]
        self._verdicts.setdefault(cell, {})[carried["check"]] = {
            key: carried[key] for key in ("verdict", "problems", "note") if carried.get(key) not in (None, "")
        }
        if "observation" in carried:
            self._observe(cell, carried["observation"])
            self._seconds[cell] = carried["seconds"]
        self._line({"kind": "verdict", **carried})

    def lost(self, nodeid: str, text: str) -> None:
        """The pytest process that ran this item died, so nobody reported its verdict."""
        cell, check = _parts(nodeid)
        if cell in self._known:
            problem = {"message": "the pytest worker that ran this item died", "evidence": text,
                       "hint": "", "file": "", "line": 0}
            self.add({"cell": cell, "check": check, "verdict": "crash", "problems": [problem]})

    def finish(self, exit_status: int) -> None:
        """Close the journal."""
        self.exit_status = exit_status
        self._line({"kind": "end", "exit_status": exit_status, "not_run": self.not_run()})
        if self._file is not None:
            self._file.close()
            self._file = None

    # what came of it

    def not_run(self) -> list[str]:
        """Items that were to be judged and have no verdict, as ``cell::check``."""
        return [f"{cell}::{check}" for cell, names in self._expected.items() for check in names
                if check not in self._verdicts.get(cell, {})]

    def usage_errors(self) -> list[str]:
        """Mistakes in the matrix that only a rank process could find."""
        failures = (o.get("failure") or {} for o in self._observations.values())
        return sorted({f["message"] for f in failures if f.get("kind") == "usage"})

    def seconds(self) -> dict[str, float]:
        """Wall seconds of each cell that ran."""
        return {cell: round(s, 3) for cell, s in self._seconds.items() if s}

    def status(self, cell: str) -> str:
        """The cell's status: the worst of its verdicts; ``not_run`` counts too."""
        verdicts = [v["verdict"] for v in self._verdicts.get(cell, {}).values()]
        missing = set(self._expected.get(cell, ())) - set(self._verdicts.get(cell, {}))
        return worst(verdicts + ["not_run"] * bool(missing))

    def leaks(self, cell: str) -> list[str]:
        """Torch state that the cell changed and left changed."""
        return list(self._observations.get(cell, {}).get("leaks", ()))

    def selected(self, cell: str) -> bool:
        """Whether this run was to judge the cell, not deselected by ``-k``, ``-m`` or a node id."""
        return cell in self._expected

    def compiled(self) -> int:
        """How many cells executed compiled code."""
        sections = (o["sections"].get("compiles", {}) for o in self._observations.values())
        return sum(any(g["runs"] for g in s.get("graphs", ())) for s in sections)

    def block(self) -> dict[str, Any]:
        """The report's block ``compile_matrix``; the schema is in :mod:`.schema`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "environment": self.environment,
            "matrix": {
                "path": self.settings.matrix,
                "sha256": self.matrix.sha256,
                "cells_planned": [p.cell.id for p in self.matrix.cells],
                "checks": list(self.settings.checks or self.matrix.checks),
                "excluded": dict(Counter(e.reason for e in self.matrix.excluded)),
            },
            "shard": {"index": self.settings.shard[0], "of": self.settings.shard[1]},
            "finished": self.exit_status in (0, 1) and not self.not_run(),
            "gates": {},
            "cells": [self._cell(p) for p in self.planned],
        }

    def write(self, path: Path) -> None:
        """Write the block alone as a report, where pytest-json-report is switched off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"compile_matrix": self.block()}), encoding="utf-8")

    def _cell(self, planned: PlannedCell) -> dict[str, Any]:
        cell = planned.cell.id
        checks = {name: {"verdict": "not_run", "problems": []} for name in self._expected.get(cell, ())}
        return {
            "id": cell,
            "axes": planned.cell.axes,
            "status": self.status(cell),
            "selected": self.selected(cell),
            "checks": checks | self._verdicts.get(cell, {}),
            "seconds": self._seconds.get(cell),
            "observation": self._observations.get(cell),
        }

    def _observe(self, cell: str, observation: dict[str, Any]) -> None:
        environment = observation.pop("environment")
        self.environment = self.environment or environment
        if environment and environment != self.environment:
            observation["environment"] = environment  # ranks that differ: the gate refuses a mixed report
        self._observations[cell] = observation

    def _line(self, content: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # a run beside this one goes on writing to the file that it opened
            self._file = self.path.open("x", encoding="utf-8")
            plan = {"kind": "plan", "schema_version": SCHEMA_VERSION, "matrix": self.settings.matrix,
                    "sha256": self.matrix.sha256, "expected": self._expected}
            self._file.write(json.dumps(plan) + "\n")
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


def _parts(nodeid: str) -> tuple[str, str]:
    """Cell and check of ``file::cell::check``."""
    *_, cell, check = ["", "", *nodeid.split("::")]
    return cell, check
