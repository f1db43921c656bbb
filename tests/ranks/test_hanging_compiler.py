"""A C++ compiler that hangs in the zygote's first compile: it costs that compile alone, and is ended with the run."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.zygotes import Zygote
from pytest_torchcompile.system import can_fork

pytestmark = [pytest.mark.needs_torch, pytest.mark.skipif(not can_fork(), reason="there is no zygote here")]
HANGS = """#!/bin/sh
case "$*" in *--version*) exec g++ "$@";; esac
echo $$ >> "$HANGING_COMPILERS"
sleep 600
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """The numbers of the compilers that hang, as the file says that they write."""
    compiler = tmp_path / "g++"
    compiler.write_text(HANGS)
    compiler.chmod(0o755)
    pids = tmp_path / "pids"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HANGING_COMPILERS", str(pids))
    # A folder of its own: what an earlier run has built would be found.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTEST_TORCHCOMPILE_WARM", raising=False)
    return pids


def alive(pids: Path) -> list[int]:
    found = []
    for pid in pids.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().split()[2] != "Z":
            found.append(int(pid))
    return found


def test_its_first_compile_is_given_up(hanging):
    """A rank process is had soon, and the compiler is gone."""
    zygote = Zygote(5.0)
    rank = Rank(zygote.folder)
    try:
        begun = time.monotonic()
        connection = rank.begin({"do": "no such job", "path": sys.path})
        assert connection is not None
        assert time.monotonic() - begun < 90
        assert hanging.read_text().split()
        assert alive(hanging) == []
    finally:
        rank.close()
        zygote.close()


@pytest.mark.parametrize("swept", [False, True], ids=["", "swept"])
def test_it_does_not_outlive_the_run(hanging, swept):
    """The run ends while the compiler hangs, also where another run that begins has just removed its folder."""
    zygote = Zygote(600.0)
    deadline = time.monotonic() + 120
    while not hanging.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(hanging)
    if swept:
        shutil.rmtree(zygote.folder)
    zygote.close()
    deadline = time.monotonic() + 10
    while alive(hanging) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(hanging) == []
