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
        return json.loads(text, object_pairs_hook=None if ours else _object, parse_constant=_constant)
    except StrictError:
        raise
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()):
            raise StrictError(f"ends in line {error.lineno}, before it is complete") from None
        raise StrictError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # a whole number of more digits than Python reads
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
        return _plain(value)
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON of any value: NaN and infinities as texts, what JSON has no form for as ``str`` has it."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_plain(value), indent=indent, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise StrictError(f"the key {twice!r} is given twice in one object")
    return found


def _constant(name: str) -> NoReturn:
    raise StrictError(f"{name} is no JSON")
