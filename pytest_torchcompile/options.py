"""OPTIONS: every setting of a matrix run, declared once; parser, ini keys, help and README are made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.errors import UsageError, nearest

__all__ = ["OPTIONS", "Option", "Settings"]


@dataclass(frozen=True)
class Option:
    """One setting: ``--compile-NAME`` on the command line, ``compile_NAME`` in the ini file."""

    name: str
    help: str
    default: str = ""
    metavar: str = ""
    """Empty: a flag."""
    optional: bool = False
    """May the option be given without a value?"""

    @property
    def flag(self) -> str:
        """``--compile-name``."""
        return f"--compile-{self.name}"

    @property
    def ini(self) -> str:
        """``compile_name``."""
        return f"compile_{self.name}"


OPTIONS: Final = (
    Option("matrix", "Run the cells of a matrix file; without FILE, the ini key's or matrix/default.yaml",
           "matrix/default.yaml", "FILE", optional=True),
    Option("checks", "Judge only these checks, separated by commas (default: those of the matrix)", "", "NAMES"),
    Option("shard", "Run one of N parts of the matrix, for example 2/8", "", "I/N"),
    Option("timeout", "Seconds that one cell may take before its process is stopped", "300", "SECONDS"),
    Option("isolation", "'rank': processes are reused between cells; 'cell': a fresh one for each", "rank", "WHAT"),
    Option("inprocess", "Run cells in pytest's own process, for debuggers: a crash then ends pytest"),
)
ISOLATION: Final = ("rank", "cell")


@dataclass(frozen=True)
class Settings:
    """The settings of one run, validated."""

    matrix: str
    checks: tuple[str, ...]
    shard: tuple[int, int]
    timeout: float
    isolation: str
    inprocess: bool

    @classmethod
    def read(cls, get: Callable[[Option], Any]) -> Settings:
        """Make settings from a function that gives each option's text (a flag's bool).

        Raises :class:`~pytest_torchcompile.errors.UsageError`, naming the option.
        """
        given = {option.name: get(option) for option in OPTIONS}
        return cls(
            matrix=given["matrix"],
            checks=_checks(given["checks"]),
            shard=_shard(given["shard"]),
            timeout=_seconds(given["timeout"]),
            isolation=_isolation(given["isolation"]),
            inprocess=given["inprocess"] in (True, "true", "1", "yes", "on"),
        )


def _checks(text: str) -> tuple[str, ...]:
    from pytest_torchcompile.checks import CHECKS

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in CHECKS:
            raise UsageError(f"--compile-checks: {name!r} is not a check; {nearest(name, CHECKS)}")
    return names


def _shard(text: str) -> tuple[int, int]:
    from pytest_torchcompile.shards import parse

    return parse(text) if text else (1, 1)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--compile-timeout: {text!r} is not a number of seconds above 0, for example 300")
    return seconds


def _isolation(text: str) -> str:
    if text not in ISOLATION:
        raise UsageError(f"--compile-isolation: {text!r} is not a way to isolate cells; {nearest(text, ISOLATION)}")
    return text
