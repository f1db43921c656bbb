"""WatchedFiles: what a rank process opens and lists, by an audit hook of Python. It can't be removed again.

The hook is one Python function that calls no other one: Dynamo, which sees every function that runs while compiled code
does, is told to leave it alone (:func:`~pytest_torchcompile.gauges.compiler.leave_untraced`), and would see others.
What it has noted is looked at when a cell has ended.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.gauges.peaks_file import peaks_path
from pytest_torchcompile.run.imported import hash_of

__all__ = [
    "LARGEST",
    "Opened",
    "changed_since_start",
    "hash_of_listing",
    "is_cache",
    "is_installed",
    "is_own",
    "is_standard",
    "opened_so_far",
    "start_watching",
]

LARGEST: Final = 256 << 20
"""Bytes of a file that is still hashed: a larger one can't be followed."""
_STARTS_PROCESS: Final = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "pty.spawn"}
)
_USES_NETWORK: Final = frozenset({"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"})
_EVENTS: Final = frozenset(
    {
        "open",
        "os.listdir",
        "os.scandir",
        "import",
        "ctypes.dlopen",
        "os.chdir",
        "sqlite3.connect",
        *_STARTS_PROCESS,
        *_USES_NETWORK,
    }
)
_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_ZOO: Final = os.path.join(_PACKAGE, "zoo") + os.sep
"""Models that lie in this package, and are a project's all the same."""
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# The library may be reached by a link, and a file of it is known by either path.
_STANDARD: Final = tuple({os.path.join(path, "") for path in (*_LIBRARIES, *map(os.path.realpath, _LIBRARIES))})
_ZIPPED: Final = frozenset(path for path in sys.path if path.endswith(".zip"))
"""Where Python looks for its own library before it looks in a folder."""
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_COMPILERS: Final = ("torch", "torchgen", "functorch", "triton")
"""Installed packages whose processes, libraries and caches are the compiler's own affair."""
_DRAWS_FROM_CODE: Final = "hypothesis"
"""An installed package that reads modules for the constants in them, and draws these more often. No comment is one."""
_MACHINE: Final = ("/proc/", "/sys/", "/dev/null", "/dev/nvidia", "/dev/shm/", "/etc/ld.so")
"""What tells of the machine, which a key tells in its own way."""
_OUR_FOLDERS: Final = frozenset({"__pycache__", ".compile-matrix", ".pytest_cache", ".hypothesis"})


@dataclass
class Opened:
    """What one process has opened since it was forked: of every cell that it ran, for modules keep what they read."""

    files: dict[str, str] = field(default_factory=dict)
    """File to the hash of its bytes; empty where there was none."""
    folders: dict[str, str] = field(default_factory=dict)
    """Folder that was listed to the hash of the names in it."""
    imports: set[str] = field(default_factory=set)
    """Every module that was asked for, those that were not found too."""
    untraceable: list[str] = field(default_factory=list)
    """Why what the process did can't be followed."""
    all_code: bool = False
    """Has something drawn from the constants of all modules, whichever the cell uses?"""


_noted: deque[tuple[str, Any, Any, str, bool]] = deque()
"""Event, its first argument, its flags, the file that is to answer for it, and whether the import system raised it."""
_seen = Opened()
_written: set[str] = set()
_started = 0.0


def start_watching() -> None:
    """Note from now on what this process opens; a second call changes nothing."""
    global _started
    if _started:
        return
    _started = time.time()
    from pytest_torchcompile.gauges.compiler import leave_untraced

    leave_untraced(_note_event)
    sys.addaudithook(_note_event)


