"""Graph passes one by one: the model with the first k of them, held against the model with the first k - 1.

What the whole did wrong is so told by the pass that did it, and two wrongs that cancel out are both told.
Decompositions are such a step too: they are meant to change the last bits, and by how much is measured.

Each variant runs the calls, one of another size where they have one alone, then all of them again with other values
(``pass_calls.py``): a pass that has put a weight, a buffer or a size into the graph computes something else then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import headline
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.ledger.trace import muted_trace
from pytest_torchcompile.oracle.calls import Side
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.discrepancies import why_vacuous
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.pass_calls import PassCalls, choose_calls
from pytest_torchcompile.oracle.pass_records import PassStep, WrongLeaf
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.tensor_forms import same_bits
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["JudgedSteps", "judge_steps"]

_CAPTURE = "the capture itself"
_FRAME: Final = re.compile(r'  File "(.+?)", line (\d+), in .*\n(.*)')
# How the leaves begin whose strides compiled code keeps.
_PROMISED = ("output", "input", "buffer", "attribute")
# How the types of errors begin that are raised while a graph is made, and not by what it computes.
_OF_COMPILING: Final = ("torch._dynamo.", "torch._inductor.", "torch.fx.")
_BEYOND_DOUBT: Final = 1000.0
"""A pass that is off by so many times the rounding noise in one call is wrong: no noise is drawn for further calls."""


@dataclass
class _Variant:
    """The model with some of the passes, and what came of its calls."""

    toolkit: Toolkit | None
    told: str
    passes: tuple[str, ...] = ()
    """How its passes are spoken of."""
    recordings: dict[str, Recording] = field(default_factory=dict)
    """By the label of the call."""

    @property
    def structures(self) -> list[dict[int, str]]:
        """Of each of its graphs, in the order in which they were compiled: :attr:`GraphNote.structures`."""
        return [note.structures for note in self.toolkit.notes] if self.toolkit is not None else []

    @property
    def operators(self) -> dict[str, int]:
        """How often its graphs call each operator."""
        return self.toolkit.operators if self.toolkit is not None else {}


@dataclass(frozen=True)
class JudgedSteps:
    """All steps, and what the calls could not show."""

    steps: tuple[PassStep, ...]
    """The capture, the decompositions if there are any, then each pass."""
    remarks: tuple[str, ...] = ()


def judge_steps(trial: Trial) -> JudgedSteps:
    """Each step of the trial's toolkit, in order: the capture, the decompositions, then the passes.

    A step is held against the one before it, in the calls of the trial and those of
    :func:`~pytest_torchcompile.oracle.pass_calls.choose_calls`; what is run ends in torch's operators, so that no
    compiler has a part in it. It ends with a step that raises, or of which nothing could be compared. Everything
    compiled is forgotten.
    """
    steps: list[PassStep] = []
    already_wrong: set[str] = set()
    with trial.phase("passes"), muted_trace():
        before = _Variant(None, "eager")
        chosen = _run_eagerly(trial, before)
        for variant in _variants(trial.settings["backend"]):
            forget_compiled()
            side = trial.make({**trial.settings, "backend": variant.toolkit})
            _run_calls(trial, side, variant, chosen)
            if refusal := _refused_size(chosen, before, variant):
                chosen = chosen.without_added(refusal)
            step = _judge_step(trial, chosen, before, variant, already_wrong)
            steps.append(step)
            already_wrong |= {wrong.name for wrong in step.wrong}
            if step.is_beyond(_BEYOND_DOUBT):
                # Not all calls were compared.
                already_wrong |= _changed_values(chosen, before, variant)
            # Where nothing was compared, no pass is at fault.
            if step.raised or not step.compared:
                break
            before = variant
        forget_compiled()
    return JudgedSteps(tuple(steps), chosen.remarks)


def _variants(toolkit: Toolkit) -> Iterator[_Variant]:
    """The model's graph as it was captured, with decompositions, then with one pass more each time."""
    passes = toolkit.graph_passes
    common: dict[str, Any] = {"capture": toolkit.capture or "joint", "compiler": "eager", "dump": None}
    yield _Variant(toolkit.with_passes(0, **common | {"decompositions": "none"}), _CAPTURE)
    table = toolkit.decompositions
    if table and table != "none":
        name = table if isinstance(table, str) else "of your own"
        yield _Variant(toolkit.with_passes(0, **common), f"decompositions {name}")
    told = [f"pass {number} of {len(passes)} ({each.name})" for number, each in enumerate(passes, 1)]
    for number in range(1, len(passes) + 1):
        # Without a compiler it is the last pass that runs the graph.
        if number == len(passes) and toolkit.compiler == "none":
            common["compiler"] = "none"
        yield _Variant(toolkit.with_passes(number, **common), told[number - 1], tuple(told[:number]))


