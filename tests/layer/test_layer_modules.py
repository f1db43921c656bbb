"""What comes with the production layer: who lets it into a training job must be able to read it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_torch
LIMITS = {"maybe_compile": 45, "ShapeStabilizer": 12}
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
