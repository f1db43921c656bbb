"""Zygotes that are killed, that cannot import torch, or whose owner is gone; with an empty torch that loads at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_torchcompile.errors import NoRank
from pytest_torchcompile.ranks import capped_log, zygotes
from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.zygotes import Zygote, connect_rank, is_alive

pytestmark = pytest.mark.needs_torch
EMPTY_TORCH = """
import os, sys, types
from pathlib import Path

def environment():
    exec(Path(__file__).with_name("job.py").read_text(), {})

runner = sys.modules["pytest_torchcompile.run.runner"] = types.ModuleType("pytest_torchcompile.run.runner")
runner.environment = environment

class cuda:
    _is_in_bad_fork = staticmethod(lambda: False)

def set_num_threads(count):
    pass
"""


@pytest.fixture
def torch_file(tmp_path, monkeypatch):
    """The __init__.py of a torch without content, which a zygote imports in no time."""
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_WARM", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(zygotes.tempfile, "tempdir", None)
    monkeypatch.setattr(zygotes, "START_SECONDS", 60.0)
    package = tmp_path / "stub/torch"
    for name in ("_dynamo", "_inductor"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "_inductor/compile_fx.py").touch()
    (package / "__init__.py").write_text(EMPTY_TORCH)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "stub"), *sys.path])
    monkeypatch.setattr(zygotes.tempfile, "gettempdir", lambda: "/tmp")
    return package / "__init__.py"


@pytest.fixture
def run(torch_file):
    """The owner's side of a run."""
    made = Zygote(300.0)
    yield made
    made.close()
    assert not made.folder.exists()


def kill_zygote(root, number):
    """Kill a zygote, and wait until it is dead."""
    folder = root / str(number)
    until(lambda: (folder / "pid").exists() and (folder / "socket").exists())
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    until(lambda: not is_alive(folder))


def until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_zygote_is_replaced_once(run):
    """Rank processes live on; all that ask meanwhile get one from the same second zygote, and then one sentence."""
    first, first_pid, _ = connect_rank(run.folder)
    assert not run.was_replaced
    kill_zygote(run.folder, 1)
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda _: connect_rank(run.folder), range(8)))
    assert run.was_replaced
    assert {folder for _, _, folder in asked} == {run.folder / "2"}
    kill_zygote(run.folder, 2)
    for _ in range(2):
        with pytest.raises(NoRank, match=r"^the process that starts rank processes was killed 2 times, and is not "
                                         r"started again$"):
            connect_rank(run.folder)
    assert sorted(path.name for path in run.folder.glob("[0-9]*")) == ["1", "2"]
    assert all(lives(pid) for pid in (first_pid, *(pid for _, pid, _ in asked)))
    first.close()
    until(lambda: not lives(first_pid))  # it ends with the other side, though its zygote is dead
    for connection, _, _ in asked:
        connection.close()


@pytest.mark.parametrize(("code", "sentence"), [
    ("raise ImportError('libtorch_cuda.so: no such file\\nand more')", "ImportError: libtorch_cuda.so: no such file"),
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
])
def test_a_torch_that_cannot_be_imported_is_tried_once(torch_file, code, sentence):
    """One sentence, and the traceback as evidence; whoever asks again hears the same at once."""
    torch_file.write_text(code)
    run = Zygote(300.0)
    try:
        for _ in range(3):
            with pytest.raises(NoRank) as caught:
                Rank(run.folder).begin({"do": "environment"})
            assert str(caught.value) == f"torch cannot be imported by {sys.executable}: {sentence}"
            assert "Traceback (most recent call last)" in caught.value.evidence
        assert not run.was_replaced
    finally:
        run.close()


def test_a_zygote_that_dies_while_it_imports_is_tried_twice(torch_file):
    """As of an illegal instruction; what Python wrote of it is the evidence."""
    torch_file.write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    run = Zygote(300.0)
    try:
        with pytest.raises(NoRank, match="was killed 2 times") as caught:
            connect_rank(run.folder)
        assert "Fatal Python error: Illegal instruction" in caught.value.evidence
    finally:
        run.close()


