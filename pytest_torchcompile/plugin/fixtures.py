"""Fixtures and markers for the tests of a model repository. Nothing is loaded, and no torch, until a test asks."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchcompile.plugin.marker_mistakes import (
    MARKERS,
    marker_mistake,
    misspelt_marker,
    place_of,
    registered_markers,
)

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions
    from pytest_torchcompile.ledger import Ledger
    from pytest_torchcompile.ledger.watch import Awaited
    from pytest_torchcompile.plan.markers import Combination, MarkerLimits
    from pytest_torchcompile.run.counters import Evidence, GraphBreaks, HeaviestSequence, RecompileCounter, ShapeBuckets

__all__ = ["FuzzCutShortWarning", "RanEagerlyWarning", "StateLeakWarning", "WarmUpLostWarning"]

_WATCH = "_compile_watch"
_MISTAKES = "compile_marker_mistakes"
_NO_MODEL = """compiled_model compiles what the fixture `model` returns, and there is none here.
Add one, for example to conftest.py:

    import pytest
    from my_package import Net

    @pytest.fixture
    def model():
        return Net()
"""


class StateLeakWarning(UserWarning):
    """A test left a setting of torch changed; it was put back."""


class RanEagerlyWarning(UserWarning):
    """A test that passed ran eagerly what it meant to run compiled, without a word of torch's."""


class FuzzCutShortWarning(UserWarning):
    """A fuzzed test passed over fewer sequences than it was to be run over."""


class WarmUpLostWarning(UserWarning):
    """A fixture of a class, module or session compiled something, and the test began with nothing compiled."""


@pytest.fixture
def compile_config(request: pytest.FixtureRequest) -> Combination:
    """How `compiled_model` is compiled: mode, dynamic, backend, wrapper, fullgraph, from the marker `compile_modes`."""
    from pytest_torchcompile.plan.markers import Combination

    combination: Combination = getattr(request, "param", None) or Combination()
    return combination


@pytest.fixture
def compiled_model(request: pytest.FixtureRequest, _compile_watch: Ledger, model: Any,
                   compile_config: Combination) -> Iterator[Any]:
    """What your own fixture `model` returns, compiled as `compile_config` says.

    A module, or a function with the wrapper `none`. What a wrapper changes in the module is undone after the test.
    """
    from pytest_torchcompile.plugin import fixture_model
    from pytest_torchcompile.wrappers import WRAPPERS

    earlier = fixture_model.module_attributes(model)
    try:
        call = fixture_model.compile_model(request, model, compile_config)
        changed = fixture_model.changed_attributes(model, earlier)
    # Also for a skip, which pytest raises as such: the model is shared with the tests that follow.
    except BaseException:
        fixture_model.undo_changes(fixture_model.changed_attributes(model, earlier))
        raise
    # It would keep alive what the test drops.
    del earlier
    if compile_config.wrapper in WRAPPERS:
        from pytest_torchcompile.ledger.process_watch import watch

        request.node.stash[_AWAITED] = watch.wait_for(model)
    yield call
    fixture_model.undo_changes(changed)


@pytest.fixture
def recompile_counter(request: pytest.FixtureRequest, _compile_watch: Ledger) -> RecompileCounter:
    """Recompiles of this test: `count`, `compiles`, `explain()`, `with expect(n)`, `with assert_no_recompiles()`."""
    from pytest_torchcompile.run.counters import RecompileCounter

    request.node.stash[_COUNTER] = counter = RecompileCounter(_compile_watch)
    return counter


@pytest.fixture
def graph_breaks(request: pytest.FixtureRequest, _compile_watch: Ledger) -> GraphBreaks:
    """Graph breaks of this test, as a list; `explain()` tells each in words."""
    from pytest_torchcompile.run.counters import GraphBreaks

    request.node.stash[_BREAKS] = breaks = GraphBreaks(_compile_watch)
    return breaks


@pytest.fixture
def shape_buckets(request: pytest.FixtureRequest, _compile_watch: Ledger) -> ShapeBuckets:
    """Sizes to run a model with, of the marker `shape_buckets`: `sizes`, `batches(make)`, `stabilizer`.

    `batches(make)` calls `make(S=size)` where make has a parameter S, else `make(size)`. Without the marker the sizes
    are 256, 512, 1024 and 2048.
    """
    from pytest_torchcompile.layer.config import BucketConfig
    from pytest_torchcompile.plan.markers import read_bucket_sizes
    from pytest_torchcompile.run.counters import ShapeBuckets

    mark = request.node.get_closest_marker("shape_buckets")
    sizes = read_bucket_sizes(mark.args, mark.kwargs) if mark is not None else BucketConfig().buckets
    return ShapeBuckets(sizes, _compile_watch)


