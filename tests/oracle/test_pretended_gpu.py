"""Comparisons on a device that is none: what mixes it with the CPU raises there as on a GPU, and CI has none."""

from __future__ import annotations

import os
import re
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


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the program prints, by lines."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=600,
                         check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip().splitlines()


def test_comparisons_find_the_same_there(printed: list[str]) -> None:
    lines = [line for line in printed if "wrong" in line]
    assert len(lines) == 14
    assert all(line.endswith(" 0 wrong") for line in lines)
    assert any(" 1 draws" in line for line in lines)
    assert any(" 37 draws" in line for line in lines)


def test_waits_do_not_grow_with_the_number_of_leaves(printed: list[str]) -> None:
    """A GPU is waited for a few times in a comparison, and not for each leaf, before any draw and with draws."""
    waits: dict[tuple[str, str], list[int]] = {}
    for line in printed:
        if found := re.fullmatch(r"(\d+) layers, (.+), leaves up to (\d+) at hand: (\d+) waits", line):
            waits.setdefault((found[2], found[3]), []).append(int(found[4]))
    assert len(waits) == 4
    for few_layers, many_layers in waits.values():
        assert many_layers <= few_layers + 4
        assert many_layers <= 40
