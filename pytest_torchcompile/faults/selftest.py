"""``pytest --compile-selftest``: what our checks catch on this machine's torch."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.faults import CASES
from pytest_torchcompile.faults.fault_parts import KINDS, Case
from pytest_torchcompile.faults.judged_case import JudgedCase, ReportedProblem, run_case

__all__ = ["selected_cases", "selftest", "table"]

WORDS = (*KINDS, "correct", "control")


_STEP = 40
"""After so many cases it says how far it is."""


def selftest(words: str, say: Callable[[str], object], device: str = "cpu") -> int:
    """Run the cases that ``words`` selects (see :func:`selected_cases`) on a device, and say what came of them.

    Returns the exit code.
    0: every fault was caught and nothing correct was reported; 1: one was missed, or a false alarm came.
    Raises :class:`UsageError` for a device that is not here.
    """
    cases = selected_cases(words)
    refuse_missing(device)
    # Each worker imports torch and compiles; with more than four they wait for memory and disk.
    workers = min(4, os.cpu_count() or 1, len(cases))
    say(f"{len(cases)} cases on torch {torch.__version__}, on {device}, in {workers} process(es)")
    start = time.perf_counter()
    judged_cases: list[JudgedCase] = []
    for judged in _run_all(cases, workers, device):
        judged_cases.append(judged)
        if not judged.ok:
            say(str(judged))
        # It takes minutes, and a CI job without output looks like one that hangs.
        if len(judged_cases) % _STEP == 0 and len(judged_cases) < len(cases):
            say(f"{len(judged_cases)} of {len(cases)} after {time.perf_counter() - start:.0f} s")
    say("")
    say(table(judged_cases))
    bad = [judged for judged in judged_cases if not judged.ok]
    seconds = time.perf_counter() - start
    say("")
    if bad:
        say(f"FAILED in {seconds:.0f} s: {len(bad)} of {len(judged_cases)} cases are not as they should be")
        return 1
    say(f"passed in {seconds:.0f} s")
    return 0


def selected_cases(words: str) -> list[Case]:
    """The cases of these kinds, or with these words in their names, separated by commas; all where there are none.

    ``correct`` are the backends that round differently, ``control`` the programs without any fault.
    Raises :class:`UsageError` for a word that selects nothing.
    """
    selected: list[Case] = []
    for word in filter(None, map(str.strip, words.split(","))):
        # A kind stands for itself only: "value" would also be in the names of some cases.
        if word in WORDS:
            matching = [case for case in CASES if word == _kind_of(case)]
        else:
            matching = [case for case in CASES if word in case.name]
        if not matching:
            raise UsageError(f"--compile-selftest: {word!r} is no kind, and in the name of no case; "
                             f"{nearest(word, WORDS)}")
        selected += [case for case in matching if case not in selected]
    return selected or list(CASES)


def _kind_of(case: Case) -> str:
    if case.control:
        return "control"
    return case.kind or "correct"


def refuse_missing(device: str) -> None:
    """Raises :class:`UsageError` for a device that this machine, or torch, does not have."""
    # The only question that all of torch's devices understand.
    try:
        torch.ones(1, device=device)
    except Exception as error:  # each device has its own way to say no
        text = " ".join(str(error).split())
        raise UsageError(f"--compile-selftest-device: torch {torch.__version__} can't use {device!r} here: "
                         f"{text[:200]}") from error


def _run_all(cases: Sequence[Case], workers: int, device: str) -> Iterator[JudgedCase]:
    """In order, each as soon as it is there. Cases go to the processes as their places in CASES."""
    # Else torch's profiler tells of each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Not fork: torch's threads do not survive it.
    spawn = multiprocessing.get_context("spawn")
    places = [(CASES.index(case), device) for case in cases]
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_silence_torch) as pool:
        results = pool.map(_run_place, places)
        for case in cases:
            yield JudgedCase(case, *next(results))


def _silence_torch() -> None:
    """Torch logs what it thinks of many of these faults; the table is what should be read."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _run_place(place: tuple[int, str]) -> tuple[str, tuple[ReportedProblem, ...], str, float]:
    # A case holds functions that can't be pickled, so neither it nor its verdict crosses the processes whole.
    index, device = place
    case = CASES[index]
    judged = run_case(replace(case, program=replace(case.program, device=device)))
    return judged.verdict, judged.reported, judged.text, judged.seconds


_APART = {"below noise": "below rounding", "mended": "not in this torch", "unavailable": "not run"}
"""Verdicts that are neither good nor bad, and what the remarks below the table call them."""
_COLUMNS = ("kind", "planted", "caught", "missed", "below rounding", "false alarms")
_Row = tuple[str | int, ...]


def table(judged_cases: Sequence[JudgedCase]) -> str:
    """What was caught, missed and falsely reported, one line for each kind of problem. Markdown, which a terminal shows
    as it is.

    A false alarm counts under every kind that it was reported as.
    """
    # What is reported beside a fault is a false alarm of another kind.
    alarms: Counter[str] = Counter()
    for judged in judged_cases:
        if judged.verdict == "false alarm":
            alarms.update({report.kind for report in judged.reported} - {judged.case.kind})
    planted = [judged for judged in judged_cases if judged.case.kind]
    rows: list[_Row] = [_COLUMNS]
    for kind in KINDS:
        row = _table_row(kind, [judged for judged in planted if judged.case.kind == kind], alarms[kind])
        if any(row[1:]):
            rows.append(row)
    rows.append(_table_row("all", planted, sum(judged.verdict == "false alarm" for judged in judged_cases)))
    return "\n".join([*_markdown_lines(rows), "", *_remarks(judged_cases)])


def _table_row(kind: str, judged_cases: Sequence[JudgedCase], alarms: int) -> _Row:
    verdicts = Counter(judged.verdict for judged in judged_cases)
    missed = sum(not judged.ok for judged in judged_cases)
    return kind, len(judged_cases), verdicts["caught"], missed, verdicts["below noise"], alarms


def _width_of_column(column: Sequence[object]) -> int:
    return max(len(str(cell)) for cell in column)


def _markdown_lines(rows: Sequence[_Row]) -> list[str]:
    """Columns as wide as their widest cell, numbers at the right."""
    first, *others = map(_width_of_column, zip(*rows, strict=True))
    lines = []
    for name, *numbers in rows:
        cells = [f"{number:>{width}}" for number, width in zip(numbers, others, strict=True)]
        lines.append(f"| {name:{first}} | {' | '.join(cells)} |")
    rules = ["-" * (width - 1) + ":" for width in others]
    lines.insert(1, f"| {'-' * first} | {' | '.join(rules)} |")
    return lines


def _remarks(judged_cases: Sequence[JudgedCase]) -> Iterator[str]:
    controls = sum(judged.case.control for judged in judged_cases)
    correct = sum(not judged.case.kind and not judged.case.control for judged in judged_cases)
    yield (f"False alarms are counted over {correct} correct backends that round differently and "
           f"{controls} programs with nothing planted in them.")
    for verdict, words in _APART.items():
        names = [f"{judged.case.name} ({judged.text})" for judged in judged_cases if judged.verdict == verdict]
        if names:
            yield f"{len(names)} {words}: {'; '.join(names)}."
