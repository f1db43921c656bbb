"""The import rules: rooms import downwards, start-up is light, torch and pytest stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from unit.rooms import MODULES, ROOMS, edges, imports, room_of

USES_PYTEST = {
    "plugin", "plugin/collection", "plugin/ending", "plugin/fixture_model", "plugin/fixtures", "plugin/graph_pass",
    "plugin/marker_mistakes", "plugin/progress_line",
    "plugin/rank_supply", "plugin/repeated", "plugin/resuming", "plugin/reusing", "plugin/scheduling",
    "plugin/scheduler_choice", "plugin/startup", "plugin/test_lane",
}
NEEDS_TORCH = {
    "adoption/examination", "adoption/guesses", "adoption/library_models", "adoption/shape_trial", "batch", "zoo",
    "ledger", "gauges", "lowering", "state",
    "oracle", "layer", "wrappers", "gates", "faults", "backends/bf16_islands",
    "backends/collective_buckets", "backends/cuda_graphs", "backends/graph_halves", "backends/graph_names",
    "backends/graph_structure",
    "backends/constant_nodes", "backends/partitioner", "backends/decomposition_tables",
    "backends/graph_passes", "backends/toolkit", "backends/whole_graph", "explain/capture",
    "explain/decompositions", "explain/dynamo_hooks", "explain/graph_runs",
    "contract/history_culprit",
    "contract/changed_batch", "contract/history_run", "contract/mutations", "artifacts/routes", "explain/roofline",
    "explain/runnable",
    "explain/toolkit_notes",
    "culprit",
    "fuzz/sequence_run", "run/cold_process", "run/culprit_process", "run/environment", "run/kept_log",
    "run/cause_search", "run/prepared_run", "run/runner", "run/subject",
}
"""Modules and rooms that may import torch at their top."""
TORCH_FREE_IN_THEM = {
    "contract/mutations", "contract/mutations/torch_settings", "artifacts/routes", "gauges",
    "gauges/code_pieces", "gauges/library_operators",
    "gauges/peaks_file", "gauges/quietness",
    "wrappers", "wrappers/wrapping", "gates", "layer", "layer/benchmark_result", "layer/config", "layer/shape_ways",
    "oracle", "oracle/diagnosis", "oracle/discrepancies", "oracle/leaf_limits", "oracle/pass_records", "oracle/proof",
    "culprit", "culprit/culprit_record",
    "ledger", "ledger/break_sites", "ledger/explain", "ledger/ledger",
    "ledger/eager_reasons", "ledger/reasons", "ledger/records",
    "lowering", "lowering/kernel_records", "lowering/places",
}
HEAVY = {"torch", "triton", "hypothesis", "pydantic", "numpy", "xdist"}
AT_START = {"__init__", "errors", "plugin", "plugin/fixtures", "run", "run/options"}
"""What a run that does not use us loads; of these nothing may be heavy, nor yaml."""


def _may_have_torch(module: str) -> bool:
    folders = {module.partition("/")[0], module.rpartition("/")[0]}
    return (module in NEEDS_TORCH or bool(folders & NEEDS_TORCH)) and module not in TORCH_FREE_IN_THEM


def upward(modules: dict[str, Path]) -> list[str]:
    """Imports that go from a room to one above it."""
    found = {(room_of(module), room_of(target), module, target) for module, target in edges(modules)}
    return sorted(f"{module} -> {target}" for above, below, module, target in found
                  if ROOMS.index(below) > ROOMS.index(above))


@pytest.mark.parametrize(("planted", "expected"), [
    (None, []),
    ("from pytest_torchcompile.checks.compiles import CHECK", ["oracle/planted -> checks/compiles"]),
    ("def later():\n    import pytest_torchcompile.plugin.fixtures", ["oracle/planted -> plugin/fixtures"]),
    ("if TYPE_CHECKING:\n    from pytest_torchcompile.layer import wrap",
     ["oracle/planted -> layer", "oracle/planted -> layer/wrap"]),
], ids=["ours", "planted", "planted in a function", "planted for types"])
def test_rooms_import_downwards(planted, expected, tmp_path):
    """No room imports from one above it; ``__init__`` of the package itself hands out everybody's public names."""
    modules = {module: path for module, path in MODULES.items() if module != "__init__"}
    if planted:
        (tmp_path / "planted.py").write_text(planted)
        modules["oracle/planted"] = tmp_path / "planted.py"
    assert upward(modules) == expected


def circles(modules: dict[str, Path]) -> list[set[str]]:
    """Modules that import each other, over however many others."""
    imported: dict[str, set[str]] = {module: set() for module in modules}
    for module, target in edges(modules):
        if modules[target].name != "__init__.py":  # a room's own file says what the room is for
            imported[module].add(target)
    found: list[set[str]] = []
    for module in modules:
        if not any(module in circle for circle in found):
            circle = {other for other in reached(imported, module) if module in reached(imported, other)}
            if circle:
                found.append(circle)
    return found


