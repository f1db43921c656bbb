"""The JSON Schema of a matrix file, for editors; made from the tables that the reader itself uses.

It knows the form. What needs the file as a whole (a rule that matches nothing, a factory that is not there)
only the reader can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pytest_torchcompile.backends import BACKENDS, installed
from pytest_torchcompile.cell import AXES
from pytest_torchcompile.checks import CHECKS, LIMITS, Limit
from pytest_torchcompile.plan import matrix, models, rules, strategy
from pytest_torchcompile.plan.axes import DEVICE
from pytest_torchcompile.plan.reader import DAY
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import ORDERS

__all__ = ["matrix_schema"]

Schema = dict[str, Any]

_TARGET: Final[Schema] = {"type": "string", "pattern": r"^[^\W\d][\w.]*:[^\W\d][\w.]*$"}
_TEXT: Final[Schema] = {"type": "string", "pattern": r"\S"}
_SIZE: Final[Schema] = {"type": "integer", "minimum": 0}
_SCALAR: Final[Schema] = {"type": ["string", "number", "boolean", "null"]}


def matrix_schema() -> Schema:
    """JSON Schema (2020-12) of a matrix. Backends of packages installed on this machine are known names."""
    sections: dict[str, Schema] = {
        "version": {"const": matrix.VERSION},
        "models": {"type": "object", "minProperties": 1, "additionalProperties": _model(),
                   "propertyNames": {"pattern": f"^{models.MODEL_NAME}$"}},
        "axes": _axes(),
        "rules": {"type": "array", "items": {"oneOf": [_rule(verb) for verb in rules.VERBS]}},
        "strategy": _strategy(),
        "checks": _some({"enum": list(CHECKS)}),
        "autotune_choices": _SIZE,
        "fuzz_seconds": {"type": "number", "minimum": 1},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-torchcompile matrix",
        **_record(matrix.KEYS, sections, ("version", "models")),
    }


def _record(helps: Mapping[str, str], properties: Mapping[str, Schema],
            required: Iterable[str] = ()) -> Schema:
    """An object with these keys and no others."""
    described = {key: {"description": helps[key], **schema} for key, schema in properties.items()}
    return {"type": "object", "properties": described, "additionalProperties": False,
            "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}


def _some(items: Schema) -> Schema:
    """One, or a list of them."""
    return {"anyOf": [items, _list(items)]}


def _model() -> Schema:
    numbers = {"min": _SIZE, "max": _SIZE, "multiple_of": {"type": "integer", "minimum": 1}}
    sizes = {"choices": _list(_SIZE), "buckets": _list(_SIZE)}
    dim = {"anyOf": [_SIZE, _TEXT, _record(models.DIM_KEYS, numbers | sizes)]}
    names = {"pattern": r"^[^\W\d]\w*$"}
    # An argument is any scalar under a Python name; `call` is the code that gets it.
    called = {"type": "object", "properties": {models.CALL: _TARGET}, "required": [models.CALL],
              "additionalProperties": _SCALAR, "propertyNames": names}
    code = {"anyOf": [_TARGET, called]}
    forms: dict[str, Schema] = {
        "factory": code,
        "inputs": code,
        "loss": _TARGET,
        "dims": {"type": "object", "additionalProperties": dim, "propertyNames": names},
        "axes": _axes(),
        "mode_of_modules": {"enum": list(models.MODES_OF_MODULES)},
    }
    return _record(models.MODEL_KEYS, forms, models.REQUIRED)


def _values() -> dict[str, Schema]:
    """The values of each axis that is known here."""
    known: dict[str, Schema] = {
        "backend": {"anyOf": [{"enum": sorted({*BACKENDS, *installed()})}, _TARGET]},
        "wrapper": {"anyOf": [{"enum": list(WRAPPERS)}, {"type": "string", "pattern": _wrapping()}]},
        "device": {"type": "string", "pattern": f"^{DEVICE}$"},
    }
    for name, axis in AXES.items():
        if axis.values is not None:
            known[name] = {"enum": list(axis.values)}
    return known


_VERSION: Final = r" *(===?|~=|!=|[<>]=?) *[0-9][0-9A-Za-z.*+!-]* *"
"""One demand on a version, as pip has them."""


def _wrapping() -> str:
    """A name or target, its compile order and its ranks (:mod:`pytest_torchcompile.wrappers.wrapping`)."""
    names = "|".join([*map(re.escape, WRAPPERS), _TARGET["pattern"].strip("^$")])
    return rf"^({names})(@({'|'.join(ORDERS)}))?(\*(fake)?[1-9]\d*)?$"


def _axes() -> Schema:
    known = {name: {"description": AXES[name].help, **_list(values)} for name, values in _values().items()}
    names = {"pattern": r"^[^\W\d]\w*$", "not": {"const": "model"}}
    return {"type": "object", "properties": known, "additionalProperties": _list(_SCALAR),
            "propertyNames": names}


def _rule(verb: str) -> Schema:
    known = {name: _some(values) for name, values in _values().items()}
    axes: Schema = {"type": "object", "minProperties": 1, "additionalProperties": _some(_SCALAR)}
    # `not` within `not` would be an axis of that name, which there cannot be.
    unless = axes | {"properties": known, "propertyNames": {"not": {"const": rules.NOT}}}
    cells = axes | {"properties": known | {rules.NOT: unless}}
    numbers = {name: _limit(limit) for name, limit in LIMITS.items()}
    limits = _record({name: limit.help for name, limit in LIMITS.items()}, numbers) | {"minProperties": 1}
    forms = {
        "limits": limits,
        "also": _some({"enum": list(CHECKS)}),
        "when": cells,
        "reason": _TEXT,
        "issue": _TEXT,
        "until": {"type": "string", "format": "date", "pattern": f"^{DAY}$"},
        "checks": _some({"enum": list(CHECKS)}),
        "torch": {"type": "string", "pattern": rf"^{_VERSION}(,{_VERSION})*$"},
    }
    keys = (verb, *rules.VERBS[verb])
    return _record(rules.RULE_KEYS, {key: forms.get(key, cells) for key in keys}, rules.REQUIRED[verb])


def _limit(limit: Limit) -> Schema:
    schema: Schema = {"type": "integer" if limit.whole else "number", "minimum": limit.least}
    return schema if limit.most is None else schema | {"maximum": limit.most}


def _strategy() -> Schema:
    least, most = strategy.STRENGTHS
    pairwise = {"strength": {"type": "integer", "minimum": least, "maximum": most}}
    sample = {"n": {"type": "integer", "minimum": 1}, "seed": _SIZE}
    given = {
        "pairwise": _record(strategy.KEYS["pairwise"], pairwise, ("strength",)),
        "sample": _record(strategy.KEYS["sample"], sample, ("n",)),
    }
    words = {"enum": [kind for kind in strategy.KINDS if kind != "sample"]}
    return {"anyOf": [words, *(_record({key: ""}, {key: form}, (key,)) for key, form in given.items())]}
