"""Comparisons on a device that is none: what mixes it with the CPU raises there as on a GPU, and CI has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as registration

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not hasattr(registration, "_setup_privateuseone_for_python_backend"),
                       reason="torch has no devices in Python yet (2.10 and later have)"),
]
PROGRAM = Path(__file__).with_name("pretended_gpu.py")


def test_comparisons_find_the_same_there():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=600,
                         check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.strip().splitlines()
    assert len(lines) == 14
    assert all(line.endswith(" 0 wrong") for line in lines)
    assert any(" 1 draws" in line for line in lines)
    assert any(" 37 draws" in line for line in lines)
