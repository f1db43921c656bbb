"""Slow causes: why a model is not faster compiled, as one sentence with place and remedy, from the section of `worth`.

Six kinds of causes have evidence there:

- little was compiled, or something compiles again in the timed steps;
- nothing was fused, or the kernels are so short that calling them is the work;
- memory or processor are at their peak, so that no compiler helps;
- the host is busy with guards, with Python, or with waiting for numbers.

Of several the one that takes most of the step is told, and a cause before what follows from it: where most operators
run eagerly, single launches and kernels that nothing fused are what breaks leave. What the machine needs of the step at
its peak is taken off the others, for no remedy wins that back; what explains less than a tenth is not told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.ledger.records import OverLimit
from pytest_torchcompile.quantity import count, readable_seconds

__all__ = ["SlowCause", "gpu_share", "idle_causes", "idle_remark", "kernel_time", "roof_share", "slow_cause",
           "slow_causes"]

COVERED: Final = 0.9
"""With a smaller share of operator calls in graphs, little was compiled."""
MOSTLY_OUTSIDE: Final = 0.5
"""With a smaller share, what graph breaks leave to eager is why there are as many launches and kernels."""
LEAST_TOLD: Final = 0.1
"""A cause that explains less of the step is not told: its remedy would win nothing that one sees."""
MUCH_GUARDING: Final = 0.15
MUCH_CALLING: Final = 1 / 3
MUCH_LIBRARY: Final = 0.5
MUCH_PYTHON: Final = 0.5
SAME_KERNELS: Final = 0.95
"""From this share of eager's kernels on, nothing to speak of was fused."""
NEAR_ROOF: Final = 0.6
"""From this share of the machine's peak on, little is left to win."""
FAR_FROM_ROOF: Final = 0.3
MOST_OF_ROOF: Final = 1.25
"""Peaks and steps are measured as well as this. A step with more of its roof shows that the roof is not its own."""
SHORT_CALL: Final = 15e-6
"""A kernel on a CPU that takes no longer is mostly the call of it."""
MANY_CALLS: Final = 8
IDLE_GPU: Final = 0.5
"""A GPU that works less of a step than this waits for the host."""
NAMED_CALLS: Final = 3
LONGEST_REASON: Final = 200
LEAVES_IDLE: Final = ("coverage", "host", "launches")
_NUMBERS_TAKEN: Final = {
    "Tensor.item()": ("a number is taken out of a tensor (`.item()`, `float()`)",
                      "keep it a tensor, or set torch._dynamo.config.capture_scalar_outputs = True"),
    "Tensor.tolist()": ("numbers are taken out of a tensor (`.tolist()`)", "keep them a tensor"),
    "Data-dependent branching": ("the code branches on a number of a tensor",
                                 "compute both sides and choose by torch.where, or write it with torch.cond"),
}
"""What torch's reason for a graph break holds, to what the code does there and what to do (torch 2.8 to 2.15)."""
_ROOFS: Final = {
    "memory": ("the memory's bandwidth", "move fewer bytes"),
    "compute": ("the peak of matrix products", "compute less"),
    "functions": ("the peak of exp, tanh and the like", "compute less"),
}
"""What bounds a step, to its name and what to do."""
FASTER: Final = "faster"
NOT_FASTER: Final = ("slower", "no difference")


@dataclass(frozen=True)
class SlowCause:
    """One possible cause."""

    kind: str
    """``coverage``, ``recompiles``, ``fusion``, ``launches``, ``roof`` or ``host``."""
    share: float
    """Of the step, that it explains."""
    text: str
    """What it is, where, and what to do."""


def slow_cause(section: Mapping[str, Any]) -> str:
    """The first cause of a section of `worth` that is slower or no different; empty where none is known."""
    causes = slow_causes(section)
    return causes[0].text if causes else ""


def slow_causes(section: Mapping[str, Any]) -> list[SlowCause]:
    """All of them, that which explains most of the step first."""
    # Something that compiles is no steady state, whatever the times say.
    late = list(_late_compiles(section))
    if section["verdict"] == FASTER:
        return late
    given_up = _told(_over_limit(section))
    if late or section["verdict"] not in NOT_FASTER or not section.get("profile"):
        # What runs eagerly by now was compiled until its limit: those compiles are the smaller trouble.
        return [*given_up, *late] if _mostly_outside(section) else [*late, *given_up]
    return _ranked_causes(section, given_up)


