"""The JSON Schema of the report's block ``compile_matrix``, its version, and upgrades from earlier minor versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.wrappers.wrapping import LANES

__all__ = ["COUNTED", "ENVIRONMENT_KEYS", "SCHEMA_VERSION", "STEPS", "TEST_LANE", "block_schema", "line_schemas",
           "report_schema", "upgrade_block"]

SCHEMA_VERSION: Final = "1.3"
"""MAJOR.MINOR: a reader takes any minor of its major and ignores keys it does not know. Earlier minors are brought up
to this one by :func:`upgrade_block`."""
TEST_LANE: Final = "test"
COUNTED: Final = ("compiles", "recompiles", "graph_breaks", "eager_frames", "graphs")
"""The lists of a ledger that are counted; ``runs`` counts the executions of its graphs."""

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}


# Each key that is not named as optional is required: a report that lacks it is refused.
def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [k for k in properties if k not in optional]}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _map(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_PROBLEM: Final = _object({"message": _TEXT, "evidence": _TEXT, "hint": _TEXT, "file": _TEXT, "line": _COUNT})
_CHECK: Final = _object({
    "verdict": {"enum": list(VERDICTS)},
    "problems": _list(_PROBLEM),
    "note": _TEXT,
}, optional=("note",))
# Nothing of it is required: a report in which no cell ran has an empty one.
_ENVIRONMENT: Final = {"type": "object", "properties": {
    "torch": _TEXT, "torch_git": {"type": ["string", "null"]}, "triton": {"type": ["string", "null"]}, "python": _TEXT,
    "platform": _TEXT, "cpu": _TEXT, "cores": _COUNT, "compiler": {"type": ["string", "null"]},
    "cuda": {"type": ["string", "null"]}, "driver": {"type": ["string", "null"]}, "devices": _list(_TEXT),
}}
"""Of the process that ran the cells; empty where none ran."""
ENVIRONMENT_KEYS: Final = tuple(_ENVIRONMENT["properties"])
_FAILURE: Final = _object({"kind": _TEXT, "message": _TEXT, "phase": _TEXT, "evidence": _TEXT})
_OBSERVATION: Final = _object({
    "cell": _TEXT,
    "sections": _map({"type": "object"}),
    "failure": _maybe(_FAILURE),
    "seconds": _map(_NUMBER),
    "leaks": _list(_TEXT),
    "environment": _ENVIRONMENT,
    "sources": _map(_TEXT),
    "ranks": _list(_object({
        "sections": _map({"type": "object"}),
        "failure": _maybe(_FAILURE),
        "seconds": _map(_NUMBER),
        "leaks": _list(_TEXT),
    })),
}, optional=("environment", "sources", "ranks"))
_PLANNED: Final = _object({
    "outcome": {"enum": ["run", "skip", "xfail"]},
    "reason": _TEXT,
    "issue": _TEXT,
    "until": _TEXT,
    "expected": _list(_TEXT),
    "limits": _map(_NUMBER),
    "rule": _TEXT,
    "checks": _list(_TEXT, uniqueItems=True),
    "also": _list(_TEXT, uniqueItems=True),
}, optional=("also",))
# Later minors have added keys; these are optional, so that reports of earlier ones hold to the schema too.
_GIT: Final = _object({"commit": _TEXT, "changed": {"type": "boolean"}, "diff_sha256": _TEXT, "prefix": _TEXT,
                       "untracked_sha256": _TEXT}, optional=("diff_sha256", "untracked_sha256"))
_OF_RUN: Final = {"started": _maybe(_TEXT), "finished": _maybe(_TEXT), "git": _maybe(_GIT), "environment": _ENVIRONMENT,
                  "sources": {"enum": ["same", "edited", "unknown"]}}
_KEPT: Final = _object({"checks": _list(_TEXT, uniqueItems=True), **_OF_RUN}, optional=("environment", "sources"))
"""Verdicts of an earlier run, which a run of a part of the matrix left as they were. ``sources``: what became since of
the files that the run had imported."""
_KEPT_TESTS: Final = _object({"tests": _list(_TEXT, uniqueItems=True), **_OF_RUN}, optional=("environment", "sources"))
_REUSED: Final = _object({"run": _TEXT, "commit": {"type": ["string", "null"]}, "changed": {"type": "boolean"},
                          "age": _COUNT, "comparisons": _COUNT}, optional=("comparisons",))
"""The result is of an earlier run, and nothing that it rests on has changed: when that run began, its commit, whether
files differed from it, and the seconds since the cell ran. With ``comparisons`` the cell was compiled and run in this
run; so many comparisons of its calls are of the earlier one, as code and values are the same."""
_CELL: Final = _object({
    "id": _TEXT,
    # A user's own axis may have numbers for values.
    "axes": _map({"type": ["string", "number", "boolean", "null"]}),
    "lane": {"enum": list(LANES)},
    "planned": _maybe(_PLANNED),
    "status": {"enum": list(VERDICTS)},
    "selected": {"type": "boolean"},
    "checks": _map(_CHECK),
    "seconds": {"type": ["number", "null"]},
    "observation": _maybe(_OBSERVATION),
    "evidence_sha256": {"type": ["string", "null"]},
    "kept": _list(_KEPT),
    "reused": _REUSED,
}, optional=("lane", "kept", "reused"))
_TRUTH: Final = {"type": "boolean"}
_TEST: Final = _object({
    "id": _TEXT,
    "lane": {"enum": [TEST_LANE]},
    "verdict": {"enum": list(VERDICTS)},
    "problems": _list(_PROBLEM),
    "note": _TEXT,
    "limits": _map(_COUNT),
    "must_run": _TRUTH,
    "asks_model": _TRUTH,
    "model": _maybe(_object({"called": _TRUTH, "ran": _TRUTH})),
    "counts": _object(dict.fromkeys((*COUNTED, "runs"), _COUNT)),
    "ledger": _maybe(_object(dict.fromkeys(COUNTED, _list({"type": "object"})))),
    "sequences": _maybe(_COUNT),
    "attempts": _COUNT,
    "seconds": _NUMBER,
    "evidence_sha256": _TEXT,
})
_MATRIX: Final = _object({
    "path": _TEXT,
    "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "cells_planned": _list(_TEXT, uniqueItems=True),
    "checks": _list(_TEXT, uniqueItems=True),
    "excluded": _map(_COUNT),
})
_RUN: Final = _object({
    "plugin": _TEXT,
    "packages": _map(_TEXT),
    "started": _TEXT,
    "finished": {"type": ["string", "null"]},
    "exit_status": {"type": ["integer", "null"]},
    "git": _maybe(_GIT),
    "ci": _map(_TEXT),
    "sources": _map(_TEXT),
    "sources_edited": _list(_TEXT),
    "tests_deselected": _list(_TEXT),
    "workers": {"type": "integer", "minimum": 1},
}, optional=("packages", "sources", "sources_edited", "tests_deselected", "workers"))
"""``sources``: the project's files that were imported, from the matrix' root, each with its SHA-256. ``packages``:
every installed package and its version."""


def block_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the block ``compile_matrix``."""
    return _object({
        "schema_version": {"type": "string", "pattern": r"^1\.[0-9]+$"},
        "run": _maybe(_RUN),
        "environment": _ENVIRONMENT,
        "matrix": _MATRIX,
        "shard": _object({"index": {"type": "integer", "minimum": 1}, "of": {"type": "integer", "minimum": 1}}),
        "finished": {"type": "boolean"},
        "gates": _map(_CHECK),
        "cells": _list(_CELL),
        "tests_planned": _list(_TEXT, uniqueItems=True),
        "tests": _list(_TEST),
        "tests_kept": _list(_KEPT_TESTS),
        "head_sha256": {"type": ["string", "null"]},
    }, optional=("tests_kept",))


