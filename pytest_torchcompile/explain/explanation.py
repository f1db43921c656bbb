"""An explanation: all that the compiler made of one model, as plain data that text, page and files are written from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.explain.explanation_records import Bytecode, GraphRun, PassChange, TracedOperator
from pytest_torchcompile.explain.graph_texts import SavedTensor, Stage, saved_tensors
from pytest_torchcompile.explain.guards import Guard
from pytest_torchcompile.gauges.quietness import is_quiet
from pytest_torchcompile.ledger.break_sites import BACKEND_FAILED
from pytest_torchcompile.ledger.records import NOT_CONVERTED, Compile, EagerFrame, FailedCompile, GraphBreak
from pytest_torchcompile.lowering.kernel_records import KernelCall
from pytest_torchcompile.quantity import count

__all__ = ["FORMAT", "Explanation", "calls_text", "resumed_text", "total_bytes"]

FORMAT: Final = 1
"""Of the JSON; a number more where a key changes its meaning."""


@dataclass
class Explanation:
    """What the compiler made of a model in one call."""

    name: str
    torch_version: str
    settings: str
    """How it was compiled, in words."""
    seconds: float = 0.0
    """The step that compiled, and all that was noted of it."""
    compiles: list[Compile] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    kernels: list[KernelCall] = field(default_factory=list)
    operators: list[TracedOperator] = field(default_factory=list)
    """Operators of AOTAutograd's graphs as they were before decomposition, and what they became."""
    guards: list[Guard] = field(default_factory=list)
    bytecode: list[Bytecode] = field(default_factory=list)
    passes: list[PassChange] = field(default_factory=list)
    """Of a cell of the toolkit: each pass on each graph, in their order."""
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of a cell of the toolkit: by how many each operator becomes more or fewer with each table of decompositions."""
    graph_runs: list[GraphRun] = field(default_factory=list, repr=False)
    """What each of Dynamo's graphs was given first and what came of it; tensors, and so not in the JSON."""
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    eager_frames: list[EagerFrame] = field(default_factory=list)
    failures: list[FailedCompile] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """What could not be read."""
    unrest: float = 1.0
    """How restless the machine was while kernels were timed (:mod:`pytest_torchcompile.gauges.quietness`)."""
    others_load: str = ""
    """What other processes did meanwhile, in words; empty where that was next to nothing, or nobody knows."""
    error: str = ""
    """What the compiled step raised; what was made until then is explained all the same."""

    @property
    def busy(self) -> str:
        """Why the seconds of kernels are too long, or may be; empty where nothing of that was seen."""
        if is_quiet(self.unrest):
            if not self.others_load:
                return ""
            return (f"while kernels were timed {self.others_load}: their microseconds may be too long, so explain it "
                    "again when it is quiet")
        return (f"this machine was busy while kernels were timed (of the same steps the slowest took {self.unrest:.1f} "
                "times the fastest): their microseconds are too long, so explain it again when it is quiet")

    @property
    def own_breaks(self) -> list[GraphBreak]:
        """Graph breaks of the model: not those where the backend failed, and each frame that was given up once.

        Of a break that only says that a frame was given up something else mostly says why.
        """
        known = {failure.compile_id for failure in self.failures}
        known |= {found.compile_id for found in self.graph_breaks if not found.reason.startswith(NOT_CONVERTED)}
        own = []
        for found in self.graph_breaks:
            told_elsewhere = found.reason.startswith(NOT_CONVERTED) and found.compile_id in known
            if not told_elsewhere and not found.reason.startswith(BACKEND_FAILED):
                own.append(found)
        return own

    @property
    def backend_failures(self) -> list[GraphBreak]:
        """Graphs that the backend raised for, and that torch ran eagerly: it reports them as if they were breaks."""
        return [found for found in self.graph_breaks if found.reason.startswith(BACKEND_FAILED)]

    @property
    def breaks_text(self) -> str:
        """What a matrix would fail on, for the line that is read first; empty where there is none of it."""
        words = []
        if self.own_breaks:
            words.append(count(len(self.own_breaks), "graph break"))
        if self.backend_failures:
            words.append(f"{count(len(self.backend_failures), 'graph')} that the backend failed on")
        return ", ".join(words)

    def stages_of(self, compile_id: str, stage: str) -> list[Stage]:
        """The graphs of one stage that a compile made."""
        return [found for found in self.stages if found.compile_id == compile_id and found.stage == stage]

    def compile_of(self, compile_id: str) -> Compile | None:
        """The ledger's record of a compile; None where it has none."""
        return next((found for found in self.compiles if found.compile_id == compile_id), None)

    @property
    def traced_graphs(self) -> list[Stage]:
        """The graphs that AOTAutograd traced: with the backward pass, or, where there is none, without."""
        with_backward = {stage.compile_id for stage in self.stages if stage.stage == "joint"}
        traced = []
        for stage in self.stages:
            alone = stage.stage == "forward" and stage.compile_id not in with_backward
            if alone or stage.stage == "joint":
                traced.append(stage)
        return traced

    @property
    def compile_ids(self) -> list[str]:
        """Compiles that made a graph, in order of time."""
        return list(dict.fromkeys(stage.compile_id for stage in self.stages))

    def saved_of(self, compile_id: str) -> list[SavedTensor]:
        """What the forward pass of a compile keeps for its backward pass."""
        saved: list[SavedTensor] = []
        pairs = zip(self.stages_of(compile_id, "forward"), self.stages_of(compile_id, "backward"), strict=False)
        for forward, backward in pairs:
            saved += saved_tensors(forward.nodes, backward.nodes)
        return saved

    def kernels_of(self, compile_id: str, stage: str) -> list[KernelCall]:
        """The kernels of ``forward``, ``backward`` or ``inference`` of a compile."""
        return [kernel for kernel in self.kernels if (kernel.compile_id, kernel.stage) == (compile_id, stage)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(replace(self, graph_runs=[]))
        del plain["graph_runs"]
        for kernel, call in zip(plain["kernels"], self.kernels, strict=True):
            kernel |= {"bytes_read": call.bytes_read, "bytes_written": call.bytes_written,
                       "bytes_kept_inside": call.bytes_kept_inside}
        saved = {compile_id: [asdict(tensor) for tensor in self.saved_of(compile_id)]
                 for compile_id in self.compile_ids}
        return {"format": FORMAT, **plain, "saved": saved}


def resumed_text(compiled: Compile) -> str:
    """Which part of its function a compile is of: empty for a whole one, or the first part of one that breaks."""
    return f", from line {compiled.resumed_at}" if compiled.resumed_at else ""


def calls_text(kernels: Sequence[KernelCall]) -> str:
    """How many kernels are called, and how many more may be."""
    branches = [kernel for kernel in kernels if kernel.in_branch]
    text = count(len(kernels) - len(branches), "kernel call")
    return f"{text} and {len(branches)} in branches of which one runs" if branches else text


def total_bytes(tensors: Iterable[SavedTensor]) -> int:
    """Bytes of those whose sizes are known."""
    return sum(tensor.bytes or 0 for tensor in tensors)
