"""Kernels: what Inductor generated, what is fused in each and where it comes from; and what one call launches.

Reads the code that Inductor wrote (event ``inductor_output_code``; PythonWrapperCodegen in
torch/_inductor/codegen/wrapper.py, torch 2.8 to 2.15). It is recorded on a cache hit as well.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.errors import InstrumentError, Unavailable
from pytest_torchcompile.gauges.library_operators import calls_library
from pytest_torchcompile.ledger.cudagraph_skips import DEFINED_KERNEL
from pytest_torchcompile.ledger.records import Text

__all__ = ["Kernel", "Kernels", "Launches", "aten_operators", "count_launches", "covered_length", "functions_of_graph",
           "note_source_lines", "read_kernels", "read_module", "stage_of_code"]

_FUSED: Final = re.compile(r"^(?:cpp|triton)_(?:[a-z]{3}_)?fused_(.*?)_?\d*$")
_STAGE: Final = re.compile(r"^# AOT ID: \['\d+_(\w+)'\]", re.M)
_RUNS_GRAPH: Final = re.compile(r"call$|partition_")
_SOURCES: Final = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_LEVEL: Final = "trace.provenance_tracking_level"
_LINE: Final = re.compile(r'File "(.+?)", line (\d+)')
_NO_KERNELS: Final = ("Memcpy", "Memset", "Command Buffer")
"""What the profiler shows of the GPU beside kernels."""


@dataclass(frozen=True)
class Kernel:
    """One generated kernel."""

    name: str
    language: str
    """``cpp`` or ``triton``."""
    ops: tuple[str, ...]
    """ATen operators fused in it."""
    lines: tuple[str, ...] = ()
    """``file:line`` of the user's code; empty unless compiled under :func:`note_source_lines`."""
    calls: int = 0
    """How often one run of the graph calls it."""


@dataclass(frozen=True)
class Kernels:
    """What one run of one generated graph calls."""

    compile_id: str
    stage: str
    """``forward``, ``backward`` or ``inference``."""
    generated: tuple[Kernel, ...] = ()
    library: dict[str, int] = field(default_factory=dict)
    """Calls of library kernels, like ``addmm``."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls of ATen operators that Inductor generates no code for, like ``aten.sort.stable``."""

    @property
    def launches(self) -> int:
        """Calls of all kinds in one run."""
        generated = sum(kernel.calls for kernel in self.generated)
        return generated + sum(self.library.values()) + sum(self.fallbacks.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def read_kernels(texts: Iterable[Text], operators: Iterable[str] = ()) -> list[Kernels]:
    """Kernels of each generated graph, in order.

    :param texts: :attr:`Ledger.texts` of an observation with `keep_texts`.
    :param operators: known ATen operators, which :func:`aten_operators` lists; without them the words of a kernel's
        name cannot be told apart (``native_layer_norm_relu``) unless its comment names them.
    """
    known = frozenset(operators)
    graphs: list[Kernels] = []
    for text in texts:
        if text.stage == "code":
            graphs.append(read_module(text.text, text.compile_id, known))
        # They come right after the code that they are of.
        elif text.stage == "kernel_lines" and graphs and text.text.startswith("{"):
            graphs[-1] = _with_lines(graphs[-1], text.text)
    return graphs


def read_module(code: str, compile_id: str = "", operators: frozenset[str] = frozenset()) -> Kernels:
    """Kernels of one generated module."""
    defined, sources = dict(DEFINED_KERNEL.findall(code)), _commented_operators(code)
    calls: Counter[str] = Counter()
    library: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    for name in _names_called(code):
        first = name.partition(".")[0]
        if first in defined:
            calls[first] += 1
        elif name.startswith("extern_kernels."):
            library[name.removeprefix("extern_kernels.")] += 1
        elif name.startswith(("torch.ops.", "aten.")):
            fallbacks[name.removeprefix("torch.ops.")] += 1
    generated = []
    for name, language in defined.items():
        ops = sources.get(name) or _operators_in_name(name, operators)
        generated.append(Kernel(name, language.partition("_")[0], ops, calls=calls[name]))
    return Kernels(compile_id, stage_of_code(code), tuple(generated), dict(library), dict(fallbacks))


def functions_of_graph(module: ast.Module) -> list[ast.FunctionDef]:
    """The functions of Inductor's module that run its graph: ``call``, and the partitions of it."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if _RUNS_GRAPH.match(function.name)]


def stage_of_code(code: str) -> str:
    """``forward``, ``backward`` or ``inference``, as Inductor writes above a module."""
    stage = _STAGE.search(code)
    return stage[1] if stage else "inference"


def _names_called(code: str) -> Iterator[str]:
    """Names of all functions that running the graph calls."""
    for function in functions_of_graph(ast.parse(code)):
        yield from (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))


def _commented_operators(code: str) -> dict[str, tuple[str, ...]]:
    """ATen operators from the comment above each generated kernel, where there is one (Triton)."""
    by_kernel: dict[str, tuple[str, ...]] = {}
    pending: tuple[str, ...] = ()
    for line in code.splitlines():
        if match := _SOURCES.search(line):
            ops = [op.strip().removeprefix("aten.") for op in match[2].split(",")]
            pending = tuple(dict.fromkeys(filter(None, ops)))
        elif pending and not line.lstrip().startswith("#"):
            if match := re.match(r"(\w+) = async_compile\.", line):
                by_kernel[match[1]] = pending
            pending = ()
    return by_kernel


def _operators_in_name(name: str, operators: frozenset[str]) -> tuple[str, ...]:
    """Operators out of a kernel's name: they stand in it sorted and joined by ``_``."""
    match = _FUSED.match(name)
    if not match or not match[1]:
        return ()
    words = match[1].split("_")
    return _split_words(words, 0, "", operators) or (match[1],)


def _split_words(words: list[str], start: int, before: str, operators: frozenset[str]) -> tuple[str, ...] | None:
    """The longest known operator first, each after the one before in the alphabet; None where it does not fit."""
    if start == len(words):
        return ()
    for end in range(len(words), start, -1):
        word = "_".join(words[start:end])
        if word in operators and word >= before:
            rest = _split_words(words, end, word, operators)
            if rest is not None:
                return (word, *rest)
    return None


def _with_lines(graph: Kernels, text: str) -> Kernels:
    """Add the user's lines; torch numbers the calls (``kernel:2``), several may be of one kernel."""
    lines: dict[str, list[str]] = {}
    for call, stacks in json.loads(text).items():
        of_kernel = lines.setdefault(call.partition(":")[0], [])
        for stack in stacks:
            places = _LINE.findall(stack) if isinstance(stack, str) else []
            if places:
                file, line = places[-1]
                of_kernel.append(f"{file}:{line}")
    generated = []
    for kernel in graph.generated:
        generated.append(replace(kernel, lines=tuple(dict.fromkeys(lines.get(kernel.name, ())))))
    return replace(graph, generated=tuple(generated))


def aten_operators() -> frozenset[str]:
    """ATen operators of this torch, without overloads."""
    import torch

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in names)


