"""Tests that use the fixtures do not see each other; what a test leaves changed is put back and named."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
PAIR = """
import pytest, torch
from models import *

def compile_three(recompile_counter, graph_breaks):
    assert recompile_counter.count == 0 and recompile_counter.compiles == [] and graph_breaks == []
    assert not torch._dynamo.utils.counters
    net = torch.compile(Net(), backend="eager")
    for size in (2, 3, 4):
        net(batch(size))
    assert [c.kind for c in recompile_counter.compiles] == ["first", "recompile"]
    assert recompile_counter.compiles[0].compile_id == "0/0"

@pytest.mark.parametrize("n", range(4))
def test_one(recompile_counter, graph_breaks, n):
    compile_three(recompile_counter, graph_breaks)
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_no_test_sees_another(repo, workers):
    """Each test compiles the same class from scratch and counts its own compiles only, also side by side."""
    repo.file("test_a.py", PAIR)
    repo.file("test_b.py", PAIR)
    repo.run("-p", "no:cacheprovider", *workers, option="").assert_outcomes(passed=8)


WARM = """
import pytest, torch
from models import *

def warmed():
    net = torch.compile(Net(), backend="eager", dynamic=False)
    for size in (2, 3, 4):
        net(batch(size))
    return net

@pytest.fixture
def warm():
    return warmed()

@pytest.fixture(scope="module")
def module_warm():
    return warmed()

@pytest.fixture(scope="module", autouse=True)
def compiles_nothing():
    return torch.compile(Net(), backend="eager")

def test_warm_up_first(warm, recompile_counter):
    assert recompile_counter.count == 2
    with recompile_counter.assert_no_recompiles():
        warm(batch(9))

def test_counter_first(recompile_counter, warm):
    with recompile_counter.assert_no_recompiles():
        warm(batch(9))

@pytest.mark.compile_limits(recompiles=2)
def test_limits(warm):
    warm(batch(9))

@pytest.mark.compile_limits(recompiles=2)
def test_within_limits(warm):
    warm(batch(3))

@pytest.mark.compile_limits(recompiles=2)
def test_of_the_module(module_warm):
    module_warm(batch(9))

def test_without_us(module_warm):
    module_warm(batch(9))
"""


def test_a_warm_up_in_a_fixture_counts(repo):
    """The watch begins before the user's fixtures; one of a wider scope comes too early, and is named."""
    repo.file("test_it.py", WARM)
    result = repo.run("-p", "no:cacheprovider", option="")
    result.assert_outcomes(passed=3, failed=3, warnings=1)
    result.stdout.fnmatch_lines([
        "*_ test_warm_up_first _*", "*1 recompile, none allowed", "*_ test_counter_first _*",
        "*1 recompile, none allowed", "*_ test_limits _*", "compile_limits: 3 recompiles, 2 allowed",
        "*test_it.py:40: WarmUpLostWarning: test_of_the_module begins with nothing compiled, so what the module-scoped "
        "fixture 'module_warm' compiled in its set-up is gone, and the test's first compile is no recompile; *"])


LEAKS = """
import random
import pytest, torch
from models import *

@pytest.mark.parametrize("n", range(2))
def test_leaves(recompile_counter, n):
    assert torch.get_default_dtype() is torch.float32
    assert not torch._dynamo.config.suppress_errors
    torch.set_default_dtype(torch.float64)
    torch._dynamo.config.suppress_errors = True
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(n)

def test_tidy(recompile_counter):
    assert torch.get_default_dtype() is torch.float32
    with torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(Net(), backend="eager")(batch(2))
"""


def test_what_a_test_leaves_is_put_back_and_named(repo):
    """Settings that a test leaves changed are restored, with one warning at the test that names each key."""
    repo.file("test_it.py", LEAKS)
    result = repo.run("-p", "no:cacheprovider", option="")
    result.assert_outcomes(passed=3, warnings=2)
    result.stdout.fnmatch_lines([
        "test_it.py::test_leaves[[]0[]]",
        "*test_it.py:6: StateLeakWarning: test_leaves[[]0[]] left torch changed, and it was put back: default dtype: "
        "torch.float32 -> torch.float64; stance: default -> force_eager; torch._dynamo.config.suppress_errors: "
        "False -> True",
    ])


