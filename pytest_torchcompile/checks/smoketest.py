"""smoketest: CompileSmoketest says True of the compiled model as the run has left it, whole steps and all.

The optimiser's step changes parameters in place, and nothing may be compiled anew for that. That it says False of what
is broken is proven apart, with broken models: ``pytest-torchcompile gates``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

STEPS = 2
"""The second starts from parameters that the first has moved."""


def measure(run: CellTrial) -> dict[str, Any]:
    """What the smoketest found, on the model and the code that the run has compiled."""
    import torch

    from pytest_torchcompile.layer.smoketest import CompileSmoketest
    from pytest_torchcompile.oracle.training import default_loss

    if run.compiled.error or run.side is None:
        return not_run(run) | {"ok": False}
    test, loss = CompileSmoketest(STEPS), None
    if run.train:
        loss = run.loss or default_loss
    # The model's state is as at the start of the run; what was compiled stays.
    run.side.restore()
    with torch.set_grad_enabled(run.train):
        test.run(run.side.call, run.calls[0].batch.value, None, loss)
    result = test.last_result
    if result is None:
        return {"raised": None, "ok": False, "reason": "it has no result", "phase": "state"}
    names = ("ok", "reason", "phase", "step", "seconds", "graphs", "compiles", "evidence", "notes")
    section = {name: getattr(result, name) for name in names}
    return {"raised": None, **section, "notes": list(result.notes)}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; takes no limits."""
    if section["raised"]:
        yield from unjudged(section)
    elif not section["ok"]:
        where = section["phase"]
        if section.get("step"):
            where = f"step {section['step']}, {where}"
        yield Problem(f"the smoketest says False: {section['reason']} ({where})", section.get("evidence", ""))
    elif section["compiles"]:
        yield Problem(f"{section['compiles']} compile(s) in the smoketest of a model that was warm",
                      hint="an optimiser's step or another seed must not compile anything anew; see `recompiles`")


CHECK = Check("smoketest", measure, judge)
