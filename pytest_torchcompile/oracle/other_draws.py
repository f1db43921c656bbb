"""Other draws: a compiled model that draws other random numbers than eager, so that its values can't be compared.

It may do so rightly, although Inductor is told to draw eager's numbers: a library that asks
``torch.compiler.is_compiling()`` takes another operator, which asks the generator for more or for fewer. (transformers
5.17 gives wav2vec2's attention a mask when it is compiled and none eagerly; with one CUDA draws dropout elsewhere.)
Then two things can still be judged: the distributions over many seeds, and the same calls in evaluation, where
dropout draws nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.chances import Chances, compare_chances, sample_chances
from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.properties import GENERATOR, labels_with_other_draws
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.trial_account import Passed

__all__ = ["judge_other_draws"]

# Seeds that each side is run with, to compare distributions.
_SEEDS = 64
# Seeds that show whether eager draws anything that matters.
_FEW = 4
# More than both modes need.
_RECOMPILES = 256
_VALUES = frozenset({"value", "gradient", "buffer", "mutation"})
_SET_ASIDE = (
    "the compiled run draws other random numbers than eager, so this was not compared number by number; over "
    f"{_SEEDS} seeds its distribution is eager's, and in evaluation all values agree"
)


class _Judged(Protocol):
    """What is asked of a trial that has run."""

    leaves: list[tuple[str, Leaf]]
    trained: list[tuple[str, Leaf]]
    passed: list[Passed]
    compiled: Any
    options: TrialOptions

    def in_evaluation(self) -> Any:
        """The same trial, not yet run, of the model in evaluation."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the wall seconds of a block to the phase ``name``."""


def judge_other_draws(trial: _Judged, eager: Side, compiled: Side) -> None:
    """Judge calls that draw other random numbers compiled: by distributions, and by the model in evaluation.

    What is wrong there is told beside what was found. If nothing is, what was found in these calls is undecided.
    A model that is spread over ranks stays as it was found, for all ranks would have to take part; and so does one
    whose compiled code does not run in evaluation, or whose values there depend on other draws too. Leaves that are
    nothing but rounding noise have no distribution that is worth comparing.
    """
    from torch._dynamo import config as dynamo_config

    labels = labels_with_other_draws([*trial.leaves, *trial.trained])
    spread = trial.options.one_process is not None or type(eager.spread) is not Spread
    if not labels or spread or not trial.options.in_evaluation or trial.compiled.error is not None:
        return
    # A call of the training is one of the first pass, whose values are the model's own.
    own_calls = [passed.call for passed in trial.passed if passed.call.other is None]
    first = next((call for call in own_calls if call.label in labels), own_calls[0])
    with trial.phase("other draws"):
        expected, actual = _sample_both(eager, compiled, first, trial.options)
        if not expected.varies:
            return
        evaluation = trial.in_evaluation()
        # The same functions are compiled once more, for another mode: both together may pass a limit that neither does.
        with dynamo_config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            evaluation.run()
    # Where all values agree, the generator alone is in another state, and that is the fault.
    reached = _reach_values(trial.leaves, labels)
    if why := _why_nothing_is_proved(evaluation, reached):
        trial.leaves = _with_remark(trial.leaves, labels, f"judged in evaluation instead, nothing is proved: {why}")
        return
    rounding = {leaf.name for label, leaf in trial.leaves if label == first.label and not leaf.decided}
    sampled = _without_measures_of(rounding, compare_chances(expected, actual))
    found = [(f"{first.label}, over {_SEEDS} seeds", leaf) for leaf in sampled]
    found += [(f"{label}, in evaluation", leaf) for label, leaf in _without_idle_draws(evaluation.leaves)]
    trained = [(f"{label}, in evaluation", leaf) for label, leaf in _without_idle_draws(evaluation.trained)]
    if not find_discrepancies([*found, *trained]):
        trial.leaves = _set_aside(trial.leaves, labels, expected.names_that_vary)
        # Behind the first step everything varies.
        trial.trained = _set_aside(trial.trained, labels, None)
    trial.leaves += found
    trial.trained += trained