@pytest.mark.parametrize(("filters", "outcomes"), [
    (["-W", "error"], {"passed": 3, "errors": 2}),
    (["-W", "error", "-W", "ignore::pytest_torchcompile.StateLeakWarning"], {"passed": 3}),
], ids=["errors", "filtered"])
def test_the_warning_can_be_filtered(repo, filters, outcomes):
    """With -W error a leak is an error of the test's teardown, unless its own category is ignored."""
    repo.file("test_it.py", LEAKS)
    result = repo.run("-p", "no:cacheprovider", *filters, option="")
    result.assert_outcomes(**outcomes)


def test_a_failing_test_is_cleaned_up_too(repo):
    """After a test that raises in the middle of a block, torch and its logger are as they were."""
    repo.file("test_it.py", """
    import logging
    import pytest, torch
    from torch._dynamo import convert_frame
    from models import *

    before = convert_frame.CatchErrorsWrapper.__call__, list(logging.getLogger("torch.__trace").handlers)

    def test_fails(recompile_counter, shape_buckets):
        for size in shape_buckets.batches(int):
            with recompile_counter.expect(1):
                torch.set_num_threads(1)
                torch.compile(Net(), backend="eager")(batch(size))
                raise ValueError

    def test_after():
        assert convert_frame.CatchErrorsWrapper.__call__ is before[0]
        assert torch.get_num_threads() == 2
        assert not torch._dynamo.utils.counters
    """)
    repo.file("conftest.py", "import torch\ntorch.set_num_threads(2)\n")
    repo.run("-p", "no:cacheprovider", option="").assert_outcomes(passed=1, failed=1, warnings=1)


def test_nothing_is_loaded_until_a_test_asks(repo):
    """A run with no test of ours loads neither torch nor the rest of the package; markers alone load no torch."""
    repo.file("conftest.py", """
    import sys

    def pytest_unconfigure():
        ours = sorted(n for n in sys.modules if n.startswith("pytest_torchcompile."))
        print("loaded:", [n for n in ("torch", "yaml") if n in sys.modules], ours)
    """)
    repo.file("test_it.py", "def test_it(): pass\n")
    repo.run_anew("-s", "-p", "no:hypothesispytest").stdout.fnmatch_lines([
        "loaded: [[][]] [[]'pytest_torchcompile.errors', "
        "'pytest_torchcompile.plan', 'pytest_torchcompile.plan.matrix_path', 'pytest_torchcompile.plugin', "
        "'pytest_torchcompile.plugin.fixtures', 'pytest_torchcompile.plugin.graph_pass', "
        "'pytest_torchcompile.plugin.marker_mistakes', 'pytest_torchcompile.run', "
        "'pytest_torchcompile.run.options'[]]",
    ])
    repo.file("test_it.py", """
    import pytest

    @pytest.mark.compile_modes("default", "max-autotune")
    @pytest.mark.skip
    def test_it(compile_config): pass
    """)
    result = repo.run_anew("-s", "-p", "no:hypothesispytest")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["loaded: [[][]] *'pytest_torchcompile.plan.markers'*"])


LOGS = """
import logging
import pytest, torch
from models import *
from pytest_torchcompile import observe

log = logging.getLogger("torch.__trace")
COMPILED = torch.compile(Net(), backend="eager")
COMPILED(batch(2))  # torch's logger is as torch makes it

def test_watched(recompile_counter):
    watched()

def test_alone(caplog):
    before = [(handler, list(handler.filters)) for handler in log.handlers]
    with observe():
        with observe():
            watched()
        watched()
    assert [(handler, handler.filters) for handler in log.handlers] == before
    assert [record.name for record in caplog.records] == ["mine", "mine"]
    raise ValueError

def watched():
    torch.compile(Net(), backend="eager", dynamic=False)(batch(3))
    logging.getLogger("mine").warning("kept")
    assert log.handlers and not log.propagate
"""


def test_what_the_ledger_reads_is_no_log_for_users(repo):
    """Torch's trace fills no captured log, log file or terminal; what the test logs is there."""
    repo.file("test_it.py", LOGS)
    # pytest finds torch's logger where torch is loaded before the tests are collected.
    result = repo.run_anew("-p", "no:cacheprovider", "--log-level=DEBUG", "--log-cli-level=DEBUG",
                           "--log-file=all.txt", "--log-file-level=DEBUG")
    result.assert_outcomes(passed=1, failed=1)
    written = (repo.path / "all.txt").read_text(encoding="utf-8")
    assert "kept" in written
    result.stdout.fnmatch_lines(["WARNING * mine:test_it.py:* kept"])
    assert "torch.__trace" not in written + result.stdout.str()
