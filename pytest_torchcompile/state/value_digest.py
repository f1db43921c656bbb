"""ValueDigest: one hash of values of any kind, tensors bit by bit. Equal hashes mean equal values, in any process."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch

from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = ["Undigestible", "ValueDigest"]

_EXACT: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class Undigestible(Exception):
    """A value of which nobody can tell whether another one is the same."""


class ValueDigest:
    """Takes value after value; raises :class:`Undigestible` for objects other than containers and dataclasses."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def hexdigest(self) -> str:
        """Of all that was taken so far."""
        return self._hash.hexdigest()

    def take(self, value: Any) -> None:
        """Add one value. What it is made of comes with its type, so that no two values are told alike."""
        if isinstance(value, torch.Tensor):
            self._take_tensor(value)
        elif isinstance(value, _EXACT):
            # NaN with another payload is another number for nobody.
            self._tell(f"{type(value).__name__} {value!r}")
        elif isinstance(value, Mapping):
            self._tell(f"mapping {len(value)}")
            for key, item in value.items():
                self.take(key)
                self.take(item)
        elif isinstance(value, (list, tuple)):
            self._tell(f"{type(value).__name__} {len(value)}")
            for item in value:
                self.take(item)
        elif isinstance(value, (set, frozenset)):
            self._tell(f"set {sorted(_digest_of(item) for item in value)}")
        elif is_dataclass(value) and not isinstance(value, type):
            self._tell(f"dataclass {type(value).__qualname__}")
            for each in fields(value):
                self.take(getattr(value, each.name))
        else:
            raise Undigestible(type(value).__qualname__)

    def _take_tensor(self, tensor: torch.Tensor) -> None:
        if not is_plain(tensor) or tensor.is_meta:
            raise Undigestible(f"{type(tensor).__qualname__} with layout {tensor.layout}")
        about = (tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device), tensor.requires_grad)
        self._tell(f"tensor {about}")
        # A view of a tensor may be lazily conjugated, or negated.
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        size = dense.numel() * dense.itemsize
        if size:
            self._hash.update((ctypes.c_char * size).from_address(dense.data_ptr()))

    def _tell(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        # With its length, so that the end of one value is never the beginning of the next.
        self._hash.update(len(data).to_bytes(8, "big"))
        self._hash.update(data)


def _digest_of(value: Any) -> str:
    digest = ValueDigest()
    digest.take(value)
    return digest.hexdigest()
