"""Cells judged again from their observations: what a report claims must follow from the evidence that it holds.

A stored verdict counts only if the checks say the same of the stored observation; what is worse holds. A policy with
other limits, or an expected failure whose day is over, is judged from the same observations.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.observation import BAD, GOOD, Judgement, Observation, worst
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.evidence import cell_fingerprint
from pytest_torchcompile.report.metrics import Sections
from pytest_torchcompile.report.testrecord import TEST_LANE
from pytest_torchcompile.run.verdicts import apply_xfail, expired_hint, judge_observation, with_hint
from pytest_torchcompile.wrappers.wrapping import lane_of, processes_of

__all__ = ["BAD", "GOOD", "JudgedCell", "judge_again"]


@dataclass
class JudgedCell:
    """One cell, and what holds of it."""

    id: str
    axes: dict[str, Any]
    verdicts: dict[str, dict[str, Any]]
    """Check to ``verdict``, ``problems`` and perhaps ``note``, as in the report; the gate adds limits of its policy."""
    sections: Sections
    """What its run recorded; of several ranks, the first did."""
    seconds: float | None
    compiled: bool
    """Did compiled code run?"""
    missing: tuple[str, ...] = ()
    """Checks that the matrix wants and the report lacks."""
    contradictions: list[str] = field(default_factory=list)
    """Where the report's claims do not follow from its evidence."""
    claimed: str = ""
    """The lane that the report says it is of; older reports don't."""
    others: tuple[Sections, ...] = ()
    """What the ranks after the first recorded."""
    changed: list[str] = field(default_factory=list)
    """Checks whose verdict is another one under the policy, or on this day."""

    @property
    def status(self) -> str:
        """The worst of its verdicts."""
        return worst([check["verdict"] for check in self.verdicts.values()])

    @property
    def ranks(self) -> tuple[Sections, ...]:
        """What each rank recorded."""
        return self.sections, *self.others

    @property
    def lane(self) -> str:
        """A key of :data:`~pytest_torchcompile.wrappers.wrapping.LANES`, told by its axes. Of a wrapper that this
        version can't read only the report knows: it is fake where that says so. A test is of the lane ``test``."""
        lane = lane_of(self.axes.get("wrapper"))
        return self.claimed if lane == "single" and self.claimed in ("fake", TEST_LANE) else lane

    @property
    def proven(self) -> bool:
        """Did compiled code run on numbers that mean something? In the fake lane it does not."""
        return self.compiled and self.lane != "fake"

    @property
    def ran(self) -> bool:
        """Does it count among those that ran compiled code? What is expected to fail does not."""
        return self.proven and self.status != "xfail"

    @property
    def holds(self) -> bool:
        """Is all that was judged as it should be, of code that ran compiled? What is expected to fail is not."""
        return self.proven and self.status == "pass"

    @property
    def bad(self) -> dict[str, dict[str, Any]]:
        """The checks that no release takes."""
        return {name: check for name, check in self.verdicts.items() if check["verdict"] in BAD}

    @property
    def skipped(self) -> str | None:
        """Why it was skipped; None if it was not."""
        notes = [check.get("note", "") for check in self.verdicts.values() if check["verdict"] == "skip"]
        return notes[0] if notes else None


def judge_again(cell: Mapping[str, Any], matrix: Mapping[str, Any], policy: Policy, today: datetime.date,
                ours: bool, sealed: bool = False) -> JudgedCell:
    """Judge one cell of a report.

    ``ours``: written by this very version, so that its claims must agree with our judgement to the letter; those of
    another version may differ, and then the worse holds. ``sealed``: and the file is as it was written, so that they do
    agree. A cell of schema 1.0, which does not tell its limits, is taken as it is.
    """
    observation = cell["observation"]
    sections = observation["sections"] if observation else {}
    judged = JudgedCell(cell["id"], cell["axes"], dict(cell["checks"]), sections, cell["seconds"], _compiled(sections),
                        claimed=cell.get("lane", ""), others=_others(observation))
    if not cell["selected"]:
        if cell["checks"]:
            judged.contradictions.append("has verdicts, though it says that it was not selected")
        return judged
    if not sealed:
        judged.contradictions += _form(cell, matrix, ours)
    if cell["planned"] is not None:
        judged.missing = tuple(name for name in cell["planned"]["checks"] if name not in cell["checks"])
        limits = {name: number for name, (number, _) in policy.limits_of(cell["axes"]).items() if name in LIMITS}
        try:
            expired = _expired(cell["planned"], today)
            if not sealed or limits or expired:
                _rejudge(judged, cell, limits, expired, ours)
        except Exception as error:  # a section may hold anything that is JSON, and checks are made for sound ones
            judged.contradictions.append(f"its observation can't be judged: {type(error).__name__}: {error}")
    return judged


def _others(observation: Mapping[str, Any] | None) -> tuple[Sections, ...]:
    ranks = (observation or {}).get("ranks", [])
    found = (rank.get("sections") for rank in ranks if isinstance(rank, dict))
    return tuple(sections for sections in found if isinstance(sections, dict))


