"""The one watch that all open ledgers of this process share, and its hooks.

Four hooks, none of which changes what is compiled or how it is looked up in a cache:
:mod:`.trace` (torch's structured trace), :mod:`.frames` (what Dynamo decided for each frame, and calls of
compiled callables), :mod:`.executions` (how often each graph ran) and :mod:`.cudagraph_skips` (those not made).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pytest_torchcompile.ledger import cudagraph_skips, executions, frames, trace
from pytest_torchcompile.ledger.watch import Watch

__all__ = ["eager_on_purpose", "watch"]

watch = Watch((executions.install_hook, frames.install_hook, trace.install_hook, cudagraph_skips.install_hook))
"""The process' only one."""


@contextlib.contextmanager
def eager_on_purpose() -> Iterator[None]:
    """Run a block eagerly, in all threads, as the other side of a comparison; no ledger calls that a compile missed."""
    import torch

    with watch.lock:
        watch.on_purpose += 1
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with watch.lock:
            watch.on_purpose -= 1
