"""The JSON Schema of a matrix file, for editors; made from the tables that the reader itself uses.

It knows the form. What needs the file as a whole (a rule that matches nothing, a factory that is not there)
only the reader can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pytest_torchcompile.backends import BACKENDS, TABLES, installed
from pytest_torchcompile.cell import AXES
from pytest_torchcompile.checks import CHECKS, LIMITS, Limit
from pytest_torchcompile.plan import matrix, models, rules, selection
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
        "models": {"type": "object", "minProperties": 1, "additionalProperties": _model_schema(),
                   "propertyNames": {"pattern": f"^{models.MODEL_NAME}$"}},
        "axes": _axes_schema(),
        "rules": {"type": "array", "items": {"oneOf": [_rule_schema(verb) for verb in rules.VERBS]}},
        "strategy": _strategy_schema(),
        "checks": _one_or_more({"enum": list(CHECKS)}),
        "autotune_choices": _SIZE,
        "fuzz_seconds": {"type": "number", "minimum": 1},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-torchcompile matrix",
        **_object_of(matrix.KEYS, sections, ("version", "models")),
    }


def _object_of(helps: Mapping[str, str], properties: Mapping[str, Schema],
            required: Iterable[str] = ()) -> Schema:
    """An object with these keys and no others."""
    described = {key: {"description": helps[key], **schema} for key, schema in properties.items()}
    return {"type": "object", "properties": described, "additionalProperties": False,
            "required": list(required)}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}


def _one_or_more(items: Schema) -> Schema:
    """One, or a list of them."""
    return {"anyOf": [items, _list_of(items)]}


def _model_schema() -> Schema:
    numbers = {"min": _SIZE, "max": _SIZE, "multiple_of": {"type": "integer", "minimum": 1}}
    sizes = {"choices": _list_of(_SIZE), "buckets": _list_of(_SIZE)}
    dim = {"anyOf": [_SIZE, _TEXT, _object_of(models.DIM_KEYS, numbers | sizes)]}
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
        "axes": _axes_schema(),
        "mode_of_modules": {"enum": list(models.MODES_OF_MODULES)},
    }
    return _object_of(models.MODEL_KEYS, forms, models.REQUIRED)


def _axis_values() -> dict[str, Schema]:
    """The values of each axis that is known here."""
    known: dict[str, Schema] = {
        "backend": {"anyOf": [{"enum": sorted({*BACKENDS, *installed()})}, _TARGET]},
        "wrapper": {"anyOf": [{"enum": list(WRAPPERS)}, {"type": "string", "pattern": _wrapper_pattern()}]},
        "device": {"type": "string", "pattern": f"^{DEVICE}$"},
        "decompositions": {"anyOf": [{"enum": ["default", *TABLES]}, _TARGET]},
        "passes": {"type": "string", "minLength": 1},
    }
    for name, axis in AXES.items():
        if axis.values is not None:
            known[name] = {"enum": list(axis.values)}
    return known


_VERSION: Final = r" *(===?|~=|!=|[<>]=?) *[0-9][0-9A-Za-z.*+!-]* *"
"""One demand on a version, as pip has them."""


def _wrapper_pattern() -> str:
    """A name or target, its compile order or dtype, and its ranks (:mod:`pytest_torchcompile.wrappers.wrapping`)."""
    names = "|".join([*map(re.escape, WRAPPERS), _TARGET["pattern"].strip("^$")])
    after = {*ORDERS}
    for entry in WRAPPERS.values():
        after |= {*entry.dtypes}
    return rf"^({names})(@({'|'.join(sorted(after))}))?(\*(fake)?[1-9]\d*)?$"


def _axes_schema() -> Schema:
    known = {name: {"description": AXES[name].help, **_list_of(values)} for name, values in _axis_values().items()}
    names = {"pattern": r"^[^\W\d]\w*$", "not": {"const": "model"}}
    return {"type": "object", "properties": known, "additionalProperties": _list_of(_SCALAR),
            "propertyNames": names}


def _rule_schema(verb: str) -> Schema:
    known = {name: _one_or_more(values) for name, values in _axis_values().items()}
    axes: Schema = {"type": "object", "minProperties": 1, "additionalProperties": _one_or_more(_SCALAR)}
    # `not` within `not` would be an axis of that name, which there cannot be.
    unless = axes | {"properties": known, "propertyNames": {"not": {"const": rules.NOT}}}
    cells = axes | {"properties": known | {rules.NOT: unless}}
    numbers = {name: _limit_schema(limit) for name, limit in LIMITS.items()}
    limits = _object_of({name: limit.help for name, limit in LIMITS.items()}, numbers) | {"minProperties": 1}
    forms = {
        "limits": limits,
        "also": _one_or_more({"enum": list(CHECKS)}),
        "when": cells,
        "reason": _TEXT,
        "issue": _TEXT,
        "until": {"type": "string", "format": "date", "pattern": f"^{DAY}$"},
        "checks": _one_or_more({"enum": list(CHECKS)}),
        "torch": {"type": "string", "pattern": rf"^{_VERSION}(,{_VERSION})*$"},
    }
    keys = (verb, *rules.VERBS[verb])
    return _object_of(rules.RULE_KEYS, {key: forms.get(key, cells) for key in keys}, rules.REQUIRED[verb])


def _limit_schema(limit: Limit) -> Schema:
    schema: Schema = {"type": "integer" if limit.whole else "number", "minimum": limit.least}
    if limit.most is not None:
        schema["maximum"] = limit.most
    return schema


def _strategy_schema() -> Schema:
    least, most = selection.STRENGTHS
    pairwise = {"strength": {"type": "integer", "minimum": least, "maximum": most}}
    sample = {"n": {"type": "integer", "minimum": 1}, "seed": _SIZE}
    given = {
        "pairwise": _object_of(selection.KEYS["pairwise"], pairwise, ("strength",)),
        "sample": _object_of(selection.KEYS["sample"], sample, ("n",)),
    }
    # A sample needs its size, so its name alone is no strategy.
    forms: list[Schema] = [{"enum": [kind for kind in selection.KINDS if kind != "sample"]}]
    for key, form in given.items():
        forms.append(_object_of({key: ""}, {key: form}, (key,)))
    return {"anyOf": forms}
