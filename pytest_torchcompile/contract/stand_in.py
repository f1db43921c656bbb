"""What stands in for a part of a module that a finding does without: an Identity, or a Linear where that does not fit.

A stand-in is a text, which crosses processes and goes into records: ``path``, or ``path=Linear(6, 5)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from pytest_torchcompile.batch import Batch

__all__ = ["code_of", "linear_stand_ins", "path_of", "put_in", "stand_in_words"]


def path_of(text: str) -> str:
    """The path of the part."""
    return text.partition("=")[0]


def code_of(text: str) -> str:
    """The expression that makes it, in a script that has imported torch."""
    return f"torch.nn.{text.partition('=')[2] or 'Identity()'}"


def stand_in_words(texts: Iterable[str]) -> str:
    """``an Identity instead of norm, a Linear(6, 5) instead of block``."""
    words = []
    for text in texts:
        made = text.partition("=")[2]
        words.append(f"{'a ' + made if made else 'an Identity'} instead of {path_of(text)}")
    return ", ".join(words)


def put_in(module: nn.Module, texts: Iterable[str]) -> None:
    """Put stand-ins into a module; their weights come from torch's generator as it is."""
    import torch

    for text in texts:
        sizes = text.partition("=Linear(")[2].removesuffix(")")
        part: nn.Module = torch.nn.Identity()
        if sizes:
            given, returned = map(int, sizes.split(", "))
            part = torch.nn.Linear(given, returned)
        module.set_submodule(path_of(text), part)


def linear_stand_ins(module: nn.Module, batch: Batch) -> dict[str, str]:
    """By path of a part the Linear that takes and gives what it does, found by an eager call without gradients.

    The module is the caller's to throw away: it keeps hooks.

    A part has one where it is called with one tensor of float32, and returns one that differs in its last size at most.
    """
    import torch

    found: dict[str, str] = {}

    def note(path: str, given: Any, returned: Any) -> None:
        if len(given) != 1 or not all(isinstance(each, torch.Tensor) for each in (*given, returned)):
            return
        one, other = given[0], returned
        is_float = one.dtype == other.dtype == torch.float32
        if is_float and one.device.type == "cpu" and one.ndim == other.ndim and one.shape[:-1] == other.shape[:-1]:
            found[path] = f"{path}=Linear({one.shape[-1]}, {other.shape[-1]})"

    for path, part in module.named_modules():
        if path and type(part) is not torch.nn.Linear:
            part.register_forward_hook(lambda part, given, returned, path=path: note(path, given, returned))
    with torch.no_grad():
        module(*batch.args, **batch.kwargs)
    return found
