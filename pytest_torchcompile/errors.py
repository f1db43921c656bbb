"""Every exception this package raises on purpose, and the exit code it stands for.

::

    TorchcompileError            1   whatever we raise on purpose
      UsageError                 4   the caller gave something we cannot use (pytest's own code for it)
        MatrixError              4   ... in a matrix or policy file, with file:line:column
      RepeatedMistake            4   ... in a function of theirs, and every cell that calls it alike would find it
      ReportError                2   a report that cannot be read, or not by this version
      NothingToJudge             3   nothing ran, so nothing may pass
      NoRank                       1   no process can be had to run a cell in
      Unavailable                    this machine lacks what a cell needs: a skip, never a pass
      InstrumentError            1   this torch lacks an internal that an instrument reads
      CompileFailed              1   a model does not compile, or does not pass its smoketest, and nobody may fall back
      CannotFallBack             1   ... and to go on eagerly could give other results than eager gives
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = [
    "OWN_FAILURE",
    "CannotFallBack",
    "CompileFailed",
    "InstrumentError",
    "MatrixError",
    "NoRank",
    "NothingToJudge",
    "RepeatedMistake",
    "ReportError",
    "TorchcompileError",
    "Unavailable",
    "UsageError",
    "headline",
    "nearest",
    "short_line",
]

OWN_FAILURE: Final = 70
"""Exit code for a mistake of ours (EX_SOFTWARE of sysexits.h): Python's own 1 would read as a verdict."""
_LONGEST_HEADLINE: Final = 200
"""Characters."""


class TorchcompileError(Exception):
    """Whatever this package raises on purpose."""

    exit_code = 1


class UsageError(TorchcompileError):
    """The caller gave something we cannot use."""

    exit_code = 4


class MatrixError(UsageError):
    """A matrix or policy file has a mistake; the text starts with ``file:line:column``."""

    def __init__(self, path: str, line: int, column: int, text: str) -> None:
        super().__init__(f"{path}:{line}:{column}: {text}")
        self.path = path
        self.line = line
        self.column = column
        self.text = text


class RepeatedMistake(UsageError):
    """A factory or inputs function that cannot be called as the matrix says, or raised the same twice."""


class NoRank(TorchcompileError):
    """No rank process can be had; the text is one sentence, ``evidence`` what was written by whoever starts them."""

    def __init__(self, text: str, evidence: str = "") -> None:
        super().__init__(text)
        self.evidence = evidence


class ReportError(TorchcompileError):
    """A report that cannot be read, or not by this version."""

    exit_code = 2


class NothingToJudge(TorchcompileError):
    """Nothing ran, so nothing may pass."""

    exit_code = 3


class Unavailable(TorchcompileError):
    """This machine lacks what a cell needs; reported as a skip with this text."""


class InstrumentError(TorchcompileError):
    """This torch lacks an internal that an instrument reads; the text names both."""


class CompileFailed(TorchcompileError):
    """A model does not compile, or does not pass its smoketest, and ``fail_policy`` is ``raise``."""


class CannotFallBack(TorchcompileError):
    """A compiled model failed where to go on eagerly could give other results than eager gives; the text says why."""


# Known names that an error lists; there are more models than checks.
_LISTED = 30


def headline(text: str) -> str:
    """The first line of an error's text, cut where it is long; where it only leads up to the next one, that one too.

    >>> headline("Unsupported:\\n  Data-dependent branching\\n  Explanation: ...")
    'Unsupported: Data-dependent branching'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = 2 if lines and lines[0].endswith(":") else 1
    start = " ".join(lines[:told])
    if len(start) <= _LONGEST_HEADLINE:
        return start
    return f"{start[:_LONGEST_HEADLINE - 3]}..."


def short_line(text: str, longest: int) -> str:
    """All of a text on one line, cut behind ``longest`` characters: some messages of the compiler bring a graph along.

    >>> short_line("aten.mm\\n  has no kernel", 40), short_line("aten.mm has no kernel", 7)
    ('aten.mm has no kernel', 'aten.mm ...')
    """
    line = " ".join(text.split())
    if len(line) <= longest:
        return line
    return f"{line[:longest].rstrip()} ..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error text: the nearest known name, and the list of all of them.

    >>> nearest("inducter", ["eager", "inductor"])
    "did you mean 'inductor'? Known: eager, inductor"
    """
    import difflib

    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        listed += ", ..."
    return f"{hint}Known: {listed}" if names else "none are known"
