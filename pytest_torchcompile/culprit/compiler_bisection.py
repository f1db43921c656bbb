"""Compiler bisection: torch's own bisector finds the part of the compiler, and which of its steps."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.places import place_of_stack
from pytest_torchcompile.lowering.scheduler_notes import compile_anew

__all__ = ["Bisection", "bisect_compiler"]

_MODULE: Final = "torch._inductor.compiler_bisector"
_WHAT: Final = "tries parts of the compiler one by one"
_WITHOUT: Final = "the part to blame can't be told"
OWN_SETTINGS: Final = (
    ("max_fusion_size", 1),
    ("inplace_buffers", False),
    ("allow_buffer_reuse", False),
    ("cpp.simdlen", 0),
)
"""What torch's bisector does not try by itself: without fusion, without memory that is used again, without vectors."""


@dataclass(frozen=True)
class Bisection:
    """What the bisector came to."""

    subsystem: str = ""
    """``lowerings``, ``post_grad_passes``, ``decomposition``, ..., or ``inductor_`` and a setting that mends it."""
    number: int = 0
    """Of the step in the subsystem, from 0; 0 of a setting."""
    step: str = ""
    """The bisector's name of it: a node of the graph, a pass, an operator."""
    operator: str = ""
    """Of a lowering: ``aten.relu.default``."""
    place: str = ""
    """``file:line`` that called it; empty where torch does not know."""
    why_not: str = ""
    """Why there is no answer, in one sentence."""


class _OutOfTime(Exception):
    pass


def bisect_compiler(shows: Callable[[str], bool], backend: str, deadline: float) -> Bisection:
    """Find the part of ``backend`` without which a fault does not show.

    Args:
        shows: Whether a freshly compiled program shows the fault; called with the backend's name, many times. It
            compiles by ``torch.compile`` with a backend given by its name, for which torch puts its own choice.
        backend: The first that shows it: ``aot_eager_decomp_partition`` or ``inductor``.
        deadline: Of ``time.monotonic()``.

    ``torch._inductor.compiler_bisector``: torch 2.13; changes the process while it runs, and puts it back.
    """
    try:
        bisector = private_name(_MODULE, "CompilerBisector", _WHAT, _WITHOUT)
    except InstrumentError as missing:
        return Bisection(why_not=str(missing))
    steps: dict[str, tuple[str, str]] = {}

    def works() -> bool:
        tried = bisector.get_backend()
        # Those before it are known to agree, and torch's cross-checking one says nothing of the fault.
        if tried != backend:
            return True
        if time.monotonic() > deadline:
            raise _OutOfTime
        return not shows(backend)

    try:
        with _own_settings_tried(), _steps_noted(bisector, steps), compile_anew(), _silent():
            found = bisector.do_bisect(works)
    except InstrumentError as missing:
        return Bisection(why_not=str(missing))
    except _OutOfTime:
        return Bisection(why_not="the time was over before torch's bisector had an answer")
    except (RuntimeError, AssertionError, AttributeError) as why:
        first_line = str(why).strip().partition("\n")[0]
        return Bisection(why_not=f"torch's bisector gave up ({type(why).__name__}: {first_line})")
    return _read_result(found, backend, steps)


def _read_result(found: Any, backend: str, steps: dict[str, tuple[str, str]]) -> Bisection:
    if found is None:
        return Bisection(why_not=f"with torch's bisector, {backend} did not show it again")
    if not found.subsystem:
        return Bisection(why_not=f"no part that torch's bisector can leave out of {found.backend} mends it")
    step = found.debug_info or ""
    operator, place = steps.get(step, ("", ""))
    number = found.bisect_number or 0
    return Bisection(found.subsystem, number, step, operator, place)


@contextlib.contextmanager
def _own_settings_tried() -> Iterator[None]:
    """Have the bisector try our settings too, before it takes the lowerings apart, which change all that follows."""
    subsystems = private_name(_MODULE, "BACKENDS", _WHAT, _WITHOUT)["inductor"]
    change = private_name(_MODULE, "ConfigChange", _WHAT, _WITHOUT)
    config = import_module("torch._inductor.config")
    before = list(subsystems)
    added = [change("inductor", name, value) for name, value in OWN_SETTINGS if _has_setting(config, name)]
    subsystems[-1:-1] = added
    try:
        yield
    finally:
        subsystems[:] = before


def _has_setting(config: Any, name: str) -> bool:
    value = config
    for part in name.split("."):
        value = getattr(value, part, _MISSING)
    return value is not _MISSING


_MISSING: Final = object()


@contextlib.contextmanager
def _steps_noted(bisector: Any, steps: dict[str, tuple[str, str]]) -> Iterator[None]:
    """Note operator and place of each node whose lowering is asked for (``V.current_node``, torch 2.13)."""
    virtual = private_name("torch._inductor.virtualized", "V", "knows the node that is lowered",
                           "the line of an operator can't be told")
    theirs = bisector.__dict__["disable_subsystem"]

    def noting(cls: Any, backend: str, subsystem: str, debug_info: Callable[[], str] | None = None) -> bool:
        if subsystem == "lowerings" and debug_info is not None:
            node = getattr(virtual, "current_node", None)
            if node is not None:
                steps[debug_info()] = str(node.target), place_of_stack(node.meta.get("stack_trace") or "")
        answer: bool = theirs.__func__(cls, backend, subsystem, debug_info)
        return answer

    bisector.disable_subsystem = classmethod(noting)
    try:
        yield
    finally:
        bisector.disable_subsystem = theirs


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