def _note_event(event: str, args: tuple[Any, ...]) -> None:
    """The hook. Who is to answer for an event is the innermost file that is not of Python's own library."""
    if event not in _EVENTS:
        return
    frame = sys._getframe(1)
    # Python's import opens files and lists folders for itself; of that only which module it found counts.
    by_import = frame.f_code.co_filename.startswith("<frozen importlib")
    answers = ""
    while frame is not None:
        name = frame.f_code.co_filename
        # Frames without a file, and Python's own library, act for who called them.
        if name[:1] != "<" and not (name.startswith(_STANDARD) and "-packages" not in name):
            answers = name
            break
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    # Only noted: a hook that opens files itself would call itself, and one that takes long slows everything.
    _noted.append((event, args[0] if args else None, args[2] if len(args) > 2 else 0, answers, by_import))


def opened_so_far(root: Path, imported: set[str]) -> Opened:
    """Take what was noted. ``imported``: the files of modules, which count as code and not as data."""
    while _noted:
        event, subject, flags, answers, by_import = _noted.popleft()
        if event == "import":
            _seen.imports.add(str(subject))
        elif event == "open":
            if not by_import:
                _take_open(subject, flags, answers, root, imported)
        elif event in ("os.listdir", "os.scandir"):
            if not by_import and not _is_compilers(answers):
                _take_listing(subject, root)
        elif why := _untraceable(event, subject, answers):
            _refuse(f"{_shown(answers, root)} {why}")
    return _seen


def _take_open(subject: Any, flags: Any, answers: str, root: Path, imported: set[str]) -> None:
    path = _absolute(subject)
    if path is None or _is_outside(path, root):
        return
    # O_ACCMODE, which Windows has not.
    accesses = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else os.O_RDONLY
    # Nobody can write to a folder: `tempfile` names that of the new file which it makes. So it does where the file is
    # to be read, as Triton's are. Anybody else may look for files in a folder that was opened.
    if (accesses != os.O_RDONLY or _is_compilers(answers)) and os.path.isdir(path):
        return
    if accesses != os.O_RDONLY:
        _written.add(path)
    if accesses == os.O_WRONLY or path in _seen.files:
        return
    # Who shows a line of code opens its file too; that the project itself reads it is another matter.
    if path in imported and (_is_compilers(answers) or not answers):
        return
    if path in imported and _package_of(answers) == _DRAWS_FROM_CODE:
        _seen.all_code = True
        return
    _seen.files[path] = _watch_file(path, root)


def _watch_file(path: str, root: Path) -> str:
    """The hash of a file as the cell had it."""
    try:
        status = os.stat(path)
    # A path with a NUL byte raises ValueError; as for Python itself there is no such file.
    except (OSError, ValueError):
        return ""
    if not os.path.isfile(path):
        _refuse(f"{_shown(path, root)} is opened, which is no file")
    elif status.st_size > LARGEST:
        _refuse(f"{_shown(path, root)} is opened, which has more than {LARGEST >> 20} MiB")
    elif changed_since_start(path) or path in _written:
        _refuse(f"{_shown(path, root)} is read, and was written while the process ran")
    return hash_of(Path(path))


def _take_listing(subject: Any, root: Path) -> None:
    path = _absolute("." if subject is None else subject)
    if path is not None and not _is_outside(path, root) and path not in _seen.folders:
        _seen.folders[path] = hash_of_listing(Path(path))


def hash_of_listing(folder: Path) -> str:
    """Of the names in a folder, but those that this package and Python leave; empty where there is none."""
    try:
        names = sorted(set(os.listdir(folder)) - _OUR_FOLDERS)
    except OSError:
        return ""
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def _untraceable(event: str, subject: Any, answers: str) -> str:
    """Why an event can't be followed; empty for what the compiler does."""
    if _is_compilers(answers):
        # The compiler loads what it has just built, which is no input; a library of the project is one.
        if event == "ctypes.dlopen" and _is_project_library(subject):
            return f"loads the library {Path(str(subject)).name}"
        return ""
    if event in _STARTS_PROCESS:
        return "starts a process"
    if event in _USES_NETWORK:
        return "uses the network"
    if event == "os.chdir":
        return "changes the working folder"
    if event == "sqlite3.connect":
        return "opens a database"
    # None is the process itself.
    if event == "ctypes.dlopen" and subject is not None:
        return f"loads the library {Path(str(subject)).name}"
    return ""


