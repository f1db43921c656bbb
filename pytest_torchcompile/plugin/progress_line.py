"""Progress: on a terminal one live line below what pytest writes; elsewhere, and in CI, a line a minute.

pytest's own reporter writes as ever. The live line is erased before each of its hooks, and drawn again behind it. A
thread keeps the clock going while a cell is compiled, and is held off while pytest writes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

import pytest

from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.plugin.collection import MatrixSession
from pytest_torchcompile.ranks.execution import gpus_of
from pytest_torchcompile.ranks.gpus import Leases, gpu_device_files, open_leases
from pytest_torchcompile.report.progress import RunProgress
from pytest_torchcompile.report.safe_output import harmless_text

__all__ = ["ProgressHooks", "is_live"]

LIVE_SECONDS: Final = 1.0
"""Between two drawings of the live line."""
LINE_SECONDS: Final = 60.0
"""Between two lines where there is no terminal."""
_ERASE: Final = "\x1b[J"
"""From the cursor to the end of the screen."""


def is_live(config: pytest.Config, stream: Any) -> bool:
    """May a line be drawn that moves? Not where something else writes to the terminal too."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    # What tests print, or a debugger, is between us and pytest then.
    if config.getoption("capture") == "no" or config.option.usepdb:
        return False
    isatty = getattr(stream, "isatty", None)
    return bool(isatty is not None and isatty())