def idle_remark(section: Mapping[str, Any]) -> str:
    """What a model that is faster already leaves unused: a part that was given up, a GPU that waits; mostly empty."""
    causes = idle_causes(section)
    return f"more to win: {causes[0].text}" if causes else ""


def idle_causes(section: Mapping[str, Any]) -> list[SlowCause]:
    """The causes of :func:`idle_remark`; what a GPU computes is none of them."""
    if section["verdict"] != FASTER or section.get("late"):
        return []
    given_up = list(_over_limit(section))
    busy = gpu_share(section) if section.get("profile") else None
    if busy is None or busy >= IDLE_GPU:
        return given_up
    ranked = [cause for cause in _ranked_causes(section, ()) if cause.kind in LEAVES_IDLE]
    return [*given_up, *ranked]


def _mostly_outside(section: Mapping[str, Any]) -> bool:
    """Whether most operators run eagerly; so it is taken to be where it was not measured."""
    coverage = section.get("coverage")
    return coverage is None or float(coverage) < MOSTLY_OUTSIDE


def _ranked_causes(section: Mapping[str, Any], given_up: Sequence[SlowCause]) -> list[SlowCause]:
    outside = [*given_up, *_little_compiled(section)]
    causes = [*outside, *_guards(section), *_python(section), *_calling(section), *_waits(section), *_roof(section)]
    # Of kernels that are mostly their calls it says little that they are as many as before.
    following = list(_launches(section)) or list(_same_kernels(section))
    if outside and _mostly_outside(section):
        return [*_told(causes), *_told(following)]
    return _told([*causes, *following])


def _told(causes: Iterable[SlowCause]) -> list[SlowCause]:
    """Those that explain enough, the largest first."""
    return sorted((cause for cause in causes if cause.share >= LEAST_TOLD), key=_share_of, reverse=True)


def _share_of(cause: SlowCause) -> float:
    return cause.share


def _part(section: Mapping[str, Any], name: str) -> float:
    """The share of a part of the profiled step; on a GPU of the time that this one waits for the host."""
    profile = section["profile"]
    seconds = profile["seconds"]
    return float(profile[name] / seconds) * _waiting_share(section) if seconds else 0.0


def gpu_share(section: Mapping[str, Any]) -> float | None:
    """The share of a compiled step in which the GPU works; None without a GPU.

    Kernels are timed in one step under the profiler, which waits before it, and the step in rows of many without: a GPU
    that never waits may come out some hundredths above 1, because its caches and clocks were cold. That counts as 1.
    """
    share = kernel_time(section)
    return None if share is None else min(1.0, share)


def kernel_time(section: Mapping[str, Any]) -> float | None:
    """The time of a profiled step's kernels over that of a timed step, as measured; None without a GPU."""
    launched = (section.get("launches") or {}).get("compiled")
    if not launched:
        return None
    seconds = section["sides"]["compiled"]["low"]
    return float(launched["busy_seconds"]) / seconds if seconds else 0.0


def _waiting_share(section: Mapping[str, Any]) -> float:
    busy = gpu_share(section)
    return 1.0 if busy is None else 1.0 - busy


def roof_share(roof: Mapping[str, Any] | None) -> float | None:
    """How near a compiled step comes to the least time that its machine needs; None where that is not known.

    A step that beats that time by more than measurement does has none: what it reads lies in caches, which are faster
    than memory, or less was moved than was counted.
    """
    if not roof or roof["share"] > MOST_OF_ROOF:
        return None
    return min(1.0, float(roof["share"]))


def _roof_share(section: Mapping[str, Any]) -> float:
    return roof_share(section.get("roof")) or 0.0


def _first_break(section: Mapping[str, Any]) -> str:
    """``file:line`` of the first graph break; empty without one."""
    breaks = section.get("breaks")
    return f"{breaks[0]['file']}:{breaks[0]['line']}" if breaks else ""


