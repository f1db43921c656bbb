"""Torch's own hints about graph breaks, tried before they are passed on: with the backend eager, on the first call."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.ledger import observe
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["tried_hints"]

_SETTING: Final = re.compile(r"torch\._dynamo\.config\.(\w+) ?= ?True")
_MOST: Final = 3
"""Settings that are tried in one cell."""


def tried_hints(trial: Trial, breaks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """What came of the setting that the hint of a break names, by the number of the break.

    Everything compiled is forgotten.
    """
    by_setting: dict[str, list[int]] = {}
    for number, found in enumerate(breaks):
        if match := _SETTING.search(found.get("hint") or ""):
            by_setting.setdefault(match[1], []).append(number)
    told: dict[int, str] = {}
    for setting, numbers in list(by_setting.items())[:_MOST]:
        left, raised = _breaks_with(trial, setting)
        for number in numbers:
            if raised:
                told[number] = f"with {setting} = True the compiled run raises {raised}"
            elif _place(breaks[number]) in left:
                told[number] = f"{setting} = True was tried and does not help here"
            else:
                told[number] = f"{setting} = True was tried: this break is gone with it"
    return told


def _breaks_with(trial: Trial, setting: str) -> tuple[set[tuple[str, int]], str]:
    """Places of breaks in the first call under a setting of Dynamo's, and what it raises."""
    if not hasattr(torch._dynamo.config, setting):
        return set(), "nothing, for this torch does not have it"
    forget_compiled()
    kept = {key: trial.settings[key] for key in ("dynamic",) if key in trial.settings}
    try:
        side = trial.make({**kept, "backend": "eager"})
        with torch._dynamo.config.patch({setting: True}), observe(root=trial.root) as seen, trial.phase("hints"):
            found, _ = side.run(trial.calls[0], trial.loss, trial.train, trial.seed)
    except Exception as why:  # a hint that cannot be tried says nothing of the model
        return set(), type(why).__name__
    return {_place(each.to_dict()) for each in seen.graph_breaks}, found.error.type if found.error else ""


def _place(found: Mapping[str, Any]) -> tuple[str, int]:
    return os.path.basename(found["file"]), found["line"]