def _run_eagerly(trial: Trial, eager: _Variant) -> PassCalls:
    """Choose the calls, run them without any compiler, and return them: the variants run the same."""
    forget_compiled()
    with eager_on_purpose():
        chosen = choose_calls(trial, trial.make(None))
        _run_calls(trial, trial.make(None), eager, chosen)
    return chosen


def _run_calls(trial: Trial, side: Side, variant: _Variant, chosen: PassCalls) -> None:
    for call in chosen.calls:
        tape = trial.new_tape((call.index, call.other)) if variant.toolkit is None else None
        # Also behind a call that raises: eager may raise in one of several, and the others are worth judging.
        variant.recordings[call.label], _ = side.run(call, trial.loss, trial.train, trial.seed, tape)


def _refused_size(chosen: PassCalls, before: _Variant, after: _Variant) -> str:
    """Why no graph is made at a size that nobody has given; empty where it is made.

    It would be made to fail a run of which it is no part. An error of a graph that was made is the pass's.
    """
    for call in chosen.calls:
        error = after.recordings[call.label].error
        if error is None or before.recordings[call.label].error is not None:
            continue
        # The first call that raises is what has to be told.
        if not chosen.is_added(call):
            return ""
        if after.told == _CAPTURE or error.type.startswith(_OF_COMPILING):
            return (f"with {after.told} the model raises in {call.label}: {_own_words(error.type, error.text)}; so a "
                    "size that a pass has put into the graph is not seen: give calls of two sizes, or ask for static "
                    "ones")
    return ""


@dataclass
class _ComparedCalls:
    """What came of holding the calls of one variant against those of the variant before."""

    leaves: list[tuple[str, Leaf]] = field(default_factory=list)
    """Each with the label of its call."""
    compared: int = 0
    """Leaves of calls that eager answers. That both raise proves nothing about a pass."""
    only_zeros: bool = True
    eager_error: str = ""
    """The first call that eager raises in, and what it says."""
    raised: str = ""
    """What this variant raises where the one before does not; nothing behind it was compared."""

    def problems(self, after: _Variant) -> tuple[WrongLeaf, ...]:
        """The leaves that are wrong, each as in the first call that shows it."""
        limits = Limits().over(leaf for _, leaf in self.leaves)
        wrong: dict[str, WrongLeaf] = {}
        for label, leaf in self.leaves:
            text = problem(leaf, limits)
            if text is not None and not _is_free_stride(leaf, after):
                wrong.setdefault(leaf.name, WrongLeaf(leaf.name, label, text, leaf.rms))
        return tuple(wrong.values())

    @property
    def noise(self) -> float:
        """The largest error in units of the rounding noise."""
        return max((leaf.rms for _, leaf in self.leaves if leaf.rms is not None), default=0.0)

    @property
    def vacuous(self) -> str:
        """Why these calls prove nothing; empty where they do."""
        if self.only_zeros:
            return "of every call nothing came but zeros and NaN"
        return why_vacuous(self.leaves) or ""


def _judge_step(trial: Trial, chosen: PassCalls, before: _Variant, after: _Variant,
                already_wrong: set[str]) -> PassStep:
    calls = _compare_calls(trial, chosen, before, after, already_wrong)
    if calls.raised:
        return PassStep(after.told, raised=calls.raised)
    operators = {}
    if after.told.startswith("decompositions"):
        operators = _difference(before.operators, after.operators)
    return PassStep(after.told, changed=_has_changed(after), noise=calls.noise, compared=calls.compared,
                    wrong=calls.problems(after), operators=operators, vacuous=calls.vacuous,
                    eager_error=calls.eager_error, unsteady=_unsteady_part(before, after))


