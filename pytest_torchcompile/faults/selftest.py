"""``pytest --compile-selftest``: what our checks catch on this machine's torch."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.faults import CASES
from pytest_torchcompile.faults.case import KINDS, Case
from pytest_torchcompile.faults.outcome import Outcome, Report, run
from pytest_torchcompile.faults.table import table

__all__ = ["selected", "selftest"]

WORDS = (*KINDS, "correct", "control")


_STEP = 40
"""After so many cases it says how far it is."""


def selftest(words: str, say: Callable[[str], object], device: str = "cpu") -> int:
    """Run the cases that ``words`` selects (see :func:`selected`) on a device, say what came of them, return the exit
    code.

    0: every fault was caught and nothing correct was reported; 1: one was missed, or a false alarm came.
    Raises :class:`UsageError` for a device that is not here.
    """
    cases = selected(words)
    refuse_missing(device)
    workers = min(4, os.cpu_count() or 1, len(cases))
    say(f"{len(cases)} cases on torch {torch.__version__}, on {device}, in {workers} process(es)")
    start = time.perf_counter()
    outcomes = []
    for outcome in _run_all(cases, workers, device):
        outcomes.append(outcome)
        if not outcome.ok:
            say(str(outcome))
        if len(outcomes) % _STEP == 0 and len(outcomes) < len(cases):
            say(f"{len(outcomes)} of {len(cases)} after {time.perf_counter() - start:.0f} s")
    say("")
    say(table(outcomes))
    bad = [o for o in outcomes if not o.ok]
    say("")
    say(f"{'FAILED' if bad else 'passed'} in {time.perf_counter() - start:.0f} s"
        + (f": {len(bad)} of {len(outcomes)} cases are not as they should be" if bad else ""))
    return 1 if bad else 0


def selected(words: str) -> list[Case]:
    """The cases of these kinds, or with these words in their names, separated by commas; all where there are none.

    ``correct`` are the backends that round differently, ``control`` the programs without any fault.
    Raises :class:`UsageError` for a word that selects nothing.
    """
    found: list[Case] = []
    for word in filter(None, map(str.strip, words.split(","))):
        these = [case for case in CASES if word == _kind(case) or (word not in WORDS and word in case.name)]
        if not these:
            raise UsageError(f"--compile-selftest: {word!r} is no kind, and in the name of no case; "
                             f"{nearest(word, WORDS)}")
        found += [case for case in these if case not in found]
    return found or list(CASES)


def _kind(case: Case) -> str:
    return case.kind or ("control" if case.control else "correct")


def refuse_missing(device: str) -> None:
    """Raises :class:`UsageError` for a device that this machine, or torch, does not have."""
    try:
        torch.ones(1, device=device)
    except Exception as error:  # each device has its own way to say no
        text = " ".join(str(error).split())
        raise UsageError(f"--compile-selftest-device: torch {torch.__version__} can't use {device!r} here: "
                         f"{text[:200]}") from error


def _run_all(cases: Sequence[Case], workers: int, device: str) -> Iterator[Outcome]:
    """In order, each as soon as it is there. Cases go to the processes as their places in CASES."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, or it tells of each start and stop
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_quiet) as pool:
        found = pool.map(_run, [(CASES.index(case), device) for case in cases])
        for case in cases:
            yield Outcome(case, *next(found))


def _quiet() -> None:
    """Torch logs what it thinks of many of these faults; the table is what should be read."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _run(what: tuple[int, str]) -> tuple[str, tuple[Report, ...], str, float]:
    case, device = CASES[what[0]], what[1]
    outcome = run(replace(case, program=replace(case.program, device=device)))
    return outcome.verdict, outcome.reports, outcome.text, outcome.seconds
