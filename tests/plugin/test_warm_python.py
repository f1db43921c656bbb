"""The tests' own warm interpreters: what is forked from them is as what a new interpreter would run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import warm_python

from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.system import can_fork

pytestmark = [pytest.mark.needs_torch, pytest.mark.skipif(not can_fork(), reason="nothing forks on this system")]
TELLS = """
def telling():
    with open("told", "w") as told:
        print(os.getppid(), os.environ.get("OMP_NUM_THREADS"), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), file=told)
    return net()
"""
MATRIX = """
version: 1
models: {net: {factory: "models:telling", inputs: "models:batch", dims: {B: 4}}}
axes: {backend: [eager]}
checks: [compiles]
"""


@pytest.fixture
def start(warm, tmp_path, monkeypatch):
    """Runs a command line of Python in an empty folder; the process, and what it printed."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **environment):
        printed = tmp_path / "printed"
        with printed.open("w") as file:
            process = warm_python.start_python(warm["torch"], [sys.executable, *arguments], stdout=file, stderr=file,
                                               env={**os.environ, **environment})
            process.wait(60)
        return process, printed.read_text()

    return run


def test_a_fork_is_what_was_asked_for(start, tmp_path):
    """Arguments, folder, variables, path, number; no file of ours below it; and the modules are there."""
    process, printed = start("-c", "import os, sys; m = sys.modules; print(sys.argv, os.getcwd(), os.environ['CI'],"
                             "sys.path[:2], os.getpid(), hasattr(m['__main__'], '__file__'), 'torch' in m)",
                             "a", CI="of this run", PYTHONPATH=str(tmp_path))
    assert printed.strip() == (f"['-c', 'a'] {tmp_path} of this run {['', str(tmp_path)]} {process.pid} False True")


@pytest.mark.parametrize(("end", "returncode", "text"), [
    ("", 0, ""),
    ("sys.exit(3)", 3, ""),
    ("sys.exit('a sentence')", 1, "a sentence\n"),
    ("raise ValueError('no')", 1, "ValueError: no\n"),
    ("os.kill(os.getpid(), 9)", -9, ""),
    ("import atexit; atexit.register(print, 'at last'); print(end='')", 0, "at last\n"),
])
def test_its_end_is_told(start, end, returncode, text):
    """As of a new interpreter: exit codes, texts and signals."""
    process, printed = start("-c", f"import os, sys\n{end}")
    assert isinstance(process, warm_python.ForkedPython)
    assert process.returncode == returncode
    assert printed.endswith(text)
    assert bool(printed) == bool(text)


@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")
def test_a_compile_in_this_process_makes_no_difference(start):
    """Inductor sets a variable; without a fork each of the tests behind it would import torch anew."""
    torch = pytest.importorskip("torch")
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(3))
    process, printed = start("-c", "import sys; print('torch' in sys.modules)")
    assert isinstance(process, warm_python.ForkedPython)
    assert printed == "True\n"


@pytest.mark.parametrize("environment", [
    {"OMP_NUM_THREADS": "1"}, {"TORCH_LOGS": "dynamo"}, {"PYTHONPATH": "/somewhere/else"}, {"TMPDIR": "/tmp"},
], ids=str)
def test_what_imports_may_read_starts_a_new_interpreter(start, environment):
    """torch has read it once and for all in the warm one."""
    process, printed = start("-c", "import sys; print('torch' in sys.modules)", **environment)
    assert isinstance(process, subprocess.Popen)
    assert printed == "False\n"


def test_what_is_installed_is_imported(tmp_path, monkeypatch):
    """The tests of a wheel start in a checkout, which has a package of the same name."""
    (tmp_path / "pytest_torchcompile").mkdir()
    (tmp_path / "pytest_torchcompile/__init__.py").write_text("raise ValueError('the checkout')\n")
    monkeypatch.chdir(tmp_path)
    warm_python.WarmPython(["pytest_torchcompile.errors"]).close()


@pytest.mark.parametrize("threads", [None, "1"])
def test_ranks_of_an_inner_run(repo, warm, monkeypatch, threads):
    """Their zygote is forked, with the variables of its run; where one of these is of torch it is started anew."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(repo.path / "cache"))
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    repo.models(TELLS + """
with open("command", "wb") as file:
    file.write(open(f"/proc/{os.getppid()}/cmdline", "rb").read())
""")
    repo.matrix(MATRIX)
    assert repo.run().ret == 0
    _, *told = (repo.path / "told").read_text().split()
    assert told == [str(threads), str(repo.path / "cache")]
    # A fork keeps the command line of the interpreter that it is one of.
    assert (b"warm python" in (repo.path / "command").read_bytes()) == (threads is None)


def test_two_numbers_that_are_sent_at_once_are_two():
    """A process that has ended before anybody read its number: the number and its end arrive together."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(warm_python._number_text(12345) + warm_python._number_text(-9))
        assert [int(warm_python._read_number(here)) for _ in range(2)] == [12345, -9]
        there.close()
        assert warm_python._read_number(here) == b""
