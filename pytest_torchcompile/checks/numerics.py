"""The checks that compare numbers: `equivalence`, `gradients`, `training_steps` and `aliasing`.

All judge leaves of one comparison: an output, a gradient, a buffer, each with its distance from eager in units of the
program's own rounding noise. `equivalence` has outputs, loss, buffers, mutated inputs, dtypes, shapes, random
generators and torch's settings; in the calls that compile, in the same calls with other values, and again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.culprit.culprit_record import Culprit, culprit_text
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.diagnosis import remedy_of, stage_summary
from pytest_torchcompile.oracle.discrepancies import NOT_HELD, find_discrepancies, undecided_notes, why_vacuous
from pytest_torchcompile.oracle.leaf_limits import NOTED, Leaf, Limits, is_excused, is_stride

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["ALIASING", "EQUIVALENCE", "GRADIENTS", "STEPS", "TRAINING_STEPS", "judge_leaves", "located_stage",
           "measure_leaves", "remark_leaves", "tried_remedy"]

STEPS = 3
"""Training steps where the matrix gives no limit ``steps``."""
SHOWN = 5
"""How many problems a check lists; the others are named in the last one's evidence."""
KEPT = 200
"""How many leaves a section keeps, the ones farthest off first; the rest are counted."""

_NONE: Mapping[str, float] = MappingProxyType({})
_GRADIENT = "gradient of "
"""How the oracle names the leaves that are the check `gradients`'."""
_OTHER_LOSS = "give the model a loss that depends on its parameters (key `loss` of the model)"

LabelledLeaf = tuple[str, Leaf]
"""The call in which it was compared, and the leaf."""


# A section of leaves, and the problems made of it.


def measure_leaves(run: Trial, leaves: list[LabelledLeaf]) -> dict[str, Any]:
    """A section: how many leaves were compared, undecidable and bitwise equal, and all that were not in full."""
    together = Limits().over(leaf for _, leaf in leaves)
    inexact = [(label, leaf) for label, leaf in leaves if not leaf.bitwise]
    # Sorted before it is cut, so that the worst are always kept.
    inexact.sort(key=_farthest_first)
    zero_gradients = {leaf.name for _, leaf in leaves if leaf.kind == "zero_gradient"}
    zero_signs = {leaf.name for _, leaf in leaves if leaf.kind == "zero_sign"}
    error = run.compiled.error
    return {
        "raised": error.type if error else None,
        "compared": sum(leaf.decided for _, leaf in leaves),
        # Counted apart from what is equal: a leaf of noise proves nothing.
        "undecided": sum(not leaf.decided for _, leaf in leaves),
        "excused": sum(is_excused(leaf, together) for _, leaf in leaves),
        "notes": undecided_notes(leaves)[:KEPT],
        "vacuous": why_vacuous(leaves),
        "zero_gradients": sorted(zero_gradients),
        "zero_signs": sorted(zero_signs),
        "bitwise": len(leaves) - len(inexact),
        "looks": together.looks,
        "inexact": len(inexact),
        "leaves": [{"call": label, **leaf.to_dict()} for label, leaf in inexact[:KEPT]],
    }


def _farthest_first(labelled: LabelledLeaf) -> float:
    leaf = labelled[1]
    if leaf.kind in NOTED:
        return 0.0
    # Not a matter of rounding, so always a problem: kept first.
    if leaf.rms is None or leaf.peak is None:
        return -math.inf
    return -max(leaf.rms, leaf.peak / 4, (leaf.bias or 0) / 2)


def remark_leaves(section: Mapping[str, Any]) -> str:
    """How many leaves were decided, where some were not; how many were excused; how many gradients are zeros in place
    of None."""
    remarks = []
    decided, undecided = section.get("compared", 0), section.get("undecided", 0)
    if undecided:
        remarks.append(f"{decided} of {decided + undecided} leaves were decided")
    # Older reports say nothing of these two.
    if small := section.get("excused"):
        remarks.append(f"{small} value(s) are off by more than rounding, but less than one eps of their largest "
                       "element")
    if zeros := section.get("zero_gradients"):
        remarks.append(f"{len(zeros)} gradient(s) are zeros where eager has none")
    if signs := section.get("zero_signs"):
        remarks.append(f"{len(signs)} output(s) have zeros of another sign")
    return "; ".join(remarks)


NOISE_LIMITS = ("rms", "bias", "peak")
"""Limits of a matrix in units of rounding noise."""


