"""An outage of the compiler: while it lasts, whatever is to be compiled fails at once, before anything is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_torchcompile.errors import InstrumentError

__all__ = ["Outage", "PlannedFailure", "compiler_outage"]


class PlannedFailure(RuntimeError):
    """What the compiler says while there is an outage."""


@dataclass
class Outage:
    """One outage."""

    met: int = 0
    """How often something was to be compiled."""


@contextlib.contextmanager
def compiler_outage() -> Iterator[Outage]:
    """Have every compile of this process fail; the cheapest way to see what a program does then.

    A callback that Dynamo calls before it compiles a frame, and that raises
    (``torch._dynamo.callback.callback_handler``, torch 2.8 to 2.15). Compiled code that is there already still runs.

    :raises InstrumentError: this torch has no such callbacks.
    """
    import torch
    from torch._dynamo import callback

    lasting = Outage()

    def fail(*_: object) -> None:
        lasting.met += 1
        raise PlannedFailure("a planned outage of the compiler")

    try:
        callback.callback_handler.register_start_callback(fail)
        remove = callback.callback_handler.remove_start_callback
    except AttributeError:
        raise InstrumentError(f"torch {torch.__version__} has no torch._dynamo.callback.callback_handler, by which an "
                              "outage of the compiler is planned; please report it with this version") from None
    try:
        yield lasting
    finally:
        # torch.compiler.reset() drops all callbacks, and may have been called meanwhile.
        with contextlib.suppress(ValueError):
            remove(fail)
