"""What a smoketest refuses a step for: each check raises :class:`StepFailed`, with the words for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle import Fault, Recording, problem
from pytest_torchcompile.oracle.recording import has_signal
from pytest_torchcompile.oracle.shared_memory import held_leaves
from pytest_torchcompile.quantity import numbered

__all__ = [
    "StepFailed", "compiler_failure", "has_answers", "has_finite_values", "is_finite", "left_alone",
    "refuse_differences", "refuse_eager_parts", "refuse_not_finite", "refuse_overwritten", "refuse_user_error",
]

_TEXT_LENGTH = 300
"""Characters of an error's text that a reason quotes."""


class StepFailed(Exception):
    """Why a smoketest ends."""

    def __init__(
        self, reason: str, phase: str, step: int = 0, evidence: str = "", user_error: BaseException | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.phase, self.step, self.evidence, self.user_error = reason, phase, step, evidence, user_error


# what was raised


def left_alone(
    error: BaseException | None, missing: tuple[int, ...], departed: tuple[int, ...], step: int
) -> StepFailed:
    """A call that the ranks ``missing`` do not end, or after which those that ``departed`` make no more.

    ``error`` is what this rank's call ended with.
    """
    ranks = numbered("rank", missing)
    if set(missing) <= set(departed):
        why = f"{ranks} had to leave the same call, and the log there says why"
    else:
        why = (f"{ranks} did not end the same call, and may wait for this rank in a collective until this process ends "
               "or the process group's time-out")
    if error is None:
        return StepFailed(why, "rank", step)
    raised = error
    if isinstance(error, StepFailed) and error.user_error is not None:
        raised = error.user_error
    text = _on_one_line(str(raised))
    return StepFailed(f"the model raises {type(raised).__name__} on this rank: {text}; {why}", "forward", step,
                      user_error=raised)


def refuse_user_error(fault: Fault | None, step: int) -> None:
    """Refuse what eager raised."""
    if fault is not None:
        raise _user_failure(fault, step)


def _user_failure(fault: Fault, step: int) -> StepFailed:
    # The test holds copies, so that eager alone might have had room enough: nobody's error.
    if isinstance(fault.exception, torch.OutOfMemoryError):
        return StepFailed("not enough memory for the test, which holds two more copies of the model", "state", step,
                          fault.traceback)
    if fault.ours:
        return StepFailed(f"the test itself failed, which is no fault of the model: {_described(fault)}", fault.phase,
                          step, fault.traceback)
    return StepFailed(f"the model raises without torch.compile too: {_described(fault)}", fault.phase, step,
                      fault.traceback, fault.exception)


def compiler_failure(fault: Fault, step: int) -> StepFailed:
    """What a compiled run raised, and eager did not."""
    return StepFailed(f"compiled it raises, eagerly it does not: {_described(fault)}", fault.phase, step,
                      fault.traceback)


def _described(fault: Fault) -> str:
    where = f"{fault.type} in {fault.phase}"
    text = _on_one_line(fault.text)
    return f"{where}: {text}" if text else where


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:_TEXT_LENGTH]


# what ran


def refuse_eager_parts(seen: Ledger, graph_runs: int, step: int) -> None:
    """Refuse a compiled run of which a part, or all, ran eagerly without anybody's wish."""
    frames = "\n".join(f"{f.function}  {f.file}:{f.line}  {f.kind}: {f.reason}" for f in seen.eager_frames)
    if seen.failures:
        failures = "\n".join(f"{f.function}  {f.file}:{f.line}  {f.type}: {f.message}" for f in seen.failures)
        raise StepFailed("it did not compile and ran eagerly instead", "forward", step, failures)
    silent = sorted({frame.kind for frame in seen.eager_frames if frame.kind in SILENT})
    if silent:
        raise StepFailed(f"a part silently ran eagerly: {', '.join(silent)}", "forward", step, frames)
    if not graph_runs:
        raise StepFailed("nothing was compiled: the forward pass ran no compiled graph", "forward", step, frames)
    if seen.lost:
        raise StepFailed("what ran compiled could not be told", "forward", step, "\n".join(seen.lost))


# what came of it


def refuse_differences(texts: list[str], step: int) -> None:
    """Refuse leaves that differ, one line each."""
    if texts:
        raise StepFailed(texts[0], "comparison", step, "\n".join(texts))


def refuse_overwritten(eager: Mapping[str, str], compiled: Mapping[str, str], step: int) -> None:
    """Refuse outputs of the step before that this one overwrote, compiled only.

    Memory that is only shared is no fault yet: a constant may be handed out again and again.
    """
    changed = {name: what for name, what in compiled.items() if what == "changed"}
    eager_too = {name: what for name, what in changed.items() if eager.get(name) == what}
    problems = map(problem, held_leaves(eager_too, changed, f"step {step}"))
    refuse_differences([text for text in problems if text], step)


def refuse_not_finite(compiled: Recording, train: bool, step: int) -> None:
    """Refuse a loss or a gradient that is no number, although it agrees with eager."""
    if train and compiled.loss is not None and not is_finite(compiled.loss):
        raise StepFailed("the loss is not finite, eagerly too", "loss", step)
    for name, gradient in compiled.gradients.items():
        if gradient is not None and not is_finite(gradient):
            raise StepFailed(f"{name} is not finite, eagerly too", "backward", step)


def has_finite_values(recording: Recording) -> bool:
    """Whether loss and gradients are numbers."""
    tensors = [recording.loss, *recording.gradients.values()]
    return all(tensor is None or is_finite(tensor) for tensor in tensors)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    return bool(values.isfinite().all())


def has_answers(recording: Recording) -> bool:
    """Whether an output or a gradient is more than zeros."""
    if _outputs_answer(recording):
        return True
    return any(gradient is not None and has_signal(gradient) for gradient in recording.gradients.values())


def _outputs_answer(recording: Recording) -> bool:
    """A zero among whole numbers, or False, is an answer like any other; floating zeros may just be memory."""
    values = [item.value for item in recording.outputs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return any(values)
    return not recording.all_zero or any(map(_holds_whole_numbers, tensors))


def _holds_whole_numbers(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not (tensor.is_floating_point() or tensor.is_complex())
