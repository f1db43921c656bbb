"""Diagnosis: the same trial again with other settings. Which stage of the compiler brings a difference in? Do torch's
own hints about graph breaks help? Torch is needed only where something is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.oracle.discrepancies import find_discrepancies

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["STAGES", "first_stage", "locate_stage", "stage_summary", "stages_before", "try_hints"]

STAGES: Final = {
    "eager": "Dynamo's capture of the program",
    "aot_eager": "AOTAutograd's graphs of forward and backward",
    "aot_eager_decomp_partition": "the decompositions or the partitioner that Inductor uses",
    "inductor": "Inductor's lowering, fusion or generated code",
}
"""Backend to what it adds to the one before it."""
# What a stage did where it computes what eager computes; reports hold the word.
_AGREES: Final = "agrees"
_UNTRIED: Final = "could not be tried"
_SETTING_IN_HINT: Final = re.compile(r"torch\._dynamo\.config\.(\w+) ?= ?True")
# Settings that are tried in one cell: each costs a compile.
_MOST_HINTS: Final = 3


def stages_before(backend: str) -> list[str]:
    """The backends that do part of what ``backend`` does, in order; of an unknown one the two that most build on."""
    names = list(STAGES)
    if backend not in STAGES:
        return names[:2]
    return names[:names.index(backend)]


def stage_summary(located: Mapping[str, Any]) -> str:
    """One line: what each stage did, and which is the first that differs.

    ``located`` has ``backend``, the one under test, and ``stages``: pairs of a backend and ``agrees`` or what it did
    instead; and ``beyond``, the same of backends that do more, which an older report does not have.
    """
    text = _first_that_differs(located["backend"], located["stages"])
    for name, did in located.get("beyond", ()):
        if did == _AGREES:
            text += f"; {name} works where {located['backend']} raises"
    return text


def first_stage(located: Mapping[str, Any]) -> str:
    """The first backend that shows it: one of those before the one under test, or that one."""
    for name, did in located["stages"]:
        if did != _AGREES and not did.startswith(_UNTRIED):
            return str(name)
    return str(located["backend"])


def _first_that_differs(backend: str, tried: Sequence[tuple[str, str]]) -> str:
    if not tried:
        return f"stages: {backend} does nothing but run {STAGES[backend]}: look there"
    words = ", ".join(f"{name} {did}" for name, did in tried)
    last, did = tried[-1]
    if did != _AGREES:
        return f"stages: {words}: look at {STAGES[last]}"
    suspect = STAGES.get(backend, "the backend itself")
    return f"stages: {words}; {backend} is the first that does not: look at {suspect}"


def locate_stage(trial: Trial) -> dict[str, Any] | None:
    """Try the backends that do part of what the trial's backend does, until one differs or raises as it does.

    Returns what :func:`stage_summary` takes; None where nothing is wrong that a stage could bring in. Everything
    compiled is forgotten.
    """
    error, wrong_places = trial.compiled.error, _wrong_places(trial)
    if error is None and not wrong_places:
        return None
    backend = trial.settings.get("backend", "inductor")
    if isinstance(backend, str):
        name, stages = backend, stages_before(backend)
    else:
        name, stages = getattr(backend, "__name__", type(backend).__name__), stages_before("")
    tried: list[tuple[str, str]] = []
    beyond: list[tuple[str, str]] = []
    with trial.phase("stages"):
        for stage in stages:
            tried.append((stage, _try_backend(trial, stage, wrong_places)))
            if tried[-1][1] != _AGREES:
                break
        if error is not None and name == "aot_eager":
            # What most users go on to: Inductor may do well what AOTAutograd's graphs raise when they run as they are.
            beyond.append(("inductor", _try_backend(trial, "inductor", wrong_places)))
    return {"backend": name, "stages": tried, "beyond": beyond}


def _try_backend(trial: Trial, backend: str, wrong_places: set[tuple[str, str]]) -> str:
    """What the trial does with another backend, in one or two words."""
    from pytest_torchcompile.state.torch_state import forget_compiled

    # Modes and options belong to the backend under test.
    settings = _settings_among(trial, ("dynamic", "fullgraph"))
    forget_compiled()
    other = trial.again({**settings, "backend": backend})
    try:
        other.run()
    except Exception as why:
        return f"{_UNTRIED} ({type(why).__name__})"
    if other.compiled.error:
        return f"raises {other.compiled.error.type}"
    return "differs" if wrong_places & _wrong_places(other) else _AGREES


def _settings_among(trial: Trial, keys: Sequence[str]) -> dict[str, Any]:
    return {key: trial.settings[key] for key in keys if key in trial.settings}


def _wrong_places(trial: Trial) -> set[tuple[str, str]]:
    discrepancies = find_discrepancies([*trial.leaves, *trial.trained])
    return {(discrepancy.kind, discrepancy.where) for discrepancy in discrepancies}


def try_hints(trial: Trial, breaks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Torch's own hints, tried before they are passed on: with the backend eager, on the first call.

    Returns what came of the setting that the hint of a break names, by the number of the break. Everything compiled is
    forgotten.
    """
    by_setting: dict[str, list[int]] = {}
    for number, graph_break in enumerate(breaks):
        if match := _SETTING_IN_HINT.search(graph_break.get("hint") or ""):
            by_setting.setdefault(match[1], []).append(number)
    outcomes: dict[int, str] = {}
    for setting, numbers in list(by_setting.items())[:_MOST_HINTS]:
        places, raised = _breaks_with(trial, setting)
        for number in numbers:
            if raised:
                outcomes[number] = f"with {setting} = True the compiled run raises {raised}"
            elif _place_of(breaks[number]) in places:
                outcomes[number] = f"{setting} = True was tried and does not help here"
            else:
                outcomes[number] = f"{setting} = True was tried: this break is gone with it"
    return outcomes


def _breaks_with(trial: Trial, setting: str) -> tuple[set[tuple[str, int]], str]:
    """Places of breaks in the first call under a setting of Dynamo's, and what it raises."""
    import torch._dynamo

    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.state.torch_state import forget_compiled

    if not hasattr(torch._dynamo.config, setting):
        return set(), "nothing, for this torch does not have it"
    forget_compiled()
    settings = _settings_among(trial, ("dynamic",))
    try:
        side = trial.make({**settings, "backend": "eager"})
        with torch._dynamo.config.patch({setting: True}), observe(root=trial.root) as seen, trial.phase("hints"):
            recording, _ = side.run(trial.calls[0], trial.loss, trial.train, trial.seed)
    except Exception as why:  # a hint that cannot be tried says nothing of the model
        return set(), type(why).__name__
    places = {_place_of(graph_break.to_dict()) for graph_break in seen.graph_breaks}
    return places, recording.error.type if recording.error else ""


def _place_of(graph_break: Mapping[str, Any]) -> tuple[str, int]:
    return os.path.basename(graph_break["file"]), graph_break["line"]
