"""Masthead: what a release manager reads first: the verdict, a card for each severity, what was run, when and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.gate.announcement import judged_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.page.baseline_comparison import News
from pytest_torchcompile.page.markup import Html, tag
from pytest_torchcompile.page.overview import FindingGroup
from pytest_torchcompile.page.past_runs import commit_in_words, moment_in_words
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.merging import Merged

__all__ = ["NAME", "masthead"]

NAME: Final = "torch.compile matrix"
_VERSIONS: Final = ("torch", "triton", "python", "cuda", "driver")
_NOT_TOLD: Final = "not told"


def masthead(outcome: GateOutcome, groups: Sequence[FindingGroup], news: News) -> Html:
    """The top of the page."""
    run = outcome.merged
    facts = {"matrix": run.matrix["path"], "when": _when(run), "commit": _commit(run), "versions": _versions(run),
             "machine": _machine(run), "judged": judged_facts(outcome)}
    if news.beside:
        facts["compared with"] = news.beside
    told = [tag("div", tag("dt", name), tag("dd", text or _NOT_TOLD)) for name, text in facts.items()]
    return tag(
        "header", tag("h1", NAME),
        tag("p", sentence(outcome), class_="sentence good" if outcome.code == 0 else "sentence bad"),
        tag("ul", list(_cards(outcome, groups, news)), class_="cards", aria_label="At a glance"),
        tag("dl", told, class_="facts"), class_="top",
    )  # fmt: skip


def _when(run: Merged) -> str:
    """Begin and length, and those of the earlier runs of which verdicts are kept, as after a resumed run."""
    text = _span_of([report.block["run"] for report in run.reports if report.block["run"]])
    kept = [cell for cell in run.cells.values() if cell.get("kept")]
    earlier = {}
    for cell in kept:
        earlier.update({(each["started"], each["finished"]): each for each in cell["kept"]})
    if not text or not earlier:
        return text
    whose = "an earlier run" if len(earlier) == 1 else f"{len(earlier)} earlier runs"
    spans = filter(None, (_span_of([each]) for each in earlier.values()))
    return f"{text}; {count(len(kept), 'cell')} of {whose}: {'; '.join(sorted(spans)) or _NOT_TOLD}"


def _span_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """Begin and length; of shards, from the first that began to the last that ended."""
    begins = list(filter(None, (moment_in_words(str(each["started"])) for each in runs)))
    ends = list(filter(None, (moment_in_words(str(each["finished"])) for each in runs)))
    if not begins:
        return ""
    text = f"{min(begins):%Y-%m-%d %H:%M} UTC"
    if len(ends) == len(runs):
        text += f", took {readable_seconds((max(ends) - min(begins)).total_seconds())}"
    return text


def _commit(run: Merged) -> str:
    if not run.git:
        return ""
    return commit_in_words(run.git) + (" with uncommitted changes" if run.git["changed"] else "")


def _versions(run: Merged) -> str:
    parts = []
    for name in _VERSIONS:
        if run.environment.get(name):
            parts.append(f"{name} {run.environment[name]}")
    if run.plugin:
        parts.append(f"pytest-torchcompile {run.plugin}")
    return ", ".join(parts)


def _machine(run: Merged) -> str:
    environment = run.environment
    parts = [str(environment[name]) for name in ("cpu", "platform") if environment.get(name)]
    if environment.get("cores"):
        parts.insert(1, f"{environment['cores']} cores")
    devices = Counter(map(str, environment.get("devices") or ()))
    for name, number in devices.items():
        parts.append(name if number == 1 else f"{number} × {name}")
    return ", ".join(parts)


# the cards


def _cards(outcome: GateOutcome, groups: Sequence[FindingGroup], news: News) -> Iterator[Html]:
    """The worst first; what is good, expected or reused comes last."""
    for number, group in enumerate(groups):
        if group.weight == "note":
            continue
        # Several findings of a group may name the same cell.
        cells: set[str] = set()
        for index in group.findings:
            cells.update(outcome.findings[index].cells)
        details = [_cells_and_tests(outcome, cells), news.on_card(group.findings)]
        yield _card(f"#group-{number}", "bad", len(group.findings), group.title, details)
    every = [*outcome.cells.values(), *outcome.tests.values()]
    statuses = Counter(each.status for each in every)
    noun = "cells and tests" if outcome.tests and outcome.cells else "tests" if outcome.tests else "cells"
    yield _card("#map", "good" if statuses["pass"] else "", statuses["pass"], "Hold", [f"of {len(every)} {noun}"])
    if statuses["xfail"]:
        yield _card("#expected", "", statuses["xfail"], "Expected failures", ["as rules of the matrix say"])
    reused = sum("reused" in cell for cell in outcome.merged.cells.values())
    if reused:
        yield _card("#map", "", reused, "Reused", ["results of earlier runs; underlined in the map"])


def _cells_and_tests(outcome: GateOutcome, names: set[str]) -> str:
    tests = sum(name in outcome.tests for name in names)
    parts = [count(len(names) - tests, "cell")] if len(names) > tests else []
    if tests:
        parts.append(count(tests, "test"))
    return " and ".join(parts)


def _card(address: str, kind: str, number: int, title: str, details: Sequence[str]) -> Html:
    content: list[Any] = [tag("b", number), " ", tag("span", title, class_="title")]
    content += [tag("span", text, class_="detail") for text in details if text]
    return tag("li", tag("a", content, href=address, class_=f"card {kind}".rstrip()))
