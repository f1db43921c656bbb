"""A watch over kernels: hooks for a while, beside a ledger, and then each kernel's facts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_facts import complete_calls
from pytest_torchcompile.lowering.kernel_records import KernelCall
from pytest_torchcompile.lowering.scheduler_notes import KernelNotes, compile_anew

__all__ = ["KernelWatch", "compile_id_reader"]


def compile_id_reader() -> Callable[[], str]:
    """A function that tells what is compiled now (``torch._guards.CompileContext.current_compile_id``, torch 2.13)."""
    current = private_name("torch._guards", "CompileContext.current_compile_id", "tells what is compiled now",
                           "graphs can't be told apart")

    def compile_id() -> str:
        return str(current() or "")

    return compile_id


@dataclass
class KernelWatch:
    """Every kernel that Inductor plans while the watch is on."""

    lost: list[str] = field(default_factory=list)
    """What could not be read, each text once."""
    notes: KernelNotes | None = None
    anew: bool = True
    """Caches of compiled graphs are off: they hand out code without planning it, and nothing is noted of that."""

    @contextlib.contextmanager
    def taken(self, ledger: Ledger) -> Iterator[None]:
        """Watch while the block runs.

        :param ledger: one that keeps texts: by its code a kernel's graph is known.

        Where this torch lacks a name that is read, :attr:`lost` says so, and nothing is noted.
        """

        with contextlib.ExitStack() as hooks:
            try:
                self.notes = self._new_notes(ledger)
                if self.anew:
                    hooks.enter_context(compile_anew())
                hooks.enter_context(self.notes.taken())
            except InstrumentError as missing:
                self.lost.append(str(missing))
            yield

    def _new_notes(self, ledger: Ledger) -> KernelNotes:
        compile_id = compile_id_reader()

        def place_in_run() -> tuple[str, int]:
            # The texts of a graph come before its code, which is written after the last of its kernels.
            return compile_id(), sum(text.stage == "code" for text in ledger.texts)

        return KernelNotes([], self.lost, place_in_run)

    def calls(self, texts: Sequence[Text]) -> list[KernelCall]:
        """Each call of a kernel, in the order of the generated code.

        :param texts: of the same ledger.
        """
        if self.notes is None:
            return []
        return complete_calls(self.notes.notes, [text.text for text in texts if text.stage == "code"])
