"""Graph passes one by one: the model with the first k of them, held against the model with the first k - 1.

What the whole did wrong is so told by the pass that did it, and two wrongs that cancel out are both told.
Decompositions are such a step too: they are meant to change the last bits, and by how much is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import headline
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.calls import Call, Side
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.discrepancies import why_vacuous
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.pass_records import PassStep, WrongLeaf
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["judge_steps"]

_CAPTURE = "the capture itself"
# How the leaves begin whose strides compiled code keeps.
_PROMISED = ("output", "input", "buffer", "attribute")


@dataclass
class _Variant:
    """The model with some of the passes, and what came of its calls."""

    toolkit: Toolkit | None
    told: str
    recordings: list[Recording] = field(default_factory=list)

    @property
    def operators(self) -> dict[str, int]:
        """How often its graphs call each operator."""
        return self.toolkit.operators if self.toolkit is not None else {}


def judge_steps(trial: Trial) -> list[PassStep]:
    """Each step of the trial's toolkit, in order: the capture, the decompositions, then the passes.

    A step is held against the one before it, in the calls of the first pass that were run eagerly; what is run ends in
    torch's operators, so that no compiler has a part in it. It ends with a step that raises. Everything compiled is
    forgotten.
    """
    calls = [call for call in trial.calls if (call.index, call.other) in trial.tapes]
    steps: list[PassStep] = []
    already_wrong: set[str] = set()
    before: _Variant | None = None
    with trial.phase("passes"):
        for variant in _variants(trial.settings["backend"]):
            _record_calls(trial, variant, calls)
            if before is not None:
                step = _judge_step(trial, calls, before, variant, already_wrong)
                steps.append(step)
                already_wrong |= {wrong.name for wrong in step.wrong}
                if step.raised:
                    break
            before = variant
        forget_compiled()
    return steps


def _variants(toolkit: Toolkit) -> Iterator[_Variant]:
    """The eager model, its graph as it was captured, with decompositions, then with one pass more each time."""
    passes = toolkit.graph_passes
    common: dict[str, Any] = {"capture": toolkit.capture or "joint", "compiler": "eager", "dump": None}
    yield _Variant(None, "eager")
    yield _Variant(toolkit.with_passes(0, **common | {"decompositions": "none"}), _CAPTURE)
    table = toolkit.decompositions
    if table and table != "none":
        name = table if isinstance(table, str) else "of your own"
        yield _Variant(toolkit.with_passes(0, **common), f"decompositions {name}")
    for number, each in enumerate(passes, 1):
        # Without a compiler it is the last pass that runs the graph.
        if number == len(passes) and toolkit.compiler == "none":
            common["compiler"] = "none"
        yield _Variant(toolkit.with_passes(number, **common), f"pass {number} of {len(passes)} ({each.name})")


def _record_calls(trial: Trial, variant: _Variant, calls: Sequence[Call]) -> None:
    forget_compiled()
    if variant.toolkit is None:
        with eager_on_purpose():
            _run_calls(trial, trial.make(None), variant, calls)
    else:
        _run_calls(trial, trial.make({**trial.settings, "backend": variant.toolkit}), variant, calls)


def _run_calls(trial: Trial, side: Side, variant: _Variant, calls: Sequence[Call]) -> None:
    for call in calls:
        recording, _ = side.run(call, trial.loss, trial.train, trial.seed)
        # Also behind a call that raises: eager may raise in one of several, and the others are worth judging.
        variant.recordings.append(recording)


def _judge_step(trial: Trial, calls: Sequence[Call], before: _Variant, after: _Variant,
                already_wrong: set[str]) -> PassStep:
    leaves: list[tuple[str, Leaf]] = []
    unit = _unit_of_passes(after)
    compared = 0
    only_zeros = True
    for call, one, other in zip(calls, before.recordings, after.recordings, strict=True):
        if other.error is not None and one.error is None:
            return PassStep(after.told, raised=headline(_own_words(other.error.type, other.error.text)))
        found = compare(one, other, lambda call=call: trial.call_reference(call, unit))  # type: ignore[misc]
        leaves += [(call.label, leaf) for leaf in _beside_wrong_ones(found, one, other, already_wrong, unit)]
        # That both raise proves nothing about a pass.
        if one.error is None:
            compared += len(found)
            only_zeros = only_zeros and one.all_zero and not one.has_answers
    limits = Limits().over(leaf for _, leaf in leaves)
    wrong: dict[str, WrongLeaf] = {}
    for label, leaf in leaves:
        text = problem(leaf, limits)
        if text is not None and not _is_free_stride(leaf, after):
            wrong.setdefault(leaf.name, WrongLeaf(leaf.name, label, text, leaf.rms))
    noise = max((leaf.rms for _, leaf in leaves if leaf.rms is not None), default=0.0)
    operators = {}
    if after.told.startswith("decompositions"):
        operators = _difference(before.operators, after.operators)
    vacuous = why_vacuous(leaves) or ""
    if only_zeros:
        vacuous = "of every call nothing came but zeros and NaN"
    return PassStep(after.told, changed=_has_changed(after), noise=noise, compared=compared,
                    wrong=tuple(wrong.values()), operators=operators, vacuous=vacuous)


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
    """Of a compile error what our own part said; Dynamo writes the backend before it."""
    _, found, words = text.partition("UsageError: ")
    return words if found else f"{kind}: {text}"


def _beside_wrong_ones(leaves: Sequence[Leaf], before: Recording, after: Recording,
                       already_wrong: set[str], unit: float | None) -> Iterator[Leaf]:
    """The leaves; those that were wrong before this step are measured from the graph before it, not from what is right.

    Else each pass after a wrong one would be called wrong too.
    """
    beside: dict[tuple[str, str], Leaf] = {}
    if any(leaf.name in already_wrong for leaf in leaves):
        as_before = Reference(before)
        as_before.unit = unit or 0.0
        beside = {(leaf.name, leaf.kind): leaf for leaf in compare(before, after, as_before)}
    for leaf in leaves:
        if leaf.name in already_wrong:
            yield beside.get((leaf.name, leaf.kind), leaf)
        else:
            yield leaf


def _has_changed(variant: _Variant) -> bool:
    """Whether the last pass has changed any graph; a capture or a table always counts."""
    if variant.toolkit is None or not variant.toolkit.graph_passes:
        return True
    number = len(variant.toolkit.graph_passes)
    return any(number in note.changed_by for note in variant.toolkit.notes)


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    names = sorted({*before, *after})
    return {name: after.get(name, 0) - before.get(name, 0) for name in names if after.get(name) != before.get(name)}
