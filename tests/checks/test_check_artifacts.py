"""The check `artifacts`: what it makes of the routes by which compiled code got into another process. No torch."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load

CHECK = load("artifacts")
AOT_COMPILE = {"route": "aot_compile", "skipped": "", "refused": "", "problems": [], "calls": 4, "mute": 0,
               "cached": False, "hits": 0, "misses": 0, "cold_seconds": 9.26, "loaded_seconds": 1.5,
               "refusals": ["call 3"]}
WARM_FOLDER = AOT_COMPILE | {"route": "warm_folder", "cached": True, "hits": 2, "refusals": []}
SKIPPED = AOT_COMPILE | {"route": "precompile", "skipped": "torch 2.13 has no precompile"}
REFUSED = AOT_COMPILE | {"route": "aot_inductor", "refused": "it has no forward alone"}


def section(*routes, **changes):
    return {"raised": None, "unfit": "", "routes": list(routes)} | changes


def judged(*routes, **limits):
    return list(CHECK.judge(section(*routes), limits))


def messages(*routes, **limits):
    return [problem.message for problem in judged(*routes, **limits)]


def test_routes_that_computed_what_eager_does_pass():
    assert not judged(AOT_COMPILE, WARM_FOLDER, SKIPPED, REFUSED)


@pytest.mark.parametrize(("routes", "limits", "text"), [
    ([SKIPPED, REFUSED], {}, "vacuous: 0 routes shipped the model, and 1 must"),
    ([], {}, "vacuous: 0 routes shipped the model, and 1 must"),
    ([AOT_COMPILE, SKIPPED], {"routes": 2}, "vacuous: 1 route shipped the model, and 2 must"),
])
def test_routes_that_shipped_nothing_show_nothing(routes, limits, text):
    """A check whose every route was refused must not pass; it says which were, and why."""
    (problem,) = judged(*routes, **limits)
    assert problem.message == text
    for route in routes:
        why = route["skipped"] or route["refused"]
        assert why in problem.evidence


@pytest.mark.parametrize(("changes", "text"), [
    ({"calls": 0}, "vacuous: route warm_folder: no call was compared that gave more than zeros, NaN or noise"),
    ({"mute": 4}, "vacuous: route warm_folder: no call was compared that gave more than zeros, NaN or noise"),
    ({"hits": 0}, "vacuous: route warm_folder: torch's caches were never asked"),
])
def test_a_route_that_shows_nothing_is_vacuous(changes, text):
    assert messages(WARM_FOLDER | changes) == [text]


def test_some_mute_calls_are_no_harm():
    assert not judged(AOT_COMPILE | {"mute": 3})


@pytest.mark.parametrize(("misses", "limit", "fails"), [(1, None, True), (1, 1, False), (2, 1, True), (0, None, False)])
def test_a_cache_that_missed_compiles_again(misses, limit, fails):
    """By default no graph may be compiled again in the second process."""
    limits = {} if limit is None else {"cache_misses": limit}
    found = judged(WARM_FOLDER | {"misses": misses}, **limits)
    assert bool(found) == fails
    if fails:
        assert found[0].message.startswith(f"recompiles: route warm_folder: {misses} graph")
        assert found[0].message.endswith(f"(limit cache_misses {limit or 0}, 2 hits)")
        assert "`determinism`" in found[0].hint


def test_misses_say_nothing_of_a_route_without_a_cache():
    assert not judged(AOT_COMPILE | {"misses": 7})


def test_what_a_route_computed_otherwise_is_told_by_kind_and_call():
    """The hint is that of the route: each drops guards of its own."""
    wrong = {"kind": "value", "code": "call(B=3)", "message": "output is 9 times the noise off"}
    (problem,) = judged(REFUSED | {"refused": "", "problems": [wrong]})
    assert problem.message == "value: route aot_inductor, call(B=3): output is 9 times the noise off"
    assert "AOTI_RUNTIME_CHECK_INPUTS=1" in problem.hint
    (problem,) = judged(AOT_COMPILE | {"problems": [wrong | {"code": ""}]})
    assert problem.message == "value: route aot_compile: output is 9 times the noise off"
    assert "drops guards on globals" in problem.hint


def test_what_cannot_be_loaded_has_its_error_as_evidence():
    error = {"kind": "load", "code": "", "message": "RuntimeError: made for sm_90"}
    (problem,) = judged(AOT_COMPILE | {"problems": [error]})
    assert problem.message == "load: route aot_compile: another process could not load what was shipped"
    assert problem.evidence == "RuntimeError: made for sm_90"


def test_a_route_that_failed_is_not_told_as_vacuous_too():
    """Its calls ended early, so that their number says nothing."""
    error = {"kind": "load", "code": "", "message": "RuntimeError"}
    assert len(judged(WARM_FOLDER | {"calls": 0, "hits": 0, "misses": 3, "problems": [error]})) == 1


def test_cells_that_ship_nothing_have_nothing_to_judge():
    (problem,) = CHECK.judge(section(unfit="a module is shipped as it is, not in the wrapper 'ddp'"), {})
    assert problem.message == "nothing to judge: a module is shipped as it is, not in the wrapper 'ddp'"
    assert "`artifacts`" in problem.hint


def test_a_run_that_raised_is_not_passed():
    (problem,) = CHECK.judge(section(raised="ValueError"), {})
    assert "the compiled run raised ValueError" in problem.message


def test_the_remark_tells_what_each_route_took():
    told = CHECK.remark(section(AOT_COMPILE, WARM_FOLDER | {"misses": 1, "built": 2}, SKIPPED, REFUSED))
    assert told.split("; ") == [
        "aot_compile: 9.3 s cold, 1.5 s loaded, 4 calls as eager, 1 refused",
        "warm_folder: 9.3 s cold, 1.5 s loaded, 1 miss and 2 hits, 2 C++ kernel libraries built again",
        "precompile skipped: torch 2.13 has no precompile",
        "aot_inductor refused: it has no forward alone",
    ]
