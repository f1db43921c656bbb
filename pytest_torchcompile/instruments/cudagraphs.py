"""CUDA graphs that Inductor did without, and why.

Some are skipped when compiled, some at the first run; only a log message has both
(``log_cudagraph_skip_and_bump_counter`` in torch/_inductor/cudagraph_utils.py: a warning of the artifact
``cudagraphs``, in torch 2.8 of ``perf_hints``).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.instruments.records import CudagraphSkip

if TYPE_CHECKING:
    from pytest_torchcompile.instruments.watch import Watch

__all__ = ["installed", "parse"]

_LOGGERS: Final = tuple(f"torch._inductor.cudagraph_utils.__{name}" for name in ("cudagraphs", "perf_hints"))
_REASON: Final = re.compile(r"(?:skipping cudagraphs due to )+(.*?)(?:\. Found from|$)", re.S)
_LINE: Final = re.compile(r'File "(.+?)", line (\d+)')


def parse(message: str) -> CudagraphSkip | None:
    """Read a log message; None for one about something else.

    >>> parse('skipping cudagraphs due to mutated inputs. Found from : \\n   File "n.py", line 5, in f')
    CudagraphSkip(reason='mutated inputs', file='n.py', line=5, during='')
    """
    match = _REASON.search(message)
    if not match:
        return None
    lines = _LINE.findall(message)
    file, line = lines[-1] if lines else ("", 0)
    return CudagraphSkip(" ".join(match[1].split()), file, int(line))


class _Handler(logging.Handler):
    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.watch.guarded(self._read, record)

    def _read(self, record: logging.LogRecord) -> None:
        if found := parse(record.getMessage()):
            self.watch.add(found)


@contextlib.contextmanager
def installed(watch: Watch) -> Iterator[None]:
    """Report skipped CUDA graphs to ``watch`` while the block runs. What torch itself logs stays as it is."""
    handler, loggers = _Handler(watch), [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