def _is_project_library(subject: Any) -> bool:
    """Is it a library that neither the system, nor a package, nor the compiler's cache has?"""
    path = _absolute(subject)
    if path is None or os.sep not in str(subject):
        return False
    return not (is_installed(path) or path.startswith(("/usr/", "/lib", "/opt/")) or is_cache(path))


def _refuse(why: str) -> None:
    if why not in _seen.untraceable:
        _seen.untraceable.append(why)


def _shown(path: str, root: Path) -> str:
    if not path:
        return "something"
    relative = os.path.relpath(path, root)
    return path if relative.startswith("..") else relative


def _absolute(subject: Any) -> str | None:
    """A path as text; None for an open file's number."""
    if isinstance(subject, int) or subject is None:
        return None
    try:
        # An audit event may name a file by its descriptor, which is no path.
        return os.path.abspath(os.fsdecode(subject))
    except (TypeError, ValueError):
        return None


def _is_outside(path: str, root: Path) -> bool:
    """Is it of Python, this package, the machine or a cache, of which the key tells in its own way?"""
    if path.startswith(_MACHINE) or is_own(path) or is_standard(path) or is_cache(path):
        return True
    # Only timed cells read it, and these always run.
    if path == os.path.abspath(peaks_path()):
        return True
    if not _OUR_FOLDERS.isdisjoint(Path(path).parts) or path.endswith(".pyc") or path in _ZIPPED:
        return True
    # The lists of what is installed are of the key as a whole.
    if ".dist-info" in path or ".egg-info" in path:
        return True
    if is_installed(path) and path.endswith((".py", ".so")):
        return True
    below_root = path.startswith(os.path.join(str(root), ""))
    # A process leaves files there and reads them again; what was there before it is data.
    return not below_root and _is_temporary(path) and changed_since_start(path)


def _is_temporary(path: str) -> bool:
    return path.startswith(os.path.join(os.path.realpath(tempfile.gettempdir()), ""))


def changed_since_start(path: str) -> bool:
    """Was a file written since this process began to watch, or is it gone? Clocks of file systems are coarse."""
    try:
        return os.stat(path).st_mtime >= _started - 0.05
    except (OSError, ValueError):
        return True


def is_cache(path: str) -> bool:
    """Is it in a folder in which Inductor or Triton keep what they compiled?"""
    return any(path.startswith(folder) for folder in _caches())


def _caches() -> Iterator[str]:
    yield os.path.join(tempfile.gettempdir(), "torchinductor_")
    yield os.path.join(os.path.expanduser("~"), ".triton", "")
    here = os.path.join(os.getcwd(), "")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if os.environ.get(name):
            folder = os.path.join(os.path.abspath(os.environ[name]), "")
            # One that holds the project too would take its modules and data for the compiler's.
            if not here.startswith(folder):
                yield folder


def is_own(path: str) -> bool:
    """Is it a file of this package, but no model of its zoo?"""
    return path.startswith(_PACKAGE) and not path.startswith(_ZOO)


def is_installed(path: str) -> bool:
    """Is it a file of an installed package, which is not this one?"""
    return any(folder in path for folder in _INSTALLED) and not path.startswith(_PACKAGE)


def is_standard(path: str) -> bool:
    """Is it a file of Python's own library?"""
    return path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)


def _is_compilers(path: str) -> bool:
    """Is it a file of torch, Triton or this package?"""
    return is_own(path) or is_cache(path) or _package_of(path) in _COMPILERS


def _package_of(path: str) -> str:
    """The installed package that has a file; empty for another file."""
    for folder in _INSTALLED:
        _, found, inside = path.rpartition(folder)
        if found:
            return inside.partition(os.sep)[0]
    return ""
