"""GPU leases, with tokens in place of GPUs: never two owners, nobody starves, the dead hold nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.ranks import leases
from pytest_torchcompile.ranks.gpus import visible_gpus
from pytest_torchcompile.ranks.leases import Leases, PrivateFolder

WORKER = """
import json, os, random, sys, time
from pathlib import Path
from pytest_torchcompile.ranks.leases import Leases
folder, name, sharing, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draw = random.Random(int(name))
leases = Leases(folder, tuple("0123"), sharing)
with open(folder / f"log{name}", "w") as log:
    for turn in range(turns):
        count, alone = draw.choice([1, 1, 2, 4]), draw.random() < 0.3
        asked = time.monotonic()
        with leases.hold_gpus(count, alone=alone) as gpus:
            start = time.monotonic()
            if name == "0" and turn == 3:
                print("holding", flush=True)
                time.sleep(60)                      # it is killed here
            time.sleep(draw.random() * 0.01)
            log.write(json.dumps([asked, start, time.monotonic(), gpus, alone or sharing == 1, count]) + chr(10))
            log.flush()
"""


def workers(folder: Path, sharing: int, turns: int = 12) -> list[subprocess.Popen[str]]:
    """Eight processes that want one, two or four of four GPUs, again and again."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return [subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(name), str(sharing), str(turns)],
                             stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
            for name in range(8)]


@pytest.mark.parametrize("sharing", [1, 3])
def test_eight_processes_four_gpus_and_a_holder_that_is_killed(tmp_path, sharing):
    """Nobody holds what another holds alone, no GPU has more holders than allowed, and all others finish."""
    started = workers(tmp_path, sharing)
    first = started[0].stdout
    assert first is not None
    assert first.readline() == "holding\n"
    os.kill(started[0].pid, signal.SIGKILL)
    assert [process.wait(60) for process in started] == [-signal.SIGKILL, *[0] * 7]
    for process in started:
        process.stdout and process.stdout.close()
    held = [json.loads(line) for name in range(8) for line in (tmp_path / f"log{name}").read_text().splitlines()]
    assert len(held) == 7 * 12 + 3
    assert {len(gpus) for _, _, _, gpus, _, count in held if len(gpus) == count} == {1, 2, 4}
    for number, (_, start, end, gpus, alone, _) in enumerate(held):
        for gpu in gpus:
            same = [other for k, other in enumerate(held) if k != number and gpu in other[3]
                    and other[1] < end and start < other[2]]
            if alone:
                assert not same, f"{gpu} was held alone and by another"
            assert len([other for other in same if other[1] <= start]) < sharing
    assert not list((tmp_path / "queue").iterdir())


def test_whoever_wants_all_is_not_overtaken(tmp_path):
    """Strict order: while the ticket for four waits, nobody behind it gets a free one."""
    one, late = Leases(tmp_path, tuple("0123")), Leases(tmp_path, tuple("0123"))
    with one.hold_gpus(1):
        folder = PrivateFolder.open(tmp_path)
        _, ticket = leases._take_ticket(folder, PrivateFolder.open(Path("queue"), inside=folder))
        with pytest.raises(TorchcompileError, match=r"no 1 GPU\(s\) of 0, 1, 2, 3 in 0.1 s; ticket 0+2 is first"), \
                late.hold_gpus(1, timeout=0.1):
            pass
        os.close(ticket)  # its owner is gone: it stands in nobody's way
        with late.hold_gpus(1, timeout=5) as gpus:
            assert gpus == ("1",)


def test_runs_that_share_and_runs_that_do_not_respect_each_other(tmp_path):
    """Two pytest runs on one host, with another number of cells per GPU each."""
    shares, owns = Leases(tmp_path, ("0",), 2), Leases(tmp_path, ("0",), 1)
    with shares.hold_gpus(1), shares.hold_gpus(1):
        for mine in (shares, owns):
            with pytest.raises(TorchcompileError, match="others hold them"), mine.hold_gpus(1, timeout=0.05):
                pass
    refused = pytest.raises(TorchcompileError, match="others hold them")
    with owns.hold_gpus(1), refused, shares.hold_gpus(1, timeout=0.05):
        pass
    with shares.hold_gpus(1), pytest.raises(TorchcompileError), shares.hold_gpus(1, alone=True, timeout=0.05):
        pass


def test_who_waits_is_told(tmp_path):
    """To whoever looks, from another process too; a ticket that goes meanwhile is no ticket."""
    mine, others = Leases(tmp_path, ("0",)), Leases(tmp_path, ("0",))
    assert mine.waiting_names() == frozenset()
    with ThreadPoolExecutor() as pool:
        with others.hold_gpus(1, name="holds"):
            waiting = [pool.submit(held, mine, name) for name in ("waits é", "")]
            deadline = time.monotonic() + 10
            while mine.waiting_names() != {"waits é"} or len(list((tmp_path / "queue").iterdir())) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert [each.result() for each in waiting] == [("0",), ("0",)]
    assert mine.waiting_names() == frozenset()
    folder = PrivateFolder.open(tmp_path / "queue")
    assert folder.read_file("000000000009") == ""
    (tmp_path / "queue" / "000000000009").mkdir()
    assert folder.read_file("000000000009") == ""


def held(leases, name):
    with leases.hold_gpus(1, name=name, timeout=20) as gpus:
        return gpus