def line_schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas of a journal's lines, by ``kind``. Loose: the block that is made of them is held against its own."""
    head = _object({"run": {"type": "object"}, "matrix": _object({"checks": _list(_TEXT)}),
                    "cells": _list(_object({"id": _TEXT}))})
    verdict = {**_CHECK["properties"], "cell": _TEXT, "check": _TEXT, "seconds": _NUMBER, "observation": _OBSERVATION,
               "reused": _REUSED}
    return {
        "plan": _object({"head": head, "expected": _map(_list(_TEXT)), "expected_tests": _list(_TEXT),
                         "report": _TEXT, "sha256": _TEXT}, optional=("expected_tests", "report")),
        "verdict": _object({**verdict, "sha256": _TEXT}, optional=("note", "seconds", "observation", "reused")),
        "tests_planned": _object({"tests": _list(_TEXT), "sha256": _TEXT}),
        "test": _object({"test": _object({"id": _TEXT}), "environment": {"type": "object"}, "sources": _map(_TEXT),
                         "sha256": _TEXT}, optional=("sources",)),
        "later_run": _object({"began": _TEXT, "command": _TEXT, "sha256": _TEXT}),
        "end": _object({"exit_status": {"type": "integer"}, "finished": _TEXT, "sources_edited": _list(_TEXT),
                        "tests_deselected": _list(_TEXT), "sha256": _TEXT},
                       optional=("sources_edited", "tests_deselected")),
    }


def report_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a report file: pytest-json-report's, of which we describe only our block."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-torchcompile report",
        **_object({"compile_matrix": block_schema()}),
    }


def upgrade_block(block: dict[str, Any], minor: int) -> dict[str, Any]:
    """Return the block as the current version has it; one of the current or a later minor is returned as it is.

    Raises ValueError for a block that has keys which its own version did not have.
    """
    # A block of a later minor than ours has no steps to go.
    for step in STEPS[minor:]:
        block = {**step(block), "schema_version": f"1.{len(STEPS)}"}
    return block


def _cells_of(block: dict[str, Any]) -> list[dict[str, Any]]:
    # The block has not been held against the schema yet, so it may hold anything.
    return [cell for cell in block.get("cells", ()) if isinstance(cell, dict)]


def _from_1_0(block: dict[str, Any]) -> dict[str, Any]:
    """1.1 brought ``run``, what was planned for each cell, and fingerprints; a 1.0 report can't tell them."""
    new = {"planned": None, "evidence_sha256": None}
    cells = _cells_of(block)
    if "run" in block or any(not new.keys().isdisjoint(cell) for cell in cells):
        raise ValueError("says that it is of schema 1.0, but has keys of a later one")
    return {**block, "run": None, "cells": [{**cell, **new} for cell in cells]}


def _from_1_1(block: dict[str, Any]) -> dict[str, Any]:
    """1.2 brought the tests that use our fixtures."""
    if "tests" in block or "tests_planned" in block:
        raise ValueError("says that it is of schema 1.1 or older, but has keys of a later one")
    return {**block, "tests_planned": [], "tests": []}


def _from_1_2(block: dict[str, Any]) -> dict[str, Any]:
    """1.3 brought a fingerprint of environment, run and matrix, and verdicts that are kept from an earlier run."""
    cells = _cells_of(block)
    if "head_sha256" in block or "tests_kept" in block or any("kept" in cell for cell in cells):
        raise ValueError("says that it is of schema 1.2 or older, but has keys of a later one")
    return {**block, "head_sha256": None}


STEPS: Final[tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]] = (_from_1_0, _from_1_1, _from_1_2)
"""Step k takes a block from minor k to minor k + 1."""
