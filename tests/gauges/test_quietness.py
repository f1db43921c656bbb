"""What others do on this machine: seen by what the processors did beside this process, also where it is steady."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pytest_torchcompile.gauges import quietness
from pytest_torchcompile.gauges.quietness import OthersLoad, watch_others

STAT = "cpu  {user} 10 20 1000 30 4 6 {steal} 5 0\ncpu0 1 2 3\n"


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """A file of our own for the processors' ticks, and a clock that this test sets."""
    path = tmp_path / "stat"
    monkeypatch.setattr(quietness, "_STAT", path)
    now, own = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: own[0])
    monkeypatch.setattr(quietness.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(quietness.os, "cpu_count", lambda: 4)

    def after(seconds, own_seconds, user, steal=0):
        now[0], own[0] = seconds, own_seconds
        path.write_text(STAT.format(user=user, steal=steal))

    after(0.0, 0.0, 500)
    return after


@pytest.mark.parametrize(("own", "user", "steal", "told"), [
    (10.0, 1500, 0, ""), (10.0, 1520, 0, ""),
    (10.0, 3000, 0, "other processes kept 1.5 of 4 processors busy"),
    (10.0, 1500, 1000, "other processes kept 1.0 of 4 processors busy"),
])
def test_what_the_processors_did_beside_this_process(stat, own, user, steal, told):
    """Ten seconds pass, of which this process computes all; what a hypervisor takes is others' too."""
    with watch_others() as load:
        stat(10.0, own, user, steal)
    assert load.told == told


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(quietness, "_STAT", tmp_path / "nothing")
    with watch_others() as load:
        pass
    assert (load.processors, load.told) == (None, "")


@pytest.mark.skipif(not quietness._STAT.exists(), reason="this system has no /proc/stat")
def test_a_steady_load_is_seen():
    """A process that only counts, for as long as we watch: really measured."""
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        busy.stdout.readline()
        with watch_others() as load:
            time.sleep(0.5)
    finally:
        busy.kill()
        busy.communicate()
    assert load.told == OthersLoad(load.processors, load.of).told != ""
