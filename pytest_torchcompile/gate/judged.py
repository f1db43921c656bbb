"""Cells judged again from their observations: what a report claims must follow from the evidence that it holds.

A stored verdict counts only if the checks say the same of the stored observation; what is worse holds. A policy with
other limits, or an expected failure whose day is over, is judged from the same observations.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.cell import AXES, DEFAULTS, Cell
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.observation import BAD, GOOD, Judgement, Observation, verdicts_in, worst
from pytest_torchcompile.oracle.proof import compiled_code_ran
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.metrics import Sections
from pytest_torchcompile.report.provenance import cell_fingerprint
from pytest_torchcompile.report.schema import TEST_LANE
from pytest_torchcompile.run.verdicts import apply_xfail, expired_hint, judge_observation, with_hint
from pytest_torchcompile.wrappers.wrapping import lane_of, processes_of

__all__ = ["BAD", "GOOD", "JudgedCell", "contradictions_in", "ids_of", "judge_again",
           "names_with_status"]


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
        return worst(verdicts_in(self.verdicts))

    @property
    def ranks(self) -> tuple[Sections, ...]:
        """What each rank recorded."""
        return self.sections, *self.others

    @property
    def lane(self) -> str:
        """A key of :data:`~pytest_torchcompile.wrappers.wrapping.LANES`, told by its axes. Of a wrapper that this
        version can't read only the report knows: it is fake where that says so. A test is of the lane ``test``."""
        lane = lane_of(self.axes.get("wrapper"))
        if lane == "single" and self.claimed in ("fake", TEST_LANE):
            return self.claimed
        return lane

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
        for check in self.verdicts.values():
            if check["verdict"] == "skip":
                note: str = check.get("note", "")
                return note
        return None


def ids_of(cells: Iterable[JudgedCell]) -> tuple[str, ...]:
    """Of cells, and of tests."""
    return tuple(cell.id for cell in cells)


def names_with_status(judged: Mapping[str, JudgedCell], status: str) -> list[str]:
    """Of cells, and of tests."""
    return [name for name, each in judged.items() if each.status == status]


def contradictions_in(judged: Mapping[str, JudgedCell]) -> dict[str, list[str]]:
    """By the name of the cell or test; none of those that agree with themselves."""
    return {name: each.contradictions for name, each in judged.items() if each.contradictions}


def judge_again(cell: Mapping[str, Any], matrix: Mapping[str, Any], policy: Policy, today: datetime.date,
                ours: bool, sealed: bool = False) -> JudgedCell:
    """Judge one cell of a report.

    ``ours``: written by this very version, so that its claims must agree with our judgement to the letter; those of
    another version may differ, and then the worse holds. ``sealed``: and the file is as it was written, so that they do
    agree. A cell of schema 1.0, which does not tell its limits, is taken as it is.
    """
    observation = cell["observation"]
    sections = observation["sections"] if observation else {}
    judged = JudgedCell(cell["id"], cell["axes"], dict(cell["checks"]), sections, cell["seconds"],
                        _compiled_code_ran(sections), claimed=cell.get("lane", ""), others=_other_ranks(observation))
    if not cell["selected"]:
        if cell["checks"]:
            judged.contradictions.append("has verdicts, though it says that it was not selected")
        return judged
    # An intact seal already says that nothing was edited. Then only a new limit or a new day needs a new judgement.
    if not sealed:
        judged.contradictions += _contradictions_in_form(cell, matrix, ours)
    planned = cell["planned"]
    if planned is None:
        return judged
    judged.missing = tuple(name for name in planned["checks"] if name not in cell["checks"])
    # Limits that only the policy has need no judgement of checks: `policy_limits` holds them against the numbers.
    limits = _limits_of_checks(policy, cell["axes"])
    try:
        expired = _expectation_expired(planned, today)
        if not sealed or limits or expired:
            _rejudge(judged, cell, limits, expired, ours)
    # A section may hold anything that is JSON, and checks are made for sound ones.
    except Exception as error:
        judged.contradictions.append(f"its observation can't be judged: {type(error).__name__}: {error}")
    return judged


def _limits_of_checks(policy: Policy, axes: Mapping[str, Any]) -> dict[str, float]:
    """What the policy has over the limits of the matrix; limits that only policies have are not for checks."""
    limits = {}
    for name, (number, _) in policy.limits_of(axes).items():
        if name in LIMITS:
            limits[name] = number
    return limits


def _other_ranks(observation: Mapping[str, Any] | None) -> tuple[Sections, ...]:
    others = []
    for rank in (observation or {}).get("ranks", []):
        if isinstance(rank, dict) and isinstance(rank.get("sections"), dict):
            others.append(rank["sections"])
    return tuple(others)


def _compiled_code_ran(sections: Sections) -> bool:
    # A report may be of another version, or damaged, so the section may have any shape.
    try:
        return compiled_code_ran(sections)
    # What cannot be read is no proof that compiled code ran, so the answer is the strict one.
    except (AttributeError, KeyError, TypeError):
        return False


