"""Record: a run's plan and verdicts, as plain data, made into the report's block.

And what a report holds of one test of a model repository that uses our fixtures, the lane ``test``. A cell is judged by
checks; a test is judged by its own body, and beside that by what its ledger says of its limits. Both stand in the
report: the verdict, and the ledger that it has to follow from.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import Problem, verdicts_in, worst
from pytest_torchcompile.oracle.proof import graph_runs
from pytest_torchcompile.report.provenance import cell_fingerprint, fingerprint, head_fingerprint, run_provenance
from pytest_torchcompile.report.schema import COUNTED, SCHEMA_VERSION, TEST_LANE
from pytest_torchcompile.report.strictjson import plain_json

__all__ = [
    "GATES", "Record", "RecordedTest", "count_ledger", "gate_verdicts", "head_without_matrix", "list_tests",
    "merge_tests", "seal_test", "utc_time",
]


@dataclass(frozen=True)
class RecordedTest:
    """One test, as plain data."""

    id: str
    """Pytest's node id."""
    verdict: str
    """A word of :data:`~pytest_torchcompile.observation.VERDICTS`."""
    problems: tuple[Problem, ...] = ()
    note: str = ""
    """Why it was skipped, or expected to fail."""
    limits: dict[str, int] = field(default_factory=dict)
    """Those of its markers ``compile_limits``."""
    must_run: bool = False
    """Does a test in which no compiled graph ran go over its limits?"""
    asks_model: bool = False
    """Does it take ``compiled_model``, so that it has to run it?"""
    model: dict[str, bool] | None = None
    """Whether that model was ``called``, and whether a graph ``ran`` in its calls; None: any graph will do."""
    ledger: dict[str, Any] | None = None
    """What torch.compile did in it; None where its set-up never came so far. Of a fuzzed test that passed, in the
    sequence that compiled most."""
    sequences: int | None = None
    """Of a fuzzed test: the sequences that passed."""
    attempts: int = 1
    """How often it was run, with those of a plugin that runs failures again."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The test as the report has it, with its counts and a fingerprint over all of it."""
        test = {"lane": TEST_LANE, **asdict(self), "counts": count_ledger(self.ledger)}
        # A list, as it is after a way through JSON.
        test["problems"] = [asdict(problem) for problem in self.problems]
        return seal_test(test)


def count_ledger(ledger: Mapping[str, Any] | None) -> dict[str, int]:
    """How much of each there is in a ledger's plain data."""
    if ledger is None:
        return dict.fromkeys((*COUNTED, "runs"), 0)
    counts = {name: len(ledger[name]) for name in COUNTED}
    counts["runs"] = graph_runs(ledger)
    return counts


def seal_test(test: Mapping[str, Any]) -> dict[str, Any]:
    """The test with the fingerprint of all else that is recorded of it.

    The verdict of a cell can be told again from its observation. That of a test is partly its body's, which a report
    doesn't hold, so the fingerprint covers the verdict too.
    """
    unsealed = plain_json({name: value for name, value in test.items() if name != "evidence_sha256"})
    return {**unsealed, "evidence_sha256": fingerprint(unsealed)}


