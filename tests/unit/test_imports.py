"""The import rules: modules import downwards, start-up is light, torch and pytest stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_torchcompile

PACKAGE = Path(pytest_torchcompile.__file__).parent
MODULES = {p.relative_to(PACKAGE).with_suffix("").as_posix().replace("/__init__", ""): p
           for p in sorted(PACKAGE.rglob("*.py"))}
USES_PYTEST = {"plugin", "fixtures", "fixture_model", "collection", "rank_supply", "startup", "testlane"}
NEEDS_TORCH = {
    "batch", "environment", "runner", "store", "subject", "zoo", "triton_op",
    "instruments", "oracle", "wrappers", "layer", "gates", "faults", "backends/toolkit", "fuzz/attempts",
}
"""Modules and folders that may import torch at their top."""
TORCH_FREE_IN_THEM = {
    "wrappers", "gates", "oracle", "oracle/findings", "oracle/leaf", "oracle/limits", "oracle/notes", "oracle/stages",
    "instruments", "instruments/records", "instruments/causes", "instruments/ledger", "instruments/graph_breaks",
    "instruments/advice", "instruments/reasons", "instruments/explain", "instruments/sites",
    "layer", "layer/config", "layer/environment", "wrappers/wrapping",
}
HEAVY = {"torch", "triton", "hypothesis", "pydantic", "numpy", "xdist"}
AT_START = {"__init__", "exports", "plugin", "fixtures", "options", "errors"}
"""What a run that does not use us loads; of these nothing may be heavy, nor yaml."""


def imports(path: Path, whole: bool) -> Iterator[str]:
    """Names of imported modules: of the whole file, or only those that importing it runs."""
    nodes = ast.walk(ast.parse(path.read_text())) if whole else _at_the_top(ast.parse(path.read_text()).body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} imports relatively: write the module's full name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_the_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield from _at_the_top(getattr(node, inner, []))


def _may_have_torch(module: str) -> bool:
    folder = module.partition("/")[0]
    return (module in NEEDS_TORCH or folder in NEEDS_TORCH) and module not in TORCH_FREE_IN_THEM


@pytest.mark.parametrize("module", MODULES)
def test_heavy_imports(module):
    """Only the middle of the road imports torch at the top of a file; nothing at start-up imports anything heavy."""
    top = {name.partition(".")[0] for name in imports(MODULES[module], whole=False)}
    if module == "scheduling":
        top.discard("xdist")  # loaded only by pytest-xdist's own hook
    assert not top & HEAVY or _may_have_torch(module), f"{module} imports {top & HEAVY} at its top"
    if module in AT_START:
        assert "yaml" not in top


@pytest.mark.parametrize("module", MODULES)
def test_pytest_imports(module):
    """Only the plugin's three files import pytest."""
    found = {name.partition(".")[0] for name in imports(MODULES[module], whole=True)}
    assert not found & {"pytest", "_pytest"} or module in USES_PYTEST or module == "scheduling"


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


@pytest.mark.parametrize("module", MODULES)
def test_size(module):
    """No file is over 400 lines."""
    assert len(MODULES[module].read_text().splitlines()) <= 400


def test_no_asserts():
    """pytest rewrites asserts in the modules of a plugin, and Dynamo would trace the rewritten code: none are used."""
    found = [name for name, path in MODULES.items()
             if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))]
    assert not found
