"""Why a smoketest ends: what is raised, and the words for it."""

from __future__ import annotations

import torch

from pytest_torchcompile.oracle import Fault
from pytest_torchcompile.quantity import numbered

__all__ = ["StepFailed", "alone", "of_compiler", "refuse_differences", "refuse_user_error"]


class StepFailed(Exception):
    """Why a smoketest ends."""

    def __init__(
        self, reason: str, phase: str, step: int = 0, evidence: str = "", user_error: BaseException | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.phase, self.step, self.evidence, self.user_error = reason, phase, step, evidence, user_error


def alone(error: BaseException | None, missing: tuple[int, ...], left: tuple[int, ...], step: int) -> StepFailed:
    """A call that the ranks ``missing`` do not end, or after which those that ``left`` make no more.

    ``error`` is what this rank's call ended with.
    """
    who = numbered("rank", missing)
    why = f"{who} had to leave the same call, and the log there says why" if set(missing) <= set(left) else (
        f"{who} did not end the same call, and may wait for this rank in a collective until this process ends or the "
        "process group's time-out")
    if error is None:
        return StepFailed(why, "rank", step)
    raised = error.user_error or error if isinstance(error, StepFailed) else error
    told = " ".join(str(raised).split())[:300]
    return StepFailed(f"the model raises {type(raised).__name__} on this rank: {told}; {why}", "forward", step,
                  user_error=raised)


def refuse_differences(wrong: list[str], step: int) -> None:
    """Raise :class:`StepFailed` for leaves that differ, one line each."""
    if wrong:
        raise StepFailed(wrong[0], "comparison", step, "\n".join(wrong))


def refuse_user_error(fault: Fault | None, step: int) -> None:
    """Raise :class:`StepFailed` for what eager raised."""
    if fault is not None:
        raise _of_user(fault, step)


def _of_user(fault: Fault, step: int) -> StepFailed:
    if isinstance(fault.exception, torch.OutOfMemoryError):
        return StepFailed("not enough memory for the test, which holds two more copies of the model", "state", step,
                      fault.traceback)
    if fault.ours:
        return StepFailed(f"the test itself failed, which is no fault of the model: {_told(fault)}", fault.phase, step,
                      fault.traceback)
    return StepFailed(f"the model raises without torch.compile too: {_told(fault)}", fault.phase, step, fault.traceback,
                  fault.exception)


def of_compiler(fault: Fault, step: int) -> StepFailed:
    """What a compiled run raised, and eager did not."""
    return StepFailed(f"compiled it raises, eagerly it does not: {_told(fault)}", fault.phase, step, fault.traceback)


def _told(fault: Fault) -> str:
    text = " ".join(fault.text.split())
    return f"{fault.type} in {fault.phase}" + (f": {text[:300]}" if text else "")