def list_tests(planned: Sequence[str], recorded: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every planned test in the order of the plan, and behind them any that nobody had planned."""
    tests = []
    for name in dict.fromkeys((*planned, *recorded)):
        if name in recorded:
            tests.append(recorded[name])
        else:
            tests.append(RecordedTest(name, "not_run", attempts=0).to_dict())
    return tests


def merge_tests(blocks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tests of all shards by node id. Shards may have run the same tests; of those the worst verdict holds."""
    merged: dict[str, dict[str, Any]] = {}
    for block in blocks:
        for test in block["tests"]:
            known = merged.get(test["id"])
            if known is None or worst([known["verdict"], test["verdict"]]) != known["verdict"]:
                merged[test["id"]] = test
    return merged


# -------------------------------------------------------------------------------------------------------- the whole run
GATES: Final = ("safe_fallback", "smoketest", "shape_stability")
"""The checks whose worst verdict the block states by itself, under ``gates``."""
# The block repeats them for who reads nothing else; the cells have all of them.
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
        self.reused: dict[str, dict[str, Any]] = {}
        """Cell to the earlier run that its result is of."""
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
        verdict = {}
        for key in ("verdict", "problems", "note"):
            # An empty note would be written for each of thousands of verdicts.
            if carried.get(key) not in (None, ""):
                verdict[key] = carried[key]
        self.verdicts.setdefault(cell, {})[carried["check"]] = verdict
        # The first verdict of a cell brings the observation for all of them.
        if "observation" in carried:
            self._add_observation(cell, carried["observation"])
            self.seconds[cell] = carried["seconds"]
            self.reused.pop(cell, None)
            if carried.get("reused"):
                self.reused[cell] = dict(carried["reused"])

    def add_test(self, test: Mapping[str, Any], environment: Mapping[str, Any],
                 sources: Mapping[str, str] | None = None) -> None:
        """Keep what came of one test; of a test that was run again the last."""
        self.tests[test["id"]] = dict(test)
        self._add_sources(sources)
        # Tests that need no GPU may run in processes that see none.
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
        missing: list[str] = []
        for cell, checks in self.expected.items():
            verdicts = self.verdicts.get(cell, {})
            for check in checks:
                if check not in verdicts:
                    missing.append(f"{cell}::{check}")
        return missing + [test for test in self.expected_tests if test not in self.tests]

    def status(self, cell: str) -> str:
        """The cell's status: the worst of its verdicts; ``not_run`` counts too."""
        known = self.verdicts.get(cell, {})
        verdicts = verdicts_in(known)
        # A verdict that never came weighs as much as one that says so.
        if not known.keys() >= set(self.expected.get(cell, ())):
            verdicts.append("not_run")
        return worst(verdicts)

    def block(self) -> dict[str, Any]:
        """The report's block ``compile_matrix``; the schema is in :mod:`.schema`."""
        cells = list(map(self._make_cell, self.head["cells"]))
        block = {
            **self.head,
            "run": self._make_run(),
            "environment": self.environment or self.tests_environment,
            "finished": self._ended_by_itself() and not self.not_run(),
            "gates": gate_verdicts(self.head["matrix"]["checks"], cells),
            "cells": cells,
            "tests_planned": list(self.expected_tests),
            "tests": list_tests(self.expected_tests, self.tests),
        }
        return {**block, "head_sha256": head_fingerprint(block)}

    def _make_run(self) -> dict[str, Any]:
        # Keys that a run has nothing to say of are left out, as in reports of earlier versions.
        run = {**self.head["run"], "finished": self.finished, "exit_status": self.exit_status}
        if self.sources is not None:
            run["sources"] = self.sources
        if self.tests_deselected:
            run["tests_deselected"] = self.tests_deselected
        if self.sources_edited:
            run["sources_edited"] = self.sources_edited
        return run

    def _ended_by_itself(self) -> bool:
        """That is pytest's 0 and 1, and its 5 (nothing collected) for a shard that has no cells."""
        return self.exit_status in (0, 1) or (self.exit_status == 5 and not self.head["cells"])

    def _make_cell(self, planned: dict[str, Any]) -> dict[str, Any]:
        cell = planned["id"]
        checks = {name: {"verdict": "not_run", "problems": []} for name in self.expected.get(cell, ())}
        content = {
            **planned,
            "status": self.status(cell),
            "selected": cell in self.expected,
            "checks": checks | self.verdicts.get(cell, {}),
            "seconds": self.seconds.get(cell),
            "observation": self.observations.get(cell),
        }
        if cell in self.reused:
            content["reused"] = self.reused[cell]
        return {**content, "evidence_sha256": cell_fingerprint(content)}

    def _add_observation(self, cell: str, observation: dict[str, Any]) -> None:
        observation = dict(observation)
        environment = observation.pop("environment", {})
        self._add_sources(observation.pop("sources", None))
        # What all cells have in common is told once.
        self.environment = self.environment or environment
        # Where rank processes differ it is told of each cell, and the gate refuses the mixed report.
        if environment and environment != self.environment:
            observation["environment"] = environment
        self.observations[cell] = observation

    def _add_sources(self, sources: Mapping[str, str] | None) -> None:
        """Take note of imported files; of one that was imported twice the first, for it was edited since."""
        if sources is not None:
            self.sources = {**sources, **(self.sources or {})}


def gate_verdicts(checks: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each gate that the matrix runs: the worst verdict of that check in the cells that ran, and its problems."""
    stated = {}
    for name in GATES:
        by_cell = {cell["id"]: cell["checks"][name] for cell in cells if name in cell["checks"]}
        # A shard may have no cell that the gate applies to, and says nothing of it then.
        if name in checks and by_cell:
            stated[name] = _state_gate(by_cell)
    return stated


def _state_gate(by_cell: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    # A cell that was skipped says nothing of the gate, unless all of them were.
    verdicts = {check["verdict"] for check in by_cell.values()} - {"skip"}
    verdict = worst(list(verdicts)) if verdicts else "skip"
    problems: list[dict[str, Any]] = []
    if verdict != "pass":
        for cell, check in by_cell.items():
            if check["verdict"] == verdict:
                for problem in check["problems"]:
                    problems.append({**problem, "message": f"{cell}: {problem['message']}"})
    return {"verdict": verdict, "problems": problems[:PROBLEMS_OF_A_GATE]}
