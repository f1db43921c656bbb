"""The ledger: what did torch.compile do during these calls?

>>> with observe() as seen:                      # doctest: +SKIP
...     with seen.during("call 1"):
...         compiled(batch)
>>> seen.recompiles, seen.graph_breaks           # doctest: +SKIP
([], [])

To read it: ``records`` and ``ledger`` are what comes out, without torch. ``process_watch`` names the instruments, and
``watch`` is what they share. ``frames`` and ``executions`` wrap private functions of Dynamo, ``trace`` and
``cudagraph_skips`` listen to torch's loggers. ``decisions`` (with ``refusals``) makes records of what they saw.
``reasons`` and ``entries`` take failed guards apart, ``break_sites`` graph breaks; it and ``users`` know whose code it
is. ``explain`` puts all of it into words. ``torch_logs`` writes torch's own log and trace of a cell to files, and
``torch_internals`` looks up private names.
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
    # torch.compile then returns the function itself, and no hook of ours is ever called.
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        ledger.add(EagerFrame("", "", 0, "TORCHDYNAMO_DISABLE=1 switches torch.compile off", "off"))
    watch.open(ledger, os.fspath(root) if root is not None else None)
    try:
        yield ledger
    finally:
        watch.close(ledger)
