"""Torch's own log and trace of a while, in files: channels of ``TORCH_LOGS``, and a trace for tlparse."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.ledger.torch_internals import private_name

__all__ = ["TRACE", "logged_channels", "traced_to_file"]

TRACE: Final = "trace"
"""A channel of ours: the structured trace, as a file for tlparse."""
_LEVELS: Final = {"+": logging.DEBUG, "-": logging.ERROR}


def _read_channels(channels: tuple[str, ...]) -> dict[str, Any]:
    """What ``torch._logging.set_logs`` is called with; its keywords are the names of all channels (torch 2.8 to 2.15).

    Raises :class:`UsageError` for a name that is none of them.
    """
    from torch._logging._internal import set_logs

    known = {name: parameter.default for name, parameter in inspect.signature(set_logs).parameters.items()
             if name != "modules"}
    wanted: dict[str, Any] = {}
    for channel in channels:
        name = channel.lstrip("+-")
        if name not in known:
            raise UsageError(f"--compile-logs: {channel!r} is no channel of torch's log; {nearest(name, known)}")
        # A component has a level, and None by default; what may be switched on or off is False.
        is_component = known[name] is None
        wanted[name] = _LEVELS.get(channel[:1], logging.INFO) if is_component else True
    return wanted


@contextlib.contextmanager
def logged_channels(channels: tuple[str, ...], file: Path) -> Iterator[Callable[[str], None]]:
    """Have what torch logs in these channels written to ``file`` while the block runs; nothing else of its log changes.

    Gives what begins a part of the file under a heading. A part without lines has none.

    Raises :class:`UsageError` for a name that is no channel.
    """
    from torch._logging._internal import set_logs

    wanted = _read_channels(channels)
    # Torch's own handlers write to what stderr is when they are made. Lines are there when the process dies.
    with file.open("w", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        with contextlib.redirect_stderr(log), _without_environment():
            set_logs(**wanted)
        headings = _Headings(log)
        try:
            yield headings.begin
        finally:
            headings.drop_empty()
            with _without_environment():
                set_logs()


class _Headings:
    """Headings in a log, none of them above nothing."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._start = self._end = log.tell()
        """Of the last heading."""

    def begin(self, heading: str) -> None:
        """What is logged from now on is of this."""
        self.drop_empty()
        self._start = self._log.tell()
        self._log.write(f"--- {heading}\n")
        self._end = self._log.tell()

    def drop_empty(self) -> None:
        """Take the last heading out if nothing was logged below it."""
        if self._start != self._end == self._log.tell():
            self._log.seek(self._start)
            self._log.truncate()
            self._end = self._start


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Without ``TORCH_LOGS``, which would have ``set_logs`` do nothing."""
    given = os.environ.pop("TORCH_LOGS", None)
    try:
        yield
    finally:
        if given is not None:
            os.environ["TORCH_LOGS"] = given


@contextlib.contextmanager
def traced_to_file(file: Path) -> Iterator[None]:
    """Have the structured trace written to ``file`` while the block runs, as ``TORCH_TRACE`` does; tlparse reads it.

    Raises :class:`~pytest_torchcompile.errors.InstrumentError` where this torch has another formatter
    (``torch._logging._internal.TorchLogsFormatter``, torch 2.13).
    """
    formatter = private_name("torch._logging._internal", "TorchLogsFormatter", "writes lines of the trace",
                             "no trace can be written for tlparse")
    handler = logging.FileHandler(file, "w", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(formatter(trace=True))
    log = logging.getLogger("torch.__trace")
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
