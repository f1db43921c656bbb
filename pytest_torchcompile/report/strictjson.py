"""JSON as its standard has it: a key that is given twice, NaN and Infinity are refused, not read as something."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["StrictError", "dumps", "loads", "plain_json"]


class StrictError(ValueError):
    """A text that is no JSON; its text says what was found, and where if that can be told."""


def loads(text: str, ours: bool = False) -> Any:
    """Read one JSON value. Raises :class:`StrictError`, whatever is wrong with the text.

    ``ours``: known to be as :func:`dumps` wrote it, so that no object is looked through for keys given twice.
    """
    try:
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
    except RecursionError:
        raise StrictError("is nested too deeply") from None
    except MemoryError:
        raise StrictError("is larger than this machine's memory") from None


def plain_json(value: Any) -> Any:
    """Return the value with NaN and infinities as texts (``nan``, ``inf``), for which JSON has no numbers."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return _spell_out_nan(value)
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON of any value: NaN and infinities as texts, what JSON has no form for as ``str`` has it."""
    try:
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
