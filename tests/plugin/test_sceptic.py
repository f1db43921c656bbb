"""Ways in which a check was once made to lie, each tried again."""

from __future__ import annotations

import json

import pytest

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.cli import main

pytestmark = pytest.mark.needs_torch
ALL = sum(check.applies({"phase": "training", "wrapper": "none"}) and not check.on_request for check in CHECKS.values())
ONE = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: %s}}
axes:
  backend: [%s]
%s
"""
FAULTS = """
def third(graph, inputs):
    calls = []
    def run(*args):
        calls.append(0)
        outs = graph.forward(*args)
        return tuple(out * 1.5 for out in outs) if len(calls) == 3 else outs
    return run

def raises_later(graph, inputs):
    calls = []
    def run(*args):
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("not a fourth time")
        return graph.forward(*args)
    return run
"""


def test_later_calls_are_judged(repo):
    """Wrong in the third call of a graph, or raising in the fourth: caught, and told as the compiler's fault."""
    repo.models(FAULTS)
    repo.matrix(ONE % (4, '"models:third", "models:raises_later"', ""))
    repo.run()
    found = repo.verdicts()
    assert found["net-models_third-default-auto-none::equivalence"] == "fail"
    assert found["net-models_raises_later-default-auto-none::compiles"] == "fail"
    assert "not a fourth time" in json.dumps(repo.problems("net-models_raises_later-default-auto-none", "compiles"))


def test_no_check_passes_where_nothing_was_compiled(repo):
    """Also where `compiles` is not among the checks."""
    repo.models("""
    def net(hidden=8):
        net = Net(hidden)
        net.forward = torch.compiler.disable(net.forward)
        return net
    """)
    repo.matrix(ONE % (4, "eager", "checks: [equivalence, gradients]"))
    result = repo.run()
    assert result.ret == 1
    assert set(repo.verdicts().values()) == {"fail"}
    result.stdout.fnmatch_lines(["*equivalence: nothing to judge: no compiled code ran*"])


def test_a_cell_without_the_check_compiles_counts_as_compiled(repo):
    """The summary counts what ran, whichever checks were asked for."""
    result = repo.run("--compile-checks=equivalence")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["1 cell: 1 pass; 1 ran compiled code"])


def test_a_restricted_xfail_does_not_hide_a_crash(repo):
    """A rule about `recompiles` expects that check to fail, not the process to die."""
    repo.models("def dies(graph, inputs):\n    os._exit(3)\n")
    repo.matrix(ONE % (4, '"models:dies"', """
rules:
  - xfail: {model: net}
    checks: [recompiles]
    reason: it recompiles
"""))
    assert repo.run("--compile-checks=recompiles").ret == 1
    assert set(repo.verdicts().values()) == {"crash"}


def test_the_wrapper_before_does_not_decide(repo):
    """A wrapper that computes in bfloat16 leaves no wide tolerance behind for the cell after it."""
    repo.models("""
    def mycast(model, settings, cell):
        call = torch.compile(model, **settings) if settings else model
        def run(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return call(*args)
        return run

    def slightly(graph, inputs):
        return lambda *args: tuple(out * 1.002 for out in graph.forward(*args))
    """)
    repo.matrix(ONE % (4, '"models:slightly"', '  wrapper: ["models:mycast", none]'))
    repo.run()
    assert repo.verdicts()["net-models_slightly-default-auto-none::equivalence"] == "fail"


def test_python_state_is_no_false_alarm(repo):
    """A model that keeps something in Python between calls is compared with an eager one of the same history."""
    repo.models("""
    class Cached(Net):
        last = None

        def forward(self, x):
            y = super().forward(x)
            if self.last is not None:
                y = y + self.last
            self.last = y.detach()
            return y

    def net(hidden=8):
        return Cached()
    """)
    repo.matrix(ONE % (4, "aot_eager, inductor", "rules: [{limits: {recompiles: 3}, when: {model: net}}]"))
    repo.run().assert_outcomes(passed=2 * ALL)


def test_settings_made_at_import_hold_for_every_cell(repo):
    """A setting at a module's top is there for each cell, in whatever order they run in one process."""
    repo.models("""
    import torch._dynamo
    torch._dynamo.config.capture_scalar_outputs = True

    class Scalar(Net):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    def net(hidden=8):
        return Scalar()
    """)
    repo.matrix(ONE % (4, "eager, aot_eager", "  dynamic: [auto, static]"))
    repo.run("--compile-checks=graph_breaks").assert_outcomes(passed=4)


def test_without_xdist(repo):
    """-p no:xdist switches it off, and nothing breaks."""
    repo.run("-p", "no:xdist").assert_outcomes(passed=ALL)


def test_sizes_0_and_1_are_explained(repo):
    """Torch compiles them apart, so a recompile for one is explained."""
    repo.matrix(ONE % ("{choices: [4, 1, 8]}", "eager", "  dynamic: [auto, dynamic, static]"))
    repo.run().assert_outcomes(passed=3 * ALL)


def test_a_recompile_that_no_size_explains(repo):
    """A recompile for a changed number is not excused by the sizes that changed beside it."""
    repo.models("""
    class Numbered(Net):
        def forward(self, x, k):
            return super().forward(x) * k.bit_length() ** 0

    def net(hidden=8):
        return Numbered()

    made = []

    def batch(B):
        made.append(0)
        return torch.randn(4, 6), 2 ** len(made)
    """)
    repo.matrix(ONE % ("{choices: [4, 8]}", "eager", "  dynamic: [static]"))
    repo.run()
    (cell,) = repo.block()["cells"]
    assert "no size explains" in json.dumps(cell["checks"]["recompiles"]), cell["checks"]["recompiles"]


def test_nan_proves_nothing(repo):
    """A model whose outputs are all NaN is no green one."""
    repo.models("""
    class Nan(Net):
        def forward(self, x):
            return super().forward(x) * float("nan")

    def net(hidden=8):
        return Nan()
    """)
    repo.run()
    found = repo.verdicts()
    assert found["net-eager-default-auto-none::compiles"] == "fail"
    assert found["net-eager-default-auto-none::gradients"] == "fail"


def test_a_rank_that_dies_between_cells_blames_nobody(repo):
    """The next cell gets a new process."""
    repo.file("conftest.py", """
    import os, signal, time
    import pytest

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(item, nextitem):
        group = item.config.pluginmanager.get_plugin("compile-matrix").execution._group
        if nextitem is not None and nextitem.parent is not item.parent and group is not None:
            os.kill(group.ranks[0].pid, signal.SIGKILL)
            time.sleep(0.3)
            print("killed between two cells")
    """)
    repo.matrix(ONE % (4, "eager, aot_eager", ""))
    result = repo.run("-s")
    result.assert_outcomes(passed=2 * ALL)
    assert str(result.stdout).count("killed between two cells") == 1


def test_an_earlier_report_does_not_survive(repo):
    """A run that dies leaves the report of the run before it as data, and nothing that the gate passes."""
    repo.run().assert_outcomes(passed=ALL)
    report = str(repo.path / ".compile-matrix/report.json")
    assert main(["gate", report]) == 0
    repo.file("conftest.py", "import os\n\ndef pytest_runtest_logfinish():\n    os._exit(9)\n")
    repo.run()
    assert main(["gate", report]) == 2


def test_a_report_that_cannot_be_written_fails_the_run(repo):
    """Green without a report would be a lie to whoever reads it."""
    (repo.path / "taken").mkdir()
    result = repo.run("--json-report-file=taken")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*taken could not be written: *"])
