"""The JSON Schema of the report's block ``compile_matrix``, and its version."""

from __future__ import annotations

from typing import Any, Final

from pytest_torchcompile.observation import VERDICTS

__all__ = ["SCHEMA_VERSION", "report_schema"]

SCHEMA_VERSION: Final = "1.0"
"""MAJOR.MINOR: a reader takes any minor of its major and ignores keys it does not know."""

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [k for k in properties if k not in optional]}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def report_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a report file: pytest-json-report's, of which we describe only our block."""
    problem = _object({"message": _TEXT, "evidence": _TEXT, "hint": _TEXT, "file": _TEXT, "line": _COUNT})
    check = _object({
        "verdict": {"enum": list(VERDICTS)},
        "problems": {"type": "array", "items": problem},
        "note": _TEXT,
    }, optional=("note",))
    failure = _object({"kind": _TEXT, "message": _TEXT, "phase": _TEXT, "evidence": _TEXT})
    observation = _object({
        "cell": _TEXT,
        "sections": {"type": "object", "additionalProperties": {"type": "object"}},
        "failure": _maybe(failure),
        "seconds": {"type": "object", "additionalProperties": {"type": "number"}},
        "leaks": {"type": "array", "items": _TEXT},
        "environment": {"type": "object"},
    }, optional=("environment",))
    scalar = {"type": ["string", "number", "boolean", "null"]}
    cell = _object({
        "id": _TEXT,
        "axes": {"type": "object", "additionalProperties": scalar},
        "status": {"enum": list(VERDICTS)},
        "selected": {"type": "boolean"},
        "checks": {"type": "object", "additionalProperties": check},
        "seconds": {"type": ["number", "null"]},
        "observation": _maybe(observation),
    })
    block = _object({
        "schema_version": {"type": "string", "pattern": r"^1\.\d+$"},
        "environment": {"type": "object"},
        "matrix": _object({
            "path": _TEXT,
            "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "cells_planned": {"type": "array", "items": _TEXT, "uniqueItems": True},
            "checks": {"type": "array", "items": _TEXT},
            "excluded": {"type": "object", "additionalProperties": _COUNT},
        }),
        "shard": _object({"index": {"type": "integer", "minimum": 1}, "of": {"type": "integer", "minimum": 1}}),
        "finished": {"type": "boolean"},
        "gates": {"type": "object"},
        "cells": {"type": "array", "items": cell},
    })
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-torchcompile report",
        **_object({"compile_matrix": block}),
    }
