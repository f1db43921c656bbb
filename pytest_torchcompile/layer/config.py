"""What the production layer is told: frozen, validated when made. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["BucketConfig"]


@dataclass(frozen=True)
class BucketConfig:
    """The lengths that batches are padded to, so that a compiled model meets few shapes.

    Raises :class:`ValueError`, naming the field, its value and what is allowed.

    >>> BucketConfig((128, 256)).bucket(130)
    256
    """

    buckets: tuple[int, ...] = (256, 512, 1024, 2048)
    """Lengths in tokens, each larger than the one before."""
    pad_token_id: int = 0
    """What token ids are padded with."""

    def __post_init__(self) -> None:
        given: Any = self.buckets
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise ValueError(f"buckets={given!r}: expected lengths, for example (128, 256)")
        buckets = tuple(given)
        if not buckets:
            raise ValueError(f"buckets={given!r}: expected at least one length, for example (128, 256)")
        for size in buckets:
            if not _whole(size) or size < 1:
                raise ValueError(f"buckets={buckets!r}: {size!r} is no length; expected whole numbers from 1 on")
        for size, after in pairwise(buckets):
            if after <= size:
                raise ValueError(f"buckets={buckets!r}: {after} comes after {size}; "
                                 "expected each larger than the one before")
        object.__setattr__(self, "buckets", buckets)
        if not _whole(self.pad_token_id) or self.pad_token_id < 0:
            raise ValueError(f"pad_token_id={self.pad_token_id!r}: expected a token id, a whole number from 0 on")

    def bucket(self, length: int, what: str = "the batch") -> int:
        """The smallest bucket that ``length`` fits into.

        Raises :class:`ValueError` where it fits into none, naming ``what``, the length and the largest bucket.
        """
        for size in self.buckets:
            if length <= size:
                return size
        raise ValueError(f"{what} has length {length}, longer than the largest bucket, {self.buckets[-1]}; "
                         "cut it, or add a bucket")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
