"""CHECKS: what must hold of a cell, causes before what follows from them, and LIMITS: the numbers a matrix may change.

To add a check: a file in this folder with its ``measure`` and ``judge``, and its record here. From the record terminal,
page, gate and playbook know it: how bad it is when it fails, whether it compares numbers, what of torch's log shows it.

Read ``check.py`` (what a check is), ``severity.py`` (how bad a failure is), then any check: each judges one section
of the observation. ``numerics.py`` has the four that compare numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_torchcompile.backends import promised
from pytest_torchcompile.checks import severity
from pytest_torchcompile.checks.numbers import Column, Limit
from pytest_torchcompile.checks.severity import Effect, Way
from pytest_torchcompile.observation import RAISED
from pytest_torchcompile.wrappers import limits_of
from pytest_torchcompile.wrappers.wrapping import Wrapping

if TYPE_CHECKING:
    from pytest_torchcompile.checks.check import Check

__all__ = ["CHECKS", "COMPARING", "LIMITS", "RENAMED", "CheckEntry", "Column", "Limit",
           "computes_wrong_numbers", "current_name", "default_limits", "fails_by_wrong_numbers", "load", "renamed_text",
           "way_of"]


@dataclass(frozen=True, slots=True)
class CheckEntry:
    """One check: where it is (loaded only when it runs), and the limits it takes."""

    target: str
    help: str
    effect: Effect
    """What becomes of a model in which it does not hold, and how bad that is."""
    limits: tuple[Limit, ...] = ()
    ways: tuple[Way, ...] = ()
    """Ways in which it fails that are worse or milder than ``effect``; the first that fits counts."""
    columns: tuple[Column, ...] = ()
    """The numbers that it shows of each cell."""
    compares: bool = False
    """Does it compare numbers (:mod:`~pytest_torchcompile.checks.numerics`), as ``compare()`` does?"""
    logs: str = ""
    """The channels of ``TORCH_LOGS`` that show what it judges (torch/_logging/_registrations.py, torch 2.8 to 2.15; a
    test holds them against the torch that is installed)."""
    phases: tuple[str, ...] = ("training", "inference")
    """The phases in which it has something to judge."""
    graphs: bool = False
    """It has something to judge only where CUDA graphs are promised: on a GPU, by the mode or the backend."""
    on_request: bool = False
    """It takes long, so it runs only where a matrix or ``--compile-checks`` names it."""
    ranks: Literal["any", "one", "several"] = "any"
    """Has it something to judge in cells of one rank, of several, or of any number?"""
    draws: bool = False
    """It draws sizes of its own, out of the whole range of a dim."""
    toolkit: bool = False
    """Does it judge what the backend ``toolkit`` does, and nothing of other backends?"""
    fake: bool = False
    """Has it something to judge where the ranks are fake, so that no number means anything?"""

    def applies(self, axes: Mapping[str, Any]) -> bool:
        """Whether a cell with these values of the axes has something to judge; others have no such item."""
        return not self.idle(axes)

    def idle(self, axes: Mapping[str, Any]) -> str:
        """Why there is nothing to judge in a cell with these values of the axes; empty if there is."""
        if axes.get("phase") not in self.phases:
            return f"it judges phase {' and '.join(self.phases)}, not {axes.get('phase')}"
        on_gpu = str(axes.get("device")).partition(":")[0] == "cuda"
        if self.graphs and not (on_gpu and promised(axes)):
            return "no CUDA graphs are promised, by a mode or a backend on device cuda"
        if self.toolkit and axes.get("backend") != "toolkit":
            return "it judges the graph passes of backend toolkit"
        try:
            wrapping = Wrapping.read(str(axes.get("wrapper")))
        except ValueError:
            # A report may hold a wrapper that this version does not know.
            return ""
        if wrapping.fake and self.fake:
            return ""
        if wrapping.fake:
            return "in the fake lane no number means anything"
        if self.ranks == "one" and wrapping.ranks > 1:
            return "it judges cells of one rank only"
        if self.ranks == "several" and wrapping.ranks <= 1:
            return "it judges cells of several ranks only"
        return ""


def default_limits(names: Iterable[str], wrapper: str = "none") -> dict[str, float]:
    """The limits of the checks that have a value where no rule sets one, in cells of a wrapper."""
    of_wrapper = limits_of(wrapper)
    defaults: dict[str, float] = {}
    for name in names:
        for limit in CHECKS[name].limits:
            if limit.default is not None:
                defaults[limit.name] = of_wrapper.get(limit.name, limit.default)
    return defaults


def current_name(name: str) -> str:
    """The name that a check has now, for an old one too; warns of that."""
    if name not in RENAMED:
        return name
    warnings.warn(renamed_text(name), FutureWarning, stacklevel=2)
    return RENAMED[name]


def renamed_text(name: str) -> str:
    """What is said of an old name."""
    return f"the check {name!r} is called {RENAMED[name]!r} now; the old name will go with the next release"


def way_of(check: str, message: str) -> Way | None:
    """The way in which a check failed, told by the message of its problem; None: as its record says by default."""
    ways: tuple[Way, ...] = severity.OF_EVERY_CHECK
    # A report may hold a check that this version does not know.
    if check in CHECKS:
        ways = (*CHECKS[check].ways, *ways)
    elif check == severity.TEST_CHECK:
        ways = severity.OF_TESTS
    words = severity.without_ranks(message)
    return next((way for way in ways if way.matches(words)), None)


def computes_wrong_numbers(check: str, message: str) -> bool:
    """Does a problem of this check mean that the model computes something else?"""
    if way := way_of(check, message):
        return way.effect.severity == severity.Severity.WRONG_NUMBERS
    return check in CHECKS and CHECKS[check].effect.severity == severity.Severity.WRONG_NUMBERS


def fails_by_wrong_numbers(check: str, verdict: str, messages: Iterable[str]) -> bool:
    """Does the check fail because the model computes something else? Only who names the check may expect that."""
    # Of a test the set-up may compare numbers too, and its failure is an error.
    failed = verdict == "fail" or (verdict == "error" and check == severity.TEST_CHECK)
    return failed and any(computes_wrong_numbers(check, message) for message in messages)


@cache
def load(name: str) -> Check:
    """The check of that name; its file needs no torch until it measures."""
    # The file is named in the record, not imported here: start-up stays light.
    module, _, attribute = CHECKS[name].target.partition(":")
    check: Check = getattr(import_module(module), attribute)
    return check


_HERE: Final = "pytest_torchcompile.checks"

_ZERO_GRADIENTS: Final = Limit("zero_gradients", "max", None,
                               "gradients that may be zeros where eager has none; by default they are only noted")
_ZERO_SIGNS: Final = Limit("zero_signs", "max", None,
                           "outputs whose zeros may have another sign; by default they are only noted")
_DECIDED: Final = Limit("decided", "min", None,
                        "share of the leaves that rounding noise leaves decidable; by default it is only told",
                        whole=False, most=1)
_GRAPH_BREAKS: Final = Limit("graph_breaks", "max", 0, "graph breaks in the cell's run")
_DYNAMO: Final = "graph_breaks,recompiles"
_BACKWARD: Final = "aot_joint_graph,output_code"
_FORWARD: Final = "aot_graphs,output_code"

CHECKS: Final[dict[str, CheckEntry]] = {
    # What was compiled. These come first: where they fail, most of the others have nothing to judge.
    "graph_breaks": CheckEntry(
        f"{_HERE}.graph_breaks:CHECK",
        "the model is captured whole",
        severity.BREAKS,
        (_GRAPH_BREAKS,),
        columns=(Column("graph_breaks", "max", "places where a graph ends early"),),
        logs="graph_breaks",
        fake=True,
    ),
    "compiles": CheckEntry(
        f"{_HERE}.compiles:CHECK",
        "compiled code really ran, for enough of the model",
        severity.EAGER,
        (Limit("coverage", "min", 1.0, "share of operator calls in compiled graphs; lower where a wrapper or an "
               "allowed graph break leaves some to eager", whole=False, most=1),
         Limit("guard_us", "max", None, "microseconds in which the guards of one function are asked; by default they "
               "are only recorded")),
        (Way(RAISED, severity.RAISES),
         Way(severity.BESIDE_BREAKS, severity.PARTLY_EAGER, follows="graph_breaks"),
         Way(severity.UNCOVERED, severity.EAGER, follows="graph_breaks"),
         Way(f"^{severity.SLOW_GUARDS}", severity.TOO_MUCH),
         Way("^every output of the compiled model is zero", severity.WRONG),
         Way("^the ledger could not read", severity.UNPROVEN)),
        columns=(Column("silent_eager", "max", "frames that silently ran eagerly"),
                 Column("graphs", "max", "graphs that the backend compiled"),
                 Column("compile_seconds", "max", "seconds of all compiles of the cell", whole=False, unit=" s"),
                 Column("guard_microseconds", "max", "time to ask the guards of all compiles once", whole=False,
                        unit=" µs")),
        logs=_DYNAMO,
        fake=True,
    ),
    # Does it compute what eager computes?
    "equivalence": CheckEntry(
        f"{_HERE}.numerics:EQUIVALENCE",
        "outputs equal those of the eager model, within rounding noise",
        severity.WRONG,
        (Limit("rms", "max", None, "error of a whole output over its rounding noise; 4 by default", whole=False),
         Limit("bias", "max", None, "systematic part of the error over the noise's; 8 by default", whole=False),
         Limit("peak", "max", None, "error of the worst element over its noise; 16 by default", whole=False),
         _DECIDED, _ZERO_SIGNS),
        ways=(severity.STRIDES,),
        compares=True,
        logs=_FORWARD,
    ),
    "gradients": CheckEntry(
        f"{_HERE}.numerics:GRADIENTS",
        "gradients equal those of the eager model, within rounding noise",
        severity.WRONG,
        (_ZERO_GRADIENTS, _DECIDED),
        (severity.STRIDES, Way(r"^\d+ gradient\(s\) are zeros where", severity.ZEROS)),
        compares=True,
        logs=_BACKWARD,
        phases=("training",),
    ),
    "training_steps": CheckEntry(
        f"{_HERE}.numerics:TRAINING_STEPS",
        "a few steps of SGD leave what they leave eagerly, within rounding noise",
        severity.WRONG,
        (Limit("steps", "min", 3, "training steps that are compared", least=2), _DECIDED),
        (severity.STRIDES,),
        compares=True,
        logs=_BACKWARD,
        phases=("training",),
    ),
    "aliasing": CheckEntry(
        f"{_HERE}.numerics:ALIASING",
        "outputs share memory exactly where eager's do, also when the model is called again",
        severity.OTHER_MEMORY,
        compares=True,
        logs=_FORWARD,
    ),
    "layout": CheckEntry(
        f"{_HERE}.layout:CHECK",
        "outputs, inputs and buffers have eager's strides, where no timing decides about them",
        severity.OTHER_LAYOUT,
        (Limit("strides", "max", None, "strides that may differ; by default those that are timed or of gradients"),),
        logs=_FORWARD,
    ),
    # Does it stay compiled, for every shape and in every step?
    "recompiles": CheckEntry(
        f"{_HERE}.recompiles:CHECK",
        "new shapes and values do not compile again and again",
        severity.RECOMPILES,
        (Limit("recompiles", "max", None, "recompiles in the cell's run; by default what its shapes need"),
         Limit("unexplained", "max", None, "recompiles of one function that no size explains; by default none")),
        columns=(Column("recompiles", "max", "recompiles in the cell's run"),),
        logs="recompiles_verbose",
        fake=True,
    ),
    "shape_stability": CheckEntry(
        f"{_HERE}.shape_stability:CHECK",
        "once all sizes were met nothing is compiled again, also for lengths that are padded to a bucket",
        severity.RECOMPILES,
        (Limit("late_recompiles", "max", None, "recompiles after the first pass over the sizes; by default none"),),
        (Way("the compiled model raised", severity.RAISES),
         Way("nothing of it ran compiled", severity.EAGER)),
        logs="recompiles_verbose,dynamic",
    ),
    "cudagraphs": CheckEntry(
        f"{_HERE}.cudagraphs:CHECK",
        "each compiled graph of a warm step replays a CUDA graph, where the mode or the backend promises them",
        severity.NO_REPLAY,
        (Limit("uncaptured", "max", None,
               "compiled graphs of a step, or parts of them, that may do without CUDA graphs; by default none"),),
        (Way("^no compiled graph ran", severity.EAGER),),
        logs="cudagraphs,perf_hints",
        graphs=True,
    ),
    # Is the production layer safe on it?
    "smoketest": CheckEntry(
        f"{_HERE}.smoketest:CHECK",
        "CompileSmoketest says True of the compiled model",
        severity.WRONG,
        ways=severity.OF_THE_SMOKETEST,
        logs=_DYNAMO,
        ranks="one",
    ),
    "safe_fallback": CheckEntry(
        f"{_HERE}.safe_fallback:CHECK",
        "where the model does not compile, maybe_compile gives one that runs as eager does",
        severity.CORRUPTED,
        ways=(Way("^maybe_compile let a failure", severity.RAISES),
              Way("^the log says|^with a sample batch", severity.UNLOGGED)),
        logs=_DYNAMO,
        ranks="one",
    ),
    # Do the ranks agree?
    "rank_divergence": CheckEntry(
        f"{_HERE}.rank_divergence:CHECK",
        "every rank compiles the same, in the same calls",
        severity.DIVERGES,
        logs=_DYNAMO,
        ranks="several",
    ),
    # What takes long, and so runs only where somebody asks for it.
    "randomness": CheckEntry(
        f"{_HERE}.randomness:CHECK",
        "random numbers that compiled code draws itself have eager's distribution, and obey the seed",
        severity.OTHER_CHANCES,
        logs="output_code", on_request=True, ranks="one",
    ),
    "kernels": CheckEntry(
        f"{_HERE}.kernels:CHECK",
        "Inductor fuses the model into few enough kernels",
        severity.TOO_MUCH,
        (Limit("kernels", "max", None, "kernels that Inductor generated; by default they are only recorded"),
         Limit("launches", "max", None, "kernels that a GPU runs in a compiled step; by default only recorded")),
        columns=(Column("kernels", "max", "kernels that Inductor generated"),),
        logs="fusion,perf_hints",
        on_request=True,
    ),
    "memory": CheckEntry(
        f"{_HERE}.memory:CHECK",
        "a warm step leaves no more memory behind than an eager one",
        severity.LEAKS,
        (Limit("leaked_bytes", "max", None, "bytes of tensors that a compiled step may leave beyond an eager one; by "
               "default 0, on a GPU 512"),),
        columns=(Column("leaked_bytes", "max", "bytes of tensors that a step leaves behind", unit=" bytes"),),
        logs="output_code", on_request=True, ranks="one",
    ),
    "determinism": CheckEntry(
        f"{_HERE}.determinism:CHECK", "five processes, which order sets otherwise, compile the same graphs and kernels",
        severity.OTHER_CODE, logs="aot_graphs,output_code", on_request=True, ranks="one"),
    "worth": CheckEntry(
        f"{_HERE}.worth:CHECK",
        "compiled is not slower than eager, or as much faster as is wanted",
        severity.SLOWER,
        (Limit("speedup", "min", None, "eager time over compiled time; by default it must not be slower", whole=False),
         Limit("kernels_share", "max", None, "kernels of a compiled step over those of an eager one; by default it is "
               "only recorded", whole=False),
         Limit("memory_mib", "max", None, "peak memory of a compiled step, in MiB; by default it is only recorded",
               whole=False)),
        (Way("^it computes wrong numbers", severity.WRONG, follows="equivalence"),
         Way("^nothing ran compiled", severity.EAGER),
         Way(r"compile\(s\) in the timed steps", severity.RECOMPILES),
         Way("^a compiled step (?:runs|takes)|^kernels of a step were not counted", severity.TOO_MUCH)),
        columns=(Column("speedup", "min", "eager time over compiled time", whole=False),
                 Column("kernels_share", "max", "kernels of a compiled step over an eager one's", whole=False),
                 Column("memory_mib", "max", "peak memory of a call", whole=False, unit=" MiB"),
                 Column("prediction_error", "max", "how far off the predicted speed-up is, as a share", whole=False),
                 Column("step_ms", "max", "median time of a compiled step", whole=False, unit=" ms")),
        logs="fusion,perf_hints",
        on_request=True,
        ranks="one",
    ),
    "contract": CheckEntry(
        f"{_HERE}.contract:CHECK",
        "whatever a caller may do with the module, compiled code does what eager does",
        severity.WRONG,
        ways=severity.OF_HISTORIES, logs="recompiles_verbose", draws=True, on_request=True, ranks="one",
    ),
    "artifacts": CheckEntry(
        f"{_HERE}.artifacts:CHECK",
        "what another process takes of the compiled model computes what eager computes, and compiles nothing",
        severity.WRONG,
        (Limit("cache_misses", "max", 0, "graphs that a second process compiles again, by a route that keeps them"),
         Limit("routes", "min", 1, "routes by which the model must have been shipped", least=1)),
        (Way("^load: ", severity.RAISES), *severity.OF_HISTORIES),
        columns=(Column("shipped_routes", "min", "routes by which another process took the model, and all was well"),
                 Column("cache_misses", "max", "graphs that a second process compiled again")),
        logs="output_code", on_request=True, ranks="one",
    ),
    "fuzz": CheckEntry(
        f"{_HERE}.fuzz:CHECK",
        "drawn sequences of shapes find nothing wrong either",
        severity.WRONG,
        (_GRAPH_BREAKS,
         Limit("fuzz_recompiles", "max", None, "recompiles in a drawn sequence; by default what its sizes explain")),
        severity.OF_HISTORIES, logs="recompiles_verbose", draws=True, on_request=True, ranks="one",
    ),
    # What a compiler engineer asks. It forgets what was compiled, so it comes last.
    "passes": CheckEntry(
        f"{_HERE}.passes:CHECK",
        "each graph pass leaves what the graph before it computes",
        severity.WRONG,
        ways=(Way("the model raises: ", severity.RAISES),),
        logs="aot_joint_graph,aot_graphs",
        ranks="one",
        toolkit=True,
    ),
}
RENAMED: Final = {"benchmark": "worth"}
"""Old names of checks, which are read for a release more."""
LIMITS: Final[dict[str, Limit]] = {limit.name: limit for check in CHECKS.values() for limit in check.limits}
COMPARING: Final = frozenset(name for name, check in CHECKS.items() if check.compares)
"""The checks that compare numbers: their problems begin with the name of an output, a gradient, ..."""
