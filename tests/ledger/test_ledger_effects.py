"""Observing changes nothing: not what is compiled, not cache keys, not torch's settings; and nothing is lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def double(x):
    """One operator."""
    return x * 2


def inner(x):
    """Called by a function that is disabled, but only itself."""
    return x.sin()


@torch._dynamo.disable(recursive=False)
def shallow(x):
    """Disabled, not what it calls."""
    return inner(x) + 1


def outer(x):
    """A break, a disabled call, a recompile for each size."""
    y = shallow(x * 2)
    torch._dynamo.graph_break()
    return y * 3


def counted():
    """Torch's own counters after a run with everything in it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(outer, backend="aot_eager", dynamic=False)
    results = [compiled(torch.ones(size)).sum().item() for size in (3, 4, 3)]
    return results, {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}


def test_the_same_frames_are_compiled_with_and_without():
    """Torch counts the same frames, graphs and breaks, also around non-recursive disable."""
    without = counted()
    with observe() as seen:
        observed = counted()
    assert observed == without
    assert counted() == without
    assert len(seen.graphs) == without[1]["stats"]["unique_graphs"]


@pytest.mark.parametrize("observed_first", [False, True])
def test_cache_keys_do_not_change(observed_first, tmp_path, monkeypatch):
    """What was cached without an observation is hit with one, and the other way round."""
    from torch._inductor.utils import fresh_cache

    def run():
        torch.compiler.reset()
        x = torch.ones(3, requires_grad=True)
        torch.compile(double, backend="inductor", dynamic=False)(x).sum().backward()

    with fresh_cache():
        if observed_first:
            with observe() as cold:
                run()
            assert "aot miss" in cold.compiles[0].caches
            with observe() as warm:
                run()
        else:
            run()
            with observe() as warm:
                run()
        assert warm.compiles[0].caches[-1] == "aot hit"
        assert warm.compiles[0].cache_keys[-1]
        if observed_first:
            answers = zip(cold.compiles[0].caches, cold.compiles[0].cache_keys, strict=True)
            assert warm.compiles[0].cache_keys[-1] in [key for answer, key in answers if answer == "aot miss"]
        assert [g.runs for g in warm.graphs] == [1]
        if observed_first:
            from torch._dynamo.utils import counters

            counters.clear()
            run()
            assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_the_users_backend_is_called_as_it_is():
    """The backend object gets the graph itself, and what it returns is what runs."""
    got = []

    def backend(gm, inputs):
        got.append(type(gm).__name__)
        return lambda *args: (args[0] * 5,)

    with observe() as seen:
        result = torch.compile(double, backend=backend)(torch.ones(3))
    assert got == ["GraphModule"]
    assert result.tolist() == [5, 5, 5]
    assert [g.runs for g in seen.graphs] == [1]


def test_torchs_trace_logger_is_as_it_was():
    """Handlers, level, propagation and filters of the logger behind the structured trace."""
    log = logging.getLogger("torch.__trace")
    before = (list(log.handlers), log.level, log.propagate, list(log.filters))
    with observe():
        torch.compile(double, backend="eager")(torch.ones(3))
        assert list(log.handlers) != before[0]
    assert set(log.handlers) == set(before[0])
    assert (log.level, log.propagate, log.filters) == before[1:]


def test_a_reset_inside_the_block():
    """torch.compiler.reset() drops graphs and numbers; the ledger goes on."""
    with observe() as seen:
        for _ in range(2):
            torch.compile(double, backend="eager")(torch.ones(3))
            torch.compiler.reset()
    assert [(c.kind, c.compile_id) for c in seen.compiles] == [("first", "0/0"), ("first", "0/0")]
    assert [g.runs for g in seen.graphs] == [1, 1]


def test_more_compiles_than_torch_keeps_metrics_of():
    """Torch keeps 64 records; the ledger has them all, each with its reason."""
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as seen, torch._dynamo.config.patch(recompile_limit=100):
        for size in range(2, 72):
            compiled(torch.ones(size))
    assert (len(seen.compiles), len(seen.recompiles), len(seen.graphs)) == (70, 69, 70)
    assert seen.recompiles[-1].actual == "71"
    assert len(seen.recompiles[-1].all_reasons) == 69