def _without_measures_of(names: Collection[str], leaves: Iterable[Leaf]) -> list[Leaf]:
    """Leaves of ``compare_chances``, which are called ``mean of NAME``, without those of some names."""
    ends = tuple(f" of {name}" for name in names)
    return [leaf for leaf in leaves if not leaf.name.endswith(ends)]


def _reach_values(leaves: Iterable[tuple[str, Leaf]], labels: Sequence[str]) -> bool:
    """Whether values differ in the calls named: other draws were used for something."""
    values = [(label, leaf) for label, leaf in leaves if label in labels and leaf.kind in _VALUES]
    return bool(find_discrepancies(values))


def _why_nothing_is_proved(evaluation: Any, reached: bool) -> str:
    """'' if compiled code ran in every call of a trial, all of it, and drew what eager draws; else what is missing.

    It may draw other numbers that no value depends on, if the other draws have ``reached`` values outside of it.
    """
    if evaluation.compiled.error is not None:
        return f"it raises {evaluation.compiled.error.type}"
    if not all(passed.graphs for passed in evaluation.passed):
        return "no compiled graph ran in some call"
    silent = [frame["function"] for frame in evaluation.compiled.seen["eager_frames"] if frame["kind"] in SILENT]
    if silent:
        return f"{silent[0]} silently ran eagerly"
    judged = [*evaluation.leaves, *evaluation.trained]
    if labels_with_other_draws(judged):
        if not reached:
            return "it draws other random numbers there too"
        if find_discrepancies(_without_idle_draws(judged)):
            return "it draws other random numbers there too, and values differ"
    return ""


def _without_idle_draws(leaves: Iterable[tuple[str, Leaf]]) -> list[tuple[str, Leaf]]:
    """Leaves of the evaluation, where a generator that moved says nothing by itself.

    Dropout is off there. What a compiled program still draws is thrown away, as long as the values are eager's:
    Inductor on CUDA replaces an attention by a fused operator, which draws for a dropout of zero (torch 2.11).
    """
    leaves = list(leaves)
    return _set_aside(leaves, labels_with_other_draws(leaves), frozenset())


def _with_remark(leaves: Iterable[tuple[str, Leaf]], labels: Sequence[str], remark: str) -> list[tuple[str, Leaf]]:
    """Add a remark to what is said of the random generators in the calls named."""
    remarked = []
    for label, leaf in leaves:
        if label in labels and leaf.name == GENERATOR:
            leaf = replace(leaf, message=f"{leaf.message}; {remark}")
        remarked.append((label, leaf))
    return remarked


def _sample_both(eager: Side, compiled: Side, call: Call, options: TrialOptions) -> tuple[Chances, Chances]:
    """What both sides make of many seeds; of few where eager's results depend on no seed."""

    def sample(side: Side, seeds: int, first: int) -> Chances:
        side.restore()
        call.switch_mode(side.module)
        return sample_chances(side.call, side.module, call.batch, loss=options.loss, train=call.trains(options.train),
                              seeds=seeds, first=first)

    with eager_on_purpose():
        few = sample(eager, _FEW, options.seed)
        if not few.varies:
            return few, few
        expected = sample(eager, _SEEDS, options.seed)
    # Other seeds than eager's: equal draws would be no two samples of one distribution.
    return expected, sample(compiled, _SEEDS, options.seed + _SEEDS)


def _set_aside(leaves: Iterable[tuple[str, Leaf]], labels: Sequence[str],
               random: frozenset[str] | None) -> list[tuple[str, Leaf]]:
    """In the calls named, tell values that are not equal bit for bit as undecided.

    What is no number stays as it is, and so does what eager computes without a draw: all but the leaves ``random``
    (None: all are).
    """
    kept = []
    for label, leaf in leaves:
        # A leaf without a dtype is about structure, settings or an object.
        is_value = leaf.kind in _VALUES and bool(leaf.dtype) and (random is None or leaf.name in random)
        if label in labels and not leaf.bitwise and (is_value or leaf.name == GENERATOR):
            leaf = replace(leaf, kind="nondeterministic", message=_SET_ASIDE)
        kept.append((label, leaf))
    return kept
