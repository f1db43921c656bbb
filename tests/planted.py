"""The planted run that findings are put in order for: nine models with a harmless graph break, and one that lies."""

from __future__ import annotations

from typing import Any

from runs import Run

__all__ = ["LIAR", "planted"]

LIAR = "liar"
CHECKS = ["graph_breaks", "compiles", "equivalence", "gradients", "training_steps", "recompiles", "smoketest"]


def planted(*, broken: int = 9, liars: tuple[str, ...] = (LIAR,), faulty: bool = True) -> Run:
    """The run; ``faulty=False``: of the same cells before anything was planted."""
    names = [f"broken{number}" for number in range(broken)]
    run = Run(model=[*names, *liars], backend=["inductor"], dynamic=["auto", "dynamic"])
    run.checks = list(CHECKS)
    for cell, given in run.cells.items():
        lies = faulty and given.model in liars
        for name in ("equivalence", "gradients", "training_steps"):
            run.section(cell, name).update(_numbers(name, lies))
        run.section(cell, "smoketest").update(_smoketest(lies))
        if faulty and given.model in names:
            run.breaks(cell, {"line": 20 + 10 * names.index(given.model)})
            run.section(cell, "compiles")["coverage"] = [
                {"call": "call 1", "share": 0.8, "total": 10, "outside": 2, "sites": []}]
    return run


def _numbers(check: str, lies: bool) -> dict[str, Any]:
    name = {"equivalence": "output", "gradients": "gradient of w", "training_steps": "step 1: output"}[check]
    leaf = {"call": "call 1", "name": name, "kind": "value", "numel": 18, "dtype": "float32", "rms": 4.1e6, "bias": 9.0,
            "peak": 5e6, "index": [0], "eager": -0.34, "compiled": -0.68, "expected": -0.34, "wrong": 1.0}
    return {"raised": None, "compared": 9, "undecided": 0, "notes": [], "vacuous": None, "bitwise": 9 - lies,
            "inexact": int(lies), "leaves": [leaf] * lies, "nonzero": 4, "steps": 3, "rate": 0.01}


def _smoketest(lies: bool) -> dict[str, Any]:
    reason = "output: error is 3.5e+06 times the rounding noise (limit 5)"
    return {"raised": None, "ok": not lies, "reason": reason * lies, "phase": "comparison", "step": 1, "seconds": {},
            "graphs": 2, "compiles": 0, "evidence": "", "notes": []}