def test_threads_have_their_own_labels_and_lose_no_run():
    """Four threads run one compiled function; each recompile bears the label of its own thread."""
    compiled = torch.compile(double, backend="eager")
    inputs = {"Float": torch.float32, "Double": torch.float64, "Int": torch.int32, "Long": torch.int64}
    with observe() as seen:
        def work(name):
            with seen.during(name):
                for _ in range(25):
                    compiled(torch.ones(3, dtype=inputs[name]))

        threads = [threading.Thread(target=work, args=(name,)) for name in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(g.runs for g in seen.graphs) == 100
    assert {c.during for c in seen.compiles} == set(inputs)
    assert len(seen.compiles) == 4
    assert all(c.during == c.actual for c in seen.recompiles)
    assert [*seen.eager_frames, *seen.lost] == []


def test_threads_that_race_for_one_compile_recompile_nothing():
    """Each waits for torch's lock and compiles the same once more; no guard failed, so that is no recompile."""
    together = threading.Barrier(4)

    def slow(gm, inputs):
        time.sleep(0.05)  # so that the others arrive while this one compiles
        return gm.forward

    compiled = torch.compile(double, backend=slow)

    def work():
        together.wait()
        compiled(torch.ones(3))

    with observe() as seen:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen.recompiles == []
    assert {c.kind for c in seen.compiles} <= {"first", "raced"}
    assert [c.kind for c in seen.compiles].count("first") == 1
    assert sum(g.runs for g in seen.graphs) == 4


def test_threads_that_race_for_a_dynamic_graph_recompile_once():
    """The second makes the size dynamic; the others waited, and what they compile once more was there by then."""
    together = threading.Barrier(4)

    def slow(gm, inputs):
        time.sleep(0.2)
        return gm.forward

    compiled = torch.compile(double, backend=slow)

    def work(size):
        together.wait()
        compiled(torch.ones(size))

    with observe() as seen:
        threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3, 4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    kinds = [c.kind for c in seen.compiles]
    if kinds[1] == "first":  # torch may name no guard of an entry that came while the call waited
        kinds[1] = "recompile"
    else:
        assert [c.cause for c in seen.recompiles] == ["shape"]
    assert kinds[:2] == ["first", "recompile"]
    assert set(kinds[2:]) <= {"raced"}  # on a busy machine one may come so late that it compiles nothing


def test_a_thread_that_waits_for_a_recompile_recompiles_nothing():
    """When it came only the entry of size 2 was there, so torch names its guard; a dynamic entry is there by then."""
    waiting = threading.Event()
    late = threading.Thread(target=lambda: compiled(torch.ones(4)))

    def slow(gm, inputs):
        if seen.compiles and not waiting.is_set():  # the second compile
            waiting.set()
            late.start()
            time.sleep(0.5)  # so that it waits for torch's lock
        return gm.forward

    compiled = torch.compile(double, backend=slow)
    with observe() as seen:
        compiled(torch.ones(2))
        compiled(torch.ones(3))
        late.join()
        compiled(torch.ones(5))
    assert [c.kind for c in seen.compiles] in (["first", "recompile", "raced"], ["first", "recompile"])
    assert sum(g.runs for g in seen.graphs) == 4


def test_the_rest_after_a_break_speaks_of_the_users_line():
    """Dynamo's name for what lay on the stack says nothing to anybody."""

    def rest(x):
        return shallow(x) * 3

    compiled = torch.compile(rest, backend="eager", dynamic=False)
    with observe() as seen:
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    line = rest.__code__.co_firstlineno + 1
    found = [r.what for r in seen.recompiles if r.resumed_at]
    assert found == [f"(value at line {line}).size(0)"]


def test_a_record_that_cannot_be_read_is_named_not_hidden(monkeypatch):
    """A parser's error neither fails the run nor goes unseen."""
    from pytest_torchcompile.ledger import decisions

    def fail(*args):
        raise KeyError("new in torch 3")

    monkeypatch.setattr(decisions, "read_failed_guards", fail)
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as seen:
        compiled(torch.ones(3))
        assert compiled(torch.ones(4)).shape == (4,)
    assert seen.lost == ["trace record 'artifact': KeyError: 'new in torch 3'"]
    assert [r.cause for r in seen.recompiles] == ["shape"]  # the metrics record has the reason too


def _breaks(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


@pytest.mark.parametrize("off", ["disabled", "logging.disable", "disabled inside"])
def test_a_logger_that_is_switched_off_hides_nothing(off):
    """``logging.config.dictConfig`` disables all loggers that it does not name, torch's trace too; here only that."""
    log = logging.getLogger("torch.__trace")
    compiled = torch.compile(_breaks, backend="eager", dynamic=False)
    try:
        log.disabled = off == "disabled"
        logging.disable(logging.CRITICAL if off == "logging.disable" else 0)
        with observe() as seen:
            if off == "disabled inside":
                log.disabled = True
            compiled(torch.ones(3))
            compiled(torch.ones(4))
        assert log.disabled == (off != "logging.disable")
    finally:
        log.disabled = False
        logging.disable(0)
    assert (len(seen.recompiles), len(seen.graph_breaks), seen.lost) == (2, 1, [])


def test_compiles_without_a_record_are_named():
    """Whoever takes our handler from the logger leaves the numbers too small; the ledger says so."""
    log = logging.getLogger("torch.__trace")
    with observe() as seen:
        handlers = list(log.handlers)
        log.handlers.clear()
        torch.compile(double, backend="eager")(torch.ones(3))
        log.handlers += handlers
    assert seen.lost == ["double was compiled without a record: something took the handler from the logger "
                         "torch.__trace"]


@pytest.mark.parametrize(("name", "stance"), [
    ("enter_decision", "default"), ("enter_call_without_graph", "force_eager")])
def test_a_failure_of_our_own_is_named_and_the_run_goes_on(monkeypatch, name, stance):
    """Bookkeeping that breaks costs a record, never the user's call."""
    from pytest_torchcompile.ledger import decisions

    def fail(*args):
        raise RecursionError("ours")

    monkeypatch.setattr(decisions, name, fail)
    with observe() as seen, torch.compiler.set_stance(stance):
        assert torch.compile(double, backend="eager")(torch.ones(3)).tolist() == [2, 2, 2]
    assert seen.lost == ["test_a_failure_of_our_own_is_named_and_the_run_goes_on.<locals>.fail: RecursionError: ours"]


def test_compiled_autograd_is_watched_too():
    """Its tracer calls Dynamo on frames whose arguments answer to any attribute; ours asks them none."""
    model = torch.nn.Linear(4, 4)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True), observe() as seen:
        torch.compile(step, backend="aot_eager")(torch.ones(2, 4))
    assert [c.kind for c in seen.compiles if c.compile_id.startswith("!")] == ["backward"]
    assert [g.runs for g in seen.graphs if g.compile_id.startswith("!")] == [1]
    assert seen.lost == []


@pytest.mark.parametrize(("place", "name"), [
    ("torch._dynamo.convert_frame.CatchErrorsWrapper", "__call__"),
    ("torch._dynamo.eval_frame", "_callback_from_stance"), ("torch._dynamo.eval_frame", "_maybe_set_eval_frame"),
    ("torch._dynamo.output_graph.OutputGraph", "install_global_unsafe"),
    ("torch._dynamo.utils.CleanupManager", "instance"),
])  # fmt: skip
def test_a_torch_without_the_internal_is_named(monkeypatch, place, name):
    """A missing private name: one sentence with the name and torch's version, and no hook left behind."""
    import torch._dynamo.convert_frame
    import torch._dynamo.output_graph

    from pytest_torchcompile.ledger.process_watch import watch

    module, _, attribute = place.rpartition(".")
    owner = sys.modules.get(place) or getattr(sys.modules[module], attribute)
    handlers = list(logging.getLogger("torch.__trace").handlers)
    monkeypatch.delattr(owner, name)
    version = torch.__version__.partition("+")[0]
    with pytest.raises(InstrumentError, match=f"torch {version}.* has no .*{name}"), observe():
        pass
    assert watch.ledgers == []
    assert logging.getLogger("torch.__trace").handlers == handlers


def test_the_switch_in_the_environment(monkeypatch):
    """With TORCHDYNAMO_DISABLE=1 torch.compile gives the function back: there is nothing to observe but that."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with observe() as seen:
        torch.compile(double, backend="eager")(torch.ones(3))
    assert [(f.kind, f.reason) for f in seen.eager_frames] == [
        ("off", "TORCHDYNAMO_DISABLE=1 switches torch.compile off")]  # fmt: skip


def test_a_stance_is_named():
    """force_eager, and eager_on_recompile where no graph fits; none of it under the default stance."""
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as seen:
        compiled(torch.ones(3))
        with torch.compiler.set_stance("eager_on_recompile"):
            compiled(torch.ones(3))
            compiled(torch.ones(4))
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(3))
    assert [(f.function, f.kind, f.calls) for f in seen.eager_frames] == [("double", "stance", 2)]
    assert [g.runs for g in seen.graphs] == [2]


def test_a_path_without_operators_gives_the_whole_function_up():
    """Torch skips such a frame for good: later calls with work to do run eagerly. Only graph runs show it."""

    def maybe(x, flag):
        return x * 2 if flag else 3

    compiled = torch.compile(maybe, backend="eager")
    with observe() as seen:
        compiled(torch.ones(3), False)
        compiled(torch.ones(3), True)
    assert seen.compiles == []
    assert [(f.function, f.kind, f.calls) for f in seen.eager_frames] == [("maybe", "empty", 2)]


def test_the_first_backward_is_a_compile_of_its_own():
    """Compiled when the first backward runs, during that call."""
    compiled = torch.compile(double, backend="aot_eager", dynamic=False)
    with observe() as seen:
        with seen.during("forward"):
            loss = compiled(torch.ones(3, requires_grad=True)).sum()
        with seen.during("backward"):
            loss.backward()
    assert [(c.function, c.kind, c.during) for c in seen.compiles] == [
        ("double", "first", "forward"), ("double", "backward", "backward")]  # fmt: skip


def test_records_are_read_without_torch():
    """A stored ledger can be judged and explained on a machine without torch."""
    code = ("import sys; sys.modules['torch'] = None\n"
            "from pytest_torchcompile.ledger import Ledger, explain\n"
            "from pytest_torchcompile.gauges.coverage import Coverage\n"
            "seen = Ledger.from_dict({'recompiles': [], 'newer': 1})\n"
            "print(explain.recompiles(seen.recompiles), Coverage(1, 0, 1.0).share)")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "0 recompiles, none allowed 1.0\n"
