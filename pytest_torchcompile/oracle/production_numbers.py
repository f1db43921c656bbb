"""Production numbers: a trial whose compiled code draws Inductor's own random numbers, and eager is given the same.

So what production compiles is judged value by value, and is compiled once. Where that can't be done, or where anything
is not right so, the trial is run again with eager's numbers (``fallback_random``), and that run is what counts. Only
wrong gradients beside right outputs are told of the first run too: outputs show that eager was given the right numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.gauges.autotune import inductor_setting
from pytest_torchcompile.gauges.random_seeds import can_note_seeds
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.discrepancies import WITH_OWN_NUMBERS, find_discrepancies
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.inductor_numbers import KNOWN, WAYS
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.shared_numbers import SharedNumbers
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.trial_account import EagerCall, TrialAccount

__all__ = ["ends_in_inductor", "have_one_form", "is_settled", "look_alike", "numbers_for", "wrong_gradients"]

# Of torch/_inductor/config.py: torch 2.8 to 2.15; the last one from torch 2.12 on.
_OTHER_SETTINGS: Final = ("cpp_wrapper", "emulate_precision_casts", "align_random_eager")
_INDUCTORS: Final = ("inductor", "regional_inductor")


def numbers_for(trial: TrialAccount, done: EagerCall, spread: Spread) -> SharedNumbers | None:
    """For a trial whose first call was run eagerly; None where the model draws nothing, or what nobody can give it.

    CUDA graphs draw without telling, and several ranks would have to agree.
    """
    options = trial.options
    if not options.compared or done.recording.error or not trial.draws or trial.replayed:
        return None
    alone = options.one_process is None and type(spread) is Spread
    if not alone or not ends_in_inductor(trial) or _draws_otherwise(trial) or not can_note_seeds():
        return None
    tape = trial.tapes[done.call.index, done.call.other]
    kinds = {torch.device(name).type for name in done.recording.generators}
    if not kinds <= WAYS.keys() or not {name for name, _ in tape.draws} <= KNOWN:
        return None
    return SharedNumbers(WAYS["cuda" if "cuda" in kinds else "cpu"])


def ends_in_inductor(trial: TrialAccount) -> bool:
    """Whether Inductor makes the code; of a backend that is a user's function it is taken to be so."""
    backend = trial.settings.get("backend") or "inductor"
    if isinstance(backend, Toolkit):
        return backend.compiler in _INDUCTORS
    return backend == "inductor" or not isinstance(backend, str)


def _draws_otherwise(trial: TrialAccount) -> bool:
    """Whether a setting of Inductor's is on with which its code draws in another way, or nobody sees it."""
    # Of this one only the options count: while cells run it is on in torch's own settings.
    options = trial.settings.get("options") or {}
    if options.get("fallback_random"):
        return True
    return any(inductor_setting(trial.settings, name) for name in _OTHER_SETTINGS)


def is_settled(trial: TrialAccount) -> bool:
    """Whether all is right that was compared with the numbers of production."""
    if trial.compiled.error is not None:
        return False
    leaves = [*trial.leaves, *trial.trained]
    # What eager did not repeat may be a mistake in giving it the numbers.
    return not find_discrepancies(leaves) and all(leaf.kind != "nondeterministic" for _, leaf in leaves)


def wrong_gradients(trial: TrialAccount) -> list[tuple[str, Leaf]]:
    """Gradients that are wrong where everything else is right in all calls; each with its call.

    A backward pass that draws again what the forward pass has drawn does that. Steps of training then go wrong too.
    Right outputs show that eager had the right numbers only where these reach them. So nothing is said without the pass
    in which a layer that is zero has other values, nor unless other numbers of each random operator make wrong outputs.
    """
    if not trial.options.varied or trial.options.passes == 1:
        return []
    limits = Limits().over(leaf for _, leaf in trial.leaves)
    wrong = [(label, leaf) for label, leaf in trial.leaves if problem(leaf, limits)]
    repeated = all(leaf.kind != "nondeterministic" for _, leaf in trial.leaves)
    if trial.compiled.error is not None or not repeated or any(leaf.kind != "gradient" for _, leaf in wrong):
        return []
    if not wrong or not _reach_outputs(trial):
        return []
    return [(f"{label}, {WITH_OWN_NUMBERS}", leaf) for label, leaf in wrong]


def _reach_outputs(trial: TrialAccount) -> bool:
    """Whether the first call has wrong outputs as soon as some numbers of any one random operator are other ones."""
    call, numbers = trial.calls[0], trial.numbers
    if numbers is None:
        return False

    def run_eagerly(changed: int | None) -> Recording:
        with numbers.given(changed):
            # A new model each time, for it may count its calls.
            return trial.make(None).run(call, trial.loss, trial.train, trial.seed)[0]

    def expected() -> Reference:
        return trial.call_reference(call)

    with trial.phase("compare"), eager_on_purpose():
        right = _outputs_alone(run_eagerly(None))
        for place in range(numbers.count):
            leaves = compare(right, _outputs_alone(run_eagerly(place)), expected)
            if not any(map(problem, leaves)):
                return False
    return True


def _outputs_alone(recording: Recording) -> Recording:
    return Recording(outputs=recording.outputs, structure=recording.structure, loss=recording.loss,
                     kinds=recording.kinds)


def look_alike(eager: Recording, compiled: Recording) -> bool:
    """Whether the loss and the outputs of two runs are near to each other, as they are with the same numbers.

    Other masks of a dropout change an output by a good part of it. This only saves what it costs to judge such a call:
    whatever passes is judged as any other.
    """
    theirs = _results_of(compiled)
    return all(_is_near(value, theirs.get(name)) for name, value in _results_of(eager).items())


def have_one_form(eager: Recording, again: Recording) -> bool:
    """Whether two eager runs have results of the same strides, dtypes and memory: what the second may stand for."""
    return eager.aliases == again.aliases and _forms_of(eager) == _forms_of(again)


def _forms_of(recording: Recording) -> dict[str, str]:
    items = recording.outputs | recording.properties
    return {name: repr(replace(item, value=None)) for name, item in items.items()}


def _results_of(recording: Recording) -> dict[str, Any]:
    results = {name: item.value for name, item in recording.outputs.items()}
    return {**results, "": recording.loss}


def _is_near(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        return True
    if not isinstance(other, torch.Tensor) or other.shape != value.shape or other.dtype != value.dtype:
        return False
    apart, size = (other.float() - value.float()).norm(), value.float().norm()
    # So far that a mask which differs is noticed, and rounding is not.
    near = torch.finfo(value.dtype).eps ** 0.25
    # With NaN no comparison is true: that is for the oracle to judge.
    return not float(apart) > near * float(size)
