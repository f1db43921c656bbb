"""A Python that has imported its modules already: the tests' many small processes are forked from one of these.

Half the tests start pytest in a process of its own, and it a zygote that imports torch. These imports take five times
as long as what the tests ask about, and are the same in all. So a worker of the tests starts an interpreter that has
done them (:class:`WarmPython`), and command lines of Python are run in forks of it: with their own arguments,
environment, folder, path and files, as ``__main__``, until the interpreter ends as usual.

A command is run by a new interpreter where its environment may change what the imports do: see :func:`is_alike`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

TORCH = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "pytest_torchcompile.ranks.zygote",
         "pytest_torchcompile.run.runner")
"""What every zygote and every rank imports."""
ADDRESS = "TESTS_WARM_PYTHON"
"""Names the socket of the interpreter that has imported torch, for the zygotes of an inner run."""
PYTEST = ("pytest", "_pytest.assertion", "_pytest.capture", "_pytest.fixtures", "_pytest.python", "yaml",
          "pytest_jsonreport.plugin", "hypothesis.internal.observability",
          "pytest_torchcompile.plugin.startup", "pytest_torchcompile.plugin.ending",
          "pytest_torchcompile.plugin.fixtures", "pytest_torchcompile.report.earlier")
"""What every pytest with this package imports, but xdist, which remembers the path of that moment."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
               "KINETO_LOG_LEVEL": "99"}
"""What the tests and every zygote set before torch is loaded."""
WITHOUT_EFFECT = frozenset({
    ADDRESS, "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_TORCHCOMPILE_WARM", "PYTEST_VERSION",
    "PYTEST_CURRENT_TEST", "PYTEST_DEBUG_TEMPROOT", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "HOME", "USERPROFILE", "PATH", "PWD", "OLDPWD",
    "COLUMNS", "LINES", "PYTORCH_NVML_BASED_CUDA_CHECK", "KINETO_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "CI",
    "TOX_ENV_DIR", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TERM", "ARTIFACT_MODELS_SEEN",
    "AOTI_RUNTIME_CHECK_INPUTS", "MY_SIZE",
    # What a shell sets for what it starts, and what the files of docs/ci call their matrix by.
    "SHLVL", "_", "MATRIX",
    # What Inductor sets in a process that loads a kernel, and a wrapper before there is a process group.
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR", "GLOO_SOCKET_IFNAME",
})
"""Variables that nothing reads when it is imported, or that each process sets for itself before."""
OF_AN_ENGINE = ("GITHUB_", "BUILDKITE")
"""How the names of others begin that no import reads."""
FOLDER = str(Path(__file__).parent)
_COMMAND = """
import sys
# What is installed is imported, and not what lies in the folder where the tests were started.
del sys.path[0]
with open(sys.argv[1], encoding="utf-8") as file:
    exec(compile(file.read(), "<warm python>", "exec"), {"__name__": "__main__", "__file__": sys.argv[1]})
"""
"""Runs this file without its name. Its frames lie below those of all forks, and torch reads the files of frames."""
_MOST_FILES = 16
_WIDTH = 16
"""Bytes of a number in a message."""
_FAR = 200
"""Numbers of files from here on are nobody's: what a command is given has lower ones."""


class WarmPython:
    """An interpreter that runs command lines in forks of itself. It ends with whoever made it."""

    def __init__(self, modules: Sequence[str], base: WarmPython | None = None) -> None:
        """``modules`` are imported. ``base``: another one whose modules it has too, as its fork."""
        # A socket's path may have about 100 bytes, so it can't be in pytest's own folder.
        self._folder = tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")
        self.address = f"{self._folder.name}/socket"
        command = [sys.executable, "-c", _COMMAND, __file__, self.address, *modules]
        lifeline, self._lifeline = os.pipe()
        ready, told = os.pipe()
        with open(lifeline) as stdin, open(ready) as answer, open(told, "w") as stdout:
            options = {"stdin": stdin, "stdout": stdout, "stderr": sys.__stderr__, "start_new_session": True,
                       "env": {**os.environ, **ENVIRONMENT}}
            if base is None:
                self._process = subprocess.Popen(command, **options)
            else:
                self._process = start_python(base.address, command, **options)
            stdout.close()
            # It says so when it listens, or it has failed with a traceback.
            assert answer.readline() == "ready\n"
        self.pid = self._process.pid

    def close(self) -> None:
        """End it, once what was forked has ended."""
        os.close(self._lifeline)
        self._process.wait()
        self._folder.cleanup()


class ForkedPython:
    """What the tests and the package use of a ``Popen``, of a process that is no child of this one."""

    def __init__(self, args: Sequence[str], channel: socket.socket, pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._channel = channel

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            # Nothing comes where the process between was killed, with the whole group.
            self.returncode = int(_read_number(self._channel) or -signal.SIGKILL)
            self._channel.close()
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_python(address: str | None, args: Sequence[str], *, stdin: Any = None, stdout: Any = None, stderr: Any = None,
                 pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None,
                 start_new_session: bool = False) -> subprocess.Popen | ForkedPython:
    """``subprocess.Popen`` of Python's command line, forked where that makes no difference.

    ``address`` is None where there is no warm interpreter.
    """
    environment = dict(os.environ if env is None else env)
    folder = str(cwd or os.getcwd())
    if address is None or not is_alike(address, args, environment, folder):
        return subprocess.Popen(args, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, env=env,
                                cwd=cwd, start_new_session=start_new_session)
    with contextlib.ExitStack() as opened:
        null = opened.enter_context(open(os.devnull, "r+b"))
        streams = [null.fileno() if stream in (subprocess.DEVNULL, subprocess.PIPE, None) else stream.fileno()
                   for stream in (stdin, stdout, stderr)]
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(address)
        socket.send_fds(channel, [b"."], [*streams, *pass_fds])
        wanted = {"args": list(args), "environment": environment, "cwd": folder, "fds": [0, 1, 2, *pass_fds],
                  "session": start_new_session}
        channel.sendall(json.dumps(wanted).encode())
        channel.shutdown(socket.SHUT_WR)
        return ForkedPython(args, channel, int(_read_number(channel)))


def inner_variables(torch: str, *folders: str) -> dict[str, str]:
    """Have a pytest fork its zygotes from the interpreter ``torch``; ``folders`` are looked through for modules."""
    searched = [*folders, FOLDER, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, searched)), "PYTEST_PLUGINS": "warm_python", ADDRESS: torch}


