"""Dynamo: bytecode before and after, and the guards of what it compiled; each private name in a function of its own."""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_torchcompile.explain.explanation_records import Bytecode
from pytest_torchcompile.explain.guards import Guard, read_guards
from pytest_torchcompile.ledger.entries import cache_entries
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_watch import compile_id_reader

__all__ = ["BytecodeNotes"]


@dataclass
class BytecodeNotes:
    """Functions that Dynamo rewrote, in order of time."""

    rewritten: list[tuple[str, types.CodeType, types.CodeType]] = field(default_factory=list)
    """Compile id, the code before, the code after."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note bytecode while the block runs (``register_bytecode_hook``, torch 2.13)."""
        register_bytecode_hook = private_name("torch._dynamo.convert_frame", "register_bytecode_hook",
                                              "shows bytecode before and after", "it can't be explained")
        compile_id = compile_id_reader()

        def note(before: types.CodeType, after: types.CodeType) -> None:
            self.rewritten.append((compile_id(), before, after))

        # Its answer None leaves the code as it is.
        handle = register_bytecode_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def bytecode(self) -> list[Bytecode]:
        """Each of them as text."""
        texts = []
        for compile_id, before, after in self.rewritten:
            # Python 3.10 knows the bare name alone.
            function = getattr(before, "co_qualname", before.co_name)
            texts.append(Bytecode(compile_id, function, before.co_filename, before.co_firstlineno,
                                  dis.Bytecode(before).dis(), dis.Bytecode(after).dis()))
        return texts

    def guards(self) -> list[Guard]:
        """The guards of every entry that torch holds for these functions, in the order of their compiles."""
        guards: list[Guard] = []
        asked = {id(before): before for _compile_id, before, _after in self.rewritten}
        for code in asked.values():
            # The newest entry comes first.
            for entry in reversed(cache_entries(code)):
                guards += read_guards(str(entry.guard_manager), str(entry.compile_id))
        return guards
