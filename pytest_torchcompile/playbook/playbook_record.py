"""The playbook for programs: which setting each model should use, and the gotchas, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.permitted import permitted_causes
from pytest_torchcompile.playbook.choice import (
    AXES,
    Setting,
    best_setting,
    has_verdict,
    least_slow,
    settings_by_model,
)
from pytest_torchcompile.report.causes import Cause, group_causes

__all__ = ["GOTCHA_VERDICTS", "playbook_record"]

GOTCHA_VERDICTS = ("xpass", "fail", "error", "timeout", "crash", "xfail")
"""What a reader of the playbook has to know of; what is expected to fail too."""


def playbook_record(outcome: GateOutcome) -> dict[str, Any]:
    """What the command prints with ``--json``. Keys are added in later versions, and never renamed."""
    run, cells = outcome.merged, outcome.facts
    models = [_model_record(model, settings) for model, settings in settings_by_model(cells).items()]
    causes = group_causes(filter(has_verdict, cells), GOTCHA_VERDICTS)
    gotchas = []
    for cause in causes:
        known = "expected" if cause.verdict == "xfail" else ""
        gotchas.append(_gotcha_record(cause, known))
    gotchas += [_gotcha_record(cause, "allowed") for cause in permitted_causes(run.cells.values(), outcome.cells)]
    return {"matrix": run.matrix["path"], "environment": run.environment, "git": run.git,
            "not_whole": list(run.problems), "models": models, "gotchas": gotchas}


def _model_record(model: str, settings: Sequence[Setting]) -> dict[str, Any]:
    """``advice``: use, do not compile, none holds, or not told where only stages of the compiler were tried."""
    real = [setting for setting in settings if setting.is_real]
    chosen = best_setting(settings)
    advice = "use"
    if chosen is None:
        chosen = least_slow(real)
        advice = "do not compile"
    if chosen is None:
        advice = "none holds" if real else "not told"
        return {"model": model, "advice": advice, "setting": None, "cells": []}
    return {
        "model": model, "advice": advice, "setting": dict(zip(AXES, chosen.values, strict=True)), "cells": chosen.ids,
        "speedup": chosen.median_of("speedup"), "compile_seconds": chosen.median_of("compile_seconds"),
        "graph_breaks": chosen.worst_of("graph_breaks"), "recompiles": chosen.worst_of("recompiles"),
    }


def _gotcha_record(cause: Cause, known: str) -> dict[str, Any]:
    """``known``: empty, expected (by an xfail of the matrix) or allowed (by its limits)."""
    problem = cause.problem
    return {"checks": cause.checks, "verdict": cause.verdict, "known": known, "severity": int(cause.effect.severity),
            "message": problem.message, "hint": problem.hint, "file": problem.file, "line": problem.line,
            "cells": cause.cells}
