"""Kernel causes: what the kernels of a compiled step say of why it is not faster, from a section of `worth`.

They are at the machine's peak, too short for their calls, as many as eager's, a library's, custom operators, or others
than eager calls.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.checks.step_evidence import (
    MOSTLY_OUTSIDE,
    MUCH_CALLING,
    MUCH_GUARDING,
    SlowCause,
    called_names,
    custom_share,
    gpu_share,
    library_share,
    part_of_step,
    roof_of_step,
    roof_share,
    share_of_calls,
)
from pytest_torchcompile.gauges.library_operators import is_custom
from pytest_torchcompile.quantity import count

__all__ = ["IDLE_GPU", "at_the_roof", "custom_operators", "other_operators", "same_kernels", "short_kernels"]

MUCH_LIBRARY: Final = 0.5
SAME_KERNELS: Final = 0.95
"""From this share of eager's kernels on, nothing to speak of was fused."""
NEAR_ROOF: Final = 0.6
"""From this share of the machine's peak on, little is left to win."""
FAR_FROM_ROOF: Final = 0.3
SHORT_CALL: Final = 15e-6
"""A kernel on a CPU that takes no longer is mostly the call of it."""
MANY_CALLS: Final = 8
IDLE_GPU: Final = 0.5
"""A GPU that works less of a step than this waits for the host."""
NAMED_CALLS: Final = 3
_FAMILIES: Final = tuple(map(re.compile, (r"mm_?$|mv_?$|dot$|matmul$|linear", "conv", "attention", "rnn|lstm|gru")))
"""Operators that stand for each other: eager's ``addmm`` may be ``mm`` in compiled code, or one of mkldnn's."""
_ROOFS: Final = {
    "memory": ("the memory's bandwidth", "move fewer bytes"),
    "compute": ("the peak of matrix products", "compute less"),
    "functions": ("the peak of exp, tanh and the like", "compute less"),
}
"""What bounds a step, to its name and what to do."""


def at_the_roof(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Memory or processor are at their peak."""
    share = roof_of_step(section)
    if share < NEAR_ROOF:
        return
    roof = section["roof"]
    what, remedy = _ROOFS[roof["bound"]]
    yield SlowCause(
        "roof", share, f"it runs at {share:.0%} of {what} of this machine ({roof['device']}), so no compiler helps: "
        f"{remedy}, by a narrower dtype or a smaller model",
    )  # fmt: skip


def short_kernels(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Kernels that are too short for what it takes to call them."""
    kernels = section["sides"]["compiled"]["kernels"]
    if not kernels or kernels < MANY_CALLS or roof_of_step(section) >= FAR_FROM_ROOF:
        return
    inside = part_of_step(section, "library") + part_of_step(section, "generated")
    busy = gpu_share(section)
    if busy is None:
        each = inside * section["profile"]["seconds"] / kernels
        if each <= SHORT_CALL:
            yield SlowCause(
                "launches", inside - roof_of_step(section),
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


def custom_operators(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Operators that the compiler does not look into, whatever is within them."""
    share = custom_share(section)
    if share < MUCH_CALLING:
        return
    names = [name for name in called_names(section) if is_custom(name)]
    yield SlowCause(
        "fusion", share - roof_of_step(section), f"{share:.0%} of a compiled step is in custom operators, which the "
        f"compiler does not look into ({_calls_text(section, names)}): only what is around them can be fused, so have "
        "them traced as plain functions of torch operators, or make them faster themselves",
    )  # fmt: skip


def other_operators(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Operators that eager does not call: the compiler's own in place of a function of numpy's, say."""
    names = _not_eagers(section)
    share = share_of_calls(section, names)
    if share >= MUCH_CALLING:
        yield SlowCause(
            "replaced", share, f"{share:.0%} of a compiled step is in operators that an eager step does not call "
            f"({_calls_text(section, names)}): compiled code has them in place of what eager runs, as of a function of "
            "numpy's, so keep that part out of the graph by torch.compiler.disable",
        )  # fmt: skip


def same_kernels(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Nothing was fused, or the most of it are library calls."""
    # Of custom operators and of others than eager's there are causes of their own.
    others = custom_share(section) + share_of_calls(section, _not_eagers(section))
    library, kernels_share = max(0.0, library_share(section) - others), section.get("kernels_share")
    # What the machine needs at its best, fusion does not win.
    roof = roof_of_step(section)
    eager, compiled = section["sides"]["eager"]["kernels"], section["sides"]["compiled"]["kernels"]
    # One kernel has nothing that it could be fused with.
    if kernels_share is not None and kernels_share >= SAME_KERNELS and eager > 1:
        inside = library + part_of_step(section, "generated")
        if busy := gpu_share(section):
            inside = max(0.0, busy - others)
        calls = f", and library calls take {library:.0%} of it" if library >= MUCH_GUARDING else ""
        # Where it is slower, eager does better than that.
        remedy = ", and eager does as well" if section["verdict"] == "no difference" else ""
        yield SlowCause(
            "fusion", inside - roof, f"a compiled step runs {count(compiled, 'kernel')} and an eager one {eager}, so "
            f"nothing was fused{calls}: `TORCH_LOGS=fusion` tells why{remedy}",
        )  # fmt: skip
    elif library >= MUCH_LIBRARY:
        apart = {*_not_eagers(section), *filter(is_custom, called_names(section))}
        names = [name for name in called_names(section) if name not in apart]
        # Of an older report nobody knows what eager called.
        too = " that eager makes too" if section.get("eager_operators") else ""
        yield SlowCause(
            "fusion", library - roof, f"{library:.0%} of a compiled step is library calls{too} "
            f"({_calls_text(section, names)}): only the rest can be fused",
        )  # fmt: skip


def _not_eagers(section: Mapping[str, Any]) -> list[str]:
    """Of the operators that compiled graphs call those that no eager step calls; none where that is not known."""
    eagers = section.get("eager_operators")
    if eagers is None:
        return []
    return [name for name in called_names(section) if not is_custom(name) and not _has(eagers, name)]


def _has(operators: Collection[str], name: str) -> bool:
    """Whether an operator is one of these, or does the work of one."""
    plain = {_plain(operator) for operator in operators}
    if _plain(name) in plain:
        return True
    for family in _FAMILIES:
        if family.search(_plain(name)):
            return any(family.search(operator) for operator in plain)
    return False


def _plain(operator: str) -> str:
    """``index_put`` of ``aten::_index_put_``."""
    return operator.rpartition("::")[2].strip("_")


def _calls_text(section: Mapping[str, Any], names: Iterable[str]) -> str:
    calls = section["profile"]["library_calls"]
    return ", ".join([f"{calls[name]} x {name}" for name in names][:NAMED_CALLS])
