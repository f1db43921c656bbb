"""The one watch that all open ledgers of this process share, and the instruments that report to it.

None of them changes what is compiled or how it is looked up in a cache: :mod:`.trace` (torch's structured trace),
:mod:`.frames` (what Dynamo decided for each frame, and calls of compiled callables), :mod:`.executions` (how often
each graph ran) and :mod:`.cudagraph_skips` (those not made).

To add one: a file in this folder, and its name here. The file has ``install_hook(watch)``, a context manager, and a
:class:`~.records.LedgerRecord` of its own if it has something new to tell.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.ledger.watch import Hook, LedgerWatch

__all__ = ["eager_on_purpose", "watch"]

_INSTRUMENTS: Final = ("executions", "frames", "trace", "cudagraph_skips")
"""In the order in which they are installed. Each looks up torch's internals first and raises if one is missing; the
hooks of those before it are taken out then."""


def _hook_of(instrument: str) -> Hook:
    hook: Hook = importlib.import_module(f"pytest_torchcompile.ledger.{instrument}").install_hook
    return hook


watch = LedgerWatch([_hook_of(instrument) for instrument in _INSTRUMENTS])
"""The process' only one."""


@contextlib.contextmanager
def eager_on_purpose() -> Iterator[None]:
    """Run a block eagerly, in all threads, as the other side of a comparison; no ledger calls that a compile missed."""
    import torch

    # A stance holds for all threads, so the count does too.
    with watch.lock:
        watch.on_purpose += 1
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with watch.lock:
            watch.on_purpose -= 1
