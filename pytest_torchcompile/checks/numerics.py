"""What the checks that compare numbers have in common: a section of leaves, and problems made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.diagnosis import stage_summary
from pytest_torchcompile.oracle.discrepancies import find_discrepancies, undecided_notes, why_vacuous
from pytest_torchcompile.oracle.leaf import NOTED, Leaf
from pytest_torchcompile.oracle.limits import Limits, is_excused

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["GRADIENT", "judge_decided", "judge_leaves", "judge_zero_gradients", "located", "numerics", "remark"]

_NONE: Mapping[str, float] = MappingProxyType({})
GRADIENT = "gradient of "
"""How the oracle names the leaves that are the check `gradients`'."""
SHOWN = 5
"""How many problems a check lists; the others are named in the last one's evidence."""
KEPT = 200
"""How many leaves a section keeps, the ones farthest off first; the rest are counted."""


def numerics(run: Trial, leaves: list[tuple[str, Leaf]]) -> dict[str, Any]:
    """A section: how many leaves were compared, undecidable and bitwise equal, and all that were not in full."""
    together = Limits().over(leaf for _, leaf in leaves)
    inexact = [(label, leaf) for label, leaf in leaves if not leaf.bitwise]
    inexact.sort(key=lambda pair: -_distance(pair[1]))
    error = run.compiled.error
    return {
        "raised": error.type if error else None,
        "compared": sum(leaf.decided for _, leaf in leaves),
        "undecided": sum(not leaf.decided for _, leaf in leaves),
        "excused": sum(is_excused(leaf, together) for _, leaf in leaves),
        "notes": undecided_notes(leaves)[:KEPT],
        "vacuous": why_vacuous(leaves),
        "zero_gradients": sorted({leaf.name for _, leaf in leaves if leaf.kind == "zero_gradient"}),
        "bitwise": len(leaves) - len(inexact),
        "looks": together.looks,
        "inexact": len(inexact),
        "leaves": [{"call": label, **leaf.to_dict()} for label, leaf in inexact[:KEPT]],
    }


def remark(section: Mapping[str, Any]) -> str:
    """How many leaves were decided, where some were not; how many were excused; how many gradients are zeros in place
    of None."""
    found = []
    decided, undecided = section.get("compared", 0), section.get("undecided", 0)
    if undecided:
        found.append(f"{decided} of {decided + undecided} leaves were decided")
    if small := section.get("excused"):  # older reports do not say
        found.append(f"{small} value(s) are off by more than rounding, but less than one eps of their largest element")
    if zeros := section.get("zero_gradients"):
        found.append(f"{len(zeros)} gradient(s) are zeros where eager has none")
    return "; ".join(found)


def judge_zero_gradients(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem where more gradients are zeros in place of None than the limit ``zero_gradients`` allows, if there is
    one."""
    names = section.get("zero_gradients", ())  # older reports do not say
    if len(names) > limits.get("zero_gradients", len(names)):
        yield Problem(f"{len(names)} gradient(s) are zeros where eager has none, {limits['zero_gradients']:g} allowed",
                      evidence="\n".join(names),
                      hint="a parameter that takes no part in the loss: freeze it with requires_grad_(False), or raise "
                           "the limit `zero_gradients`")


def judge_decided(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem where rounding noise leaves more undecided than the limit ``decided`` allows, if there is one."""
    least = limits.get("decided", 0.0)
    decided = section.get("compared", 0)
    every = decided + section.get("undecided", 0)
    if every and decided / every < least:
        share = math.floor(decided / every * 10_000) / 10_000  # rounded down, so that as a limit it passes
        yield Problem(f"{decided} of {every} leaves were decided, a share of {share:.4g}; {least:.4g} wanted",
                      evidence="\n".join(section.get("notes", ())),
                      hint="rounding noise is as large as these values: compare in a wider dtype, or with weights that "
                           f"make them larger; or allow it by the rule `- limits: {{decided: {share:.4g}}}`")


def _distance(leaf: Leaf) -> float:
    if leaf.kind in NOTED:
        return 0.0
    if leaf.rms is None or leaf.peak is None:
        return float("inf")  # not a matter of rounding, so always a problem: kept first
    return max(leaf.rms, leaf.peak / 4, (leaf.bias or 0) / 2)


NOISE_LIMITS = ("rms", "bias", "peak")
"""Limits of a matrix in units of rounding noise."""


def judge_leaves(section: Mapping[str, Any], what: str, limits: Mapping[str, float] = _NONE) -> Iterator[Problem]:
    """One problem for each leaf that is farther off than rounding explains, or than ``limits`` allow."""
    chosen = {name: limits[name] for name in NOISE_LIMITS if name in limits}
    most = Limits(**chosen, looks=section.get("looks", 0))
    if section.get("vacuous"):
        yield Problem(f"{section['vacuous']}: nothing is proved", hint="other inputs or another loss")
    elif not section["compared"]:
        yield Problem(f"nothing was compared: the model has no {what}",
                      hint="phase: inference has no gradients to judge; or leave the check out by the key `checks`"
                      if what == "gradient" else "return a tensor")
    leaves = [(kept["call"], Leaf.from_dict({k: v for k, v in kept.items() if k != "call"}))
              for kept in section["leaves"]]
    found = sorted(find_discrepancies(leaves, most), key=lambda finding: _order(finding.where))
    for number, finding in enumerate(found[:SHOWN]):
        evidence = finding.evidence if number else finding.evidence + located(section)
        if number == SHOWN - 1 and (rest := [f.where for f in found[SHOWN:]]):
            evidence += f"\n{len(rest)} more differ: {', '.join(rest[:12])}{', ...' if rest[12:] else ''}"
        yield Problem(finding.message, evidence)


def _order(where: str) -> tuple[int, int]:
    """In the order in which a program makes them, so that the first is nearest to the cause; then the worst first."""
    step = re.match(r"step (\d+): ", where)
    name = where[step.end():] if step else where
    role = next((i for i, start in enumerate(("output", "loss", GRADIENT)) if name.startswith(start)), 3)
    return int(step[1]) if step else 1 << 30 if name.endswith("steps") else 0, role


def located(section: Mapping[str, Any]) -> str:
    """A line about the stages of the compiler that were tried, to be added to evidence; empty if none was."""
    return "\n" + stage_summary(section["located"]) if section.get("located") else ""