def _over_limit(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Functions that torch has given up, for they were compiled too often, with what runs eagerly in all."""
    coverage = section.get("coverage")
    outside = None if coverage is None else 1 - float(coverage)
    share = 1.0 if outside is None else outside
    if outside and section.get("profile"):
        share = _part(section, "operators") + _part(section, "python")
    for over in section.get("over_limit", ()):
        yield SlowCause("recompiles", share, OverLimit(**over).told(outside))


def _late_compiles(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    late = section.get("late")
    if not late:
        return
    first = late[0]
    # The first few are kept, and all are counted.
    compiles = count(section.get("late_compiles") or len(late), "compile")
    what = f" because of {first['what']}" if first["what"] else _failed_guard(first)
    yield SlowCause(
        "recompiles", 1.0,
        f"{compiles} in the timed steps: {first['function']} ({first['file']}:{first['line']}) is compiled "
        f"again{what}: {first['advice']}",
    )  # fmt: skip


def _failed_guard(late: Mapping[str, Any]) -> str:
    """Torch's own words, where no variable is known that changed; a kind of reason tells nobody what to do."""
    if reason := " ".join(str(late.get("reason", "")).split()):
        return f" because a guard failed: {reason[:LONGEST_REASON]}"
    known = late["cause"] and late["cause"] != "other"
    return f" because of its {late['cause']}" if known else ""


def _little_compiled(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    coverage = section.get("coverage")
    if coverage is None or coverage >= COVERED:
        return
    place, remedy = "", "see the check `compiles` for what stayed outside"
    if at := _first_break(section):
        place = f"; the first graph break is at {at}"
        remedy = "move what breaks the graph out of forward, as the check `graph_breaks` says"
        # Older reports have no reasons.
        reason = section["breaks"][0].get("reason", "")
        for beginning, (what, known_remedy) in _NUMBERS_TAKEN.items():
            if beginning in reason:
                place, remedy = f"{place}, where {what}", known_remedy
    outside = _part(section, "operators") + _part(section, "python")
    yield SlowCause(
        "coverage", outside, f"{1 - coverage:.0%} of the operator calls run outside of compiled graphs{place}: {remedy}"
    )


def _guards(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    share = _part(section, "guards")
    if share >= MUCH_GUARDING:
        seconds = section["profile"]["guards"]
        yield SlowCause(
            "host", share, f"Dynamo's guards take {share:.0%} of a compiled step ({seconds * 1e6:.0f} µs): the step is "
            "too short for them, so compile a larger part at once, or give it larger batches",
        )  # fmt: skip


def _users_python(section: Mapping[str, Any]) -> float:
    """The share of a step that passes in Python of the user's own: by both of the profiles that see it.

    That of operators has torch's own Python in it, and what it costs itself. That of functions has operators in it.
    """
    own = section["profile"].get("user_python") or {}
    return min(_part(section, "python"), float(own.get("share", 0.0)))


def _python(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    share = _users_python(section)
    if share < MUCH_PYTHON:
        return
    own = section["profile"]["user_python"]
    place = f"{own['function']} ({own['file']}:{own['line']})"
    if at := _first_break(section):
        place += f", the first graph break being at {at}"
    yield SlowCause(
        "host", share, f"{share:.0%} of a compiled step passes in Python of the model's own, most of it in {place}: "
        "take prints, `.item()` and loading out of the step",
    )  # fmt: skip


def _calling(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """What a call of compiled code costs beside its kernels: torch's own Python, and guards."""
    guards = _part(section, "guards")
    # Where guards are much of it, that is a cause of its own.
    share = _part(section, "python") - _users_python(section) + (0 if guards >= MUCH_GUARDING else guards)
    if share < MUCH_CALLING:
        return
    kernels, busy, skipped = section["sides"]["compiled"]["kernels"], gpu_share(section), section.get("skips")
    remedy = "give it larger batches, or compile a larger part at once"
    if busy is not None and kernels and kernels > 1 and not section["launches"]["compiled"]["graphs"]:
        remedy = "give it larger batches, or have its kernels replayed as one CUDA graph, by mode reduce-overhead"
        if skipped:
            remedy = f"give it larger batches; CUDA graphs were skipped: {skipped[0]}"
    around = f" around {count(kernels, 'kernel call')}" if kernels else ""
    step = readable_seconds(section["sides"]["compiled"]["low"])
    yield SlowCause(
        "launches", share, f"{share:.0%} of a compiled step of {step} is what calling compiled code "
        f"costs (torch's own Python and guards{around}): {remedy}",
    )  # fmt: skip


def _waits(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Numbers that are taken out of tensors: each breaks the graph, and a GPU is waited for."""
    waits = section["profile"].get("waits", 0)
    busy = gpu_share(section)
    if not waits or (busy is not None and busy >= 1 - MUCH_GUARDING):
        return
    at = _first_break(section)
    place = f"; the first graph break is at {at}" if at else ""
    # On a CPU nobody is waited for: what the break leaves outside of graphs is what it costs.
    outside = _part(section, "operators") + _part(section, "python")
    share = outside if busy is None else 1 - busy
    if share >= MUCH_GUARDING:
        yield SlowCause(
            "host", share, f"a step takes {count(waits, 'number')} out of tensors (`.item()`, a branch on a "
            f"value){place}, and the rest waits for each: keep them tensors, or read them once every many steps",
        )  # fmt: skip


def _roof(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    share = _roof_share(section)
    if share < NEAR_ROOF:
        return
    roof = section["roof"]
    what, remedy = _ROOFS[roof["bound"]]
    yield SlowCause(
        "roof", share, f"it runs at {share:.0%} of {what} of this machine ({roof['device']}), so no compiler helps: "
        f"{remedy}, by a narrower dtype or a smaller model",
    )  # fmt: skip


def _launches(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Kernels that are too short for what it takes to call them."""
    kernels = section["sides"]["compiled"]["kernels"]
    if not kernels or kernels < MANY_CALLS or _roof_share(section) >= FAR_FROM_ROOF:
        return
    inside = _part(section, "library") + _part(section, "generated")
    busy = gpu_share(section)
    if busy is None:
        each = inside * section["profile"]["seconds"] / kernels
        if each <= SHORT_CALL:
            yield SlowCause(
                "launches", inside - _roof_share(section),
                f"a compiled step makes {count(kernels, 'kernel call')} of {each * 1e6:.1f} µs each"
                f"{_peak_words(section)}: calling is what takes the time, so give it larger batches or wider layers",
            )  # fmt: skip
        return
    launched = section["launches"]["compiled"]
    if busy >= IDLE_GPU or launched["graphs"]:
        return
    remedy = "mode reduce-overhead replays them as one CUDA graph"
    coverage = section.get("coverage")
    if coverage is not None and coverage < MOSTLY_OUTSIDE:
        remedy = "mode reduce-overhead replays those of compiled graphs alone, so that more has to be compiled first"
    elif skipped := section.get("skips"):
        remedy = f"CUDA graphs were skipped: {skipped[0]}"
    launches = count(launched["host_launches"], "launch", "launches")
    yield SlowCause(
        "launches", inside,
        f"the GPU works {busy:.0%} of a compiled step, and else waits for {launches} of the host: {remedy}",
    )  # fmt: skip


def _peak_words(section: Mapping[str, Any]) -> str:
    share = roof_share(section.get("roof"))
    return "" if share is None else f", of which {share:.0%} is work at this machine's peak"


def _same_kernels(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    profile = section["profile"]
    library, kernels_share = _library_share(section), section.get("kernels_share")
    # What the machine needs at its best, fusion does not win.
    roof = _roof_share(section)
    eager, compiled = section["sides"]["eager"]["kernels"], section["sides"]["compiled"]["kernels"]
    # One kernel has nothing that it could be fused with.
    if kernels_share is not None and kernels_share >= SAME_KERNELS and eager > 1:
        inside = gpu_share(section) or library + _part(section, "generated")
        calls = f", and library calls take {library:.0%} of it" if library >= MUCH_GUARDING else ""
        yield SlowCause(
            "fusion", inside - roof, f"a compiled step runs {count(compiled, 'kernel')} and an eager one {eager}, so "
            f"nothing was fused{calls}: `TORCH_LOGS=fusion` tells why, and eager does as well",
        )  # fmt: skip
    elif library >= MUCH_LIBRARY:
        names = ", ".join(f"{calls} x {name}" for name, calls in list(profile["library_calls"].items())[:NAMED_CALLS])
        yield SlowCause(
            "fusion", library - roof, f"{library:.0%} of a compiled step is library calls that eager makes too "
            f"({names}): only the rest can be fused",
        )  # fmt: skip


def _library_share(section: Mapping[str, Any]) -> float:
    """The share of library kernels in a compiled step: on a GPU of what runs there."""
    busy = gpu_share(section)
    if busy is None:
        return _part(section, "library")
    launched = section["launches"]["compiled"]
    if not launched["busy_seconds"]:
        return 0.0
    return busy * (1 - float(launched["generated_seconds"] / launched["busy_seconds"]))