@contextlib.contextmanager
def note_source_lines() -> Iterator[None]:
    """Compile with the lines of the user's code noted for each kernel.

    ``torch._inductor.config.trace.provenance_tracking_level`` (since torch 2.9) is part of the cache key: switch
    it on for all of the runs that shall share a cache, or for none. Code from a cache brings the lines of the
    run that filled it.

    :raises InstrumentError: this torch cannot.
    """
    import torch
    import torch._inductor.config as config

    if _LEVEL not in config.get_config_copy():
        raise InstrumentError(f"torch {torch.__version__} has no torch._inductor.config.{_LEVEL}, which notes the "
                              "lines of kernels; torch 2.9 and later have it")
    with config.patch({_LEVEL: 1}):
        yield


@dataclass(frozen=True)
class Launches:
    """What one call did on the GPU."""

    kernels: int
    """Kernels that ran, those inside CUDA graphs included."""
    graphs: int
    """CUDA graphs replayed (calls of ``cudaGraphLaunch``)."""
    host_launches: int
    """Kernels launched one by one from the host: what a CUDA graph saves."""
    by_name: dict[str, int] = field(default_factory=dict)
    """Kernels that ran, by name."""
    busy_seconds: float = 0.0
    """How long the GPU was at work: the time in which at least one kernel or copy ran."""
    generated_seconds: float = 0.0
    """Of that in Triton's kernels; the rest is a library's."""
    waits: int = 0
    """How often the host waited for a number of the GPU (``.item()``, a branch on a tensor, a print)."""
    by_operator: dict[str, float] = field(default_factory=dict)
    """Seconds of the kernels that each operator launched from the host, with the longest first; those of ATen without
    their namespace. Kernels in CUDA graphs belong to none."""

    @property
    def product_seconds(self) -> float:
        """Seconds of products, convolutions, attention and custom operators, which nothing is fused into."""
        return sum(seconds for name, seconds in self.by_operator.items() if calls_library(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def count_launches(call: Callable[[], object]) -> Launches:
    """Run ``call`` once, warm, and count.

    :raises Unavailable: this torch sees no CUDA GPU.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise Unavailable("launches per call are counted on a CUDA GPU; torch sees none here")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize()
    on_gpu: Counter[str] = Counter()
    on_host: Counter[str] = Counter()
    by_operator: defaultdict[str, float] = defaultdict(float)
    busy: list[tuple[float, float]] = []
    generated = 0.0
    for event in profiled.events() or ():
        if event.device_type.name == "CPU":
            on_host[event.name] += 1
            if "::" in event.name:
                by_operator[event.name.removeprefix("aten::")] += sum(kernel.duration for kernel in event.kernels)
            continue
        begun, ended = float(event.time_range.start), float(event.time_range.end)
        busy.append((begun, ended))
        if not event.name.startswith(_NO_KERNELS):
            on_gpu[event.name] += 1
            generated += (ended - begun) * event.name.startswith("triton_")
    # CUDA's runtime and its driver each have a function of their own for it; Triton calls the driver's.
    single = sum(count for name, count in on_host.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    graphs = on_host["cudaGraphLaunch"] + on_host["cuGraphLaunch"]
    # A microsecond is the profiler's unit.
    longest_first = sorted(by_operator.items(), key=lambda operator: -operator[1])
    return Launches(
        sum(on_gpu.values()), graphs, single, dict(on_gpu), covered_length(busy) / 1e6, generated / 1e6,
        on_host["aten::_local_scalar_dense"], {name: length / 1e6 for name, length in longest_first if length},
    )  # fmt: skip


def covered_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length that (start, end) spans cover together; what overlaps counts once.

    >>> covered_length([(0, 4), (2, 5), (7, 8)])
    6.0
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
