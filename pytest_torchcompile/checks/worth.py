"""worth: is it worth it? Steps of the compiled model beside eager ones, turn by turn, in the cell's own process.

Both run on one machine at one time, so that the ratio means something where seconds do not. A timing is judged apart
from all else: wrong numbers come first, and on a machine that is not quiet enough it is only said that nothing can be
told. Without limits one thing fails: the model is slower compiled, and the whole 99 % interval says so.

Why a model is not faster is told in one sentence with place and remedy (:func:`slow_cause`). Each cause has evidence:
where the time of a profiled step on a CPU went, kernels counted on both sides, and what ran outside of compiled graphs.
Of several the one that takes most of the step is told; without evidence nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.checks.numerics import EQUIVALENCE
from pytest_torchcompile.checks.protocol import Check, not_run, unjudged
from pytest_torchcompile.layer.benchmark_result import NOT_TOLD, NOTHING, came_from_cache, pays_after, speed_text
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.layer.benchmark_result import Benchmark
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK", "WRONG", "slow_cause"]

WRONG: Final = "it computes wrong numbers, so its speed says nothing"
"""How the problem begins where `equivalence` fails."""
SECONDS: Final = 1.5
"""About how long the timed steps of a cell may take, where eight rounds take no longer."""
SIGMAS: Final = 2 * 2.576
"""The width of an interval of 99 % in standard deviations, for normal noise."""
MIB: Final = 2**20
KEPT_BREAKS: Final = 3
COVERED: Final = 0.9
"""With a smaller share of operator calls in graphs, little was compiled."""
MUCH_GUARDING: Final = 0.15
MUCH_LIBRARY: Final = 0.5
MUCH_PYTHON: Final = 0.5
SAME_KERNELS: Final = 0.95
"""From this share of eager's kernels on, nothing to speak of was fused."""
NAMED_CALLS: Final = 3


def measure(run: CellTrial) -> dict[str, Any]:
    """Times of a step, eager and compiled, their ratio, kernels and memory of a step; all batches take part."""
    from pytest_torchcompile.layer.benchmark import StepRunner, benchmark_sides
    from pytest_torchcompile.oracle.training import default_loss

    if run.compiled.error or run.side is None:
        return not_run(run)
    wrong = _wrong_numbers(run)
    if wrong:
        return {"raised": None, "wrong": wrong}
    loss = (run.loss or default_loss) if run.train else None
    # The compiled model is the one that the run has compiled, so what is timed here is what was judged.
    eager, batches = run.make(None), [call.batch for call in run.calls]
    for side in (eager, run.side):
        side.restore()

    def make_batch(number: int) -> Any:
        return batches[number % len(batches)].value

    # At least one warm step of each size.
    warmup = max(3, len(batches))
    eager_runner = StepRunner(eager.call, eager.module, loss)
    compiled_runner = StepRunner(run.side.call, run.side.module, loss)
    timed = benchmark_sides(eager_runner, compiled_runner, make_batch, warmup=warmup, seconds=SECONDS, texts=run.texts)
    return {"raised": None, "wrong": "", **_figures(timed), **_compile_facts(run, timed)}


def _wrong_numbers(run: CellTrial) -> str:
    """The first wrong number that `equivalence` finds; empty if there is none."""
    for problem in EQUIVALENCE.judge(EQUIVALENCE.measure(run), run.job.limits):
        return problem.message
    return ""


def _figures(timed: Benchmark) -> dict[str, Any]:
    ratio = timed.ratio
    low, high = ratio.speedup_interval
    return {
        "verdict": timed.verdict,
        "speedup": timed.speedup,
        "speedup_spread": (high - low) / SIGMAS,
        "interval": list(ratio.speedup_interval),
        "kernels_share": timed.kernels_share,
        "memory_mib": timed.compiled.peak_bytes / MIB,
        "memory_delta_mib": (timed.compiled.peak_bytes - timed.eager.peak_bytes) / MIB,
        "memory_source": timed.memory_source,
        "unit": timed.unit,
        "late_compiles": timed.late_compiles,
        "sides": {"eager": asdict(timed.eager), "compiled": asdict(timed.compiled)},
        "profile": asdict(timed.profile) if timed.profile is not None else None,
        "text": _steady_rows(str(timed)),
    }