def test_a_run_that_has_ended(run, tmp_path):
    with pytest.raises(NoRank, match=f"the folder of the run's processes is gone: {tmp_path}/none"):
        connect_rank(tmp_path / "none")


OWNER = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[1])
from pytest_torchcompile.ranks.zygotes import Zygote
print(Zygote(300.0).folder, flush=True)
time.sleep(600)
"""
WORKER = """
import json, sys
from pathlib import Path
sys.path[:] = json.loads(sys.argv[1])
from pytest_torchcompile.ranks.zygotes import connect_rank
print(connect_rank(Path(sys.argv[2]))[1], flush=True)
"""


@pytest.fixture
def owner(torch_file):
    """A process that owns a run, and the run's folder."""
    with subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(sys.path)], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_second_zygote_ends_with_the_owner(owner):
    """Not with the worker that started it. A run that was killed is swept by the next one, and not before."""
    process, folder = owner
    kill_zygote(folder, 1)
    subprocess.run([sys.executable, "-c", WORKER, json.dumps(sys.path), str(folder)], check=True, capture_output=True)
    connection, pid, home = connect_rank(folder)
    assert home.name == "2"
    zygotes._remove_left_folders(folder.parent)
    assert (folder / "2/socket").exists()
    process.kill()
    until(lambda: not is_alive(folder / "2") and not lives(pid))
    connection.close()
    zygotes._remove_left_folders(folder.parent)
    assert not folder.exists()


def test_a_run_that_begins_is_never_swept(tmp_path, monkeypatch):
    """Another run that begins looks at the folder in the moment before it is locked, and in that after."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_locked = zygotes._open_locked

    def swept_around(path):
        path.touch()
        zygotes._remove_left_folders(tmp_path)
        file = open_locked(path)
        zygotes._remove_left_folders(tmp_path)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(zygotes, "_open_locked", swept_around)
        patch.setattr(zygotes, "_start_zygote", lambda folder, number: subprocess.Popen(["true"]))
        run = zygotes.Zygote(300.0)
    zygotes._remove_left_folders(tmp_path)
    assert is_alive(run.folder)
    assert sorted(path.name for path in run.folder.iterdir()) == ["alive", "lifeline", "warm_seconds"]
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_sweep_leaves(tmp_path):
    """Folders of runs that begin, of other users, of other names, and links."""
    names = ("torchcompile-begins", "torchcompile-old", "torchcompile-dead", "other-dead", "elsewhere",
             "torchcompile_new-begins", "torchcompile_new-old")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "torchcompile-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/alive").touch()
    (tmp_path / "torchcompile-dead/alive").touch()
    (tmp_path / "other-dead/alive").touch()
    # Made, and not locked yet.
    (tmp_path / "torchcompile_new-begins/alive").touch()
    for old in ("torchcompile-old", "torchcompile_new-old"):
        os.utime(tmp_path / old, (0, 0))
    stranger = os.geteuid() == 0
    if stranger:
        (tmp_path / "torchcompile-strange").mkdir()
        (tmp_path / "torchcompile-strange/alive").touch()
        os.chown(tmp_path / "torchcompile-strange", 4711, 4711)
    zygotes._remove_left_folders(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"torchcompile-strange"} == {"torchcompile-begins", "torchcompile-link", "other-dead", "elsewhere",
                                               "torchcompile_new-begins"}
    assert ("torchcompile-strange" in left) == stranger
    assert (tmp_path / "elsewhere/file").exists()


LEAVES = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
left = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
if not os.fork():
    os.setsid()
    if not os.fork():  # a daemon as it is in the books: nobody's child, in a session of its own
        Path("daemon.new").write_text(str(os.getpid()))
        os.rename("daemon.new", "daemon")
        time.sleep(600)
    os._exit(0)
while not os.path.exists("daemon"):
    time.sleep(0.01)
print(*left, open("daemon").read(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_dead_rank_left_behind_is_ended(run, torch_file, tmp_path):
    """By the zygote, also a daemon in a session of its own, before it is told how the rank ended."""
    code = "from pathlib import Path\n" + LEAVES
    torch_file.with_name("job.py").write_text(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    rank = Rank(run.folder)
    outcome = rank.run({"do": "environment"}, 60)
    assert (outcome.status, outcome.message) == ("crash", "killed, perhaps for want of memory (SIGKILL)")
    left = [int(pid) for pid in outcome.evidence.split()]
    assert len(left) == 3
    assert not [pid for pid in left if lives(pid)]
    rank.close()


FLOOD = """
import os
print("first words", flush=True)
lines = (b"y" * 63 + b"\\n") * 1024
for _ in range(200 * 16):
    os.write(1, lines)
