"""JSON as its standard has it, and held against a JSON Schema. What is refused is told, and never read as something.

A key that is given twice, NaN and Infinity are refused. What the published schema says is what the reader enforces,
word for word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TypeAlias

__all__ = ["StrictError", "Validator", "compile_schema", "dumps", "loads", "plain_json"]


class StrictError(ValueError):
    """A text that is no JSON; its text says what was found, and where if that can be told."""


def loads(text: str, ours: bool = False) -> Any:
    """Read one JSON value. Raises :class:`StrictError`, whatever is wrong with the text.

    ``ours``: known to be as :func:`dumps` wrote it, so that no object is looked through for keys given twice.
    """
    try:
        # What our own writer sealed has no key twice; to look for one makes the parsing of large reports slower.
        hook = None if ours else _make_object
        return json.loads(text, object_pairs_hook=hook, parse_constant=_refuse_constant)
    except StrictError:
        raise
    except json.JSONDecodeError as error:
        # A mistake at the very end is most often that of a file that was cut off.
        if error.pos >= len(text.rstrip()):
            raise StrictError(f"ends in line {error.lineno}, before it is complete") from None
        raise StrictError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    # A whole number of more digits than Python reads.
    except ValueError as error:
        raise StrictError(str(error)) from None
    # Python's parser recurses, so thousands of brackets end it: a planted file, not a report.
    except RecursionError:
        raise StrictError("is nested too deeply") from None
    except MemoryError:
        raise StrictError("is larger than this machine's memory") from None


def plain_json(value: Any) -> Any:
    """Return the value with NaN and infinities as texts (``nan``, ``inf``), for which JSON has no numbers."""
    try:
        # Tried as it is first: nearly every value is free of NaN, and to walk it costs more than to write it.
        json.dumps(value, allow_nan=False)
    except ValueError:
        return _spell_out_nan(value)
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON of any value: NaN and infinities as texts, what JSON has no form for as ``str`` has it."""
    try:
        # The same order as above: what has no NaN is not copied.
        return json.dumps(value, indent=indent, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_spell_out_nan(value), indent=indent, allow_nan=False, default=str)


def _spell_out_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spell_out_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_spell_out_nan, value))
    # Of numbers only NaN and infinities less themselves are not zero.
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Only where a key is missing the slow search for it is worth its time.
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise StrictError(f"the key {key!r} is given twice in one object")
        keys.add(key)
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise StrictError(f"{name} is no JSON")


# ------------------------------------------------------------------------------------------- held against a JSON Schema
# Only the keywords that our schemas use; a schema with another one is refused, so that none is silently ignored.
# Compiled to closures: a report of 10,000 cells has half a million values.
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
    # A number may be one of two types of Python's.
    types: set[type] = set()
    for name in names:
        types.update(_TYPES[name])
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