def open_terminal(stream: Any) -> TextIO | None:
    """Another way to where the stream writes to; None where it is no file of the system.

    While an item runs pytest has its output go elsewhere, and what we would write were the item's. So this is asked
    between items.
    """
    try:
        # Its own descriptor: pytest's capture puts others in the place of the stream's.
        return open(os.dup(stream.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    except (AttributeError, OSError, ValueError):
        return None


class ProgressHooks:
    """Follows the items of a run, in the process that sees all of them."""

    def __init__(self, session: MatrixSession) -> None:
        self.session = session
        self.progress = RunProgress(session.known_seconds(), session.journal.workers)
        self.clock = time.monotonic
        self.interrupted = False
        self._cells = {planned.cell.id for planned in session.planned}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.out: TextIO | None = None
        """The terminal, or the log of CI; None where we write nothing."""
        self._live = False
        self._drawn = False
        self._last_line = 0.0
        self._leases: Leases | None = None

    # what is to be done, and what is done

    def _split(self, nodeid: str) -> tuple[str, str]:
        """Cell and check of an item of ours; empty of another one."""
        *_, cell, check = ["", "", *nodeid.split("::")]
        return (cell, check) if cell in self._cells else ("", "")

    def _expect(self, nodeids: Iterable[str]) -> None:
        pairs = [self._split(nodeid) for nodeid in nodeids]
        with self._lock:
            self.progress.expect(pair for pair in pairs if pair[0])
            self._start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All items are known, in a run without workers."""
        if session.items:
            self._expect(item.nodeid for item in session.items)

    # Optional: xdist may be switched off.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """A worker tells them."""
        self._expect(ids)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, Any, Any]:
        """A cell begins with its first item; xdist tells that of its workers too."""
        with self._held_off():
            cell, _ = self._split(nodeid)
            self.progress.begin(cell, self.clock())
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        """The journal has the verdict when all others have seen the report."""
        with self._held_off():
            result = yield
            cell, check = self._split(report.nodeid)
            if cell and (report.when in ("call", "???") or not report.passed):
                verdict = "fail" if report.failed else "pass"
                self.progress.judge(cell, check, verdict, self.clock())
            return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self) -> Generator[None, Any, Any]:
        """pytest writes its percentage here."""
        with self._held_off():
            return (yield)

    # Optional: xdist may be switched off. It writes that a worker is gone.
    @pytest.hookimpl(wrapper=True, tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self) -> Generator[None, Any, Any]:
        """A worker is gone, and so is what it was running."""
        with self._held_off():
            return (yield)

    # the line

    def _held_off(self) -> _HeldOff:
        return _HeldOff(self)

    def _start(self) -> None:
        """Begin to tell, once it is known of what."""
        config = self.session.config
        reporter = config.pluginmanager.getplugin("terminalreporter")
        # -p no:terminal, or -qq: nobody wants to read.
        if self._thread is not None or reporter is None or not self.progress.total or config.get_verbosity() < -1:
            return
        stream = self._stream()
        self.out = open_terminal(stream)
        if self.out is None:
            return
        self._live = is_live(config, stream)
        self._last_line = self.clock()
        # Else nobody waits, and the folder of the leases need not be made.
        if gpu_device_files() and any(gpus_of(planned.cell) for planned in self.session.planned):
            self._leases = open_leases(self.session.settings.workers_per_gpu)
        self._thread = threading.Thread(target=self._tell_regularly, name="compile-matrix-progress", daemon=True)
        self._thread.start()

    def _stream(self) -> Any:
        # Beside the writer, which counts the columns of what goes through it. A private name, of pytest 8.3 to 9.2.
        return getattr(self.session.config.get_terminal_writer(), "_file", sys.stdout)

    def _tell_regularly(self) -> None:
        # A tenth: the minute is not over a second early because the thread was late before.
        step = LIVE_SECONDS if self._live else LINE_SECONDS / 10
        while not self._ended.wait(step):
            with self._lock:
                self.tell()

    def _look_at_queue(self) -> None:
        """See which cells have no GPU yet."""
        if self._leases is None:
            return
        # Who needs a GPU tells what is wrong with the folder of the leases.
        with suppress(TorchcompileError, OSError):
            self.progress.note_waiting(self._leases.waiting_names(), self.clock())

    def tell(self) -> None:
        """Draw the line anew, or write one if it is time."""
        self._look_at_queue()
        if self._live:
            self.draw()
            return
        now = self.clock()
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            begin = "\n" if self.session.config.get_terminal_writer().width_of_current_line else ""
            self._write(f"{begin}{harmless_text(self.progress.line(now))}\n")

    def draw(self) -> None:
        """The line below the one that pytest is writing, and the cursor back where it was."""
        if not self._live or self._ended.is_set():
            return
        writer = self.session.config.get_terminal_writer()
        text = harmless_text(self.progress.line(self.clock(), max(20, writer.fullwidth - 1)))
        # The line is drawn below pytest's, and the cursor goes back to where pytest writes next.
        column = writer.width_of_current_line + 1
        self._write(f"{_ERASE}\n{text}\x1b[1A\x1b[{column}G")
        self._drawn = True

    def erase(self) -> None:
        """Take the line away, so that pytest finds the screen as it left it."""
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False

    def _write(self, text: str) -> None:
        # A terminal that is gone is no reason to end the run.
        with suppress(OSError, ValueError):
            if self.out is not None:
                self.out.write(text)
                self.out.flush()

    # the end

    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C, or a run that stops itself (`-x` is none)."""
        self.interrupted = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        """No more lines from here on."""
        self.stop()
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Also where no session was finished."""
        self.stop()

    def stop(self) -> None:
        """End the thread, and take the line away."""
        with self._lock:
            self.erase()
            self._ended.set()
            if self.out is not None:
                with suppress(OSError):
                    self.out.close()
                self.out = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    # Behind the summary of the matrix, which is outermost too and registered before.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, Any, Any]:
        """After Ctrl-C: what is done, what is left, and how to go on."""
        result = yield
        if self.interrupted:
            command = f"pytest --compile-matrix={self.session.settings.matrix} --compile-resume"
            for line in self.progress.interrupted_lines(command):
                terminalreporter.write_line(harmless_text(line), yellow=True)
        return result


class _HeldOff:
    """While pytest writes: the line is taken away before, and drawn behind; the thread waits."""

    def __init__(self, hooks: ProgressHooks) -> None:
        self.hooks = hooks

    def __enter__(self) -> None:
        self.hooks._lock.acquire()
        self.hooks.erase()

    def __exit__(self, *_: object) -> None:
        try:
            # What pytest has written comes before the line below it.
            self.hooks.session.config.get_terminal_writer().flush()
            self.hooks.draw()
        finally:
            self.hooks._lock.release()
