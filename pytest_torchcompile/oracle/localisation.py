"""Which stage of the compiler brings a difference in? The same trial again, with backends that stop earlier."""

from __future__ import annotations

from typing import Any

from pytest_torchcompile.oracle.compiler_stages import stages_before
from pytest_torchcompile.oracle.findings import findings
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["located"]


def located(trial: Trial) -> dict[str, Any] | None:
    """Try the backends that do part of what the trial's backend does, until one differs or raises as it does.

    Returns what :func:`~pytest_torchcompile.oracle.compiler_stages.explained` takes; None where nothing is wrong
    that a stage could bring in. Everything compiled is forgotten.
    """
    error, wrong = trial.compiled.error, _wrong(trial)
    if error is None and not wrong:
        return None
    backend = trial.settings.get("backend", "inductor")
    own = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    tried: list[tuple[str, str]] = []
    with trial.phase("stages"):
        for name in stages_before(own if isinstance(backend, str) else ""):
            forget_compiled()
            tried.append((name, _did(trial, name, wrong)))
            if tried[-1][1] != "agrees":
                break
        beyond: list[tuple[str, str]] = []
        if error is not None and own == "aot_eager":
            # What most users go on to: Inductor may do well what AOTAutograd's graphs raise when they run as they are.
            forget_compiled()
            beyond.append(("inductor", _did(trial, "inductor", wrong)))
    return {"backend": own, "stages": tried, "beyond": beyond}


def _did(trial: Trial, backend: str, wrong: set[tuple[str, str]]) -> str:
    kept: dict[str, Any] = {key: trial.settings[key] for key in ("dynamic", "fullgraph") if key in trial.settings}
    again = trial.again({**kept, "backend": backend})
    try:
        again.run()
    except Exception as why:
        return f"could not be tried ({type(why).__name__})"
    if error := again.compiled.error:
        return f"raises {error.type}"
    return "differs" if wrong & _wrong(again) else "agrees"


def _wrong(trial: Trial) -> set[tuple[str, str]]:
    found = findings([*trial.leaves, *trial.trained])
    return {(finding.kind, finding.where) for finding in found}
