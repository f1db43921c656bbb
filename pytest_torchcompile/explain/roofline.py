"""Roofline: what each kernel computes and moves, the least time that takes on this machine, and what bounds it.

FLOPs come from the shapes in the compiler's own graphs, by :mod:`pytest_torchcompile.gauges.flop_formulas`. An operator
that has none there counts one for each element of its result, and where that says little it is told so. Bytes are what
the kernel reads and writes.
Exp, tanh and the like are held against the machine's own peak of exp; of all else that has no formula, bytes alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.graph_texts import Stage, lines_with_prefixes
from pytest_torchcompile.gauges.flop_formulas import flop_formula, flops_unknown
from pytest_torchcompile.gauges.library_operators import is_convolution, is_function
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks, machine_peaks
from pytest_torchcompile.lowering.kernel_records import (
    COLLECTIVE,
    KernelCall,
    Operator,
    TensorAccess,
    calls_that_move,
    readable_bytes,
)
from pytest_torchcompile.page.markup import Html
from pytest_torchcompile.page.roofline_figure import RoofPoint, readable_rate, roofline_figure
from pytest_torchcompile.quantity import count

__all__ = ["KernelRoof", "Roofline", "flops_of_stage", "kernel_roofs"]

_CALL: Final = re.compile(r'^\s*(\w+)(?:: "(.*?)")? = (torch\.ops\.aten\.(\w+)\.\w+\(.*)$')
_SHAPE: Final = re.compile(r"^[a-z]+\d+\w*\[([\d, ]*)\]")
_SHOWN: Final = 12

Shape = tuple[int, ...]


@dataclass(frozen=True)
class KernelRoof:
    """One call of a kernel against the machine's peaks."""

    name: str
    stage: str
    flops: int
    bytes: int
    seconds: float
    """The least that it can take."""
    bound: str
    """``memory``, ``compute``, or ``functions``: exp, tanh and the like."""
    counted: bool
    """Its FLOPs are by torch's formulas, and not one for each element."""
    dtype: str = "float32"
    """By whose peak its products are measured: that of its first result, or ``tf32`` of a GPU's convolutions."""
    uncounted: bool = False
    """It has operators whose FLOPs are not known, as a custom one, or products of open sizes: it computes more than is
    told, and may be bound by that."""
    measured: float | None = None
    """Seconds of a warm call; None: it was not timed."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def share_of_roof(self) -> float | None:
        """How near it comes to its best: 1 is at the roof. Above 1 is what lies in the processor's caches."""
        return self.seconds / self.measured if self.measured else None

    @property
    def seconds_left(self) -> float:
        """What can be won: the seconds measured beyond the least; 0 where it was not timed."""
        return max(0.0, self.measured - self.seconds) if self.measured else 0.0


def kernel_roofs(explained: Explanation, peaks: MachinePeaks) -> list[KernelRoof]:
    """Every kernel of an explanation that moves something in one rank, in the order in which they are called."""
    flops = _flops_of_graphs(explained.stages)
    # A generated kernel behind a library copies its result, or adds a bias: the products are the library's.
    beside_libraries = {graph: dict(of_nodes) for graph, of_nodes in flops.items()}
    for call in explained.kernels:
        if not call.source:
            of_nodes = beside_libraries.setdefault(call.graph, {})
            of_nodes.update((operator.node, 0) for operator in call.operators)
    roofs = []
    for call in calls_that_move(explained.kernels):
        # The links between ranks bound it, of which nobody has measured the peak.
        if call.library == COLLECTIVE:
            continue
        moved = call.bytes_read + call.bytes_written
        if moved:
            graphs = beside_libraries if call.source else flops
            roofs.append(_roof_of(call, moved, graphs.get(call.graph, {}), peaks))
    return roofs


def _flops_of_graphs(stages: Sequence[Stage]) -> dict[int, dict[str, int]]:
    """FLOPs of the nodes of each generated graph, by its number: names come again in another one, as in the backward.

    Each graph is recorded once more behind Inductor's passes, in the order of the generated code.
    """
    recorded = [stage for stage in stages if stage.stage == "post_grad"]
    return {graph: flops_of_stage(stage) for graph, stage in enumerate(recorded)}


@dataclass(frozen=True)
class _Work:
    """What a kernel computes."""

    products: int = 0
    """FLOPs of its matrix products and convolutions, by torch's own formulas."""
    arithmetic: int = 0
    """Elements that its other operators make, each of them one FLOP."""
    functions: int = 0
    """Those of them that are a function's, as of ``exp``: they take many instructions each."""
    uncounted: bool = False
    """As :attr:`KernelRoof.uncounted`."""