@pytest.fixture
def _compile_watch(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """The one ledger of a test; torch's state is as in a fresh process before, and as it was after."""
    from pytest_torchcompile.plugin.fixture_model import ignore_warnings

    for name, scope in _warmed_up(request):
        request.node.warn(WarmUpLostWarning(
            f"{request.node.name} begins with nothing compiled, so what the {scope}-scoped fixture {name!r} compiled "
            "in its set-up is gone, and the test's first compile is no recompile; give the fixture the scope "
            "'function'"))
    leaks: list[str] = []
    with contextlib.ExitStack() as stack:
        with ignore_warnings():
            from pytest_torchcompile.ledger import observe
            from pytest_torchcompile.state.torch_state import isolated

            stack.enter_context(isolated(leaks))
            ledger = stack.enter_context(observe(root=request.config.rootpath))
        request.node.stash[_LEDGER] = ledger
        try:
            yield ledger
        finally:
            with ignore_warnings():
                # Here and not by the `with`, since what torch warns of on the way out is not the test's.
                stack.close()
    if leaks:
        request.node.warn(StateLeakWarning(
            f"{request.node.name} left torch changed, and it was put back: {'; '.join(leaks)}"))


@pytest.fixture
def _compile_fuzz(request: pytest.FixtureRequest) -> tuple[FuzzOptions, MarkerLimits | None, HeaviestSequence]:
    """What ``compile_shapes`` must know: the options of fuzzing, the test's limits, and where sequences are noted."""
    from pytest_torchcompile.plugin import fuzz_options
    from pytest_torchcompile.run.counters import HeaviestSequence

    request.node.stash[HEAVIEST] = heaviest = HeaviestSequence()
    return fuzz_options(request.config), _test_limits(request.node), heaviest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with ``compile_modes`` once for each combination."""
    mark = metafunc.definition.get_closest_marker("compile_modes")
    if mark is None or "compile_config" not in metafunc.fixturenames:
        return
    from pytest_torchcompile.errors import UsageError
    from pytest_torchcompile.plan.markers import read_combinations

    try:
        combinations = read_combinations(mark.args, mark.kwargs)
    except UsageError:
        # It is told for all tests at once, after collection.
        return
    ids = [combination.id for combination in combinations]
    metafunc.parametrize("compile_config", combinations, indirect=True, ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse markers that say what we do not know, all at once; have tests with limits watched."""
    mistakes: dict[tuple[str, str], str] = {}
    registered = registered_markers(config)
    for item in items:
        for mark in item.iter_markers():
            if mark.name in MARKERS:
                text = marker_mistake(item, mark)
            else:
                text = misspelt_marker(item, mark.name, registered)
            if text:
                # A marker of a class or module is told once, at the first of its tests.
                mistakes.setdefault((item.location[0], text), f"{place_of(item)}: {mark.name}: {text}")
        if not hasattr(item, "fixturenames"):
            continue
        if _WATCH in item.fixturenames or item.get_closest_marker("compile_limits"):
            item.fixturenames = _watched_first(item, item.fixturenames)
    if not mistakes:
        return
    if hasattr(config, "workeroutput"):
        # An xdist worker that raises would look like a crash.
        config.workeroutput[_MISTAKES] = list(mistakes.values())
        items.clear()
    else:
        raise pytest.UsageError("\n".join(mistakes.values()))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Note which fixtures of a class, module or session compile something."""
    if fixturedef.scope == "function":
        return (yield)
    before = _compiled_so_far()
    result = yield
    if _compiled_so_far() > before:
        noted = request.config.stash.setdefault(_COMPILED, {})
        noted[fixturedef.argname, fixturedef.baseid] = fixturedef.scope
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what an xdist worker found wrong with markers."""
    mistakes = getattr(node, "workeroutput", {}).get(_MISTAKES, ())
    # As keys: every worker collects the same tests, and finds the same.
    node.config.stash.setdefault(_OF_WORKERS, {}).update(dict.fromkeys(mistakes))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """End the run as a usage error if an xdist worker found markers wrong."""
    result = yield
    if mistakes := session.config.stash.get(_OF_WORKERS, None):
        raise pytest.UsageError("\n".join(mistakes))
    return result


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Judge the marker ``compile_limits`` when the test's body has passed, and whether it could prove anything."""
    result = yield
    counter = item.stash.get(_COUNTER, None)
    if counter is not None and counter.unused:
        pytest.fail(f"recompile_counter.{counter.unused[0]} was called without `with`, so it checked nothing; write "
                    f"`with recompile_counter.{counter.unused[0]}:` around the calls", pytrace=False)
    evidence = gather_evidence(item)
    if evidence is None:
        return result
    if problem := evidence.problem():
        pytest.fail(problem, pytrace=False)
    if evidence.limits is None:
        from pytest_torchcompile.run.counters import ran_eagerly

        if text := ran_eagerly(evidence.ledger, counter, item.stash.get(_BREAKS, None)):
            item.warn(RanEagerlyWarning(f"{item.name}: {text}"))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Say what to write where ``compiled_model`` has no fixture ``model`` to compile."""
    report = yield
    if call.excinfo is None or "compiled_model" not in getattr(item, "fixturenames", ()):
        return report
    error = call.excinfo.value
    if isinstance(error, pytest.FixtureLookupError) and error.argname == "model":
        report.longrepr = f"{place_of(item)}: {_NO_MODEL}"
    return report


_LEDGER = pytest.StashKey["Ledger"]()
_COUNTER = pytest.StashKey["RecompileCounter"]()
_BREAKS = pytest.StashKey["GraphBreaks"]()
_AWAITED: pytest.StashKey[Awaited] = pytest.StashKey()
HEAVIEST = pytest.StashKey["HeaviestSequence"]()
"""Of a fuzzed test."""
_COMPILED = pytest.StashKey[dict[tuple[str, str], str]]()
"""Name and place of each fixture of a wider scope that compiled something in its set-up, to its scope."""
_OF_WORKERS = pytest.StashKey[dict[str, None]]()


def is_watched(item: pytest.Item) -> bool:
    """Whether the test has a ledger: it takes one of our fixtures, is fuzzed, or has limits."""
    return _WATCH in getattr(item, "fixturenames", ())


def gather_evidence(item: pytest.Item) -> Evidence | None:
    """What there is to judge a test by; None where its set-up never came to the ledger."""
    if _LEDGER not in item.stash:
        return None
    from pytest_torchcompile.run.counters import Evidence, ModelCalls

    # A marker on a whole class may well stand on tests that compile nothing.
    own = any(mark.name == "compile_limits" for mark in getattr(item, "own_markers", ()))
    awaited = item.stash.get(_AWAITED, None)
    model = ModelCalls(awaited.called, awaited.ran) if awaited is not None else None
    return Evidence(
        ledger=item.stash[_LEDGER], limits=_test_limits(item),
        must_run=own or "compiled_model" in getattr(item, "fixturenames", ()),
        asks_model=_takes_fixture(item, "compiled_model"), model=model,
    )


def _test_limits(item: pytest.Item) -> MarkerLimits | None:
    """What the markers ``compile_limits`` of a test, its class and its module say together; the nearest wins."""
    marks = list(item.iter_markers("compile_limits"))
    if not marks:
        return None
    from pytest_torchcompile.plan.markers import read_limits

    together: dict[str, Any] = {}
    # The nearest first, so that what is there already wins.
    for mark in marks:
        read_limits(mark.args, mark.kwargs)
        together = {**mark.kwargs, **together}
    return read_limits((), together)


def _watched_first(item: pytest.Item, names: list[str]) -> list[str]:
    """The names of a test's fixtures, the watch before all others of function scope: what they compile counts."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    others = [name for name in names if name != _WATCH]
    for position, name in enumerate(others):
        # The last definition of a name is the one that the test gets.
        if name in known and known[name][-1].scope == "function":
            return [*others[:position], _WATCH, *others[position:]]
    return [*others, _WATCH]


def _warmed_up(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Name and scope of each fixture of the test that compiled something for more tests than this one."""
    compiled = request.config.stash.get(_COMPILED, {})
    used: list[tuple[str, str]] = []
    for (name, base), scope in compiled.items():
        # By its place too: elsewhere there may be another fixture of that name.
        if name in request.fixturenames and request.node.nodeid.startswith(base):
            used.append((name, scope))
    return used


def _compiled_so_far() -> int:
    # Not imported here: a test that has no use for torch should not wait for it.
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from pytest_torchcompile.ledger.entries import compiled_so_far

    return compiled_so_far()


def _takes_fixture(item: pytest.Item, fixture: str) -> bool:
    """Whether the test itself takes a fixture; one that a fixture of its own takes may be for other tests."""
    function = getattr(item, "obj", None)
    return function is not None and fixture in inspect.signature(function).parameters
