"""References kept between cells: the float64 run of a model is the same for every mode and backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pytest_torchcompile.oracle import Reference

__all__ = ["References"]

LEAST: Final = 1 << 28
_MOST: Final = 1 << 32
_SHARE: Final = 1 / 50
"""Of a device's memory. A trial makes its calls three times over: where the references of one pass do not fit, each is
made again in the third."""


class References:
    """The most recently used references, as many as fit in ``limit`` bytes."""

    def __init__(self, limit: int = LEAST) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, Reference] = OrderedDict()

    def make_room(self, memory: int) -> None:
        """Take a fiftieth of a device's memory of so many bytes, if that is more than the limit; 4 GiB at most."""
        self.limit = max(self.limit, min(_MOST, int(memory * _SHARE)))

    def get(self, key: Hashable, make: Callable[[], Reference]) -> Reference:
        """Return the reference for ``key``, made by ``make`` if it isn't kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make()
        found = self._kept[key]
        # Counted anew each time: a reference grows when a suspicion buys it more draws.
        while self._kept and sum(r.nbytes for r in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        return found
