"""A value held against a JSON Schema: what the published schema says is what the reader enforces, word for word.

Only the keywords that our schemas use; a schema with another one is refused, so that none is silently ignored.
Compiled to closures: a report of 10,000 cells has half a million values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

__all__ = ["Validator", "compile_schema"]

Found: TypeAlias = "tuple[tuple[str | int, ...], str]"
"""Where in the value, and what is wrong there."""
Validator: TypeAlias = Callable[[Any], "Found | None"]
"""Returns the first mistake in a value, or None."""

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}
_WORDS: Final = {str: "a text", bool: "true or false", int: "a number", float: "a number", type(None): "null",
                 dict: "an object", list: "a list"}
_IGNORED: Final = frozenset({"$schema", "$id", "title", "description"})


def compile_schema(schema: dict[str, Any]) -> Validator:
    """Return the validator of a schema. Raises ValueError for a keyword that is not known here."""
    validators = [_KEYWORDS[keyword](schema) for keyword in _order(schema)]
    if len(validators) == 1:
        return validators[0]

    def all_of(value: Any) -> Found | None:
        for validator in validators:
            found = validator(value)
            if found is not None:
                return found
        return None

    return all_of


def _order(schema: dict[str, Any]) -> list[str]:
    """The keywords, the type first: the others rely on it."""
    unknown = set(schema) - set(_KEYWORDS) - _IGNORED - {"required", "additionalProperties"}
    if unknown:
        raise ValueError(f"keyword {min(unknown)!r} is not known to this validator")
    order = [keyword for keyword in _KEYWORDS if keyword in schema]
    if "additionalProperties" in schema and "properties" not in schema:
        order.append("properties")
    return order


def _type(schema: dict[str, Any]) -> Validator:
    given = schema["type"]
    names: list[str] = [given] if isinstance(given, str) else given
    types = tuple(dict.fromkeys(each for name in names for each in _TYPES[name]))
    exact = frozenset(types)
    expected = " or ".join({"object": "an object", "array": "a list", "string": "a text", "null": "null",
                            "boolean": "true or false", "integer": "a whole number", "number": "a number"}[n]
                           for n in names)

    if len(types) == 1 and float not in exact:
        only = types[0]
        return lambda value: None if type(value) is only else ((), f"found {_shown(value)}, expected {expected}")

    def check(value: Any) -> Found | None:
        if type(value) not in exact:  # JSON has no subclasses, and a bool is no int
            return (), f"found {_shown(value)}, expected {expected}"
        if type(value) is float and value - value != 0:
            return (), f"found {value}, expected {expected}"
        return None

    return check


def _properties(schema: dict[str, Any]) -> Validator:
    known = {name: compile_schema(inner) for name, inner in schema.get("properties", {}).items()}
    required = frozenset(schema.get("required", ()))
    other = compile_schema(schema["additionalProperties"]) if schema.get("additionalProperties") else None

    def check(value: Any) -> Found | None:
        if not required <= value.keys():
            return (), f"the key {next(name for name in schema['required'] if name not in value)!r} is missing"
        for name, inner in value.items():
            validator = known.get(name, other)
            if validator is not None and (found := validator(inner)) is not None:
                return (name, *found[0]), found[1]
        return None

    return check


def _items(schema: dict[str, Any]) -> Validator:
    validator = compile_schema(schema["items"])

    def check(value: Any) -> Found | None:
        for number, inner in enumerate(value):
            if (found := validator(inner)) is not None:
                return (number, *found[0]), found[1]
        return None

    return check


def _any_of(schema: dict[str, Any]) -> Validator:
    validators = [compile_schema(each) for each in schema["anyOf"]]

    def check(value: Any) -> Found | None:
        closest: Found | None = None
        for validator in validators:
            found = validator(value)
            if found is None:
                return None
            if closest is None or len(found[0]) > len(closest[0]):  # the one that got furthest tells most
                closest = found
        return closest

    return check


def _enum(schema: dict[str, Any]) -> Validator:
    allowed = frozenset(schema["enum"])

    def check(value: Any) -> Found | None:
        if not isinstance(value, str) or value not in allowed:
            return (), f"found {_shown(value)}, expected one of {', '.join(schema['enum'])}"
        return None

    return check


def _pattern(schema: dict[str, Any]) -> Validator:
    pattern = re.compile(schema["pattern"])

    def check(value: Any) -> Found | None:
        return None if pattern.search(value) else ((), f"found {_shown(value)}, expected the form {schema['pattern']}")

    return check


def _minimum(schema: dict[str, Any]) -> Validator:
    least = schema["minimum"]

    def check(value: Any) -> Found | None:
        return None if value >= least else ((), f"found {value}, expected at least {least}")

    return check


def _unique(schema: dict[str, Any]) -> Validator:
    def check(value: Any) -> Found | None:
        twice = _twice(value)
        return None if twice is None else ((), f"{_shown(twice)} is listed twice")

    return check


def _twice(values: Iterable[Any]) -> Any:
    seen = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return _WORDS[type(value)]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_KEYWORDS: Final[dict[str, Callable[[dict[str, Any]], Validator]]] = {
    "type": _type, "enum": _enum, "pattern": _pattern, "minimum": _minimum, "properties": _properties,
    "items": _items, "uniqueItems": _unique, "anyOf": _any_of,
}
