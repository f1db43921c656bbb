"""What happened during these calls? One file an instrument.

>>> with observe() as seen:                      # doctest: +SKIP
...     with seen.during("call 1"):
...         compiled(batch)
>>> seen.recompiles, seen.graph_breaks           # doctest: +SKIP
([], [])
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import EagerFrame

__all__ = ["Ledger", "observe"]


@contextlib.contextmanager
def observe(*, root: str | os.PathLike[str] | None = None, keep_texts: bool = False) -> Iterator[Ledger]:
    """Record what torch.compile does while the block runs.

    Nothing is traced twice, no cache key changes, and the user's backend object stays as it is. Ledgers nest;
    each sees all threads of the process. Graphs compiled before the block are counted too, when they run.

    :param root: the project's root folder, which decides whose code a break is in (default: the current).
    :param keep_texts: keep graphs and code of each stage too (:attr:`Ledger.texts`): some ten KiB for each graph.
    :raises InstrumentError: this torch lacks an internal that is read; the text names it.
    """
    from pytest_torchcompile.ledger.process_watch import watch

    ledger = Ledger(keep_texts=keep_texts)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # torch.compile then returns the function itself
        ledger.add(EagerFrame("", "", 0, "TORCHDYNAMO_DISABLE=1 switches torch.compile off", "off"))
    watch.open(ledger, os.fspath(root) if root is not None else None)
    try:
        yield ledger
    finally:
        watch.close(ledger)