def _work_of(call: KernelCall, known: Mapping[str, int]) -> _Work:
    """``known``: FLOPs of the nodes that have a formula, by name."""
    products, arithmetic, functions, uncounted = 0, 0, 0, False
    stored = {tensor.of: tensor for tensor in call.writes}
    for operator in call.operators:
        # These only move bytes.
        if operator.target in ("copy", "fill"):
            continue
        by_formula = known.get(operator.node)
        if by_formula is not None:
            products += by_formula
            continue
        name = _packet_name(operator.target)
        has_formula = _formula(name) is not None
        # A formula that was not told enough, or an operator that has none.
        uncounted = uncounted or has_formula or flops_unknown(name or operator.target.replace(".", "::", 1), False)
        if not operator.view:
            elements = _elements_made(operator, stored.get(operator.node))
            arithmetic += elements
            functions += elements * is_function(name)
    return _Work(products, arithmetic, functions, uncounted)


def _roof_of(call: KernelCall, moved: int, known: Mapping[str, int], peaks: MachinePeaks) -> KernelRoof:
    """The least seconds of a kernel: those of what it computes or those of ``moved`` bytes, whichever are more."""
    work = _work_of(call, known)
    dtype = call.writes[0].dtype if call.writes else "float32"
    convolves = any(is_convolution(_packet_name(operator.target)) for operator in call.operators)
    dtype = peaks.multiplied_in(dtype, convolves)
    # Plain arithmetic is cheap beside the bytes that it takes, so it is not held against a peak.
    multiplying = evaluating = 0.0
    if work.products:
        multiplying = work.products / peaks.products_per_second(dtype)
    if peaks.functions:
        evaluating = work.functions / peaks.functions
    computing, moving = multiplying + evaluating, moved / peaks.bandwidth
    bound = "memory"
    if computing > moving:
        bound = "functions" if evaluating > multiplying else "compute"
    return KernelRoof(
        name=call.name,
        stage=call.stage,
        flops=work.products + work.arithmetic,
        bytes=moved,
        seconds=max(computing, moving),
        bound=bound,
        counted=bool(work.products),
        dtype=dtype,
        uncounted=work.uncounted,
        measured=call.seconds,
    )


def _packet_name(target: str) -> str:
    """``mm`` of ``aten.mm.default``; empty for what is none of ATen's."""
    namespace, _, rest = target.partition(".")
    return rest.partition(".")[0] if namespace == "aten" else ""


def _elements_made(operator: Operator, stored: TensorAccess | None) -> int:
    """Those of its result; of one that writes a part in place, as ``index_put_``, those of that part."""
    elements = _count(operator.shape)
    if stored is not None and stored.shape == operator.shape and stored.bytes < operator.bytes:
        return elements * stored.bytes // operator.bytes
    return elements


def _count(shape: Sequence[int | str]) -> int:
    number = 1
    for size in shape:
        # A size that is open counts as one.
        number *= size if isinstance(size, int) else 1
    return number


def flops_of_stage(stage: Stage) -> dict[str, int]:
    """FLOPs of the nodes of a graph whose operator torch has a formula for; those with open sizes are left out."""
    shapes = {node.name: _shape_of(node.type) for node in stage.nodes}
    found: dict[str, int] = {}
    for prefix, line in lines_with_prefixes(stage.text):
        match = _CALL.match(line)
        formula = match and _formula(match[4])
        if match and formula is not None:
            named = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
            number = _apply(formula, match[3].partition(";")[0], _shape_of(match[2] or ""), named)
            if number is not None:
                found[prefix + match[1]] = number
    return found


def _formula(operator: str) -> Any:
    packet = getattr(torch.ops.aten, operator, None)
    return None if packet is None else flop_formula(packet)


def _apply(formula: Any, code: str, result: Shape | None, shapes: Mapping[str, Shape | None]) -> int | None:
    """The formula, of the shapes of what is called; None where one is open or the formula takes something else."""
    call = ast.parse(code.strip(), mode="eval").body
    if not isinstance(call, ast.Call):
        return None
    try:
        given = [_argument(each, shapes) for each in call.args]
        named = {each.arg: _argument(each.value, shapes) for each in call.keywords if each.arg}
        # Of several results the graph names none: a backward convolution returns what its input and weight are.
        returned = result if result is not None else tuple(given[1:3])
        return int(formula(*given, **named, out_val=returned))
    except (ValueError, TypeError, IndexError, KeyError):
        return None


def _argument(node: ast.expr, shapes: Mapping[str, Shape | None]) -> Any:
    if isinstance(node, ast.Name):
        shape = shapes.get(node.id)
        if shape is None:
            raise ValueError(node.id)
        return shape
    if isinstance(node, ast.Attribute):
        # A dtype, a layout, a device.
        return None
    return ast.literal_eval(node)


