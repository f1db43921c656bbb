"""worth: is it worth it? Steps of the compiled model beside eager ones, turn by turn, in the cell's own process.

Both run on one machine at one time, so that the ratio means something where seconds do not. A timing is judged apart
from all else: wrong numbers come first, and on a machine that is not quiet enough it is only said that nothing can be
told. Without limits one thing fails: the model is slower compiled, and the whole 99 % interval says so.

Why a model is not faster is told in one sentence with place and remedy (:mod:`~.slow_causes`). Each cause has evidence:
where the time of a profiled step went, kernels counted on both sides, what ran outside of compiled graphs, and what the
machine needs at its peak for the work of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.backends import promised
from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.checks.numerics import EQUIVALENCE
from pytest_torchcompile.checks.slow_causes import idle_remark, slow_cause
from pytest_torchcompile.checks.step_evidence import roof_share
from pytest_torchcompile.layer.benchmark_result import NOT_TOLD, NOTHING, came_from_cache, pays_after, speed_text
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.layer.benchmark_result import Benchmark
    from pytest_torchcompile.ledger.records import Compile, Text
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK", "WRONG"]

WRONG: Final = "it computes wrong numbers, so its speed says nothing"
"""How the problem begins where `equivalence` fails."""
SECONDS: Final = 1.5
"""About how long the timed steps of a cell may take, where eight rounds take no longer."""
SIGMAS: Final = 2 * 2.576
"""The width of an interval of 99 % in standard deviations, for normal noise."""
MIB: Final = 2**20
KEPT_BREAKS: Final = 3
_BOUNDS: Final = {"functions": "exp, tanh and the like"}
"""What bounds a step, where its name alone tells little."""


def measure(run: CellTrial) -> dict[str, Any]:
    """Times of a step, eager and compiled, their ratio, kernels and memory of a step; all batches take part.

    A model that draws random numbers is compiled anew for it, with Inductor's own, if it was compared under eager's.
    """
    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.ledger.records import Compile
    from pytest_torchcompile.oracle.own_draws import production_side

    if run.compiled.error or run.side is None:
        return not_run(run)
    wrong = _wrong_numbers(run)
    if wrong:
        return {"raised": None, "wrong": wrong}
    with production_side(run, run.single) as own:
        if own is None:
            # What is timed is what was judged.
            recompiles = list(map(Compile.from_dict, run.compiled.seen["recompiles"]))
            section = _measured(run, run.side, run.texts, recompiles)
            if run.numbers is not None:
                section["own_draws"] = True
            return section
        with observe(root=run.root, keep_texts=True) as seen:
            for call in run.calls:
                recording, _ = own.run(call, run.loss, run.train, run.seed)
                if recording.error:
                    return {"raised": f"{recording.error.type}, with random numbers that Inductor draws itself"}
        return {**_measured(run, own, seen.texts, seen.recompiles), "own_draws": True}


def _measured(
    run: CellTrial, compiled: Side, texts: Sequence[Text], recompiles: Sequence[Compile]
) -> dict[str, Any]:
    """The section of a compiled side beside an eager one; what was compiled of it before, and of that the recompiles.
    """
    from pytest_torchcompile.layer.benchmark import benchmark_sides
    from pytest_torchcompile.layer.step_runner import StepRunner
    from pytest_torchcompile.oracle.training import default_loss

    loss = (run.loss or default_loss) if run.train else None
    eager, batches = run.make(None), [call.batch for call in run.calls]
    for side in (eager, compiled):
        side.restore()

    def make_batch(number: int) -> Any:
        return batches[number % len(batches)].value

    # At least one warm step of each size.
    warmup = max(3, len(batches))
    eager_runner = StepRunner(eager.call, eager.module, loss)
    compiled_runner = StepRunner(compiled.call, compiled.module, loss)
    timed = benchmark_sides(
        eager_runner, compiled_runner, make_batch, warmup=warmup, seconds=SECONDS, texts=texts, earlier=recompiles,
    )  # fmt: skip
    section = {"raised": None, "wrong": "", **_figures(timed), **_compile_facts(run, timed), **_evidence(run, timed)}
    section["text"] = "\n".join([section["text"], *_roof_lines(section)])
    return section


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
        "others_load": timed.others_load,
        "late_compiles": timed.late_compiles,
        "sides": {"eager": asdict(timed.eager), "compiled": asdict(timed.compiled)},
        "text": _steady_rows(str(timed)),
    }


def _compile_facts(run: CellTrial, timed: Benchmark) -> dict[str, Any]:
    """What compiling took before the model was handed over here, and when that is won back."""
    from pytest_torchcompile.ledger.records import Compile, whole_compiles

    compiles = run.compiled.seen["compiles"]
    seconds = sum(each["seconds"] for each in compiles)
    counted = whole_compiles(map(Compile.from_dict, compiles))
    cached = sum(came_from_cache(each.caches) for each in counted)
    first = run.calls[0].label
    pays = None
    if timed.verdict == "faster":
        # By the ratio, and a step of a quiet moment: medians of a busy one say little.
        pays = pays_after(seconds, timed.eager.low, timed.eager.low * timed.ratio.value)
    breaks = []
    for each in run.compiled.seen["graph_breaks"][:KEPT_BREAKS]:
        breaks.append({name: each[name] for name in ("file", "line", "reason", "hint")})
    frames = []
    for each in run.compiled.seen["eager_frames"][:KEPT_BREAKS]:
        frames.append({name: each[name] for name in ("function", "file", "line", "kind", "reason", "resumed_at")})
    # What compiled in the first calls may have been given up since.
    covered = [each["share"] for each in run.compiled.coverage]
    if timed.coverage is not None:
        covered.append(timed.coverage)
    return {
        "coverage": min(covered, default=None),
        "breaks": breaks,
        "eager_frames": frames,
        "compiling_seconds": seconds,
        "first_call_seconds": sum(each["seconds"] for each in compiles if each["during"] == first),
        "compiles": len(counted),
        "cached": cached,
        "pays_after": pays,
    }


def _evidence(run: CellTrial, timed: Benchmark) -> dict[str, Any]:
    """What the diagnosis rests on: where the time went, what compiled late, and what the machine needs at its peak."""
    from pytest_torchcompile.ledger.explain import recompile_advice
    from pytest_torchcompile.ledger.records import Compile

    late = []
    for record in timed.late[:KEPT_BREAKS]:
        facts = {name: record[name] for name in ("function", "file", "line", "cause", "what", "reason")}
        # A first compile, as of a branch that no step before took, has no cause.
        advice = "make every size and branch come up before, in the warm-up"
        if record["cause"]:
            advice = recompile_advice(Compile.from_dict(record), dynamic=run.cell.dynamic == "dynamic")
        late.append({**facts, "advice": advice})
    return {
        "profile": asdict(timed.profile) if timed.profile is not None else None,
        "eager_operators": list(timed.eager_operators),
        "launches": {side: launched.to_dict() for side, launched in timed.launches.items()},
        "skips": list(dict.fromkeys(skip["reason"] for skip in run.compiled.seen.get("cudagraph_skips", ()))),
        "late": late,
        "over_limit": [asdict(over) for over in timed.over_limit],
        "work": timed.work.to_dict() if timed.work is not None else None,
        "parts": timed.parts.to_dict() if timed.parts is not None else None,
        **_by_peaks(run, timed),
    }


def _by_peaks(run: CellTrial, timed: Benchmark) -> dict[str, Any]:
    """The least time of the step by this machine's peaks, its share of a compiled step, and the speed-up that an eager
    step lets expect, with its error; None where the work of a step is not known.
    """
    from pytest_torchcompile.gauges.machine_peaks import machine_peaks
    from pytest_torchcompile.gauges.speed_prediction import predict_speed
    from pytest_torchcompile.gauges.step_work import roof_of

    if timed.work is None or timed.parts is None:
        return {"roof": None, "predicted": None}
    device = "cpu"
    for tensor in run.calls[0].batch.tensors():
        if tensor.is_cuda:
            device = str(tensor.device)
    peaks = machine_peaks(device)
    roof = roof_of(timed.work, peaks)
    of_roof = {**roof.to_dict(), "share": roof.seconds / timed.compiled.low}
    eager = timed.launches.get("eager")
    if eager is not None and not eager.by_operator:
        # A model that replays CUDA graphs of its own, or whose kernels the profiler missed: what takes its time?
        return {"roof": of_roof, "predicted": None}
    predicted = predict_speed(
        timed.work, timed.parts, peaks, timed.eager.median, trains=run.train,
        coverage=min((each["share"] for each in run.compiled.coverage), default=1.0),
        busy_seconds=None if eager is None else eager.busy_seconds,
        product_seconds=0.0 if eager is None else eager.product_seconds,
        replayed=eager is not None and promised(run.cell.axes),
    )  # fmt: skip
    error = predicted.speedup / timed.speedup - 1
    return {
        "roof": of_roof, "predicted": {**predicted.to_dict(), "error": error}, "prediction_error": abs(error),
    }  # fmt: skip


def _roof_lines(section: Mapping[str, Any]) -> Iterator[str]:
    """How near to the roof a compiled step is, and what an eager step had let expect."""
    roof, predicted = section["roof"], section["predicted"]
    if not roof:
        return
    seconds, share = section["sides"]["compiled"]["low"], roof_share(roof)
    bound = _BOUNDS.get(roof["bound"], roof["bound"])
    if uncounted := (section.get("work") or {}).get("uncounted"):
        yield (f"nobody knows the FLOPs of {', '.join(uncounted)}: the step computes more than is told, so its least "
               "time is longer, and less is left to win")
    peaks = f"at this machine's peaks a step takes {roof['seconds'] * 1e3:.3f} ms, bound by {bound}"
    if share is None:
        yield (f"{peaks}, and compiled it takes {seconds * 1e3:.3f} ms: its roof could not be told, because what it "
               "reads lies in caches, or less is moved than was counted")
    else:
        left = max(0.0, seconds - roof["seconds"])
        yield f"{peaks}: compiled it is at {share:.0%} of that roof, and {left * 1e3:.3f} ms are left to win"
    if not predicted:
        return
    yield (f"an eager step lets expect {predicted['speedup']:.2f} times the speed ({predicted['launch_share']:.0%} of "
           f"it are calls, {predicted['rest_share']:.0%} is not the model's, fusion saves "
           f"{predicted['bytes_saved']:.0%} of the model's bytes), {predicted['error']:+.0%} off")


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
        yield Problem("nothing ran compiled in the timed steps, so their times say nothing", section["text"],
                      slow_cause(section))
    elif section["late_compiles"]:
        yield Problem(f"{section['late_compiles']} compile(s) in the timed steps: there was no steady state",
                      section["text"], slow_cause(section) or "see `recompiles` and `shape_stability`")
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
        # Older reports do not say what others did.
        load = f" ({section['others_load']})" if section.get("others_load") else ""
        return (f"{NOT_TOLD}: this machine is not quiet enough{load}, the speed-up lies between {low:.2f} and "
                f"{high:.2f}")
    words = [f"{verdict}: {section['speedup']:.2f} times as fast compiled ({low:.2f} to {high:.2f})"]
    if section.get("pays_after"):
        words.append(f"pays after {section['pays_after']} steps{_cache_words(section)}")
    if cause := slow_cause(section) or idle_remark(section):
        words.append(cause)
    return "; ".join(words)


def _cache_words(section: Mapping[str, Any]) -> str:
    """How much a cache served, where it did: with empty caches compiling takes longer, and pays later."""
    if not section["cached"]:
        return ""
    return f", {section['cached']} of {section['compiles']} compiles being from a cache"


CHECK = Check("worth", measure, judge, remark)
