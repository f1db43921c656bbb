"""Stages of the compiler, each with the backend that ends after it; the text about the one that differs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["STAGES", "explained", "stages_before"]

STAGES: Final = {
    "eager": "Dynamo's capture of the program",
    "aot_eager": "AOTAutograd's graphs of forward and backward",
    "aot_eager_decomp_partition": "the decompositions or the partitioner that Inductor uses",
    "inductor": "Inductor's lowering, fusion or generated code",
}
"""Backend to what it adds to the one before it."""


def stages_before(backend: str) -> list[str]:
    """The backends that do part of what ``backend`` does, in order; of an unknown one the two that most build on."""
    names = list(STAGES)
    return names[:names.index(backend)] if backend in STAGES else names[:2]


def explained(located: Mapping[str, Any]) -> str:
    """One line: what each stage did, and which is the first that differs.

    ``located`` has ``backend``, the one under test, and ``stages``: pairs of a backend and ``agrees`` or what it did
    instead; and ``beyond``, the same of backends that do more, which an older report does not have.
    """
    beyond = "".join(f"; {name} works where {located['backend']} raises" for name, did in located.get("beyond", ())
                     if did == "agrees")
    return f"{_explained(located)}{beyond}"


def _explained(located: Mapping[str, Any]) -> str:
    own, tried = located["backend"], located["stages"]
    words = ", ".join(f"{name} {what}" for name, what in tried)
    if not tried:
        return f"stages: {own} does nothing but run {STAGES[own]}: look there"
    last, did = tried[-1]
    if did == "agrees":
        return f"stages: {words}; {own} is the first that does not: look at {STAGES.get(own, 'the backend itself')}"
    return f"stages: {words}: look at {STAGES[last]}"
