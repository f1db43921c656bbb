"""Why a model is not faster on a GPU: the planted models of benchmarks/worth_cuda.py, each named but the healthy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here")]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "worth_cuda.py"


def test_each_planted_cause_is_named_on_a_gpu(tmp_path):
    found = tmp_path / "sections.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick", "-o", str(found)], capture_output=True, text=True,
                          check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    sections = json.loads(found.read_text())
    assert sections["healthy"]["verdict"] == "faster"
    assert sections["healthy"]["kernels_share"] < 0.2
    assert all(section["launches"]["compiled"]["busy_seconds"] > 0 for section in sections.values())
