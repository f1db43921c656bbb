"""What the usual ways to compare would make of our planted faults: ``python benchmarks/rivals.py``.

Every record of ``pytest --compile-selftest`` that ``compare()`` answers for is run plainly, eagerly and compiled, all
calls three times over from the same state and seed, and handed to

* ``torch.testing.assert_close`` with its default tolerances: of the outputs, and of outputs and gradients;
* ``torch._dynamo.utils.same``, what torch's own benchmarks and fuzzers use, with the outputs of a float64 run and
  tolerance 1e-4 (1e-3 in half precision): of the outputs;
* ``compare()``.

An error that only the compiled run raises is counted as caught for everybody. Also says which record plants nothing,
bit by bit, and fails if there is one.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch._dynamo.utils import same

from pytest_torchcompile.faults import CASES, Case
from pytest_torchcompile.faults.fault_parts import KINDS
from pytest_torchcompile.faults.judged_case import Presence, run_case
from pytest_torchcompile.oracle import Recording

WAYS = ("assert_close", "same()", "assert_close + gradients", "compare()")
NOT_BY_VALUE = ("vacuous", "nondeterministic")
"""Kinds in which eager and compiled may well agree."""


def outputs(recording: Recording) -> dict[str, Any]:
    """Every output by its path."""
    return {name: item.value for name, item in recording.outputs.items()}


def with_gradients(recording: Recording) -> dict[str, Any]:
    """The outputs and every gradient."""
    return {**outputs(recording), **recording.gradients}


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Does ``assert_close`` pass for every value, with its defaults (NaN equals NaN)?"""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        if value is None or other[name] is None:
            if value is not other[name]:
                return False
            continue
        try:
            torch.testing.assert_close(other[name], value, equal_nan=True)
        except AssertionError:
            return False
    return True


def similar(one: dict[str, Any], other: dict[str, Any], exact: dict[str, Any]) -> bool:
    """Does ``same()`` pass?"""
    half = any(isinstance(v, torch.Tensor) and v.dtype.itemsize == 2 for v in one.values())
    try:
        return same(one, other, exact, tol=1e-3 if half else 1e-4, equal_nan=True, log_error=lambda *_: None)
    except (AssertionError, RuntimeError):
        return False


def verdicts(case: Case, presence: Presence) -> dict[str, bool]:
    """Which of the others would fail a test of this record."""
    found = dict.fromkeys(WAYS[:-1], False)
    for eager, compiled, exact in zip(presence.eager, presence.compiled, presence.exact(), strict=True):
        if eager.error:
            continue  # their test ends with the error of the model itself, compared with nothing
        if compiled.error:
            return dict.fromkeys(found, True)
        one, other = outputs(eager), outputs(compiled)
        found["assert_close"] |= not close(one, other)
        found["same()"] |= not similar(one, other, outputs(exact))
        found["assert_close + gradients"] |= not close(with_gradients(eager), with_gradients(compiled))
    return found


def main() -> int:
    """Print the table; 1 if a record plants nothing."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    faults: Counter[str] = Counter()
    caught: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    alarms: dict[str, list[str]] = {way: [] for way in WAYS}
    correct, nothing = 0, []
    for case in (case for case in CASES if case.check == "compare" and not case.below):
        presence = Presence(case)
        if case.kind not in NOT_BY_VALUE and not case.control and not presence.differences():
            nothing.append(case.name)
        outcome = run_case(case)
        found = {**verdicts(case, presence), "compare()": outcome.verdict in ("caught", "false alarm")}
        faults[case.kind] += bool(case.kind)
        correct += not case.kind
        for way in WAYS:
            if case.kind:
                caught[way][case.kind] += found[way]
            elif found[way]:
                alarms[way].append(case.name)
    print(f"torch {torch.__version__}\n")
    print(f"| kind | planted | {' | '.join(WAYS)} |\n| --- | ---: |{' ---: |' * len(WAYS)}")
    for kind in (kind for kind in KINDS if faults[kind]):
        print(f"| {kind} | {faults[kind]} | {' | '.join(str(caught[way][kind]) for way in WAYS)} |")
    print(f"| all caught | {faults.total()} | {' | '.join(str(caught[way].total()) for way in WAYS)} |")
    print(f"| false alarms | of {correct} | {' | '.join(str(len(alarms[way])) for way in WAYS)} |")
    for way in WAYS:
        print(f"\nfalse alarms of {way}: {', '.join(alarms[way]) or 'none'}")
    print(f"\nrecords that plant nothing: {', '.join(nothing) or 'none'}")
    return 1 if nothing else 0


if __name__ == "__main__":
    sys.exit(main())
