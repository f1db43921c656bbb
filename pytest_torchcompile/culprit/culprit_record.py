"""Culprit: what is told of the operator to blame, as plain data, in lines and as an issue draft. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["Culprit", "culprit_text", "issue_text"]

_SETTING: Final = "inductor_"
"""How the bisector's names of settings begin."""
_PASSES: Final = {
    "pre_grad_passes": "Inductor's passes before autograd",
    "joint_graph_passes": "Inductor's passes over the joint graph",
    "post_grad_passes": "Inductor's passes after autograd",
}
_SETTINGS: Final = {
    "max_fusion_size": "Inductor's fusion (right with max_fusion_size = 1)",
    "inplace_buffers": "Inductor's reuse of buffers in place (right with inplace_buffers = False)",
    "allow_buffer_reuse": "Inductor's reuse of buffers (right with allow_buffer_reuse = False)",
    "cpp.simdlen": "Inductor's vectorised code (right with cpp.simdlen = 0)",
}
_SHOWN_PLACES: Final = 3


@dataclass(frozen=True)
class Culprit:
    """What a search came to. Where it has no answer, ``why_not`` says so in one sentence, and nobody is accused."""

    backend: str
    """The first stage that shows it."""
    sign: str = ""
    """``numbers``, another kind of discrepancy, or ``raises KeyError``."""
    subsystem: str = ""
    """Part of the compiler, as torch's bisector names it."""
    number: int = 0
    """The step of the subsystem, from 0."""
    step: str = ""
    """What the bisector calls it: a node, a pass, an operator."""
    operator: str = ""
    """``aten.native_group_norm_backward.default``."""
    place: str = ""
    """``models.py:41``; empty where it is not known."""
    noise: str = ""
    """Of an operator that is wrong by itself or beside eager's: its error over noise, as ``repr`` of a float."""
    own_fault: bool = False
    """Is the operator wrong on its very inputs, run by itself?"""
    remark: str = ""
    """``mixed memory formats``."""
    left: tuple[str, ...] = ()
    """The operators of the smallest graph that shows it."""
    places: tuple[str, ...] = ()
    """Lines of the model that they come from."""
    size: int = 0
    """Operators of the graph that it was cut from."""
    script: str = ""
    """Python that shows it with torch alone; it was run."""
    operator_script: str = ""
    """The same of the operator by itself, called with inputs as it was."""
    shown: str = ""
    """What the script ended with where an issue's reader has it: a fresh process, torch alone, an empty folder."""
    needs_more: str = ""
    """What it ended with there instead, where it needs more than torch."""
    why_not_alone: str = ""
    """Why it did not show it there, in one sentence."""
    why_not: str = ""
    why_no_script: str = ""
    seconds: float = 0.0
    torch: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        return plain | {"left": list(self.left), "places": list(self.places)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Culprit:
        """Read :meth:`to_dict` back; what a newer version has added is passed over."""
        known = {name: value for name, value in plain.items() if name in cls.__dataclass_fields__}
        return cls(**known | {"left": tuple(known.get("left", ())), "places": tuple(known.get("places", ()))})

    @property
    def part(self) -> str:
        """The part of the compiler to blame, in words; empty where the bisector has no answer."""
        if not self.subsystem:
            return ""
        if self.subsystem == "lowerings":
            return f"Inductor's lowering number {self.number} ({self.step})"
        if self.subsystem == "decomposition":
            return f"the decomposition number {self.number}"
        if self.subsystem in _PASSES:
            return f"{_PASSES[self.subsystem]}: number {self.number} ({self.step})"
        setting = self.subsystem.removeprefix(_SETTING)
        return _SETTINGS.get(setting, f"what torch's setting {setting} changes (right without it)")

    @property
    def issue_script(self) -> str:
        """The script that an issue begins with; empty where there is none."""
        return self.operator_script or self.script

    @property
    def culprit(self) -> str:
        """``aten.relu.default at models.py:41``, or of a part that is no operator the operators that are left."""
        named = self.operator or ", ".join(self.left)
        places = [self.place] if self.place else list(self.places[:_SHOWN_PLACES])
        if named and places:
            return f"{named} at {', '.join(places)}"
        return named


def culprit_text(culprit: Culprit) -> str:
    """Two or three lines for a terminal."""
    lines = []
    if culprit.culprit:
        line = f"operator: {culprit.culprit}"
        if culprit.part:
            line += f": {culprit.part}"
        if culprit.noise:
            line += f", {float(culprit.noise):.3g} times the noise"
        if culprit.own_fault:
            line += ", wrong on its own inputs"
        if culprit.remark:
            line += f" ({culprit.remark})"
        lines.append(line)
    if culprit.left:
        lines.append(f"smallest graph: {len(culprit.left)} of {culprit.size} operators: {', '.join(culprit.left)}")
    if culprit.why_not:
        lines.append(f"operator: not found: {culprit.why_not}")
    if culprit.why_no_script:
        lines.append(f"no script: {culprit.why_no_script}")
    if culprit.needs_more:
        lines.append(f"no issue draft: with torch alone the script ends with {culprit.needs_more}")
    if culprit.why_not_alone:
        lines.append(f"script: not shown in a process of its own: {culprit.why_not_alone}")
    return "\n".join(lines)


_SIGNS: Final = {"numbers": "wrong result"}


def issue_text(culprit: Culprit, collected: str = "") -> str:
    """An issue for torch's tracker, in Markdown; ``collected``: what torch tells of the machine.

    Empty where there is no script that runs with torch alone: what nobody can run is no issue.
    """
    script = culprit.issue_script
    if not script or culprit.needs_more:
        return ""
    words = culprit.operator or ", ".join(culprit.left[:_SHOWN_PLACES])
    sign = _SIGNS.get(culprit.sign, culprit.sign)
    lines = [f"# [{culprit.backend}] {sign}: {words}", "", "### 🐛 Describe the bug", ""]
    lines += [f"With torch {culprit.torch}, `backend={culprit.backend!r}` and eager disagree. The script needs torch "
              "alone."]
    if culprit.part:
        lines.append(f"`torch._inductor.compiler_bisector` blames {culprit.part}.")
    if culprit.own_fault:
        lines.append(f"`{culprit.operator}` is wrong by itself on these inputs ({culprit.remark or 'as they are'}).")
    lines += ["", "```python", script.rstrip(), "```", ""]
    if culprit.shown:
        lines += ["In a process of its own and an empty folder it ends with:", "", "```text", culprit.shown, "```", ""]
    if culprit.why_not_alone:
        lines += [f"**Before you file it:** it was not shown in a process of its own: {culprit.why_not_alone}.", ""]
    if culprit.operator_script and culprit.script:
        lines += ["As a model meets it:", "", "```python", culprit.script.rstrip(), "```", ""]
    lines += [f"To look for it in the tracker first: `{search_words(culprit)}`", "", "### Versions", "",
              collected or f"torch {culprit.torch}; please add the output of `python -m torch.utils.collect_env`", ""]
    return "\n".join(lines)


def search_words(culprit: Culprit) -> str:
    """Words for a search: the stage, what is wrong, the operators."""
    operators = [name.split(".")[-2] if name.count(".") > 1 else name for name in (culprit.operator, *culprit.left)]
    words = [culprit.backend, _SIGNS.get(culprit.sign, culprit.sign), *operators, culprit.remark]
    return " ".join(dict.fromkeys(word for word in words if word))
