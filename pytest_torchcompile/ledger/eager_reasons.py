"""Eager reasons: why code was left to eager, with the line, torch's reason there, and what to do. No torch.

Of graph breaks and frames as plain data, so that a stored report can be asked too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.errors import short_line
from pytest_torchcompile.ledger.records import EAGER_WITHOUT_WORDS, part_of

__all__ = ["EagerReason", "break_reason", "eager_reason"]

_KNOWN: Final = {
    "Tensor.item()": ("a number is taken out of a tensor (`.item()`, `float()`)",
                      "keep it a tensor, or set torch._dynamo.config.capture_scalar_outputs = True"),
    "Tensor.tolist()": ("numbers are taken out of a tensor (`.tolist()`)", "keep them a tensor"),
    "Data-dependent branching": ("the code branches on a number of a tensor",
                                 "compute both sides and choose by torch.where, or write it with torch.cond"),
    "RNN, GRU, or LSTM": ("an RNN, GRU or LSTM of torch's is called, which torch.compile leaves to eager",
                          "leave it eager and compile the parts around it, or try torch._dynamo.config.allow_rnn = "
                          "True, which traces each of its steps"),
}
"""What torch's reason for a graph break holds, to what the code does there and what to do (torch 2.8 to 2.15)."""
_OUT_OF_FORWARD: Final = "move what breaks the graph out of forward, as the check `graph_breaks` says"
_LONGEST: Final = 200


@dataclass(frozen=True)
class EagerReason:
    """Why something ran eagerly."""

    what: str
    """The place, and what was found there."""
    remedy: str


def break_reason(graph_break: Mapping[str, Any]) -> EagerReason:
    """Of one graph break (:class:`~pytest_torchcompile.ledger.records.GraphBreak` as plain data).

    >>> break_reason({"file": "net.py", "line": 7, "reason": "Data-dependent branching"}).what
    'net.py:7, where the code branches on a number of a tensor'
    """
    place = f"{graph_break['file']}:{graph_break['line']}"
    # Older reports have no reasons, and no hints.
    reason = short_line(graph_break.get("reason", ""), _LONGEST)
    for part, (what, remedy) in _KNOWN.items():
        if part in reason:
            return EagerReason(f"{place}, where {what}", remedy)
    hint = short_line(graph_break.get("hint", ""), _LONGEST)
    remedy = f"{_OUT_OF_FORWARD}; torch's hint: {hint}" if hint else _OUT_OF_FORWARD
    return EagerReason(f"{place} ({reason})" if reason else place, remedy)


def eager_reason(breaks: Sequence[Mapping[str, Any]], frames: Sequence[Mapping[str, Any]]) -> EagerReason:
    """Why no compiled code ran: the first graph break with what torch gave up for it, else the first eager frame.

    :param breaks: graph breaks in order of time, as plain data.
    :param frames: frames that ran eagerly (:class:`~pytest_torchcompile.ledger.records.EagerFrame`), alike.
    """
    given_up = ""
    if frames:
        first = frames[0]
        given_up = f"{part_of(first['function'], first.get('resumed_at', 0))} ({first['file']}:{first['line']})"
    if breaks:
        why = break_reason(breaks[0])
        subject = f"torch gave up {given_up} at" if given_up else "there is"
        in_loop = ", inside a loop, where torch cannot go on" if frames and "in loop" in frames[0]["reason"] else ""
        return EagerReason(f"{subject} the graph break at {why.what}{in_loop}", why.remedy)
    if given_up:
        return EagerReason(f"{given_up} ran eagerly ({short_line(frames[0]['reason'], _LONGEST)})",
                           "see the check `compiles` for what stayed outside")
    return EagerReason("torch reports no graph break and no frame that it skipped", EAGER_WITHOUT_WORDS)