def run_python(address: str | None, args: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of Python's command line, with its output as text; ``options`` are those of the above."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start_python(address, args, stdout=stdout, stderr=stderr, **options)
        returncode = process.wait()
        # The process has written to the same files, so their place is at the end.
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(args, returncode, stdout.read(), stderr.read())


def _number_text(number: int) -> bytes:
    """Of one width: two that are sent at once arrive as one piece."""
    return f"{number:{_WIDTH}}".encode()


def _read_number(channel: socket.socket) -> bytes:
    return channel.recv(_WIDTH, socket.MSG_WAITALL)


def is_alike(address: str, args: Sequence[str], environment: Mapping[str, str], cwd: str) -> bool:
    """Whether the imports would do here what they did in the warm interpreter: same program, variables, path."""
    theirs = json.loads(Path(f"{address}.environment").read_text())
    if args[0] != sys.executable or args[1][:2] not in ("-m", "-c"):
        return False
    # pytester adds the folder that the run is in. What lies elsewhere may be another torch.
    if not {*_searched(environment)} <= {cwd, FOLDER, *_searched(theirs)}:
        return False
    different = {name for name, value in environment.items() if theirs.get(name) != value}
    different |= theirs.keys() - environment.keys()
    return all(name in WITHOUT_EFFECT or name.startswith(OF_AN_ENGINE) for name in different)


def _searched(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _serve(address: str, modules: Sequence[str]) -> dict[str, Any]:
    """Import the modules, then fork for each connection until the standard input closes. Returns only in forks."""
    known = dict(os.environ)
    # A search for garbage finds none while modules are imported, and takes a sixth of the time.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    # pytest would warn that it can't rewrite the assertions of plugins that are loaded; nobody reads these.
    for module in {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__"}:
        sys.modules[module].__doc__ = f"{sys.modules[module].__doc__}\nPYTEST_DONT_REWRITE"
    gc.collect()
    # What is frozen is not looked through for garbage in the forks, so its memory stays shared.
    gc.freeze()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(16)
    Path(f"{address}.environment").write_text(json.dumps(known))
    print("ready", flush=True)
    keepers: set[int] = set()
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        # Waited for, not ignored: only so does what they used count as this process' own.
        keepers -= {pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0]}
        if server in ready:
            channel, _ = server.accept()
            if not (keeper := os.fork()):
                server.close()
                return _keep_fork(channel)
            keepers.add(keeper)
            channel.close()
        elif sys.stdin in ready:
            for pid in keepers:
                os.waitpid(pid, 0)
            _end(0)


def _keep_fork(channel: socket.socket) -> dict[str, Any]:
    """Fork what a connection asks for, tell its number, and how it has ended. Returns only in that fork."""
    _, given, _, _ = socket.recv_fds(channel, 1, _MOST_FILES)
    told = b""
    while piece := channel.recv(1 << 16):
        told += piece
    pid = os.fork()
    if not pid:
        channel.close()
        return {**json.loads(told), "given": given}
    channel.sendall(_number_text(pid))
    _, status = os.waitpid(pid, 0)
    # Who asked may have been killed meanwhile.
    with contextlib.suppress(OSError):
        channel.sendall(_number_text(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(args: Sequence[str], environment: Mapping[str, str], cwd: str, fds: Sequence[int], given: Sequence[int],
            session: bool) -> NoReturn:
    """Take over everything that a new interpreter would have been started with, and run its command line."""
    if session:
        os.setsid()
    far = [os.dup2(fd, _FAR + place) for place, fd in enumerate(given)]
    for fd in {*given} - {0, 1, 2}:
        os.close(fd)
    for fd, number in zip(far, fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    option, rest = args[1][:2], list(args[1:])
    sys.path[:] = ["" if option == "-c" else cwd, *_searched(environment), *sys.path]
    importlib.invalidate_caches()
    # "-mpytest" and "-m pytest" are the same.
    what = rest[0][2:] or rest.pop(1)
    sys.argv[:] = [option, *rest[1:]]
    # One without a file, as a new interpreter has.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 1
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), main.__dict__)
        status = 0
    except SystemExit as exit:
        status = _status_of(exit.code)
    except BaseException:
        traceback.print_exc()
    _end(status)


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but for taking apart what is frozen: libraries call that a leak."""
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In an inner run: have its zygotes forked."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return
    from pytest_torchcompile.ranks import zygotes

    zygotes.subprocess = WarmSubprocess(address)
    # For an inner run in the process of the outer one.
    config.add_cleanup(lambda: setattr(zygotes, "subprocess", subprocess))


class WarmSubprocess:
    """The module ``subprocess``, whose processes are forked."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen | ForkedPython:
        return start_python(self._address, args, **options)


if __name__ == "__main__":
    asked = _serve(sys.argv[2], sys.argv[3:])
    _become(asked["args"], asked["environment"], asked["cwd"], asked["fds"], asked["given"], asked["session"])
