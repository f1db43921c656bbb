"""The wrong operator: the first whose results are wrong for its own inputs, or else not those that eager's have.

Errors are in units of noise: what the same operator, on the same numbers in plain contiguous memory, is off from
float64, and at least one rounding of its dtype.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from pytest_torchcompile.culprit.operator_notes import NotingBackend, OperatorNote, OperatorTrace
from pytest_torchcompile.state.tensor_forms import computable
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["FAR", "WrongOperator", "apart_from_eager", "find_wrong_operator", "operator_noise"]

FAR: Final = 64.0
"""Times the noise: far above what another order of additions makes in the operators that a model has."""
_RANDOM: Final = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class WrongOperator:
    """The first operator that is wrong."""

    note: OperatorNote
    noise: float
    """Its error, in units of noise."""
    result: int
    """Which of its results is the farthest off."""
    own_fault: bool
    """Is it wrong on its own inputs? Else they are right, and another value than eager's came of it."""
    remark: str = ""
    """``mixed memory formats``, or how eager's differs."""


def find_wrong_operator(trial: Any) -> WrongOperator | None:
    """Run a :class:`~.graph_trial.GraphTrial` by AOTAutograd, node by node; None where each operator is right.

    Raises InstrumentError where this torch has not what is needed.
    """
    backend = NotingBackend()
    forget_compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial.run_once(torch.compile(trial.module, backend=backend, dynamic=False))
        traced = OperatorTrace()
        trial.run_once(trial.module, traced)
    return _wrong_by_itself(backend.notes) or apart_from_eager(backend.notes, traced.notes)


def _wrong_by_itself(notes: Sequence[OperatorNote]) -> WrongOperator | None:
    for note in notes:
        noise, result = operator_noise(note)
        if noise > FAR:
            return WrongOperator(note, noise, result, own_fault=True, remark=_formats_of(note))
    return None


def operator_noise(note: OperatorNote) -> tuple[float, int]:
    """The error of the worst result in units of noise, and which it is; 0 where it can't be told."""
    exact = _run_again(note, torch.float64)
    plain = _run_again(note, None)
    if exact is None or plain is None:
        return 0.0, 0
    worst = (0.0, 0)
    for number, result in enumerate(note.results):
        noise = _noise_of(result, plain[number], exact[number])
        if noise > worst[0]:
            worst = noise, number
    return worst


def _noise_of(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """Distance of a result from the exact one over that of the plain one."""
    if not result.is_floating_point() or result.shape != exact.shape or not result.numel():
        return 0.0
    limits = torch.finfo(result.dtype)
    result, plain, exact = computable(result), computable(plain), computable(exact)
    finite = exact.isfinite()
    if not bool(finite.any()) or not torch.equal(plain.isfinite(), finite):
        return 0.0
    if not torch.equal(result.isfinite(), finite):
        return float("inf")
    truth = exact.double()[finite]
    error = (result.double()[finite] - truth).square().mean().sqrt()
    own = (plain.double()[finite] - truth).square().mean().sqrt()
    unit = limits.eps * truth.square().mean().sqrt()
    least = max(float(own), float(unit), limits.tiny)
    return float(error) / least


def _run_again(note: OperatorNote, dtype: torch.dtype | None) -> list[torch.Tensor] | None:
    """The results on contiguous copies of the inputs, in another dtype if given; None where that proves nothing."""
    if _RANDOM in getattr(note.operator, "tags", ()) or note.operator._schema.is_mutable or not note.results:
        return None

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        # A new tensor, for ``contiguous`` returns one of a single channel as it is.
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return fresh.to(dtype) if dtype is not None and fresh.is_floating_point() else fresh

    args, kwargs = pytree.tree_map_only(torch.Tensor, copied, (note.args, note.kwargs))
    # An operator that is told its dtype would round to it.
    if any(isinstance(leaf, torch.dtype) for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    try:
        with torch.no_grad():
            again = note.operator(*args, **kwargs)
    except Exception:  # whatever an operator raises of a wider dtype
        return None
    results = [leaf for leaf in pytree.tree_leaves(again) if isinstance(leaf, torch.Tensor)]
    return results if len(results) == len(note.results) else None


def _formats_of(note: OperatorNote) -> str:
    """``mixed memory formats`` where its large inputs lie in memory in different orders."""
    orders: set[str] = set()
    for tensor in _tensors_of(note):
        if tensor.ndim == 4:
            orders.add("channels_last" if _is_channels_last(tensor) else "contiguous")
    if len(orders) > 1:
        return "mixed memory formats"
    if orders == {"channels_last"}:
        return "channels_last"
    if any(not tensor.is_contiguous() for tensor in _tensors_of(note)):
        return "inputs that are not contiguous"
    return ""


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _tensors_of(note: OperatorNote) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves((note.args, note.kwargs)):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def apart_from_eager(ours: Sequence[OperatorNote], eagers: Sequence[OperatorNote]) -> WrongOperator | None:
    """The first operator whose results are not those of eager's of the same name and number."""
    by_name: dict[str, list[OperatorNote]] = {}
    for note in eagers:
        by_name.setdefault(note.name, []).append(note)
    counts = Counter(note.name for note in ours)
    seen: Counter[str] = Counter()
    for note in ours:
        number, same = seen[note.name], by_name.get(note.name, [])
        seen[note.name] += 1
        if len(same) != counts[note.name]:
            # What was put in, left out or taken apart has no partner.
            continue
        noise, result = _noise_apart(note, same[number])
        if noise > FAR:
            remark = "eager's has other inputs" if _other_inputs(note, same[number]) else "eager's has the same inputs"
            return WrongOperator(note, noise, result, own_fault=False, remark=remark)
    return None


def _noise_apart(ours: OperatorNote, eagers: OperatorNote) -> tuple[float, int]:
    exact = _run_again(eagers, torch.float64)
    if exact is None:
        return 0.0, 0
    worst = (0.0, 0)
    for number, (result, plain) in enumerate(zip(ours.results, eagers.results, strict=False)):
        noise = _noise_of(result, plain, exact[number])
        if noise > worst[0]:
            worst = noise, number
    return worst


def _other_inputs(ours: OperatorNote, eagers: OperatorNote) -> bool:
    pairs = list(zip(_tensors_of(ours), _tensors_of(eagers), strict=False))
    return any(one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
               for one, other in pairs if one.is_floating_point())
