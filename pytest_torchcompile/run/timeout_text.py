"""Time-outs in words: what a cell was at when its time was over, by the stacks of its process, and which option helps.

Files of torch are those of torch 2.13.
"""

from __future__ import annotations

import re
from typing import Final

from pytest_torchcompile.observation import Problem

__all__ = ["timeout_problem"]

_COMPILERS: Final = {
    "_inductor/cpp_builder.py": "the C++ compiler",
    "triton/compiler/": "Triton's compiler",
    # Inductor waits there for compilers in processes of their own, which have no frames here.
    "_inductor/async_compile.py": "a compiler that Inductor waited for (C++ or Triton)",
}
"""Of a rank's stacks: the innermost frame does not say which compiler, those around it do."""
_STAGES: Final = {
    "_inductor/compile_fx.py": "Inductor",
    "_aot_autograd/graph_compile.py": "AOTAutograd",
    "_dynamo/symbolic_convert.py": "Dynamo",
}
"""Files that are on the stack while torch compiles and not when compiled code runs, the innermost stage first."""
_PURPOSES: Final = {
    "oracle/torch_hints.py": "to try torch's hint about a graph break",
    "oracle/diagnosis.py": "to find the stage of the compiler that is wrong",
    "oracle/reference_runs.py": "for the float64 run that numbers are held against",
}
"""What a run is for beside the calls themselves, by the file of ours that is on the stack."""
_CHECK: Final = re.compile(r"pytest_torchcompile/checks/(\w+)\.py\", line \d+ in measure")
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_NOT_USERS: Final = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|[/\\]pytest_torchcompile[/\\]|torchinductor|^<")
_AFTER: Final = re.compile(r"no result after ([\d.]+) s$")


def timeout_problem(message: str, stacks: str) -> Problem:
    """The problem of a cell that was stopped: ``message`` says after how long."""
    compiler = _word_on_stack(_COMPILERS, stacks)
    hint = f"{_longer_time(message)} if the cell is just slow"
    if compiler:
        hint = (f"{_longer_time(message)}; or run again, for kernels that were finished are in torch's cache; or try "
                "smaller sizes or a smaller model, or take `backend: aot_eager`, which needs no such compiler")
    if what := _what_ran(compiler, stacks):
        message = f"{message}; {what}"
    return Problem(message, stacks, hint)


def _what_ran(compiler: str, stacks: str) -> str:
    """``Dynamo was running, to try torch's hint``; empty where the stacks do not say."""
    who = compiler or _word_on_stack(_STAGES, stacks) or _users_frame(stacks)
    purpose = _word_on_stack(_PURPOSES, stacks)
    if not purpose and (check := _CHECK.search(stacks)):
        purpose = f"for the check {check[1]}"
    if not who:
        return f"it ran {purpose}" if purpose else ""
    return f"{who} was running" + (f", {purpose}" if purpose else "")


def _users_frame(stacks: str) -> str:
    """``forward at models.py:3``: the innermost frame that is neither Python's, torch's, a package's nor ours."""
    for frame in _FRAME.finditer(stacks):
        if not _NOT_USERS.search(frame["file"]):
            # Without its folder: a report may be judged on another machine.
            name = re.split(r"[/\\]", frame["file"])[-1]
            return f"{frame['function']} at {name}:{frame['line']}"
    return ""


def _word_on_stack(words: dict[str, str], stacks: str) -> str:
    for file, word in words.items():
        if file in stacks:
            return word
    return ""


def _longer_time(message: str) -> str:
    """How the cell gets twice the time."""
    after = _AFTER.search(message)
    if after is None:
        return "raise --compile-timeout"
    return f"raise --compile-timeout (--compile-timeout={2 * float(after[1]):g} gives it twice the time)"
