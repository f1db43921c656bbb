"""Settings: the options of one run, read once and validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions
from pytest_torchcompile.run.options import OPTIONS, REUSES, Option

__all__ = ["ISOLATION", "RANKS", "Settings"]

ISOLATION: Final = ("rank", "cell")
RANKS: Final = ("here", "torchrun")


@dataclass(frozen=True)
class Settings:
    """The settings of one run, validated."""

    matrix: str
    checks: tuple[str, ...]
    shard: tuple[int, int]
    timeout: float
    isolation: str
    inprocess: bool
    ranks: str = "here"
    """Where the ranks of a cell are: a word of :data:`RANKS`."""
    baseline: str = ""
    """An earlier report to compare with."""
    keep_runs: int = 10
    """Reports of whole runs that are kept."""
    workers_per_gpu: int = 1
    """Cells that may run on one GPU at a time."""
    reuse: str = ""
    """What is taken of earlier runs, a word of :data:`~pytest_torchcompile.run.options.REUSES`; empty: nothing."""
    logs: tuple[str, ...] = ()
    """Channels of torch's log that are kept of each cell."""
    folder: str = ""
    """The folder that gets ``.compile-matrix``; empty: pytest's root folder."""
    resume: bool = False
    """Are cells left out that the report has verdicts of?"""
    culprit: float = 0.0
    """Seconds for finding the operator to blame in a failing cell; 0: it is not looked for."""
    fuzz: FuzzOptions = field(default_factory=FuzzOptions)

    @classmethod
    def read(cls, get: Callable[[Option], Any]) -> Settings:
        """Make settings from a function that gives each option's text (a flag's bool).

        Raises :class:`~pytest_torchcompile.errors.UsageError`, naming the option.
        """
        given = {option.name: get(option) for option in OPTIONS}
        # These two first: that they exclude each other is told before a mistake in any other value.
        inprocess, reuse = _read_flag(given["inprocess"]), _read_reuse(str(given["reuse"]))
        if reuse and (inprocess or given["ranks"] == "torchrun"):
            raise UsageError("--compile-reuse needs rank processes of this machine, which tell what a cell read; leave "
                             "it out, or --compile-inprocess and --compile-ranks torchrun")
        return cls(
            matrix=given["matrix"],
            checks=_read_checks(given["checks"]),
            shard=_read_shard(given["shard"]),
            timeout=_read_seconds(given["timeout"]),
            culprit=_read_culprit(given["culprit"]),
            isolation=_known_word("isolation", given["isolation"], ISOLATION, "a way to isolate cells"),
            inprocess=inprocess,
            ranks=_read_ranks(given["ranks"], inprocess),
            fuzz=FuzzOptions.read(given["fuzz-examples"], given["fuzz-seconds"], given["fuzz-seed"],
                                  settings=given["fuzz-settings"]),
            baseline=given["baseline"],
            keep_runs=_read_keep_runs(given["keep-runs"]),
            workers_per_gpu=_read_workers(given["workers-per-gpu"]),
            reuse=reuse,
            logs=_read_logs(given["logs"]),
            folder=given["folder"],
            resume=_read_flag(given["resume"]),
        )


def _read_flag(given: Any) -> bool:
    # A flag is a bool; its key in the ini file is a text.
    return given in (True, "true", "1", "yes", "on")


def _read_reuse(text: str) -> str:
    # Its key in the ini file was that of a flag.
    if text in ("", "false", "False", "0", "no", "off"):
        return ""
    if text in ("true", "True", "1", "yes", "on"):
        return "results"
    return _known_word("reuse", text, REUSES, "what can be taken of earlier runs")


def _read_checks(text: str) -> tuple[str, ...]:
    from pytest_torchcompile.checks import CHECKS, current_name

    names = tuple(current_name(name.strip()) for name in text.split(",") if name.strip())
    for name in names:
        if name not in CHECKS:
            raise UsageError(f"--compile-checks: {name!r} is not a check; {nearest(name, CHECKS)}")
    # Causes before what follows from them.
    return tuple(name for name in CHECKS if name in names)


def _read_shard(text: str) -> tuple[int, int]:
    from pytest_torchcompile.plan.selection import parse_shard

    return parse_shard(text or "1/1")


def _read_logs(text: str) -> tuple[str, ...]:
    # Which channels there are torch alone knows; the rank asks it.
    return tuple(dict.fromkeys(channel.strip() for channel in text.split(",") if channel.strip()))


def _read_keep_runs(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--compile-keep-runs: {text!r} is no number of runs; expected 0 or more, such as 10")
    return int(text)


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        # One message for what is no number, and for a number that is no time.
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--compile-timeout: {text!r} is not a number of seconds above 0, for example 300")
    return seconds


def _read_culprit(text: str) -> float:
    if text in ("", "0"):
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--compile-culprit: {text!r} is no number of seconds; expected one above 0, such as 120, or "
                         "0 for not at all")
    return seconds


def _read_workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"--compile-workers-per-gpu: {text!r} is not a whole number from 1 on, for example 4")
    return int(text)


def _known_word(option: str, text: str, words: tuple[str, ...], what: str) -> str:
    if text not in words:
        raise UsageError(f"--compile-{option}: {text!r} is not {what}; {nearest(text, words)}")
    return text


def _read_ranks(text: str, inprocess: bool) -> str:
    where = _known_word("ranks", text, RANKS, "a place for ranks")
    if where == "torchrun" and inprocess:
        raise UsageError("--compile-ranks torchrun runs a rank in a process of its own; leave out --compile-inprocess")
    return where