def judge_leaves(section: Mapping[str, Any], what: str, limits: Mapping[str, float] = _NONE) -> Iterator[Problem]:
    """One problem for each leaf that is farther off than rounding explains, or than ``limits`` allow."""
    if section.get("vacuous"):
        yield Problem(f"{section['vacuous']}: nothing is proved", hint="other inputs or another loss")
    elif not section["compared"]:
        hint = "return a tensor"
        if what == "gradient":
            hint = "phase: inference has no gradients to judge; or leave the check out by the key `checks`"
        yield Problem(f"nothing was compared: the model has no {what}", hint=hint)
    yield from _judge_differing(section, limits)


def _judge_raised(section: Mapping[str, Any], limits: Mapping[str, float] = _NONE) -> list[Problem]:
    """What can be said of a compiled run that raised; empty if it did not.

    Leaves that differed before it raised stay wrong: an error must not hide them.
    """
    raised = unjudged(section)
    if raised and section.get("leaves"):
        return [*_judge_differing(section, limits), *raised]
    return raised


def _judge_differing(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    chosen = {name: limits[name] for name in NOISE_LIMITS if name in limits}
    most = Limits(**chosen, looks=section.get("looks", 0))
    differing = sorted(find_discrepancies(_stored_leaves(section), most), key=lambda each: _program_order(each.where))
    for number, finding in enumerate(differing[:SHOWN]):
        evidence, hint = finding.evidence, ""
        if number == 0:
            evidence += located_stage(section)
            hint = tried_remedy(section)
        if number == SHOWN - 1:
            evidence += _others_named([each.where for each in differing[SHOWN:]])
        yield Problem(finding.message, evidence, hint=hint)


def _stored_leaves(section: Mapping[str, Any]) -> list[LabelledLeaf]:
    leaves = []
    for stored in section["leaves"]:
        fields = dict(stored)
        label = fields.pop("call")
        leaves.append((label, Leaf.from_dict(fields)))
    return leaves


def _others_named(names: list[str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > 12 else ""
    return f"\n{len(names)} more differ: {', '.join(names[:12])}{more}"


def _program_order(where: str) -> tuple[int, int]:
    """In the order in which a program makes them, so that the first is nearest to the cause; then the worst first."""
    step, name = 0, where
    if in_step := re.match(r"step (\d+): ", where):
        step, name = int(in_step[1]), where[in_step.end():]
    elif where.endswith("steps"):
        # What is left after the last of all steps.
        step = 1 << 30
    for role, start in enumerate(("output", "loss", _GRADIENT)):
        if name.startswith(start):
            return step, role
    return step, 3


def located_stage(section: Mapping[str, Any]) -> str:
    """A line about the stages of the compiler that were tried, to be added to evidence; empty if none was."""
    if not section.get("located"):
        return ""
    text = "\n" + stage_summary(section["located"])
    # Asked for by an option.
    if found := section["located"].get("culprit"):
        text += "\n" + culprit_text(Culprit.from_dict(found))
    return text


def tried_remedy(section: Mapping[str, Any]) -> str:
    """What was tried after the stages and mends it; empty where nothing is known."""
    return remedy_of(section.get("located") or {})


def _judge_decided(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem where rounding noise leaves more undecided than the limit ``decided`` allows, if there is one."""
    least = limits.get("decided", 0.0)
    decided = section.get("compared", 0)
    every = decided + section.get("undecided", 0)
    if every and decided / every < least:
        # Rounded down, so that as a limit it passes.
        share = math.floor(decided / every * 10_000) / 10_000
        yield Problem(f"{decided} of {every} leaves were decided, a share of {share:.4g}; {least:.4g} wanted",
                      evidence="\n".join(section.get("notes", ())),
                      hint="rounding noise is as large as these values: compare in a wider dtype, or with weights that "
                           f"make them larger; or allow it by the rule `- limits: {{decided: {share:.4g}}}`")


# equivalence


def _measure_equivalence(run: Trial) -> dict[str, Any]:
    """Everything that was compared in the calls, but what the other checks are for."""
    leaves = []
    for label, leaf in run.leaves:
        is_elsewhere = leaf.name.startswith(_GRADIENT) or leaf.kind == "alias" or is_stride(leaf)
        if not is_elsewhere:
            leaves.append((label, leaf))
    return measure_leaves(run, leaves)


def _judge_equivalence(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterable[Problem]:
    """``limits`` may hold ``rms``, ``bias`` and ``peak``, in units of the program's noise, and ``zero_signs``."""
    if section["raised"]:
        return _judge_raised(section, limits)
    return (*judge_leaves(section, "output", limits), *_judge_decided(section, limits),
            *_judge_zero_signs(section, limits))


def _judge_zero_signs(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem where zeros of more outputs have another sign than the limit ``zero_signs`` allows, if any."""
    # Older reports have no such names.
    names = section.get("zero_signs", ())
    if len(names) > limits.get("zero_signs", len(names)):
        yield Problem(f"{len(names)} output(s) have zeros of another sign, {limits['zero_signs']:g} allowed",
                      evidence="\n".join(names),
                      hint="1 / -0.0 is -inf: where nothing divides by them, raise the limit `zero_signs`")


# gradients


def _measure_gradients(run: Trial) -> dict[str, Any]:
    """The gradients of parameters and inputs, and how many of eager's are not zero."""
    leaves = []
    for label, leaf in run.leaves:
        if leaf.name.startswith(_GRADIENT) and not is_stride(leaf):
            leaves.append((label, leaf))
    return measure_leaves(run, leaves) | {"nonzero": sum(passed.gradients for passed in run.passed)}


def _judge_gradients(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """``limits`` may hold ``zero_gradients``, how many may be zeros where eager has none."""
    if section["raised"]:
        yield from _judge_raised(section)
        return
    yield from judge_leaves(section, "gradient")
    yield from _judge_decided(section, limits)
    yield from _judge_zero_gradients(section, limits)
    if section["compared"] and not section["nonzero"]:
        yield Problem("every gradient is zero, NaN or infinite in the eager run too: their equality proves nothing",
                      hint=_OTHER_LOSS)


def _judge_zero_gradients(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """A problem where more gradients are zeros in place of None than the limit ``zero_gradients`` allows, if any."""
    # Older reports have no such names.
    names = section.get("zero_gradients", ())
    if len(names) > limits.get("zero_gradients", len(names)):
        yield Problem(f"{len(names)} gradient(s) are zeros where eager has none, {limits['zero_gradients']:g} allowed",
                      evidence="\n".join(names),
                      hint="a parameter that takes no part in the loss: freeze it with requires_grad_(False), or raise "
                           "the limit `zero_gradients`")


# training_steps: a few steps of SGD. What a single backward pass can't show is compiled code that keeps parameters as
# they were when it was compiled, or gradients from the step before.


def _measure_training_steps(run: Trial) -> dict[str, Any]:
    """Outputs, loss and gradients of each step, parameters and buffers after the last, and the number of steps."""
    leaves = [(label, leaf) for label, leaf in run.trained if not is_stride(leaf)]
    steps = run.steps if run.trained else 0
    return measure_leaves(run, leaves) | {"steps": steps, "rate": run.rate, "untrained": run.untrained}


def _judge_training_steps(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """``limits`` may hold ``steps``, how many must have been compared."""
    if section["raised"]:
        yield from _judge_raised(section)
        return
    # Older reports do not have it.
    if section.get("untrained"):
        yield Problem(f"no step was compared: eager raises in them: {section['untrained']}", hint=_OTHER_LOSS)
        return
    if not section["steps"]:
        yield Problem("no step was made: no parameter of the model has a gradient, or eager does not train",
                      hint=_OTHER_LOSS)
        return
    least = limits.get("steps", STEPS)
    if section["steps"] < least:
        yield Problem(f"{section['steps']} training steps were compared, {least:g} wanted",
                      hint="the observation was made under a lower limit `steps`: run the cell again")
    yield from judge_leaves(section, "step")
    yield from _judge_decided(section, limits)


# aliasing: outputs share memory with inputs, parameters, buffers and each other exactly where eager's do. Also outputs
# that somebody still holds when the model is called again: a result that is overwritten later was right at first.


def _measure_aliasing(run: Trial) -> dict[str, Any]:
    """Everything that was compared in the sharing of memory."""
    section = measure_leaves(run, [(label, leaf) for label, leaf in run.leaves if leaf.kind == "alias"])
    if run.replayed:
        section["notes"] = [*section["notes"], NOT_HELD]
    return section


def _judge_aliasing(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterable[Problem]:
    """Takes no limits."""
    return _judge_raised(section) or judge_leaves(section, "output")


EQUIVALENCE = Check("equivalence", _measure_equivalence, _judge_equivalence, remark_leaves)
GRADIENTS = Check("gradients", _measure_gradients, _judge_gradients, remark_leaves)
TRAINING_STEPS = Check("training_steps", _measure_training_steps, _judge_training_steps, remark_leaves)
ALIASING = Check("aliasing", _measure_aliasing, _judge_aliasing)
