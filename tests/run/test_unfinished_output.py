"""What a compiler was writing when it is killed does not stay; what is whole does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_torchcompile.run import unfinished_output
from pytest_torchcompile.run.offspring import end_offspring, kill_group, offspring_of
from pytest_torchcompile.run.unfinished_output import remove_unfinished

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process was called with")
LINKER = [sys.executable, "-c", "import time; time.sleep(600)", "-o"]


def command_of(pid):
    """How a process was called."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def begun(path, words=LINKER, **given):
    """A process that is writing a file; half of it is there."""
    path.write_bytes(b"\x7fELF")
    process = subprocess.Popen([*words, str(path)], **given)
    # Until it is called so it is a fork of this process.
    while str(path) not in command_of(process.pid):
        time.sleep(0.01)
    return process


def test_a_library_that_is_being_linked_goes_with_its_linker(tmp_path):
    """Whole ones beside it stay, and so does what is no output of a compiler."""
    before = offspring_of(os.getpid())
    (tmp_path / "whole.so").write_bytes(b"\x7fELF")
    linker, other = begun(tmp_path / "half.so"), begun(tmp_path / "report.txt")
    end_offspring(keep=before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.txt", "whole.so"]
    assert linker.wait(10) in (-9, 0)
    assert other.wait(10) in (-9, 0)


def test_a_compiler_below_a_rank_process(tmp_path):
    """The group of the rank is killed, and what its compiler was writing is gone by then."""
    (tmp_path / "compiler.py").write_text(
        "import subprocess, sys\n"
        f"subprocess.run([*{LINKER!r}, 'half.so'], cwd={str(tmp_path)!r})\n")
    (tmp_path / "half.so").touch()
    rank = subprocess.Popen([sys.executable, str(tmp_path / "compiler.py")], start_new_session=True)
    while not any("half.so" in command_of(pid) for pid in offspring_of(rank.pid)):
        time.sleep(0.01)
    kill_group(rank.pid)
    assert rank.wait(10) == -9
    assert not (tmp_path / "half.so").exists()


def test_a_process_that_has_ended(tmp_path):
    """Nothing is known of it, so nothing is removed, and nothing raised."""
    (tmp_path / "lib.so").touch()
    process = subprocess.Popen([sys.executable, "-c", "", "-o", str(tmp_path / "lib.so")])
    process.wait()
    remove_unfinished([process.pid])
    assert (tmp_path / "lib.so").exists()


def test_a_linker_that_ends_just_then(tmp_path, monkeypatch):
    """Between the look at it and its stop: what it has written is whole, and another run may load it already."""
    linker = begun(tmp_path / "whole.so")
    send = unfinished_output._send

    def end_first(pid, number):
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
            # It has ended and was not waited for, so its number is still its own.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        send(pid, number)

    monkeypatch.setattr(unfinished_output, "_send", end_first)
    remove_unfinished([linker.pid])
    linker.wait(10)
    assert (tmp_path / "whole.so").exists()


def test_a_process_that_has_got_its_number(monkeypatch):
    """It is no compiler, so it is neither killed nor left stopped."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    outputs_of = unfinished_output._outputs_of
    looks = iter([{Path("half.so")}])
    monkeypatch.setattr(unfinished_output, "_outputs_of", lambda pid: next(looks, None) or outputs_of(pid))
    remove_unfinished([other.pid])
    time.sleep(0.1)
    assert other.poll() is None
    assert Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("R", "S", "D")
    other.kill()
    other.wait()
