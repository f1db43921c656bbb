"""Record: a run's plan and verdicts, as plain data, made into the report's block.

Fed line by line: by the journal while the run goes on, and by the reader from the journal of a run that was killed.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import worst
from pytest_torchcompile.report.evidence import cell_fingerprint, head_fingerprint
from pytest_torchcompile.report.provenance import run_provenance
from pytest_torchcompile.report.schema import SCHEMA_VERSION
from pytest_torchcompile.report.testrecord import tell_tests

__all__ = ["GATES", "Record", "gate_verdicts", "head_without_matrix", "utc_time"]

GATES: Final = ("safe_fallback", "smoketest", "shape_stability")
"""The checks whose worst verdict the block states by itself, under ``gates``."""
PROBLEMS_OF_A_GATE: Final = 5


def utc_time() -> str:
    """The time as reports write it, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def head_without_matrix(root: Path) -> dict[str, Any]:
    """The head of a run that has no matrix, only tests that use our fixtures."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {**run_provenance(root), "started": utc_time()},
        "matrix": {"path": "", "sha256": hashlib.sha256(b"").hexdigest(), "cells_planned": [], "checks": [],
                   "excluded": {}},
        "shard": {"index": 1, "of": 1},
        "cells": [],
    }


class Record:
    """What a run has reported so far. ``head``: the keys of the block that are known before anything ran."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.environment: dict[str, Any] = {}
        self.expected: dict[str, list[str]] = {}
        """Cell to the checks that this run is to judge."""
        self.verdicts: dict[str, dict[str, dict[str, Any]]] = {}
        self.observations: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.expected_tests: list[str] = []
        """Node ids of the tests of this run that use our fixtures."""
        self.tests: dict[str, dict[str, Any]] = {}
        """Node id to what came of the test (:mod:`.testrecord`)."""
        self.tests_environment: dict[str, Any] = {}
        self.tests_deselected: list[str] = []
        self.sources: dict[str, str] | None = None
        """The project's files that were imported (:mod:`~pytest_torchcompile.run.imported`); None: nobody told."""
        self.sources_edited: list[str] = []
        """Sources that were edited while the run went on."""
        self.exit_status: int | None = None
        self.finished: str | None = None

    def add_verdict(self, carried: Mapping[str, Any]) -> None:
        """Keep one verdict: ``cell``, ``check``, ``verdict``, ``problems``, and with the first its observation."""
        cell = carried["cell"]
        self.verdicts.setdefault(cell, {})[carried["check"]] = {
            key: carried[key] for key in ("verdict", "problems", "note") if carried.get(key) not in (None, "")
        }
        if "observation" in carried:
            self._observe(cell, carried["observation"])
            self.seconds[cell] = carried["seconds"]

    def add_test(self, told: Mapping[str, Any], environment: Mapping[str, Any],
                 sources: Mapping[str, str] | None = None) -> None:
        """Keep what came of one test; of a test that was run again the last."""
        self.tests[told["id"]] = dict(told)
        self._import(sources)
        if len(environment.get("devices", ())) >= len(self.tests_environment.get("devices", ())):
            self.tests_environment = dict(environment) or self.tests_environment

    def leave_out_tests(self, nodeids: Sequence[str]) -> None:
        """Take note of tests that use our fixtures and were deselected; each worker of xdist tells the same ones."""
        self.tests_deselected = list(dict.fromkeys((*self.tests_deselected, *nodeids)))

    def finish(self, exit_status: int, finished: str, sources_edited: Sequence[str] = ()) -> None:
        """The run ended by itself, with this exit status of pytest."""
        self.exit_status, self.finished, self.sources_edited = exit_status, finished, list(sources_edited)

    def not_run(self) -> list[str]:
        """Items that were to be judged and have no verdict: ``cell::check``, and node ids of tests."""
        checks = [f"{cell}::{check}" for cell, names in self.expected.items() for check in names
                  if check not in self.verdicts.get(cell, {})]
        return checks + [test for test in self.expected_tests if test not in self.tests]

    def status(self, cell: str) -> str:
        """The cell's status: the worst of its verdicts; ``not_run`` counts too."""
        verdicts = [v["verdict"] for v in self.verdicts.get(cell, {}).values()]
        missing = set(self.expected.get(cell, ())) - set(self.verdicts.get(cell, {}))
        return worst(verdicts + ["not_run"] * bool(missing))

    def block(self) -> dict[str, Any]:
        """The report's block ``compile_matrix``; the schema is in :mod:`.schema`."""
        cells = [self._cell(planned) for planned in self.head["cells"]]
        block = {
            **self.head,
            "run": self._run(),
            "environment": self.environment or self.tests_environment,
            "finished": self._ended() and not self.not_run(),
            "gates": gate_verdicts(self.head["matrix"]["checks"], cells),
            "cells": cells,
            "tests_planned": list(self.expected_tests),
            "tests": tell_tests(self.expected_tests, self.tests),
        }
        return {**block, "head_sha256": head_fingerprint(block)}

    def _run(self) -> dict[str, Any]:
        run = {**self.head["run"], "finished": self.finished, "exit_status": self.exit_status}
        if self.sources is not None:
            run["sources"] = self.sources
        if self.tests_deselected:
            run["tests_deselected"] = self.tests_deselected
        if self.sources_edited:
            run["sources_edited"] = self.sources_edited
        return run

    def _ended(self) -> bool:
        """By itself: pytest's 0 and 1, and its 5 (nothing collected) for a shard that has no cells."""
        return self.exit_status in (0, 1) or (self.exit_status == 5 and not self.head["cells"])

    def _cell(self, planned: dict[str, Any]) -> dict[str, Any]:
        cell = planned["id"]
        checks = {name: {"verdict": "not_run", "problems": []} for name in self.expected.get(cell, ())}
        told = {
            **planned,
            "status": self.status(cell),
            "selected": cell in self.expected,
            "checks": checks | self.verdicts.get(cell, {}),
            "seconds": self.seconds.get(cell),
            "observation": self.observations.get(cell),
        }
        return {**told, "evidence_sha256": cell_fingerprint(told)}

    def _observe(self, cell: str, observation: dict[str, Any]) -> None:
        observation = dict(observation)
        environment = observation.pop("environment", {})
        self._import(observation.pop("sources", None))
        self.environment = self.environment or environment
        if environment and environment != self.environment:
            observation["environment"] = environment  # ranks that differ: the gate refuses a mixed report
        self.observations[cell] = observation

    def _import(self, sources: Mapping[str, str] | None) -> None:
        """Take note of imported files; of one that was imported twice the first, for it was edited since."""
        if sources is not None:
            self.sources = {**sources, **(self.sources or {})}


def gate_verdicts(checks: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each gate that the matrix runs: the worst verdict of that check in the cells that ran, and its problems."""
    stated = {}
    for name in GATES:
        found = {cell["id"]: cell["checks"][name] for cell in cells if name in cell["checks"]}
        if name in checks and found:  # a shard may have no cell that it applies to
            ran = [check["verdict"] for check in found.values() if check["verdict"] != "skip"]
            verdict = worst(ran) if ran else "skip"
            problems = [{**problem, "message": f"{cell}: {problem['message']}"} for cell, check in found.items()
                        if check["verdict"] == verdict != "pass" for problem in check["problems"]]
            stated[name] = {"verdict": verdict, "problems": problems[:PROBLEMS_OF_A_GATE]}
    return stated
