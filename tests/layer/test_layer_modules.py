"""What comes with the production layer: who lets it into a training job must be able to read it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_torchcompile

pytestmark = pytest.mark.needs_torch
LIMITS = {"maybe_compile": 45, "compare": 75, "ShapeStabilizer": 12}
"""Modules of ours that importing a name may load; torch itself loads none of them."""
COUNTED = """
import json, sys
import torch
counts = {{}}
for name in {names!r}:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "pytest_torchcompile"]:
        del sys.modules[loaded]
    import pytest_torchcompile
    getattr(pytest_torchcompile, name)
    {then}
    counts[name] = sorted(each for each in sys.modules if each.partition(".")[0] == "pytest_torchcompile")
print(json.dumps(counts))
"""


def loaded_by(names, then=""):
    """The modules of ours that each name loads, in a process of its own."""
    source = COUNTED.format(names=list(names), then=then)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("planted", [False, True], ids=["ours", "planted"])
def test_a_name_loads_few_modules(planted):
    """The smoketest is loaded for a healthcheck, and the ledger for a warm-up; the planted import has both."""
    then = "import pytest_torchcompile.layer.smoketest" if planted else ""
    many = [name for name, modules in loaded_by(LIMITS, then=then).items() if len(modules) > LIMITS[name]]
    assert many == (list(LIMITS) if planted else [])


LAYER = Path(pytest_torchcompile.__file__).parent / "layer"
FRONT_ENDS = {"equivalence.py", "pass_judgement.py"}
"""``compare`` and ``judge_passes``, the oracle's own face for users: they make trials."""


def past_the_face(files):
    """Imports of the oracle's modules by files that should take its public names."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pytest_torchcompile.oracle."):
                found.append(f"{file.name}: {node.module}")
    return found


@pytest.mark.parametrize("planted", [False, True], ids=["ours", "planted"])
def test_the_smoketest_takes_the_oracles_public_names(planted, tmp_path):
    """It records, compares and judges with what the oracle hands out, and knows none of its modules."""
    files = [file for file in sorted(LAYER.glob("*.py")) if file.name not in FRONT_ENDS]
    if planted:
        files = [tmp_path / "planted.py"]
        files[0].write_text("def later():\n    from pytest_torchcompile.oracle.reference_runs import DRAWS\n")
    assert past_the_face(files) == (["planted.py: pytest_torchcompile.oracle.reference_runs"] if planted else [])