def reached(imported: dict[str, set[str]], start: str) -> set[str]:
    """Everything that importing a module may load."""
    seen: set[str] = set()
    waiting = [*imported[start]]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imported[module]
    return seen


@pytest.mark.parametrize("planted", [False, True], ids=["ours", "planted"])
def test_no_circles(planted, tmp_path):
    """No module imports itself over others, also not inside of functions or for types."""
    modules = {module: path for module, path in MODULES.items() if module != "__init__"}
    if planted:
        (tmp_path / "this.py").write_text("def later():\n    from pytest_torchcompile.oracle.that import name")
        (tmp_path / "that.py").write_text("from pytest_torchcompile.oracle.this import other")
        modules |= {"oracle/this": tmp_path / "this.py", "oracle/that": tmp_path / "that.py"}
    assert circles(modules) == ([{"oracle/this", "oracle/that"}] if planted else [])


@pytest.mark.parametrize("module", MODULES)
def test_heavy_imports(module):
    """Only the middle of the road imports torch at the top of a file; nothing at start-up imports anything heavy."""
    top = {name.partition(".")[0] for name in imports(MODULES[module], whole=False)}
    if module == "plugin/scheduling":
        top.discard("xdist")  # loaded only by pytest-xdist's own hook
    assert not top & HEAVY or _may_have_torch(module), f"{module} imports {top & HEAVY} at its top"
    if module in AT_START:
        assert "yaml" not in top


@pytest.mark.parametrize("module", MODULES)
def test_pytest_imports(module):
    """Only files of the plugin import pytest."""
    found = {name.partition(".")[0] for name in imports(MODULES[module], whole=True)}
    assert not found & {"pytest", "_pytest"} or module in USES_PYTEST


@pytest.mark.parametrize("module", MODULES)
def test_torch_free_modules_import_torch_free_modules(module):
    """What importing a module without torch loads is without torch too, all the way down."""
    if not _may_have_torch(module):
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            current = waiting.pop()
            if current in seen or current not in MODULES:
                continue
            seen.add(current)
            assert current == module or not _may_have_torch(current), f"{module} loads {current}, which needs torch"
            for name in imports(MODULES[current], whole=False):
                if name.startswith("pytest_torchcompile."):
                    waiting.append(name.removeprefix("pytest_torchcompile.").replace(".", "/"))


LOADED = """
import sys
{first}
import pytest_torchcompile, pytest_torchcompile.plugin
print([name for name in ("torch", "hypothesis", "yaml", "pydantic", "numpy") if name in sys.modules])
"""


@pytest.mark.parametrize(("first", "expected"), [("", "[]"), ("import yaml", "['yaml']")], ids=["ours", "planted"])
def test_start_up_is_light(first, expected, tmp_path):
    """Importing the plugin loads none of the heavy packages; the planted import shows that this test can fail."""
    done = subprocess.run([sys.executable, "-c", LOADED.format(first=first)], capture_output=True, text=True,
                          cwd=tmp_path, check=True)
    assert done.stdout.strip() == expected


def test_a_whole_run_that_does_not_use_us_is_light(tmp_path):
    """At the end of a pytest run over somebody's plain test, none of the heavy packages was loaded by us."""
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\n\ndef pytest_unconfigure():\n"
        "    print('loaded:', [n for n in ('torch', 'hypothesis', 'yaml', 'pydantic') if n in sys.modules])\n")
    # Hypothesis has a plugin of its own, which loads it in its terminal summary: not ours to answer for.
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:hypothesispytest"],
                          capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "loaded: []" in done.stdout, done.stdout


def hidden_names(modules: dict[str, Path]) -> list[str]:
    """What a package defines or exports by the name of a module in it: importing that module replaces it."""
    found = []
    for package, path in modules.items():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
            for node in body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names |= set(ast.literal_eval(node.value))
            folder = "" if package == "__init__" else f"{package}/"
            found += [f"{folder}{name}" for name in sorted(names) if f"{folder}{name}" in modules]
    return found


@pytest.mark.parametrize("planted", [False, True], ids=["ours", "planted"])
def test_no_module_hides_a_name_of_its_package(planted, tmp_path):
    """``zoo:triton_op`` was a function until a module of that name was imported, and a module from then on."""
    modules = dict(MODULES)
    if planted:
        modules["zoo/mini_gpt"] = tmp_path / "mini_gpt.py"
    assert hidden_names(modules) == (["zoo/mini_gpt"] if planted else [])


@pytest.mark.parametrize("module", MODULES)
def test_size(module):
    """No file is over 400 lines."""
    assert len(MODULES[module].read_text().splitlines()) <= 400


def test_no_asserts():
    """pytest rewrites asserts in the modules of a plugin, and Dynamo would trace the rewritten code: none are used."""
    found = [name for name, path in MODULES.items()
             if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))]
    assert not found