def test_the_gpu_held_last_is_taken_again(tmp_path):
    """A process there is warm."""
    mine, others = Leases(tmp_path, tuple("012")), Leases(tmp_path, tuple("012"))
    with others.hold_gpus(2), mine.hold_gpus(1) as first:
        assert first == ("2",)
    with mine.hold_gpus(1) as again:
        assert again == ("2",)
    with mine.hold_gpus(2) as more:
        assert more == ("0", "2")


def test_more_than_there_are(tmp_path):
    """A mistake of the plan, and no reason to wait for ever; none is none."""
    mine = Leases(tmp_path, ("0",))
    with pytest.raises(ValueError, match="2 GPUs wanted, 1 here"), mine.hold_gpus(2):
        pass
    with mine.hold_gpus(0) as gpus:
        assert gpus == ()


def test_an_uncontended_lease_does_not_sleep(tmp_path, monkeypatch):
    """It must not show in a run of small cells."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it slept"))
    mine = Leases(tmp_path, ("0",), 4)
    for _ in range(3):
        with mine.hold_gpus(1) as gpus:
            assert gpus == ("0",)


@pytest.mark.parametrize(("given", "gpus"), [
    (None, ("0", "1", "2")), ("1,0", ("1", "0")), ("", ()), ("-1", ()), ("2,-1,0", ("2",)),
    ("GPU-8a, GPU-9b", ("GPU-8a", "GPU-9b")),
])
def test_visible_gpus(monkeypatch, given, gpus):
    """As CUDA reads the variable."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus(["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]) == gpus


@pytest.fixture
def victim(tmp_path):
    """A file and a folder that an attacker would have changed, and what is in them."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_text("17 precious letters")

    def state():
        return {str(path): path.is_file() and path.read_text() for path in (tmp_path / "home").rglob("*")}

    before = state()
    yield tmp_path / "home"
    assert state() == before


def refused(folder, text):
    """A lease of this folder is refused with the text."""
    with pytest.raises(TorchcompileError, match=text), Leases(folder, ("0",)).hold_gpus(1, timeout=5):
        pass


def test_a_link_in_place_of_the_folder(tmp_path, victim):
    (tmp_path / "leases").symlink_to(victim)
    refused(tmp_path / "leases", "leases is a symbolic link; expected a folder of this user; have it removed, or set")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "file is no folder; expected a folder of this user; have it removed, or set TMPDIR")


@pytest.mark.parametrize("name", ["queue", "mutex", "counter", "gpu-0", "gpu-0.0"])
@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "dangling link", "hard link", "fifo"])
def test_links_planted_in_the_folder(tmp_path, victim, name, kind):
    """While others could write in it, they made the victim create and change files elsewhere."""
    folder = tmp_path / "leases"
    folder.mkdir()
    folder.chmod(0o777)
    planted = folder / name
    if kind == "hard link":
        os.link(victim / "precious", planted)
    elif kind == "fifo":
        os.mkfifo(planted)
    else:
        end = {"link to a file": "precious", "link to a folder": ".", "dangling link": "new"}[kind]
        planted.symlink_to(victim / end)
    with pytest.raises(TorchcompileError, match=f"{name} (is|can't be opened).*; have it removed, or set TMPDIR"), \
            Leases(folder, ("0",), 2).hold_gpus(1, timeout=5):
        pass
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder(tmp_path, victim):
    """As found in /tmp: it is refused, and nothing is made in it."""
    folder = tmp_path / "leases"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "counter").symlink_to(victim / "precious")
    os.chown(folder, 4711, 4711)
    refused(folder, "leases belongs to user 4711, and this is user 0; have it removed, or set TMPDIR")
    assert [path.name for path in folder.iterdir()] == ["counter"]


def test_a_folder_that_seems_another_users(tmp_path, monkeypatch):
    """The same where the tests do not run as root."""
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    refused(tmp_path / "leases", f"leases belongs to user {mine}, and this is user {mine + 1}; have it removed")


def test_the_folder_is_for_this_user_alone(tmp_path):
    """Whatever the umask says; that of an earlier version is closed to others."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o755)
    before = os.umask(0)
    try:
        for folder in (tmp_path / "new", tmp_path / "old"):
            with Leases(folder, ("0",)).hold_gpus(1):
                assert folder.stat().st_mode & 0o777 == 0o700
                assert {path.stat().st_mode & 0o077 for path in folder.rglob("*")} == {0}
    finally:
        os.umask(before)


@pytest.mark.parametrize("text", ["", "17", "\0\0\0", "many", "9" * 200, "\xff"])
def test_a_counter_that_was_damaged(tmp_path, text):
    """Nobody waits at a wrong place in the queue: a number is behind all that wait."""
    (tmp_path / "counter").write_text(text)
    folder = PrivateFolder.open(tmp_path)
    queue = PrivateFolder.open(Path("queue"), inside=folder)
    first, _ = leases._take_ticket(folder, queue)
    (tmp_path / "counter").write_text(text)
    second, _ = leases._take_ticket(folder, queue)
    assert int(second) > int(first)
    assert leases._first_ticket(queue) == first


def test_a_mutex_that_is_never_given_back(tmp_path, monkeypatch):
    """A process that holds it was stopped: nobody waits for ever, and descriptors are given back."""
    monkeypatch.setattr(leases, "MUTEX_SECONDS", 0.1)
    folder = PrivateFolder.open(tmp_path)
    held = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with leases._hold_mutex(folder):
        refused(tmp_path, r"mutex has been locked for 0\.1 s; expected a moment; end the process that holds it")
    assert not held or len(os.listdir("/proc/self/fd")) == held
