"""Torch's own hints about graph breaks, tried before they are passed on: do they help, and at what cost?"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.oracle.fast_path import SWITCH, fast_path_off, may_take_fast_path, names_fast_path

if TYPE_CHECKING:
    from pytest_torchcompile.ledger import Ledger
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["try_hints"]

_SETTING_IN_HINT: Final = re.compile(r"torch\._dynamo\.config\.(\w+) ?= ?True")
_MOST_HINTS: Final = 3
"""Settings that are tried in one cell: each costs some compiles."""
_MANY_TIMES: Final = 1.5
"""From so many times as many operators on, and :data:`_FEW` more, a setting is said to have a price."""
_FEW: Final = 50
_MUCH_MORE: Final = 4
"""Tracing for a count is given up at so many times as many operators, but never below :data:`_LEAST_LIMIT`."""
_LEAST_LIMIT: Final = 2000
"""Some seconds of tracing."""
_WARNING: Final = ("Inductor's time grows with the operators, and every size that is compiled apart takes it again: "
                   "look at the compile time before you keep it, or allow the break")


def try_hints(trial: Trial, breaks: Sequence[Mapping[str, Any]], patience: float = math.inf) -> dict[int, str]:
    """Torch's own hints, tried before they are passed on: with the backend eager, on the first call.

    Returns what came of the setting that the hint of a break names, by the number of the break. Of a setting that helps
    it says what it costs (:func:`_cost_of`). Everything compiled is forgotten. ``patience``: seconds of trials after
    which no further cost is measured.
    """
    by_setting: dict[str, list[int]] = {}
    for number, graph_break in enumerate(breaks):
        if match := _SETTING_IN_HINT.search(graph_break.get("hint") or ""):
            by_setting.setdefault(match[1], []).append(number)
    outcomes: dict[int, str] = {}
    for setting, numbers in list(by_setting.items())[:_MOST_HINTS]:
        places, raised = _breaks_with(trial, setting)
        helps = [number for number in numbers if not raised and _place_of(breaks[number]) not in places]
        cost = ""
        if helps and trial.seconds.get("hints", 0.0) > patience:
            cost = "; what it costs was not measured, for the cell's time is short"
        elif helps:
            cost = _cost_of(trial, setting)
        for number in numbers:
            if raised:
                outcomes[number] = f"with {setting} = True the compiled run raises {raised}"
            elif number in helps:
                outcomes[number] = f"{setting} = True was tried: this break is gone with it{cost}"
            else:
                outcomes[number] = f"{setting} = True was tried and does not help here"
    return outcomes | _without_fast_path(trial, breaks)


def _without_fast_path(trial: Trial, breaks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """What comes of breaks at operators of the fast path of torch's attention modules where it is switched off."""
    numbers = [number for number, graph_break in enumerate(breaks) if names_fast_path(graph_break)]
    if not numbers or not may_take_fast_path(trial):
        return {}
    with fast_path_off():
        seen, raised = _first_call(trial, "eager", {})
    if seen is None or raised:
        return {}
    left = {_place_of(graph_break.to_dict()) for graph_break in seen.graph_breaks}
    gone = [number for number in numbers if _place_of(breaks[number]) not in left]
    return dict.fromkeys(gone, f"{SWITCH}, called where the model is made, was tried: this break is gone with it")


def _breaks_with(trial: Trial, setting: str) -> tuple[set[tuple[str, int]], str]:
    """Places of breaks in the first call under a setting of Dynamo's, and what it raises."""
    import torch._dynamo

    if not hasattr(torch._dynamo.config, setting):
        return set(), "nothing, for this torch does not have it"
    seen, raised = _first_call(trial, "eager", {setting: True})
    if seen is None:
        return set(), raised
    return {_place_of(graph_break.to_dict()) for graph_break in seen.graph_breaks}, raised


def _cost_of(trial: Trial, setting: str) -> str:
    """What a setting costs that helps: operators and seconds of the capture of the first call, with it and without.

    Inductor is not asked: unrolling a GRU of 12 steps made its compile 80 times as long (torch 2.13).
    """
    from pytest_torchcompile.gauges.capture_cost import TracedBackend

    plain = TracedBackend()
    seen, raised = _first_call(trial, plain, {})
    if seen is None or raised:
        return f"; what it costs is not known: capture for AOTAutograd raises {raised} without it too"
    before, seconds_before = plain.cost, _compile_seconds(seen)
    traced = TracedBackend(max(_LEAST_LIMIT, _MUCH_MORE * before.operators))
    seen, raised = _first_call(trial, traced, {setting: True})
    after = traced.cost
    without = f"{before.operators:,} in {seconds_before:.1f} s without it"
    call = trial.calls[0].label
    if after.given_up:
        return (f", at a price: capturing {call} was given up after {after.operators:,} traced operators and "
                f"{after.seconds:.1f} s, {without}. {_WARNING}")
    if seen is None or raised:
        return f", but capture for AOTAutograd raises {raised} with it"
    figures = f"{call} is captured as {after.operators:,} traced operators in {_compile_seconds(seen):.1f} s, {without}"
    if after.operators > _MANY_TIMES * before.operators + _FEW:
        return f", at a price: {figures}. {_WARNING}"
    return f" ({figures})"


def _compile_seconds(seen: Ledger) -> float:
    return sum(compiled.seconds for compiled in seen.compiles)


def _first_call(trial: Trial, backend: Any, config: Mapping[str, bool]) -> tuple[Ledger | None, str]:
    """What the first call did with a backend under settings of Dynamo's, and what it raised.

    None where it could not be run.
    """
    import torch._dynamo

    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.state.torch_state import forget_compiled

    forget_compiled()
    try:
        side = trial.make({"dynamic": trial.settings.get("dynamic"), "backend": backend})
        with torch._dynamo.config.patch(dict(config)), observe(root=trial.root) as seen, trial.phase("hints"):
            recording, _ = side.run(trial.calls[0], trial.loss, trial.train, trial.seed)
    except Exception as why:  # a hint that cannot be tried says nothing of the model
        return None, type(why).__name__
    return seen, recording.error.type if recording.error else ""


def _place_of(graph_break: Mapping[str, Any]) -> tuple[str, int]:
    return os.path.basename(graph_break["file"]), graph_break["line"]
