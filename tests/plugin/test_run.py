"""A matrix run, end to end, on backends that need no C++ compiler."""

from __future__ import annotations

import jsonschema
import pytest

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.report.schema import report_schema

pytestmark = pytest.mark.needs_torch
ALL = sum(check.applies({"phase": "training", "wrapper": "none"}) and not check.on_request for check in CHECKS.values())
INFERENCE = sum(check.applies({"phase": "inference", "wrapper": "none"}) and not check.on_request
                for check in CHECKS.values())

ONE = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
"""
TWO = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: {buckets: [4, 8]}}}
axes:
  backend: [eager, aot_eager]
  dynamic: [auto, dynamic]
  hidden: [8, 16]
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_green_run(repo, workers):
    """Every cell is run, every check passes, the report validates and holds what ran, with and without xdist."""
    repo.matrix(TWO)
    result = repo.run("-v", *workers)
    assert result.ret == 0
    result.assert_outcomes(passed=8 * ALL)
    result.stdout.fnmatch_lines(["*matrix/default.yaml::net-eager-default-auto-none-hidden=8::compiles PASSED*"]
                                if not workers else
                                ["*PASSED*matrix/default.yaml::net-eager-default-auto-none-hidden=8::compiles*"])
    result.stdout.fnmatch_lines(["8 cells: 8 pass; 8 ran compiled code"])
    block = repo.block()
    jsonschema.validate({"compile_matrix": block}, report_schema())
    assert block["finished"]
    assert len(block["cells"]) == len(block["matrix"]["cells_planned"]) == 8
    for cell in block["cells"]:
        assert cell["status"] == "pass"
        section = cell["observation"]["sections"]["compiles"]
        assert all(graph["runs"] > 0 for graph in section["graphs"])
        assert section["coverage"][0]["share"] == 1.0
    assert block["environment"]["torch"]


def test_inference_has_no_gradients_to_judge(repo):
    """A cell of phase inference has no item for checks of gradients, and runs without grad."""
    repo.models("""
    class NoGrad(Net):
        def forward(self, x):
            if torch.is_grad_enabled() or self.training:
                raise ValueError("not inference")
            return super().forward(x)

    def net(hidden=8):
        return NoGrad(hidden)
    """)
    repo.matrix(TWO.replace("hidden: [8, 16]", "phase: [inference]").replace("[eager, aot_eager]", "[aot_eager]"))
    repo.run().assert_outcomes(passed=2 * INFERENCE)
    assert not [key for key in repo.verdicts() if "gradients" in key]


def test_a_cell_is_compiled_once(repo):
    """All checks judge one run: the backend is asked once for the one graph."""
    repo.models("""
    def counting(graph, inputs):
        with open("compiled.txt", "a") as file:
            file.write("x")
        return graph.forward
    """)
    repo.matrix(ONE.replace("[eager]", '["models:counting"]'))
    repo.run().assert_outcomes(passed=ALL)
    assert (repo.path / "compiled.txt").read_text() == "x"


def test_a_patched_forward_is_no_false_alarm(repo):
    """A forward patched onto the instance, as hooks of several libraries do, is compared like any other."""
    repo.models("""
    import functools

    def net(hidden=8):
        net = Net(hidden)
        original = net.forward
        @functools.wraps(original)
        def forward(x):
            return original(x) * 2
        net.forward = forward
        return net
    """)
    repo.matrix(ONE.replace("[eager]", "[eager, aot_eager, inductor]"))
    repo.run().assert_outcomes(passed=3 * ALL)


def test_a_factory_that_makes_another_model_each_time(repo):
    """Such a factory is a mistake that is told with its place."""
    repo.models("""
    made = []

    def net(hidden=8):
        made.append(0)
        return Net(hidden + len(made))
    """)
    result = repo.run()
    assert result.ret == 4
    result.stdout.fnmatch_lines(["*matrix/default.yaml:4:3: factory 'models:net' made another model when it was called "
                                 "again: its parameters differ in name or shape*"])


def test_torch_stays_out_of_pytest(repo):
    """The process that pytest runs in never imports torch: cells run elsewhere."""
    repo.file("conftest.py", """
    import sys

    def pytest_unconfigure():
        print("torch loaded:", "torch" in sys.modules)
    """)
    repo.run_anew("--compile-matrix", "-s").stdout.fnmatch_lines(["torch loaded: False"])


def test_in_process(repo):
    """--compile-inprocess runs the cells where a debugger can reach them."""
    repo.file("conftest.py", """
    import sys

    def pytest_unconfigure():
        print("torch loaded:", "torch" in sys.modules)
    """)
    result = repo.run("--compile-inprocess", "-s")
    result.assert_outcomes(passed=ALL)
    result.stdout.fnmatch_lines(["torch loaded: True"])


def test_a_fresh_process_for_each_cell(repo):
    """--compile-isolation=cell runs no two cells in one process."""
    repo.models("""
    def net(hidden=8):
        with open("pids.txt", "a") as file:
            file.write(f"{os.getpid()} ")
        return Net(hidden)
    """)
    repo.matrix(TWO)
    repo.run("--compile-isolation=cell").assert_outcomes(passed=8 * ALL)
    assert len(set((repo.path / "pids.txt").read_text().split())) == 8


def test_rules(repo):
    """skip, xfail and limits do what they say; an xfail that passes fails the run."""
    repo.models("""
    class Breaks(Net):
        def forward(self, x):
            y = self.inner(x)
            print(end="")
            return self.outer(y)

    def breaks():
        return Breaks()
    """)
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
      breaks: {factory: "models:breaks", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [eager, aot_eager]
      mode: [default]
    rules:
      - skip: {model: net, backend: aot_eager}
        reason: the machine is busy
      - xfail: {model: breaks, backend: eager}
        reason: it prints
        issue: us/models#1
      - limits: {graph_breaks: 1}
        when: {model: breaks, backend: aot_eager}
    """)
    result = repo.run("-rsx")
    result.assert_outcomes(passed=3 * ALL - 1, skipped=ALL, xfailed=1)
    result.stdout.fnmatch_lines(["SKIPPED*the machine is busy", "XFAIL*graph_breaks - it prints (us/models#1)"])
    verdicts = repo.verdicts()
    assert verdicts["breaks-eager-default-auto-none::graph_breaks"] == "xfail"
    assert verdicts["breaks-aot_eager-default-auto-none::graph_breaks"] == "pass"
    assert verdicts["net-aot_eager-default-auto-none::compiles"] == "skip"