def _compiled(sections: Sections) -> bool:
    try:
        return any(graph["runs"] for graph in sections["compiles"]["graphs"])
    except (KeyError, TypeError):
        return False


def _form(cell: Mapping[str, Any], matrix: Mapping[str, Any], ours: bool) -> Iterator[str]:
    """What can be told without judging; ids and the phases of checks may be other ones in another version."""
    observation, checks = cell["observation"], cell["checks"]
    if ours and cell.get("lane", lane := lane_of(cell["axes"].get("wrapper"))) != lane:
        yield f"it is said to be of the lane {cell['lane']}, and its axes say {lane}"
    if ours:
        yield from _plan(cell, matrix)
    if cell["status"] != worst([check["verdict"] for check in checks.values()]):
        yield f"its status is {cell['status']}, which is not the worst of its checks"
    if cell["planned"] is not None and _fingerprint(cell) != cell["evidence_sha256"]:
        yield "its evidence is not what was judged: it was damaged or edited since"
    if observation is None:
        if any(check["verdict"] not in ("crash", "not_run") for check in checks.values()):
            yield "has verdicts without an observation"
    elif observation["cell"] != cell["id"]:
        yield f"its observation is that of {observation['cell']}"
    elif not observation["failure"] and (told := 1 + len(observation.get("ranks", ()))) != (
            wanted := processes_of(cell["axes"].get("wrapper"), told)):
        yield f"it holds what {count(told, 'rank')} recorded, and its axes say {wanted}"


def _plan(cell: Mapping[str, Any], matrix: Mapping[str, Any]) -> Iterator[str]:
    axes, checks = cell["axes"], cell["checks"]
    known = {name: value for name, value in axes.items() if name in AXES}
    user = tuple((name, value) for name, value in axes.items() if name not in AXES)
    if len(known) < len(AXES) or Cell(**known, user=user).id != cell["id"]:
        yield "its id is not that of its axes"
    if cell["planned"] is not None:
        asked = (*matrix["checks"], *cell["planned"].get("also", ()))
        wanted = [name for name in asked if name in CHECKS and CHECKS[name].applies(axes)]
        if sorted(cell["planned"]["checks"]) != sorted(wanted):  # each version may judge them in another order
            yield "the checks planned for it are not those of the matrix"
        if extra := [name for name in checks if name not in wanted]:
            yield f"has a verdict of {extra[0]!r}, which is no check of the matrix"


def _fingerprint(cell: Mapping[str, Any]) -> str:
    try:
        return cell_fingerprint(cell)
    except ValueError:  # a number too large for a float
        return ""


def _expired(planned: Mapping[str, Any], today: datetime.date) -> bool:
    """Was the cell expected to fail until a day that is over?"""
    return (planned["outcome"] == "xfail" and planned["until"] != ""
            and today > datetime.date.fromisoformat(planned["until"]))


def _rejudge(judged: JudgedCell, cell: Mapping[str, Any], limits: Mapping[str, float], expired: bool,
             ours: bool) -> None:
    """``limits``: what the policy has over the limits of the matrix."""
    if cell["observation"] is None:
        return
    names = [name for name in cell["checks"] if name in CHECKS]
    observation = Observation.from_dict(cell["observation"])
    planned = _planned(cell)
    complete = not judged.missing
    claimed = apply_xfail(judge_observation(observation, names, planned.limits), planned, complete)
    now = claimed
    if limits or expired:
        again = replace(planned, outcome="run") if expired else planned
        now = apply_xfail(judge_observation(observation, names, {**planned.limits, **limits}), again, complete)
    for name in names:
        stored = cell["checks"][name]
        if stored["verdict"] == claimed[name].verdict:
            if now is not claimed and now[name].verdict != stored["verdict"]:
                judged.changed.append(name)
                judged.verdicts[name] = _plain(now[name], planned if expired else None)
        elif stored["verdict"] not in BAD and stored["verdict"] != "not_run":
            if ours:
                judged.contradictions.append(
                    f"{name}: the report says {stored['verdict']}, its observation says {claimed[name].verdict}")
            if worst([stored["verdict"], now[name].verdict]) != stored["verdict"]:
                judged.verdicts[name] = _plain(now[name], None)


def _planned(cell: Mapping[str, Any]) -> PlannedCell:
    planned = cell["planned"]
    return PlannedCell(_NO_CELL, planned["outcome"], planned["reason"], planned["issue"], planned["until"],
                       tuple(planned["expected"]), planned["limits"], planned["rule"])


_NO_CELL: Final = Cell(model="")
"""Judging looks at what was planned, not at the axes."""


def _plain(judgement: Judgement, expired: PlannedCell | None) -> dict[str, Any]:
    if expired is not None:
        judgement = with_hint(judgement, expired_hint(expired.until, expired.rule, expired.reason))
    return judgement.to_dict()