print("last words", flush=True)
os._exit(3)
"""


def test_a_flood_of_output_takes_no_room(run, torch_file):
    """200 MiB were written; the log takes little more than the 16 MiB that are kept, and head and tail are told."""
    torch_file.with_name("job.py").write_text(FLOOD)
    rank = Rank(run.folder)
    outcome = rank.run({"do": "environment"}, 120)
    assert outcome.message == "the process ended itself with exit code 3"
    assert outcome.evidence.startswith("first words\nyyy")
    assert outcome.evidence.endswith("yyy\nlast words")
    assert "\n... (209,715,223 bytes were written to stdout and stderr)\n" in outcome.evidence
    log = rank._process_file("log")
    assert log.stat().st_blocks * 512 < 17 << 20
    torch_file.with_name("job.py").write_text("print('few words'); import os; os._exit(4)")
    assert rank.run({"do": "environment"}, 60).evidence == "few words"


def test_the_log_of_a_cell_is_its_own(run, torch_file):
    """What the cell before it wrote is gone, though the process is the same."""
    rank = Rank(run.folder)
    for words in ("one", "two"):
        torch_file.with_name("job.py").write_text(f"print({words!r})")
        assert rank.run({"do": "environment"}, 60).status == "done"
        assert rank.log == words
    rank.close()


def test_a_rank_ends_with_the_process_that_it_works_for(run, torch_file):
    """In the middle of a job, as when a worker of xdist has crashed; the zygote goes on."""
    torch_file.with_name("job.py").write_text("import time; time.sleep(600)")
    connection, pid, _ = connect_rank(run.folder)
    connection.send({"do": "environment", "flight": None})
    connection.close()
    until(lambda: not lives(pid))
    assert is_alive(run.folder / "1")


def test_the_middle_of_a_long_log_is_dropped(tmp_path, monkeypatch):
    """Head and tail stay, the file takes no more room than they do, and what is written next is at the end."""
    monkeypatch.setattr(capped_log, "HEAD_BYTES", 1 << 20)
    monkeypatch.setattr(capped_log, "TAIL_BYTES", 1 << 20)
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as file:
        for number in range(16):
            file.write(b"%06d:" % number + b"x" * ((1 << 20) - 8) + b"\n")
            capped_log.drop_middle(log)
        file.write(b"last words\n")
    text = log.read_bytes()
    assert text.startswith(b"000000:xxx")
    assert text.endswith(b"xxx\nlast words\n")
    assert b"000015:" in text
    assert b"000007:" not in text
    assert log.stat().st_blocks * 512 <= (2 << 20) + (64 << 10)
    shown = capped_log.read_ends(log)
    assert shown.startswith("000000:xxx")
    assert shown.endswith("last words")
    assert "\n... (16,777,227 bytes were written to stdout and stderr)\n" in shown
    assert len(shown) < 5000


def test_where_no_hole_can_be_made_the_head_is_kept(tmp_path, monkeypatch):
    """As on a file system that cannot; what comes next is kept behind it."""
    monkeypatch.setattr(capped_log, "HEAD_BYTES", 1000)
    monkeypatch.setattr(capped_log, "TAIL_BYTES", 1000)
    monkeypatch.setattr(capped_log, "_punch_middle", lambda log, size: False)
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as file:
        file.write(b"a" * 5000)
        assert capped_log.drop_middle(log) == 5000
        file.write(b"b" * 10)
    assert log.read_bytes() == b"a" * 1000 + b"b" * 10
    capped_log.start_anew(log)
    assert log.read_bytes() == b""
