"""artifacts: what one process has compiled and another one loads computes what eager computes, and compiles no graph.

By each route: a warm cache folder, torch's cache artifacts, ``aot_compile``, AOTInductor's package. An artifact may
have dropped guards, so it is called as it was not made for, too: eager's answer is right then, and a refusal is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_MAKER: Final = "pytest_torchcompile.run.artifact_cell:make_artifact"
_LOADER: Final = "pytest_torchcompile.run.artifact_cell:program_of"
"""Named, not imported: they lie above, and are loaded in processes of their own."""
_STALE: Final = "a key of the cache does not hold all that the code depends on: look at custom passes and their uuid"
_HINTS: Final = {
    "aot_inductor": "AOTInductor's package asks no guards: run it with AOTI_RUNTIME_CHECK_INPUTS=1, or make sure that "
                    "nobody calls it so",
    "aot_compile": "aot_compile drops guards on globals, and hooks that are registered later are not called: make the "
                   "artifact where both are as they are where it is loaded",
    "precompile": "torch.compiler.precompile asks nothing of flags, globals, hooks and Python's values: make an "
                  "artifact for each that the model is called with",
    "warm_folder": _STALE,
    "cache_artifacts": _STALE,
}
_COMPILED_AGAIN: Final = "something in the key differs from process to process: see the check `determinism`"


def measure(run: CellTrial) -> dict[str, Any]:
    """What each route came to."""
    from dataclasses import asdict, replace

    from pytest_torchcompile.artifacts.route import ROUTES
    from pytest_torchcompile.artifacts.shipping import Shipment, ship
    from pytest_torchcompile.fuzz.drawn_call import DrawnCall

    if run.compiled.error or run.side is None:
        return not_run(run) | {"unfit": "", "routes": []}
    unfit = ""
    if run.cell.wrapper != "none":
        unfit = f"a module is shipped as it is, not in the wrapper {run.cell.wrapper!r}"
    elif run.cell.backend != "inductor":
        unfit = f"what is shipped is Inductor's code, and backend {run.cell.backend!r} makes none"
    if unfit:
        return {"raised": None, "unfit": unfit, "routes": []}
    declared = tuple(DrawnCall(tuple(call.sizes.items())) for call in run.calls)
    # Comparisons of this run are large, and the other process has no use for them.
    job = asdict(replace(run.job, comparisons=None))
    sections = [ship(Shipment(_MAKER, _LOADER, job, route, declared)) for route in ROUTES]
    return {"raised": None, "unfit": "", "routes": sections}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; the limits are ``cache_misses`` and ``routes``."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if section.get("unfit"):
        yield Problem(f"nothing to judge: {section['unfit']}", hint="leave these cells out of the check `artifacts`")
        return
    judged = [each for each in section.get("routes", ()) if _was_shipped(each)]
    for each in judged:
        yield from _judge_route(each, limits)
    # At least one: a check whose every route was refused has shown nothing.
    wanted = int(limits.get("routes", 1))
    if len(judged) < wanted:
        yield Problem(f"vacuous: {count(len(judged), 'route')} shipped the model, and {wanted} must",
                      "\n".join(_why_not(section)), "limit `routes` has how many must")


def _was_shipped(route: Mapping[str, Any]) -> bool:
    return not route["skipped"] and not route["refused"]


def _judge_route(route: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    name = route["route"]
    for found in route["problems"]:
        hint = _HINTS.get(name, "")
        if found["kind"] == "load":
            yield Problem(f"load: route {name}: another process could not load what was shipped", found["message"],
                          "ship it to a machine and a torch like those that made it")
        else:
            call = f", {found['code']}" if found["code"] else ""
            yield Problem(f"{found['kind']}: route {name}{call}: {found['message']}", hint=hint)
    if route["problems"]:
        return
    if not route["calls"] or route["mute"] == route["calls"]:
        yield Problem(f"vacuous: route {name}: no call was compared that gave more than zeros, NaN or noise",
                      hint="give it inputs and weights that reach its outputs")
    elif route["cached"] and not route["hits"] + route["misses"]:
        yield Problem(f"vacuous: route {name}: torch's caches were never asked", hint="are they switched off?")
    most = limits.get("cache_misses", 0)
    if route["cached"] and route["misses"] > most:
        yield Problem(f"recompiles: route {name}: {count(route['misses'], 'graph')} compiled again in a second process "
                      f"(limit cache_misses {most:g}, {count(route['hits'], 'hit')})", hint=_COMPILED_AGAIN)


def _why_not(section: Mapping[str, Any]) -> list[str]:
    """Each route that shipped nothing, with what was said."""
    lines = []
    for each in section.get("routes", ()):
        if each["skipped"]:
            lines.append(f"{each['route']} skipped: {each['skipped']}")
        elif each["refused"]:
            lines.append(f"{each['route']} refused: {each['refused']}")
    return lines


def remark(section: Mapping[str, Any]) -> str:
    """What each route took, and why others shipped nothing."""
    told = []
    for each in section.get("routes", ()):
        if not _was_shipped(each):
            continue
        line = f"{each['route']}: {each['cold_seconds']:.1f} s cold, {each['loaded_seconds']:.1f} s loaded"
        if each["cached"]:
            line += f", {count(each['misses'], 'miss', 'misses')} and {count(each['hits'], 'hit')}"
            # Torch's cache artifacts have the source of C++ kernels, and no library.
            if each.get("built"):
                line += f", {count(each['built'], 'C++ kernel library', 'C++ kernel libraries')} built again"
        else:
            line += f", {count(each['calls'], 'call')} as eager, {len(each['refusals'])} refused"
        told.append(line)
    return "; ".join([*told, *_why_not(section)])


CHECK = Check("artifacts", measure, judge, remark)