def test_an_xfail_that_passes_fails(repo):
    """A stale xfail rule is reported with its place in the file."""
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [eager]
    rules:
      - xfail: {model: net}
        reason: once it failed
    """)
    result = repo.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*passed, although *default.yaml:8* expects it to fail: once it failed*"])
    assert set(repo.verdicts().values()) == {"xpass"}


def test_selection(repo):
    """-k, exact markers, node ids and --compile-checks select as expected; what is left out is no failure."""
    repo.matrix(TWO)
    substring = repo.run("--co", "-q", "-k", "eager").stdout.str()
    assert "aot_eager" in substring  # why -m is there
    exact = repo.run("--co", "-q", "-m", "compile_cell(backend='eager', hidden=8)").stdout.str()
    assert exact.count("::compiles") == 2
    assert "aot_eager" not in exact
    node = "matrix/default.yaml::net-eager-default-auto-none-hidden=8::equivalence"
    result = repo.run(node)
    result.assert_outcomes(passed=1)
    statuses = {cell["id"]: (cell["status"], cell["selected"]) for cell in repo.block()["cells"]}
    assert statuses.pop("net-eager-default-auto-none-hidden=8") == ("pass", True)
    assert set(statuses.values()) == {("not_run", False)}
    before = repo.block()
    repo.run("--co", "-q")
    assert repo.block() == before, "what only lists tests leaves the report"
    result = repo.run("--compile-checks=compiles,recompiles", "-k", "aot_eager and dynamic and 16")
    result.assert_outcomes(passed=2, deselected=14)


def test_last_failed(repo):
    """--lf runs again what failed, and nothing else; the failure names that command's node id."""
    repo.models("""
    def net(hidden=8):
        net = Net(hidden)
        if hidden == 16:
            net.forward = torch.compiler.disable(net.forward)
        return net
    """)
    repo.matrix(TWO.replace("backend: [eager, aot_eager]", "backend: [eager]").replace("[auto, dynamic]", "[auto]"))
    first = repo.run()
    assert first.ret == 1
    failed = first.parseoutcomes()["failed"]
    first.stdout.fnmatch_lines(["*again  pytest --compile-matrix=* 'matrix/default.yaml::net*hidden=16::compiles'"])
    again = repo.run("--lf")
    assert again.parseoutcomes()["failed"] == failed
    assert "passed" not in again.parseoutcomes()


def test_shards(repo):
    """The shards together run every cell once."""
    repo.matrix(TWO)
    seen = []
    for shard in ("1/2", "2/2"):
        assert repo.run(f"--compile-shard={shard}", "--compile-checks=compiles").ret == 0
        block = repo.block()
        assert block["shard"] == {"index": int(shard[0]), "of": 2}
        assert len(block["matrix"]["cells_planned"]) == 8
        seen += [cell["id"] for cell in block["cells"]]
    assert sorted(seen) == sorted(block["matrix"]["cells_planned"])


def test_without_the_option_nothing_happens(repo):
    """A run without --compile-matrix collects no matrix and writes no report."""
    repo.file("test_it.py", "def test_it():\n    pass\n")
    repo.run(option="").assert_outcomes(passed=1)
    assert not (repo.path / ".compile-matrix").exists()


def test_together_with_other_tests(repo):
    """Named tests run beside the matrix."""
    repo.file("test_it.py", "def test_it():\n    pass\n")
    repo.run("test_it.py", "-n2").assert_outcomes(passed=1 + ALL)


def test_a_leak_is_named_and_put_back(repo):
    """A model that changes torch's settings is named with the key, and the next cell does not see it."""
    repo.models("""
    import torch._dynamo
    class Leaky(Net):
        def __init__(self):
            torch._dynamo.config.recompile_limit = 77
            torch.set_default_dtype(torch.float64)
            super().__init__()
            self.float()

    def leaky():
        return Leaky()

    def net():
        assert torch._dynamo.config.recompile_limit != 77
        assert torch.get_default_dtype() == torch.float32
        return Net()
    """)
    repo.matrix("""
    version: 1
    models:
      leaky: {factory: "models:leaky", inputs: "models:batch", dims: {B: 4}}
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [eager]
    """)
    result = repo.run()
    result.assert_outcomes(passed=2 * ALL)
    result.stdout.fnmatch_lines(["leaky-* changed torch's settings*default dtype: torch.float32 -> torch.float64*"
                                 "recompile_limit: 8 -> 77*"])
