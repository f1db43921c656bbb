"""CUDA graphs that Inductor did without, and why.

Some are skipped when compiled, some at the first run; only a log message has both
(``log_cudagraph_skip_and_bump_counter`` in torch/_inductor/cudagraph_utils.py: a warning of the artifact
``cudagraphs``, in torch 2.8 of ``perf_hints``). Where Inductor partitions graphs (its default since 2.9) it keeps
silent about both a graph without any part that can be captured and operators that stay outside: those are read off what
it has compiled (``cudagraph_partition_post_compile`` in torch/_inductor/output_code.py, torch 2.8 to 2.15).
"""

from __future__ import annotations

import ast
import contextlib
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger.records import CudagraphSkip

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["DEFINED_KERNEL", "install_hook", "outside_of_partitions", "parse_skip", "partition_skips"]

DEFINED_KERNEL: Final = re.compile(r"^(\w+)\s*=\s*async_compile\.(\w+)\(", re.M)
"""A kernel that Inductor's code defines: its name and language."""
_LOGGERS: Final = tuple(f"torch._inductor.cudagraph_utils.__{name}" for name in ("cudagraphs", "perf_hints"))
_REASON: Final = re.compile(r"(?:skipping cudagraphs due to )+(.*?)(?:\. Found from|$)", re.S)
_POST_COMPILE: Final = "cudagraph_partition_post_compile"
_LINE: Final = re.compile(r'File "(.+?)", line (\d+)')


def parse_skip(message: str) -> CudagraphSkip | None:
    """Read a log message; None for one about something else.

    >>> parse_skip('skipping cudagraphs due to mutated inputs. Found from : \\n   File "n.py", line 5, in f')
    CudagraphSkip(reason='mutated inputs', file='n.py', line=5, during='', part=False)
    """
    match = _REASON.search(message)
    if not match:
        return None
    reason = " ".join(match[1].split())
    lines = _LINE.findall(message)
    if not lines:
        return CudagraphSkip(reason)
    file, line = lines[-1]
    return CudagraphSkip(reason, file, int(line))


def partition_skips(graph: Any) -> list[CudagraphSkip]:
    """What a compiled graph that Inductor partitions (a ``CompiledFxGraph``) does without, which nobody logs."""
    reasons = list(getattr(graph.cudagraph_info, "cudagraph_fail_reasons", ()))
    if reasons:
        return [parse_skip(str(reason)) or CudagraphSkip(str(reason)) for reason in reasons]
    if not graph.partition_maps:
        return [CudagraphSkip("no operator of the graph can be captured")]
    outside = outside_of_partitions(graph.source_code)
    if outside:
        parts = len(graph.partition_maps)
        return [CudagraphSkip(f"outside of {parts} captured part(s): {', '.join(outside)}", part=True)]
    return []


class _Handler(logging.Handler):
    def __init__(self, watch: LedgerWatch) -> None:
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.watch.run_guarded(self._enter_skip, record)

    def _enter_skip(self, record: logging.LogRecord) -> None:
        skip = parse_skip(record.getMessage())
        if skip is not None:
            self.watch.add(skip)


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
    """Report skipped CUDA graphs to ``watch`` while the block runs. What torch itself logs stays as it is."""
    handler = _Handler(watch)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with _watch_partitions(watch):
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def _watch_partitions(watch: LedgerWatch) -> Iterator[None]:
    from torch._inductor import output_code

    original = getattr(output_code, _POST_COMPILE, None)
    if original is None:  # a torch that does not partition
        yield
        return

    def post_compile(inputs: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        # Read before torch goes on: it may drop the source afterwards.
        skips = watch.run_guarded(partition_skips, graph)
        result = original(inputs, graph, *args, **kwargs)
        for skip in skips or ():
            watch.add(skip)
        return result

    setattr(output_code, _POST_COMPILE, post_compile)
    try:
        yield
    finally:
        setattr(output_code, _POST_COMPILE, original)


def outside_of_partitions(code: str) -> list[str]:
    """Kernels, library calls, fallbacks and copies that a partitioned module makes outside of its partitions.

    Those are not part of a CUDA graph. Empty for a module that is not partitioned.
    """
    if "self.partitions[" not in code:
        return []
    defined = dict(DEFINED_KERNEL.findall(code))
    # Other calls (of partitions, of checks, of allocators) launch nothing.
    launches = ("extern_kernels.", "torch.ops.", "aten.")
    outside = []
    for name in _names_called_in_call(code):
        if name.partition(".")[0] in defined or name.endswith(".copy_") or name.startswith(launches):
            outside.append(name)
    return outside


def _names_called_in_call(code: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield ast.unparse(node.func)
