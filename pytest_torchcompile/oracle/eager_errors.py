"""What a program raises without torch.compile too: whose code it was, and what that code was given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import headline
from pytest_torchcompile.loading import kind_of
from pytest_torchcompile.oracle.recording import Fault

__all__ = ["EagerRaised", "given_text", "whose_code"]

_WHO: Final = {"forward": "the model", "loss": "the loss function", "backward": "the backward pass"}
_MOST_KEYS: Final = 6
"""Keys of a dict that are told."""


class EagerRaised(Exception):
    """The model, its loss or its backward pass raises without torch.compile too."""

    def __init__(self, label: str, error: Fault) -> None:
        super().__init__(f"{whose_code(error)} raises without torch.compile too, at {label}: {error.type}: "
                         f"{headline(error.text)}")
        self.error = error
        self.given = ""
        """:func:`given_text`, where it helps."""


def whose_code(error: Fault) -> str:
    """Who has raised it, as the subject of a sentence.

    >>> whose_code(Fault("ValueError", "", "loss"))
    'the loss function'
    """
    phase, _, _of_which = error.phase.partition(",")
    return _WHO.get(phase, "the model")


def given_text(error: Fault, batch: Batch) -> str:
    """What the code that raised was called with, where that may be the mistake; else empty."""
    if error.phase == "loss":
        return f"it is called with the output and the batch as it was given, {_described(batch.for_loss)}"
    # Python's own words, of a call that does not fit the signature.
    unfitting = error.type == "TypeError" and ("keyword argument" in error.text or "required positional" in error.text)
    if error.phase == "forward" and unfitting and batch.kwargs and not batch.args:
        return (f"the batch is {_described(batch.value)}, and a dict is keyword arguments; for a model that takes the "
                "dict itself make it a tuple of one, `(batch,)`")
    return ""


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with {_listed(value)}"
    if isinstance(value, (tuple, list)):
        kinds = [type(item).__name__ for item in value]
        return f"a {type(value).__name__} of {_listed(kinds)}"
    return kind_of(value)


def _listed(names: Iterable[Any]) -> str:
    texts = list(map(str, names))
    if len(texts) > _MOST_KEYS:
        texts[_MOST_KEYS:] = [f"{len(texts) - _MOST_KEYS} more"]
    return ", ".join(texts) or "nothing"
