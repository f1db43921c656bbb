"""compiles: the cell compiled and ran compiled. Every other verdict of the cell rests on this one.

Nothing vacuous: graphs were compiled and executed in every call, no frame silently ran eagerly, the outputs
are not all zero, and the share of the model's operator calls that ran inside compiled graphs is as high as promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.numerics import located
from pytest_torchcompile.checks.protocol import Check
from pytest_torchcompile.checks.severity import RAISED, UNCOVERED
from pytest_torchcompile.instruments.records import SILENT
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.findings import headline

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK"]


def measure(run: Trial) -> dict[str, Any]:
    """Compiled frames and graphs, frames that ran eagerly, coverage per call, the error if there was one."""
    seen, error = run.compiled.seen, run.compiled.error
    return {
        "compiles": seen["compiles"],
        "graphs": seen["graphs"],
        "eager_frames": seen["eager_frames"],
        "lost": seen["lost"],
        "coverage": run.compiled.coverage,
        "all_zero": [passed.zero for passed in run.passed if not passed.raised],
        "eager_all_zero": [passed.eager_zero for passed in run.passed if not passed.raised],
        "error": error.to_dict() if error else None,
        "seconds": run.seconds.get("compiled"),
    }


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``coverage``, the smallest share allowed (default 1)."""
    if error := section["error"]:
        yield Problem(
            f"{RAISED} {error['type']} in {error['phase']}; eager did not: {headline(error['text'])}",
            evidence=f"{error['text']}\n{error['traceback']}".strip() + located(section),
            hint="" if section.get("located") else
                 "the same call with backend='eager' and then 'aot_eager' tells which stage raises",
        )
        return
    if not section["graphs"]:
        yield Problem("nothing was compiled: no graph reached the backend",
                      evidence=_frames(section),
                      hint="a frame without tensor operations, torch.compiler.disable, a stance or "
                           "TORCHDYNAMO_DISABLE=1 does this")
        return
    silent = [f for f in section["eager_frames"] if f["kind"] in SILENT]
    if not any(g["runs"] for g in section["graphs"]):
        yield Problem("graphs were compiled, but none was ever executed", evidence=_frames(section))
    else:
        yield from _silent(silent, section)
    if section["lost"]:
        yield Problem("the ledger could not read everything that torch reported, so it can't vouch for this cell",
                      evidence="\n".join(section["lost"]),
                      hint="this torch is newer than pytest-torchcompile knows: please report it")
    if not silent:  # else the coverage, which is measured after all calls, tells only what comes of it
        yield from _coverage(section["coverage"], limits.get("coverage", 1.0))
    if section["all_zero"] and all(section["all_zero"]):
        yield Problem("every output is zero, NaN or infinite, compiled and eager: their equality proves nothing"
                      if all(section["eager_all_zero"]) else
                      "every output of the compiled model is zero, NaN or infinite",
                      hint="give the model inputs and weights that reach its outputs")


def _silent(silent: list[Mapping[str, Any]], section: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each place."""
    for file, line in dict.fromkeys((frame["file"], frame["line"]) for frame in silent):
        here = [frame for frame in silent if (frame["file"], frame["line"]) == (file, line)]
        kinds = ", ".join(sorted({frame["kind"] for frame in here}))
        yield Problem(f"{len(here)} frame(s) silently ran eagerly: {kinds} in {here[0]['function']}",
                      evidence=_frames(section), file=file, line=line)


def _frames(section: Mapping[str, Any]) -> str:
    lines = [f"{f['function']}  {f['file']}:{f['line']}  {f['kind']}: {f['reason']}"
             for f in section["eager_frames"]]
    return "\n".join(lines)


def _coverage(calls: list[Mapping[str, Any]], least: float) -> Iterator[Problem]:
    if not calls:
        return
    low = min(calls, key=lambda c: c["share"])
    if low["share"] < least:
        sites = "\n".join(low.get("sites", ()))
        yield Problem(
            f"only {low['share']:.0%} {UNCOVERED} at {low['call']}, "
            f"{least:.0%} wanted ({low['outside']} of {low['total']} ran eagerly)",
            evidence=sites,
            hint="graph_breaks lists where; if it is meant, give a rule `limits: {coverage: ...}`",
        )


CHECK = Check("compiles", measure, judge)
