"""Work in progress: a frame while Dynamo decides on it, a compiled callable while it runs."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_torchcompile.ledger.break_text import Frame, TracedCode
from pytest_torchcompile.ledger.reasons import Reason
from pytest_torchcompile.ledger.records import EagerFrame, GraphBreak

__all__ = ["FrameAttempt", "FunctionPlace", "Region"]


class FunctionPlace(NamedTuple):
    """A function of the user's, as records begin."""

    function: str
    file: str
    line: int


@dataclass
class FrameAttempt:
    """One frame that Dynamo was asked to compile, while it decides."""

    function: str = ""
    file: str = ""
    line: int = 0
    resumed_at: int = 0
    code: tuple[str, str] = ("", "")
    """File and name of the frame's own code, which may be a wrapper of torch's around the user's function."""
    frame_code: types.CodeType | None = None
    freevars: tuple[str, ...] = ()
    scope: Callable[[], Mapping[str, Any]] = dict
    """The frame's names and their values; ``G`` holds the globals. Looked up only if a guard has failed."""
    cached: bool = False
    """Whether a compiled entry was there already."""
    reasons: tuple[Reason, ...] = ()
    heard: bool = False
    """Whether any record of the structured trace came."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """``CompilationMetrics`` of torch's. Empty where the frame was refused before anything was traced."""
    breaks: list[GraphBreak] = field(default_factory=list)
    """As entered in the ledgers, newest last."""
    caches: list[str] = field(default_factory=list)
    graphs: int = 0
    ops: int = 0

    begun: float = field(default_factory=time.perf_counter)

    @property
    def where(self) -> FunctionPlace:
        """The user's function."""
        return FunctionPlace(self.function, self.file, self.line)

    @property
    def traced(self) -> TracedCode:
        """What a graph break's text is read for."""
        function = Frame(self.file, self.line, self.function)
        lines: list[int] = []
        if self.frame_code is not None:
            # Instructions that Python adds have no line.
            lines = [line for _, _, line in self.frame_code.co_lines() if line]
        if not lines:
            return TracedCode(*self.code, function=function)
        return TracedCode(*self.code, min(lines), max(lines), function)


@dataclass(slots=True)
class Region:
    """One call of a compiled callable, while it runs. Made in every call, so it holds no more than it must."""

    frame: types.FrameType
    runs_before: int
    run_only: bool = False
    """Whether this is a call by ``torch._dynamo.run``."""
    entered: bool = False
    refrained: bool = False
    """Whether a frame inside was entered because torch was told not to compile it."""
    gave_up: tuple[EagerFrame, ...] = ()
    """Frames inside that ran eagerly, as entered in the ledgers."""
    quiet: tuple[EagerFrame, ...] = ()
    """Others that torch refused or found nothing in: no fault, unless no graph at all ran in the call."""

    @property
    def function(self) -> Any:
        """What is called: ``fn`` of ``compile_wrapper`` (torch/_dynamo/eval_frame.py, 2.8 to 2.15)."""
        return self.frame.f_locals.get("fn")

    @property
    def raised(self) -> bool:
        """Whether the call is ending with an exception of its own, not inside the handling of an earlier one."""
        error = sys.exc_info()[1]
        if error is None:
            return False
        # A call in an except block sees the exception that is handled there. Its traceback has no frame of the call.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not self.frame:
            trace = trace.tb_next
        return trace is not None
