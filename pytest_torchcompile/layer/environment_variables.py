"""TORCHCOMPILE_... environment variables: read, with the nearest known name for those that are not known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_torchcompile.cell import DYNAMIC
from pytest_torchcompile.errors import nearest

__all__ = ["PREFIX", "read"]

PREFIX: Final = "TORCHCOMPILE_"
_FLAGS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_DYNAMIC: Final = {**DYNAMIC, "none": None, "true": True, "false": False}


def _flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _listed(text))


def _options(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


def _dynamic(text: str) -> bool | None:
    return _DYNAMIC[text.lower()]


_A_FLAG: Final = (_flag, ", ".join(_FLAGS))
_A_LIST: Final = (_listed, "names separated by commas")
_A_NUMBER: Final = (int, "a whole number")
_A_WORD: Final = (str, "a word")
_VARIABLES: Final[dict[str, dict[str, tuple[Callable[[str], Any], str]]]] = {
    "compile": {
        "enabled": _A_FLAG, "mode": _A_WORD, "dynamic": (_dynamic, ", ".join(_DYNAMIC)), "backend": _A_WORD,
        "fullgraph": _A_FLAG, "options": (_options, "a JSON object"), "allowlist": _A_LIST, "blocklist": _A_LIST,
        "healthcheck": _A_FLAG, "fail_policy": _A_WORD, "smoketest_steps": _A_NUMBER,
        "blocklist_recursive": _A_FLAG,
    },
    "buckets": {"buckets": (_lengths, "lengths separated by commas"), "pad_token_id": _A_NUMBER},
}
"""Config to field to (reader, what it expects). All configs share one prefix, so each knows the others' names."""


def read(environ: Mapping[str, str] | None, config: str) -> dict[str, Any]:
    """Return the fields of one config that the environment sets; ``None``: the environment of the process.

    Raises :class:`ValueError` for an unknown variable with our prefix and for a value that can't be read.
    """
    environ = os.environ if environ is None else environ
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    known = {f"{PREFIX}{field.upper()}" for fields in _VARIABLES.values() for field in fields}
    for name in given:
        if name not in known:
            raise ValueError(f"unknown environment variable {name}; {nearest(name, known)}")
    found = {}
    for field, (reader, expected) in _VARIABLES[config].items():
        name = f"{PREFIX}{field.upper()}"
        if text := given.get(name, "").strip():
            try:
                found[field] = reader(text)
            except (KeyError, ValueError):
                raise ValueError(f"{name}={text!r}: expected {expected}") from None
    return found
