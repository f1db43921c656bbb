"""Another system: what Linux has and Windows has not is hidden from this package, and from nobody else.

Torch and the standard library go on as on Linux, since their Windows parts are not installed here. Whoever asks is
known by the frame that asks. ``site_folder`` makes a folder for PYTHONPATH, by which every process hides it at its
start.
"""

from __future__ import annotations

import builtins
import errno
import faulthandler
import os
import select
import signal
import socket
import sys
import time
import types
from pathlib import Path

PACKAGE = "pytest_torchcompile"
MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"}
FOLDERS = ("/proc", "/sys/", "/dev/nvidia")
NAMES = {
    os: {"fork", "forkpty", "killpg", "getpgid", "setpgid", "setsid", "getuid", "geteuid", "getgid", "getegid",
         "mkfifo", "sysconf", "sched_getaffinity", "uname", "getloadavg", "fchmod", "chown", "pwrite", "pread",
         "posix_spawn", "register_at_fork", "wait", "WNOHANG", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY",
         "O_ACCMODE", "set_blocking", "statvfs"},
    signal: {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGALRM", "SIGHUP", "SIGPIPE", "setitimer", "alarm",
             "pthread_sigmask", "SIGSTOP", "SIGCONT"},
    faulthandler: {"register"},
    select: {"poll", "epoll"},
    socket: {"AF_UNIX", "socketpair"},
    time: {"tzset"},
}
ASKED_BY_US = ("pathlib", "io", "glob", "os", "posixpath", "genericpath", "contextlib", "fnmatch")
"""Modules between our code and a file."""


def hide() -> None:
    """Hide all of it in this process."""
    for module, names in NAMES.items():
        module.__class__ = hiding_class(module, frozenset(names), {})
    sys.__class__ = hiding_class(sys, frozenset({"platform"}), {"platform": "win32"})
    given_import = builtins.__import__

    def import_module(name, globals=None, *rest, **named):
        if name in MODULES and (globals or {}).get("__name__", "").startswith(PACKAGE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return given_import(name, globals, *rest, **named)

    given_stat = os.stat

    def stat(path, **named):
        refuse_folders("os.stat", (path,))
        return given_stat(path, **named)

    builtins.__import__ = import_module
    os.stat = stat
    sys.addaudithook(refuse_folders)


def hiding_class(module: types.ModuleType, names: frozenset[str], others: dict[str, str]) -> type[types.ModuleType]:
    """The class of a module that hides names from us, or gives us other values."""
    class Hiding(types.ModuleType):
        def __getattribute__(self, name):
            # Modules that are made later are of the class of sys, too.
            if name in names and self is module and sys._getframe(1).f_globals["__name__"].startswith(PACKAGE):
                if name in others:
                    return others[name]
                raise AttributeError(f"module has no attribute {name!r}", name=name, obj=self)
            return super().__getattribute__(name)

    return Hiding


def refuse_folders(event: str, args: tuple) -> None:
    """A file that another system does not have is not found by us."""
    if event not in ("open", "os.listdir", "os.scandir", "os.stat") or not str(args[0]).startswith(FOLDERS):
        return
    frame = sys._getframe(1)
    if event == "os.stat":
        # Who asked for it called ours.
        frame = frame.f_back
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ASKED_BY_US:
        frame = frame.f_back
    if frame.f_globals["__name__"].startswith(PACKAGE):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(args[0]))


def site_folder(folder: Path, more: str = "") -> Path:
    """A folder whose ``sitecustomize`` hides all of it, and then runs some code, in each Python that has it in its
    PYTHONPATH.
    """
    site = folder / "site"
    site.mkdir()
    here = str(Path(__file__).parent)
    begin = f"import sys\nsys.path.append({here!r})\nimport other_system\nother_system.hide()\n"
    (site / "sitecustomize.py").write_text(begin + more)
    return site
