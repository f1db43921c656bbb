"""Trouble: a run's own files that could not be written. It is told once, and the run goes on.

A disk that is full, or a ``.compile-matrix`` that is read-only, is no verdict on any cell. The verdicts are still
shown, the run ends as one with a failure, and the gate finds no whole report of it.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Trouble"]


class Trouble:
    """The first file of the run that could not be written, and why."""

    def __init__(self) -> None:
        self.text = ""
        """One sentence; empty while there is no trouble."""

    def try_writing(self, file: object, write: Callable[[], object]) -> bool:
        """Whether ``write`` could write the file; an OSError is noted, and goes no further."""
        try:
            write()
        except OSError as error:
            self.text = self.text or f"{file} could not be written: {error}; the run went on, and ends as a failure"
            return False
        return True
