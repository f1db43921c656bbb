"""A value held against a JSON Schema: what the published schema says is what the reader enforces, word for word.

Only the keywords that our schemas use; a schema with another one is refused, so that none is silently ignored.
Compiled to closures: a report of 10,000 cells has half a million values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

__all__ = ["Validator", "compile_schema"]

Mistake: TypeAlias = "tuple[tuple[str | int, ...], str]"
"""Where in the value, and what is wrong there."""
Validator: TypeAlias = Callable[[Any], "Mistake | None"]
"""Returns the first mistake in a value, or None."""

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}
_EXPECTED: Final = {
    "object": "an object", "array": "a list", "string": "a text", "null": "null", "boolean": "true or false",
    "integer": "a whole number", "number": "a number",
}
_IGNORED: Final = frozenset({"$schema", "$id", "title", "description"})
_LONGEST: Final = 60
"""Characters of a value that a mistake is told with."""


def compile_schema(schema: dict[str, Any]) -> Validator:
    """Return the validator of a schema. Raises ValueError for a keyword that is not known here."""
    validators = [_KEYWORDS[keyword](schema) for keyword in _ordered_keywords(schema)]
    if len(validators) == 1:
        return validators[0]

    def check_all(value: Any) -> Mistake | None:
        for validator in validators:
            mistake = validator(value)
            if mistake is not None:
                return mistake
        return None

    return check_all


def _ordered_keywords(schema: dict[str, Any]) -> list[str]:
    """The keywords, the type first: the others rely on it."""
    unknown = set(schema) - set(_KEYWORDS) - _IGNORED - {"required", "additionalProperties"}
    if unknown:
        raise ValueError(f"keyword {min(unknown)!r} is not known to this validator")
    keywords = [keyword for keyword in _KEYWORDS if keyword in schema]
    # One validator looks at the keys of an object, for all three keywords about them.
    if "additionalProperties" in schema and "properties" not in schema:
        keywords.append("properties")
    return keywords


def _type_validator(schema: dict[str, Any]) -> Validator:
    given = schema["type"]
    names: list[str] = [given] if isinstance(given, str) else given
    types = frozenset(python_type for name in names for python_type in _TYPES[name])
    expected = " or ".join(map(_EXPECTED.__getitem__, names))

    # Types are compared exactly: JSON has no subclasses, and a bool is no int.
    if len(types) == 1 and float not in types:
        (only,) = types

        def check_one_type(value: Any) -> Mistake | None:
            return None if type(value) is only else ((), f"found {_describe(value)}, expected {expected}")

        return check_one_type

    def check_types(value: Any) -> Mistake | None:
        if type(value) not in types:
            return (), f"found {_describe(value)}, expected {expected}"
        # NaN and infinities differ from themselves less themselves.
        if type(value) is float and value - value != 0:
            return (), f"found {value}, expected {expected}"
        return None

    return check_types


def _properties_validator(schema: dict[str, Any]) -> Validator:
    known = {name: compile_schema(inner) for name, inner in schema.get("properties", {}).items()}
    required = frozenset(schema.get("required", ()))
    other: Validator | None = None
    if schema.get("additionalProperties"):
        other = compile_schema(schema["additionalProperties"])

    def check_properties(value: Any) -> Mistake | None:
        if not required <= value.keys():
            missing = next(name for name in schema["required"] if name not in value)
            return (), f"the key {missing!r} is missing"
        for name, inner in value.items():
            validator = known.get(name, other)
            # A key that the schema does not know is one of a later version.
            if validator is not None and (mistake := validator(inner)) is not None:
                place, text = mistake
                return (name, *place), text
        return None

    return check_properties


def _items_validator(schema: dict[str, Any]) -> Validator:
    validator = compile_schema(schema["items"])

    def check_items(value: Any) -> Mistake | None:
        for number, inner in enumerate(value):
            mistake = validator(inner)
            if mistake is not None:
                place, text = mistake
                return (number, *place), text
        return None

    return check_items


def _any_of_validator(schema: dict[str, Any]) -> Validator:
    validators = list(map(compile_schema, schema["anyOf"]))

    def check_any(value: Any) -> Mistake | None:
        closest: Mistake | None = None
        for validator in validators:
            mistake = validator(value)
            if mistake is None:
                return None
            # The one that got furthest into the value tells most.
            if closest is None or len(mistake[0]) > len(closest[0]):
                closest = mistake
        return closest

    return check_any


def _enum_validator(schema: dict[str, Any]) -> Validator:
    # Only texts are looked up: a list in its place can't be hashed.
    allowed = frozenset(schema["enum"])

    def check_word(value: Any) -> Mistake | None:
        if not isinstance(value, str) or value not in allowed:
            return (), f"found {_describe(value)}, expected one of {', '.join(schema['enum'])}"
        return None

    return check_word


def _pattern_validator(schema: dict[str, Any]) -> Validator:
    pattern = re.compile(schema["pattern"])

    def check_form(value: Any) -> Mistake | None:
        if pattern.search(value):
            return None
        return (), f"found {_describe(value)}, expected the form {schema['pattern']}"

    return check_form


def _minimum_validator(schema: dict[str, Any]) -> Validator:
    least = schema["minimum"]

    def check_size(value: Any) -> Mistake | None:
        if value >= least:
            return None
        return (), f"found {value}, expected at least {least}"

    return check_size


def _unique_validator(schema: dict[str, Any]) -> Validator:
    def check_unique(value: Any) -> Mistake | None:
        repeated = _repeated_value(value)
        return None if repeated is None else ((), f"{_describe(repeated)} is listed twice")

    return check_unique


def _repeated_value(values: Iterable[Any]) -> Any:
    seen = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return _EXPECTED["object"]
    if isinstance(value, list):
        return _EXPECTED["array"]
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST - 3]}..."


_KEYWORDS: Final[dict[str, Callable[[dict[str, Any]], Validator]]] = {
    "type": _type_validator, "enum": _enum_validator, "pattern": _pattern_validator, "minimum": _minimum_validator,
    "properties": _properties_validator, "items": _items_validator, "uniqueItems": _unique_validator,
    "anyOf": _any_of_validator,
}
