"""What the check `artifacts` says of a section."""

from __future__ import annotations

import pytest

from pytest_torchcompile.artifacts.route import version_of
from pytest_torchcompile.checks import load, way_of
from pytest_torchcompile.checks.severity import Severity

WARM = {"route": "warm_folder", "skipped": "", "refused": "", "cached": True, "cold_seconds": 9.0,
        "loaded_seconds": 2.0, "hits": 2, "misses": 0, "calls": 2, "mute": 0, "refusals": [], "problems": []}
AOT = WARM | {"route": "aot_compile", "cached": False, "hits": 0, "calls": 7, "refusals": ["[call(B=6)]"]}
ABSENT = AOT | {"route": "precompile", "skipped": "torch 2.13 has no torch.compiler.precompile"}
REFUSED = AOT | {"route": "aot_compile", "refused": "Unsupported: a graph break"}


def problems(*routes, limits=None, **changes):
    """What is said of some routes."""
    section = {"raised": None, "unfit": "", "routes": list(routes)} | changes
    return list(load("artifacts").judge(section, limits or {}))


def test_all_is_well():
    """The remark has each route with its figures, and why others shipped nothing."""
    section = {"raised": None, "unfit": "", "routes": [WARM, AOT, ABSENT]}
    assert problems(WARM, AOT, ABSENT) == []
    assert load("artifacts").remark(section) == (
        "warm_folder: 9.0 s cold, 2.0 s loaded, 0 misses and 2 hits; "
        "aot_compile: 9.0 s cold, 2.0 s loaded, 7 calls as eager, 1 refused; "
        "precompile skipped: torch 2.13 has no torch.compiler.precompile")


@pytest.mark.parametrize(("built", "told"), [(0, ""), (1, ", 1 C++ kernel library built again"),
                                             (3, ", 3 C++ kernel libraries built again")])
def test_libraries_that_were_built_again(built, told):
    """No cache of graphs counts them, so that a hit says nothing of them."""
    section = {"raised": None, "unfit": "", "routes": [WARM | {"built": built}]}
    assert load("artifacts").remark(section) == f"warm_folder: 9.0 s cold, 2.0 s loaded, 0 misses and 2 hits{told}"


@pytest.mark.parametrize(("route", "message"), [
    (WARM | {"misses": 1}, "recompiles: route warm_folder: 1 graph compiled again in a second process (limit "
                           "cache_misses 0, 2 hits)"),
    (WARM | {"hits": 0}, "vacuous: route warm_folder: torch's caches were never asked"),
    (WARM | {"mute": 2}, "vacuous: route warm_folder: no call was compared that gave more than zeros, NaN or noise"),
    (AOT | {"problems": [{"kind": "load", "code": "", "where": "", "message": "RuntimeError: other machine"}]},
     "load: route aot_compile: another process could not load what was shipped"),
    (AOT | {"problems": [{"kind": "value", "code": "[call(B=2)]", "where": "output", "message": "output is off"}]},
     "value: route aot_compile, [call(B=2)]: output is off"),
    (AOT | {"problems": [{"kind": "crash", "code": "", "where": "", "message": "making the artifact ended"}]},
     "crash: route aot_compile: making the artifact ended"),
])
def test_what_is_wrong(route, message):
    (problem,) = problems(route)
    assert problem.message == message


def test_a_limit_takes_misses():
    assert problems(WARM | {"misses": 1}, limits={"cache_misses": 1}) == []


def test_nothing_was_shipped():
    """No route is no pass; how many must ship is a limit, and the reasons are told."""
    (problem,) = problems(ABSENT, REFUSED)
    assert problem.message == "vacuous: 0 routes shipped the model, and 1 must"
    assert problem.evidence.splitlines() == [
        "precompile skipped: torch 2.13 has no torch.compiler.precompile",
        "aot_compile refused: Unsupported: a graph break"]
    assert problems(WARM, ABSENT, limits={"routes": 2})[0].message.startswith("vacuous: 1 route shipped")


@pytest.mark.parametrize("unfit", ["a module is shipped as it is, not in the wrapper 'ddp'"])
def test_a_cell_that_cannot_be_judged(unfit):
    (problem,) = problems(unfit=unfit)
    assert problem.message == f"nothing to judge: {unfit}"


def test_how_bad_it_is():
    """A crash is a crash, and a compile in the second process is none that computes wrong numbers."""
    assert way_of("artifacts", "crash: route aot_inductor, x").effect.severity == Severity.CRASH
    assert way_of("artifacts", "recompiles: route warm_folder: 1").effect.severity != Severity.WRONG_NUMBERS
    assert way_of("artifacts", "value: route aot_compile, x") is None


def test_versions():
    assert version_of("2.13.0+cpu") == (2, 13)
    assert version_of("2.9.1") == (2, 9)


@pytest.mark.needs_torch
@pytest.mark.parametrize(("name", "version", "trains", "text"), [
    ("aot_compile", (2, 8), False, "torch 2.8 has no aot_compile; it came with 2.9"),
    ("aot_compile", (2, 11), False, "in torch 2.11 aot_compile is off by default"),
    ("aot_compile", (2, 13), True, ""),
    ("precompile", (2, 13), False, "torch 2.13 has no torch.compiler.precompile; it came with 2.14"),
    ("precompile", (2, 14), False, ""),
    ("precompile", (2, 15), True, "what torch.compiler.precompile makes of a forward has no backward pass"),
    ("aot_inductor", (2, 13), True, "AOTInductor's package has no backward pass"),
    ("warm_folder", (2, 8), True, ""),
])
def test_why_a_route_is_missing(name, version, trains, text):
    from pytest_torchcompile.artifacts.route import load_route

    missing = load_route(name).missing(version, trains)
    assert missing.startswith(text)
    assert bool(missing) == bool(text)
