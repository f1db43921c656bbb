"""Whose random numbers compiled code draws: those that eager draws, or Inductor's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["own_random_draws", "same_random_draws"]


@contextmanager
def same_random_draws() -> Iterator[None]:
    """Have Inductor draw the random numbers that eager draws, so that dropout can be compared."""
    with _fallback_random(True):
        yield


@contextmanager
def own_random_draws() -> Iterator[None]:
    """Have Inductor draw random numbers of its own, as it does unless it is told otherwise."""
    with _fallback_random(False):
        yield


def _fallback_random(eager: bool) -> AbstractContextManager[None]:
    from torch._inductor import config

    return config.patch(fallback_random=eager)  # type: ignore[no-any-return]