def _contradictions_in_form(cell: Mapping[str, Any], matrix: Mapping[str, Any], ours: bool) -> Iterator[str]:
    """What can be told without judging; ids and the phases of checks may be other ones in another version."""
    verdicts = verdicts_in(cell["checks"])
    if ours:
        lane = lane_of(cell["axes"].get("wrapper"))
        if cell.get("lane", lane) != lane:
            yield f"it is said to be of the lane {cell['lane']}, and its axes say {lane}"
        yield from _contradictions_with_plan(cell, matrix)
    if cell["status"] != worst(verdicts):
        yield f"its status is {cell['status']}, which is not the worst of its checks"
    if cell["planned"] is not None and _evidence_fingerprint(cell) != cell["evidence_sha256"]:
        yield "its evidence is not what was judged: it was damaged or edited since"
    observation = cell["observation"]
    if observation is None:
        # A cell that crashed took its observation with it; any other verdict rests on one.
        if not {"crash", "not_run"}.issuperset(verdicts):
            yield "has verdicts without an observation"
    elif observation["cell"] != cell["id"]:
        yield f"its observation is that of {observation['cell']}"
    elif not observation["failure"]:
        # Rank 0 is the observation itself; the others stand below it.
        recorded = 1 + len(observation.get("ranks", ()))
        wanted = processes_of(cell["axes"].get("wrapper"), recorded)
        if recorded != wanted:
            yield f"it holds what {count(recorded, 'rank')} recorded, and its axes say {wanted}"


def _contradictions_with_plan(cell: Mapping[str, Any], matrix: Mapping[str, Any]) -> Iterator[str]:
    # A cell is told by its axes; whoever edits one of them makes it another cell.
    axes = cell["axes"]
    # An axis that a report lacks is one of a later version, and was at its default.
    known = DEFAULTS | {name: value for name, value in axes.items() if name in AXES}
    user = tuple((name, value) for name, value in axes.items() if name not in AXES)
    if Cell(**known, user=user).id != cell["id"]:
        yield "its id is not that of its axes"
    planned = cell["planned"]
    if planned is None:
        return
    asked = (*matrix["checks"], *planned.get("also", ()))
    wanted = [name for name in asked if name in CHECKS and CHECKS[name].applies(axes)]
    # Sorted, for each version may judge the same checks in another order.
    if sorted(planned["checks"]) != sorted(wanted):
        yield "the checks planned for it are not those of the matrix"
    unplanned = [name for name in cell["checks"] if name not in wanted]
    if unplanned:
        yield f"has a verdict of {unplanned[0]!r}, which is no check of the matrix"


def _evidence_fingerprint(cell: Mapping[str, Any]) -> str:
    try:
        return cell_fingerprint(cell)
    except ValueError:  # a number too large for a float
        return ""


def _expectation_expired(planned: Mapping[str, Any], today: datetime.date) -> bool:
    """Was the cell expected to fail until a day that is over?"""
    return (planned["outcome"] == "xfail" and planned["until"] != ""
            and today > datetime.date.fromisoformat(planned["until"]))


def _rejudge(judged: JudgedCell, cell: Mapping[str, Any], limits: Mapping[str, float], expired: bool,
             ours: bool) -> None:
    """Judge a cell's observation anew, and hold what the report says of it against that.

    ``limits`` is what the policy has over the limits of the matrix.
    """
    if cell["observation"] is None:
        return
    names = [name for name in cell["checks"] if name in CHECKS]
    observation = Observation.from_dict(cell["observation"])
    planned = _planned_cell(cell["planned"])
    # Only where all checks were judged can it be told that an expected failure did not come.
    complete = not judged.missing
    # Two judgements: `claimed` by the matrix alone, as the run judged, and `now` by this policy and on this day.
    claimed = apply_xfail(judge_observation(observation, names, planned.limits), planned, complete)
    now = claimed
    if limits or expired:
        expected = replace(planned, outcome="run") if expired else planned
        now = apply_xfail(judge_observation(observation, names, {**planned.limits, **limits}), expected, complete)
    for name in names:
        stored = cell["checks"][name]["verdict"]
        if stored == claimed[name].verdict:
            if now[name].verdict != stored:
                judged.changed.append(name)
                judged.verdicts[name] = _changed_verdict(now[name], planned, expired)
        # A stored verdict that is bad is believed, whatever the observation says.
        elif stored not in BAD and stored != "not_run":
            _contradict(judged, name, stored, claimed[name], now[name], ours)


def _contradict(judged: JudgedCell, name: str, stored: str, claimed: Judgement, now: Judgement, ours: bool) -> None:
    """The report's verdict does not follow from its observation. Of the two that are left the worse one counts."""
    if ours:
        judged.contradictions.append(f"{name}: the report says {stored}, its observation says {claimed.verdict}")
    if worst([stored, now.verdict]) != stored:
        judged.verdicts[name] = now.to_dict()


_NO_CELL: Final = Cell(model="")
"""Judging looks at what was planned, not at the axes."""


def _planned_cell(planned: Mapping[str, Any]) -> PlannedCell:
    return PlannedCell(_NO_CELL, planned["outcome"], planned["reason"], planned["issue"], planned["until"],
                       tuple(planned["expected"]), planned["limits"], planned["rule"])


def _changed_verdict(judgement: Judgement, planned: PlannedCell, expired: bool) -> dict[str, Any]:
    if expired:
        judgement = with_hint(judgement, expired_hint(planned.until, planned.rule, planned.reason))
    return judgement.to_dict()