def _compare_calls(trial: Trial, chosen: PassCalls, before: _Variant, after: _Variant,
                   already_wrong: set[str]) -> _ComparedCalls:
    """Each call of one variant beside that of the other, until one raises or is beyond doubt."""
    calls = _ComparedCalls()
    unit = _unit_of_passes(after)
    for call in chosen.calls:
        one, other = before.recordings[call.label], after.recordings[call.label]
        if other.error is not None and one.error is None:
            calls.raised = _own_words(other.error.type, other.error.text)
            if chosen.is_added(call):
                calls.raised += f" (in {call.label})"
            return calls
        found = _compare_beside(one, other, already_wrong, unit, partial(trial.call_reference, call, unit))
        calls.leaves += [(call.label, leaf) for leaf in found]
        if one.error is None:
            calls.compared += len(found)
            calls.only_zeros = calls.only_zeros and one.all_zero and not one.has_answers
        elif not calls.eager_error:
            calls.eager_error = f"in {call.label} the model raises, without a pass too: {headline(str(one.error))}"
        if any(leaf.rms is not None and leaf.rms > _BEYOND_DOUBT for leaf in found):
            return calls
    return calls


def _unsteady_part(before: _Variant, after: _Variant) -> str:
    """The pass before this step's that has made another graph than in the variant before; empty where there is none.

    What this step seems to have changed may be that pass's doing.
    """
    earlier = after.passes[:-1]
    for first, second in zip(before.structures, after.structures, strict=False):
        for number, told in enumerate(earlier, 1):
            # A pass is for some graphs alone.
            if number in first and number in second and first[number] != second[number]:
                return told
    return ""


def _unit_of_passes(variant: _Variant) -> float | None:
    """The unit roundoff of the narrowest dtype that the passes so far have brought in; None: they bring none."""
    if variant.toolkit is None or variant.toolkit.brings_in is None:
        return None
    return unit_of(variant.toolkit.brings_in)


def _is_free_stride(leaf: Leaf, after: _Variant) -> bool:
    """Is it a stride that nobody has promised: of a gradient, or of a graph before any pass?

    A capture is judged as the whole is, by the check ``layout``. A pass that gives a result other strides is told.
    """
    if leaf.kind != "stride" or not leaf.message.startswith("stride is "):
        return False
    has_passes = after.toolkit is not None and bool(after.toolkit.graph_passes)
    return not has_passes or not leaf.name.startswith(_PROMISED)


def _own_words(kind: str, text: str) -> str:
    """Of a compile error what our own part said, which Dynamo writes the backend before; else its headline, and where
    in the user's code torch was.
    """
    _, found, words = text.partition("UsageError: ")
    if found:
        return headline(words)
    told = headline(f"{kind}: {text}")
    # The innermost frame is the last one (torch/_dynamo/exc.py, torch 2.8 to 2.15).
    frames = _FRAME.findall(text.partition("\nfrom user code:\n")[2])
    if frames:
        file, line, code = frames[-1]
        told += f" at {file}:{line} ({code.strip()})"
    return told


def _compare_beside(before: Recording, after: Recording, already_wrong: set[str], unit: float | None,
                    expected: Callable[[], Reference]) -> list[Leaf]:
    """Compare; what was wrong before this step is measured from the graph before it, not from what is right.

    Else each pass after a wrong one would be called wrong too.
    """
    leaves = [leaf for leaf in compare(before, after, expected, without=already_wrong)
              if leaf.name not in already_wrong]
    if already_wrong:
        as_before = Reference(before)
        as_before.unit = unit or 0.0
        leaves += [leaf for leaf in compare(before, after, as_before) if leaf.name in already_wrong]
    return leaves


def _changed_values(chosen: PassCalls, before: _Variant, after: _Variant) -> set[str]:
    """Names of the values that differ in any bit."""
    changed = set()
    for call in chosen.calls:
        values = after.recordings[call.label].values_by_name()
        for name, value in before.recordings[call.label].values_by_name().items():
            other = values.get(name)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and not same_bits(value, other):
                changed.add(name)
    return changed


def _has_changed(variant: _Variant) -> bool:
    """Whether the last pass has changed any graph; a capture or a table always counts."""
    if variant.toolkit is None or not variant.toolkit.graph_passes:
        return True
    number = len(variant.toolkit.graph_passes)
    return any(number in note.changed_by for note in variant.toolkit.notes)


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    names = sorted({*before, *after})
    return {name: after.get(name, 0) - before.get(name, 0) for name in names if after.get(name) != before.get(name)}
