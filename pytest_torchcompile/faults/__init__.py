"""Planted faults, as data: what our checks must catch, and what they must let pass.

``FAULTS`` are wrong backends and models, ``CORRECT`` are right ones that round differently and ``CONTROLS`` the
programs of the faults as they are. All are run by ``pytest --compile-selftest`` and, the same records, by the tests
of this package. To add one: a record in one of the files here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.faults.beside_values import BESIDE_VALUES, BESIDE_VALUES_KEPT
from pytest_torchcompile.faults.broken_contract import BROKEN_CONTRACT, KEPT_CONTRACT
from pytest_torchcompile.faults.fault_parts import Case, Program, untouched
from pytest_torchcompile.faults.moments import MOMENTS
from pytest_torchcompile.faults.not_compiled import COMPILING, CONTROLS_OF_CHECKS, FAILURES
from pytest_torchcompile.faults.reused_memory import REUSED_MEMORY
from pytest_torchcompile.faults.rewrites import REWRITES
from pytest_torchcompile.faults.wrong_form import FORM, FORM_KEPT, STATE
from pytest_torchcompile.faults.wrong_gradients import GRADIENTS, PENALIZED_CONTROLS
from pytest_torchcompile.faults.wrong_values import VALUES

__all__ = ["CASES", "CONTROLS", "CORRECT", "FAULTS", "Case", "Program"]

FAULTS: Final[tuple[Case, ...]] = (
    *VALUES, *MOMENTS, *REUSED_MEMORY, *GRADIENTS, *STATE, *FORM, *FAILURES, *COMPILING,
    *BROKEN_CONTRACT, *BESIDE_VALUES)
CORRECT: Final[tuple[Case, ...]] = REWRITES


def _untouched_programs() -> Iterator[Case]:
    """Every program whose fault is in the backend, with a backend that changes nothing."""
    seen: list[Program] = []
    for case in FAULTS:
        # Of the other checks the controls are listed; a fault of torch's own may be in the program itself.
        in_backend = case.check == "compare" and case.backend is not untouched and not case.upstream
        # AOTAutograd, through which an untouched backend goes, refuses what a loss differentiates twice.
        if in_backend and case.program.loss is None and case.program not in seen:
            seen.append(case.program)
            yield Case(f"untouched {case.program}", "nothing", case.program, control=True)


CONTROLS: Final[tuple[Case, ...]] = (*_untouched_programs(), *CONTROLS_OF_CHECKS, *PENALIZED_CONTROLS, *KEPT_CONTRACT,
                                  *BESIDE_VALUES_KEPT, *FORM_KEPT)
CASES: Final[tuple[Case, ...]] = (*FAULTS, *CORRECT, *CONTROLS)
