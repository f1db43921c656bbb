"""Notes: what a comparison could not decide, or had to do without. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.limits import note

__all__ = ["NOT_HELD", "notes", "vacuous", "wavering"]

NOT_HELD = ("what is held of a call when the next one runs was not compared: CUDA graphs write to the same memory "
            "again, and a copy is up to the caller")
_VALUES = frozenset({"value", "gradient", "buffer", "mutation", "nondeterministic"})
_KINDS = {
    "float32": "measured from a float32 run, not from a float64 one",
    "float64-inputs": "noise was drawn on parameters and inputs, not at every operator",
    "eager-draws": "measured from eager itself; noise was drawn on its parameters and inputs",
    "eager-only": "measured from eager itself, with a tolerance made from the dtype",
}


def notes(leaves: Iterable[tuple[str, Leaf]]) -> list[str]:
    """One line for each leaf that could not be decided, and for each way of measuring that fell short of float64.

    ``leaves`` come with the label of their call, which a line gives for the first of several.
    """
    found: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for label, leaf in leaves:
        if leaf.against in _KINDS and leaf.numerical:
            key = f"{leaf.against}: {leaf.why}"
            texts.setdefault(key, f"{_KINDS[leaf.against]}" + (f" ({leaf.why})" if leaf.why else ""))
            found.setdefault(key, []).append(label)
        if text := note(leaf):
            texts.setdefault(leaf.name, text)
            found.setdefault(leaf.name, []).append(label)
    return [f"{texts[key]}, in {_calls(labels)}" for key, labels in found.items()]


def vacuous(leaves: Sequence[tuple[str, Leaf]]) -> str | None:
    """Say why a comparison proves nothing although nothing is wrong, or ``None``: every value is undecidable."""
    values = [leaf for _, leaf in leaves if leaf.kind in _VALUES and leaf.numel]
    if not values or any(leaf.decided for leaf in values):
        return None
    if wavering(leaves):
        return f"eager does not repeat itself: two runs differ by more than rounding in all {len(values)} values"
    return f"all {len(values)} values are nothing but rounding noise, so that any others would have passed too"


def wavering(leaves: Sequence[tuple[str, Leaf]]) -> bool:
    """Whether eager does not repeat itself in any value that was compared."""
    values = [leaf for _, leaf in leaves if leaf.kind in _VALUES and leaf.numel]
    return bool(values) and all(leaf.kind == "nondeterministic" for leaf in values)


def _calls(labels: Iterable[str]) -> str:
    first, *others = dict.fromkeys(labels)
    return first + (f" and {len(others)} more" if others else "")