def _compile_facts(run: CellTrial, timed: Benchmark) -> dict[str, Any]:
    """What compiling took before the model was handed over here, and when that is won back."""
    compiles = run.compiled.seen["compiles"]
    seconds = sum(each["seconds"] for each in compiles)
    cached = sum(came_from_cache(each["caches"]) for each in compiles)
    first = run.calls[0].label
    pays = None
    if timed.verdict == "faster":
        # By the ratio, and a step of a quiet moment: medians of a busy one say little.
        pays = pays_after(seconds, timed.eager.low, timed.eager.low * timed.ratio.value)
    breaks = run.compiled.seen["graph_breaks"][:KEPT_BREAKS]
    return {
        "coverage": min((each["share"] for each in run.compiled.coverage), default=None),
        "breaks": [{"file": each["file"], "line": each["line"]} for each in breaks],
        "compiling_seconds": seconds,
        "first_call_seconds": sum(each["seconds"] for each in compiles if each["during"] == first),
        "compiles": len(compiles),
        "cached": cached,
        "pays_after": pays,
    }


def _steady_rows(table: str) -> str:
    """Without what was before the steady state: here the model came compiled."""
    return "\n".join(line for line in table.splitlines()[:-1] if not line.startswith("first step"))


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``speedup``, ``kernels_share`` and ``memory_mib``.

    A speed-up is too small where all of its 99 % interval is: noise fails nothing.
    """
    if section["raised"]:
        yield from unjudged(section)
    elif section.get("wrong"):
        yield Problem(f"{WRONG}: {section['wrong']}", hint="see the check `equivalence` of this cell")
    elif section["verdict"] == NOTHING:
        yield Problem("nothing ran compiled in the timed steps, so their times say nothing", section["text"])
    elif section["late_compiles"]:
        yield Problem(f"{section['late_compiles']} compile(s) in the timed steps: there was no steady state",
                      section["text"], "see `recompiles` and `shape_stability`")
    else:
        yield from _judge_speed(section, limits)
        yield from _judge_kernels(section, limits)
        yield from _judge_memory(section, limits)


def _judge_speed(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    least, (low, high) = limits.get("speedup"), section["interval"]
    found = speed_text(section["speedup"], section["interval"])
    if least is not None and high < least:
        yield Problem(f"{found}, at least {least:g} wanted", section["text"], _hint(section))
    elif least is None and section["verdict"] == "slower":
        yield Problem(f"slower: {found}", section["text"],
                      f"{_hint(section)}; where that is known, a rule `limits: {{speedup: {low:.2g}}}` allows it")


def _hint(section: Mapping[str, Any]) -> str:
    """Why, where there is evidence."""
    return slow_cause(section) or "do not compile this here, or find out why: the check `kernels` shows what was fused"


def _judge_kernels(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    most, ratio = limits.get("kernels_share"), section.get("kernels_share")
    if most is None:
        return
    if ratio is None:
        yield Problem(f"kernels of a step were not counted, so the limit kernels_share of {most:g} says nothing")
    elif ratio > most:
        eager, compiled = (section["sides"][side]["kernels"] for side in ("eager", "compiled"))
        yield Problem(f"a compiled step runs {compiled} kernels and an eager one {eager}, which is {ratio:.2f} times "
                      f"as many, at most {most:g} allowed", section["text"],
                      "the check `kernels` shows what was fused; `TORCH_LOGS=fusion` tells why two were not")


def _judge_memory(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    most = limits.get("memory_mib")
    if most is not None and section.get("memory_source") == "unknown":
        yield Problem(f"this system does not tell the memory of a process, so the limit memory_mib of {most:g} says "
                      "nothing")
    elif most is not None and section["memory_mib"] > most:
        yield Problem(f"a compiled step takes {section['memory_mib']:.4g} MiB at its peak, at most {most:g} allowed",
                      section["text"])


def remark(section: Mapping[str, Any]) -> str:
    """The answer in one line: faster, no difference, slower, or that it could not be told."""
    verdict, (low, high) = section["verdict"], section["interval"]
    if verdict == NOT_TOLD:
        return (f"{NOT_TOLD}: this machine is not quiet enough, the speed-up lies between {low:.2f} and {high:.2f}")
    words = [f"{verdict}: {section['speedup']:.2f} times as fast compiled ({low:.2f} to {high:.2f})"]
    if section.get("pays_after"):
        words.append(f"pays after {section['pays_after']} steps{_cache_words(section)}")
    if cause := slow_cause(section):
        words.append(cause)
    return "; ".join(words)


def _cache_words(section: Mapping[str, Any]) -> str:
    """How much a cache served, where it did: with empty caches compiling takes longer, and pays later."""
    if not section["cached"]:
        return ""
    return f", {section['cached']} of {section['compiles']} compiles being from a cache"


CHECK = Check("worth", measure, judge, remark)


@dataclass(frozen=True)
class _Cause:
    """One possible cause."""

    share: float
    """Of the step, that it explains."""
    text: str


def slow_cause(section: Mapping[str, Any]) -> str:
    """The first cause of a section of `worth` that is slower or no different; empty where none is known."""
    if section["verdict"] not in ("slower", "no difference") or not section.get("profile"):
        return ""
    causes = [*_little_compiled(section), *_guards(section), *_python(section), *_same_kernels(section)]
    if not causes:
        return ""
    return max(causes, key=_share_of).text


def _share_of(cause: _Cause) -> float:
    return cause.share


def _part(section: Mapping[str, Any], name: str) -> float:
    """The share of a part of the profiled step."""
    profile = section["profile"]
    seconds = profile["seconds"]
    return float(profile[name] / seconds) if seconds else 0.0


def _little_compiled(section: Mapping[str, Any]) -> Iterator[_Cause]:
    coverage = section.get("coverage")
    if coverage is None or coverage >= COVERED:
        return
    place, remedy = "", "see the check `compiles` for what stayed outside"
    if breaks := section.get("breaks"):
        first = breaks[0]
        place = f"; the first graph break is at {first['file']}:{first['line']}"
        remedy = "move what breaks the graph out of forward, as the check `graph_breaks` says"
    outside = _part(section, "operators") + _part(section, "python")
    yield _Cause(outside, f"{1 - coverage:.0%} of the operator calls run outside of compiled graphs{place}: {remedy}")


def _guards(section: Mapping[str, Any]) -> Iterator[_Cause]:
    share = _part(section, "guards")
    if share >= MUCH_GUARDING:
        seconds = section["profile"]["guards"]
        yield _Cause(share, f"Dynamo's guards take {share:.0%} of a compiled step ({seconds * 1e6:.0f} µs): the step "
                            "is too short for them, so compile a larger part at once, or give it larger batches")


def _python(section: Mapping[str, Any]) -> Iterator[_Cause]:
    share = _part(section, "python")
    if share < MUCH_PYTHON:
        return
    place = ""
    if breaks := section.get("breaks"):
        place = f", the first graph break being at {breaks[0]['file']}:{breaks[0]['line']}"
    yield _Cause(share, f"{share:.0%} of a compiled step passes in Python, outside of graphs and operators{place}: "
                        "take prints, `.item()` and loading out of the step")


def _same_kernels(section: Mapping[str, Any]) -> Iterator[_Cause]:
    profile = section["profile"]
    library, kernels_share = _part(section, "library"), section.get("kernels_share")
    if kernels_share is not None and kernels_share >= SAME_KERNELS:
        eager, compiled = section["sides"]["eager"]["kernels"], section["sides"]["compiled"]["kernels"]
        inside = library + _part(section, "generated")
        yield _Cause(inside, f"a compiled step runs {compiled} kernels and an eager one {eager}, so nothing was fused: "
                             "try the backend inductor, or leave the model to eager")
    elif library >= MUCH_LIBRARY:
        names = ", ".join(f"{calls} x {name}" for name, calls in list(profile["library_calls"].items())[:NAMED_CALLS])
        yield _Cause(library, f"{library:.0%} of a compiled step is library calls that eager makes too ({names}): only "
                              "the rest can be fused")
