"""RecordedTest: what a report holds of one test of a model repository that uses our fixtures. The lane ``test``.

A cell is judged by checks; a test is judged by its own body, and beside that by what its ledger says of its limits.
Both stand in the report: the verdict, and the ledger that it has to follow from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pytest_torchcompile.observation import Problem, worst
from pytest_torchcompile.report.evidence import fingerprint
from pytest_torchcompile.report.strictjson import plain_json

__all__ = ["COUNTED", "TEST_CHECK", "TEST_LANE", "RecordedTest", "count_ledger", "list_tests", "merge_tests",
           "seal_test"]

TEST_LANE: Final = "test"
TEST_CHECK: Final = "test"
"""Where a cell has the verdicts of checks, a test has one, under this name."""
COUNTED: Final = ("compiles", "recompiles", "graph_breaks", "eager_frames", "graphs")
"""The lists of a ledger that are counted; ``runs`` counts the executions of its graphs."""


@dataclass(frozen=True)
class RecordedTest:
    """One test, as plain data."""

    id: str
    """Pytest's node id."""
    verdict: str
    """A word of :data:`~pytest_torchcompile.observation.VERDICTS`."""
    problems: tuple[Problem, ...] = ()
    note: str = ""
    """Why it was skipped, or expected to fail."""
    limits: dict[str, int] = field(default_factory=dict)
    """Those of its markers ``compile_limits``."""
    must_run: bool = False
    """Does a test in which no compiled graph ran go over its limits?"""
    asks_model: bool = False
    """Does it take ``compiled_model``, so that it has to run it?"""
    model: dict[str, bool] | None = None
    """Whether that model was ``called``, and whether a graph ``ran`` in its calls; None: any graph will do."""
    ledger: dict[str, Any] | None = None
    """What torch.compile did in it; None where its set-up never came so far. Of a fuzzed test that passed, in the
    sequence that compiled most."""
    sequences: int | None = None
    """Of a fuzzed test: the sequences that passed."""
    attempts: int = 1
    """How often it was run, with those of a plugin that runs failures again."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The test as the report has it, with its counts and a fingerprint over all of it."""
        test = {"lane": TEST_LANE, **asdict(self), "counts": count_ledger(self.ledger)}
        # A list, as it is after a way through JSON.
        test["problems"] = [asdict(problem) for problem in self.problems]
        return seal_test(test)


def count_ledger(ledger: Mapping[str, Any] | None) -> dict[str, int]:
    """How much of each there is in a ledger's plain data."""
    if ledger is None:
        return dict.fromkeys((*COUNTED, "runs"), 0)
    counts = {name: len(ledger[name]) for name in COUNTED}
    counts["runs"] = sum(graph["runs"] for graph in ledger["graphs"])
    return counts


def seal_test(test: Mapping[str, Any]) -> dict[str, Any]:
    """The test with the fingerprint of all else that is recorded of it.

    The verdict of a cell can be told again from its observation. That of a test is partly its body's, which a report
    doesn't hold, so the fingerprint covers the verdict too.
    """
    unsealed = plain_json({name: value for name, value in test.items() if name != "evidence_sha256"})
    return {**unsealed, "evidence_sha256": fingerprint(unsealed)}


def list_tests(planned: Sequence[str], recorded: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every planned test in the order of the plan, and behind them any that nobody had planned."""
    tests = []
    for name in dict.fromkeys((*planned, *recorded)):
        if name in recorded:
            tests.append(recorded[name])
        else:
            tests.append(RecordedTest(name, "not_run", attempts=0).to_dict())
    return tests


def merge_tests(blocks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tests of all shards by node id. Shards may have run the same tests; of those the worst verdict holds."""
    merged: dict[str, dict[str, Any]] = {}
    for block in blocks:
        for test in block["tests"]:
            known = merged.get(test["id"])
            if known is None or worst([known["verdict"], test["verdict"]]) != known["verdict"]:
                merged[test["id"]] = test
    return merged
