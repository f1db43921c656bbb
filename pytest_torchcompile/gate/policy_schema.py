"""The JSON Schema of a policy file, for editors; made from the tables that the reader itself uses.

It knows the form. What needs the reports (an axis that no cell has, a key of an environment) only the gate can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS, LIMITS, RENAMED
from pytest_torchcompile.gate import policyfile
from pytest_torchcompile.gate.policy import BASELINE, COMMIT, HEAD
from pytest_torchcompile.plan.reader import DAY
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import GATES

__all__ = ["policy_schema"]

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string", "pattern": r"\S"}
_SCALAR: Final[Schema] = {"type": ["string", "number", "boolean", "null"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 1}
_SHARE: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}
_AGE: Final[Schema] = {"type": "string", "pattern": f"^{policyfile.AGE.pattern}$"}


def policy_schema() -> Schema:
    """JSON Schema (2020-12) of a policy."""
    sections: dict[str, Schema] = {
        "version": {"const": policyfile.VERSION},
        "matrix": _TEXT,
        "gates": _one_or_more({"enum": list(GATES)}),
        "environment": {"type": "object", "additionalProperties": _TEXT},
        "may_differ": _list_of(_TEXT),
        "devices": _list_of(_TEXT),
        "ran_at_least": _COUNT,
        "tests": _object_of({"ran_at_least": _COUNT}, ("ran_at_least",)),
        "pass_rate": {"type": "object", "additionalProperties": {
            "anyOf": [_SHARE, {"type": "object", "additionalProperties": _SHARE}]}},
        "limits": _entries(_limits_schema()),
        "allowed_failures": _entries(_allowed_failure_schema()),
        "allowed_skips": _entries(_for_cells_or_tests({"contains": _TEXT, "reason": _TEXT}, ("reason",))),
        "baseline": _object_of({kind: {"enum": ["fail", "note"], "description": text}
                                for kind, text in BASELINE.items()}),
        "commit": {"anyOf": [{"const": HEAD}, {"type": "string", "pattern": f"^(?:{COMMIT.pattern})$"}]},
        "max_age": _AGE,
        "reuse": {"anyOf": [{"const": "forbidden"}, _object_of({"max_age": _AGE, "at_most": _SHARE})]},
        "sealed": {"const": "required"},
        "other_tests": {"enum": ["fail", "note"]},
        "ratchet": {"type": "boolean"},
    }
    described = {key: {"description": policyfile.KEYS[key], **schema} for key, schema in sections.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-torchcompile policy",
        **_object_of(described, ("version",)),
    }


def _object_of(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """An object with these keys and no others."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False,
            "required": list(required)}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _one_or_more(items: Schema) -> Schema:
    """One, or a list of them."""
    return {"anyOf": [items, _list_of(items)]}


def _entries(items: Schema) -> Schema:
    """A list of entries that may be empty, or nothing at all: the key stays when the last entry goes."""
    return {"anyOf": [{"type": "null"}, {"type": "array", "items": items}]}


def _selector() -> Schema:
    return {"type": "object", "minProperties": 1, "additionalProperties": _one_or_more(_SCALAR)}


def _limits_schema() -> Schema:
    """Any limits, with the cells that they are for."""
    limits = {name: _limit_schema(name) for name in policyfile.LIMIT_NAMES}
    entry = _object_of({"when": _selector(), "reason": _TEXT, **limits})
    entry["anyOf"] = [{"required": [name]} for name in limits]
    return entry


def _limit_schema(name: str) -> Schema:
    limit = LIMITS.get(name)
    if limit is None:
        whole = name in METRICS and METRICS[name].whole
        return {"type": "integer" if whole else "number", "minimum": 0}
    schema: Schema = {"type": "integer" if limit.whole else "number", "minimum": limit.least, "description": limit.help}
    if limit.most is not None:
        schema["maximum"] = limit.most
    return schema


def _allowed_failure_schema() -> Schema:
    # A check of old reports keeps its name here.
    checks = {"enum": list(dict.fromkeys((*CHECKS, *RENAMED, *policyfile.LIMIT_NAMES)))}
    forms: dict[str, Schema] = {
        "checks": _one_or_more(checks),
        "verdicts": _one_or_more({"enum": list(policyfile.VERDICTS)}),
        "contains": _TEXT,
        "at_most": _COUNT,
        "reason": _TEXT,
        "issue": _TEXT,
        "until": {"type": "string", "pattern": f"^{DAY}$"},
    }
    return _for_cells_or_tests(forms, ("reason", "issue", "until"))


def _for_cells_or_tests(forms: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    """An entry of cells, or of tests; never of both."""
    entry = _object_of({"cells": _selector(), "tests": _one_or_more(_TEXT), **forms}, required)
    entry["oneOf"] = [{"required": ["cells"]}, {"required": ["tests"]}]
    return entry