def _shape_of(kind: str) -> Shape | None:
    """The sizes of a type as torch writes it; None where one is open.

    >>> _shape_of("f32[4, 600][600, 1]cpu"), _shape_of("f32[][]cpu"), _shape_of("f32[s0, 4]")
    ((4, 600), (), None)
    """
    match = _SHAPE.match(kind)
    if match is None:
        return None
    return tuple(int(size) for size in match[1].split(",") if size.strip())


@dataclass(frozen=True)
class Roofline:
    """All kernels of an explanation against the peaks of this machine."""

    kernels: tuple[KernelRoof, ...]
    peaks: MachinePeaks
    busy: str = ""
    """As :attr:`Explanation.busy`."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Operator to how many calls of it there are; they are no kernels of the roofline."""

    @classmethod
    def of(cls, explained: Explanation, device: str) -> Roofline:
        """The peaks are those that are kept of this machine, else they are measured now."""
        peaks = machine_peaks(device)
        sending = [call for call in explained.kernels if call.library == COLLECTIVE and not call.waits]
        collectives = Counter(call.name for call in sending)
        return cls(tuple(kernel_roofs(explained, peaks)), peaks, explained.busy, dict(collectives))

    @property
    def dtype(self) -> str:
        """That in which most products are computed; float32 where there are none."""
        flops: Counter[str] = Counter()
        for roof in self.kernels:
            if roof.counted:
                flops[roof.dtype] += roof.flops
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    def figure(self) -> Html:
        """Each kernel as it was measured, else where it would be at its best.

        The flat roof is the peak of the dtype with most products.
        """
        points = []
        for roof in self.kernels:
            rate = roof.flops / (roof.measured or roof.seconds)
            points.append(RoofPoint(roof.name, roof.intensity, rate, roof.bound))
        return roofline_figure(points, self.peaks.bandwidth, self.peaks.products_per_second(self.dtype))

    def lines(self) -> Iterator[str]:
        """The kernels with the longest least times."""
        if self.collectives:
            named = ", ".join(f"{number} {name}" for name, number in self.collectives.items())
            yield f"collectives, which the links between ranks bound and no roof: {named}"
        total = sum(roof.seconds for roof in self.kernels)
        if not total:
            return
        by_memory = sum(roof.seconds for roof in self.kernels if roof.bound == "memory")
        peaks = self.peaks
        yield (f"roofline: at this machine's peaks ({peaks.device}: {readable_bytes(round(peaks.bandwidth))}/s, "
               f"{readable_rate(peaks.products_per_second(self.dtype))} in {self.dtype}) all kernels take at least "
               f"{total * 1e6:.1f} µs, {by_memory / total:.0%} of it bound by memory")
        timed = [roof for roof in self.kernels if roof.measured]
        if timed:
            measured = sum(roof.measured or 0.0 for roof in timed)
            left = sum(roof.seconds_left for roof in timed)
            yield (f"  measured {measured * 1e6:.1f} µs in {count(len(timed), 'kernel')}; {left * 1e6:.1f} µs of it is "
                   "above the roof, with the calls themselves")
            if self.busy:
                yield f"  {self.busy}"
        yield f"  {'least µs':>10}  {'measured':>10}  {'of roof':>7}  {'bound':9}  {'moves':>9}  {'FLOPs':>12}  kernel"
        dearest = sorted(self.kernels, key=_cost_of, reverse=True)
        for roof in dearest[:_SHOWN]:
            yield _row_of(roof)
        if len(dearest) > _SHOWN:
            yield f"  and {len(dearest) - _SHOWN} that take less"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        kernels = []
        for roof in self.kernels:
            derived = {"intensity": roof.intensity, "share_of_roof": roof.share_of_roof,
                       "seconds_left": roof.seconds_left}
            kernels.append({**asdict(roof), **derived})
        return {"peaks": self.peaks.to_dict(), "busy": self.busy, "collectives": self.collectives, "kernels": kernels}


def _cost_of(roof: KernelRoof) -> float:
    """By what it takes, where that was measured."""
    return roof.measured or roof.seconds


def _row_of(roof: KernelRoof) -> str:
    measured = "-" if roof.measured is None else f"{roof.measured * 1e6:.2f}"
    share = "-" if roof.share_of_roof is None else f"{roof.share_of_roof:.0%}"
    remark = "" if roof.counted else " (one FLOP an element)"
    if roof.uncounted:
        remark = " (computes more: FLOPs not known, or sizes open)"
    work = f"{roof.bound:9}  {readable_bytes(roof.bytes):>9}  {roof.flops:>12,}"
    return f"  {roof.seconds * 1e6:10.2f}  {measured:>10}  {share:>7}  {work}  {roof.name}{remark}"
