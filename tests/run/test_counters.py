"""What the fixtures hand to a test, over ledgers made by hand."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Graph, GraphBreak
from pytest_torchcompile.plan.markers import MarkerLimits as Limits
from pytest_torchcompile.run.counters import GraphBreaks, RecompileCounter, judge_limits


def ran(**lists):
    """A ledger in which one compiled graph ran."""
    ledger = Ledger(graphs=[Graph("0/0", 1, runs=1)])
    for name, records in lists.items():
        getattr(ledger, name).extend(records)
    return ledger


def frame(kind):
    return EagerFrame("f", "net.py", 3, "because", kind)


@pytest.mark.parametrize(("limits", "ledger", "starts"), [
    (Limits(recompiles=0), ran(), []),
    (Limits(recompiles=0), ran(recompiles=[Compile("f", "net.py", 3, "0/1", "recompile")]), ["1 recompile, none"]),
    (Limits(recompiles=1), ran(recompiles=[Compile("f", "net.py", 3, "0/1", "recompile")]), []),
    (Limits(graph_breaks=0), ran(recompiles=[Compile("f", "net.py", 3, "0/1", "recompile")]), []),
    (Limits(graph_breaks=0), ran(graph_breaks=[GraphBreak("why", "", "net.py", 3)]), ["1 graph break, none allowed"]),
    (Limits(eager_frames=0), ran(eager_frames=[frame("skipped")]), ["1 function ran eagerly, none allowed"]),
    (Limits(eager_frames=1), ran(eager_frames=[frame("limit")]), []),
    (Limits(eager_frames=1), Ledger(eager_frames=[frame("disabled")]), []),
    (Limits(eager_frames=1), Ledger(), ["nothing to judge: no compiled graph ran in this test"]),
    (Limits(recompiles=0), ran(eager_frames=[frame("unknown"), frame("disabled"), frame("graph_break")]), []),
    *((Limits(recompiles=0), ran(eager_frames=[frame(kind)]), ["torch gave up compiling, so that the other numbers "])
      for kind in ("limit", "suppressed", "stance", "off", "skipped")),
    (Limits(recompiles=0), Ledger(), ["nothing to judge: no compiled graph ran in this test"]),
    (Limits(recompiles=0), Ledger(graphs=[Graph("0/0", 1)]), ["nothing to judge: no compiled graph ran in this test"]),
    (Limits(recompiles=0), ran(lost=["odd record"]), ["not all that torch did could be read (a newer torch than "]),
])  # fmt: skip
def test_limits(limits, ledger, starts):
    """One text for each limit that does not hold, for silently eager frames, for nothing run and for lost records."""
    found = judge_limits(limits, ledger, must_run=True)
    assert [text[: len(start)] for text, start in zip(found, starts, strict=True)] == starts


def test_a_test_that_need_not_compile():
    """Without must_run an empty ledger is within any limit."""
    assert judge_limits(Limits(recompiles=0), Ledger(), must_run=False) == []


def test_an_expectation_may_be_entered_again():
    """Each time it judges the block that it is entered for."""
    ledger = ran()
    counter = RecompileCounter(ledger)
    none = counter.assert_no_recompiles()
    for _ in range(2):
        with none:
            ledger.graphs[0].runs += 1
    assert counter.unused == []
    with pytest.raises(AssertionError, match="1 recompile, none allowed"), none:
        ledger.recompiles.append(Compile("f", "net.py", 3, "0/1", "recompile"))


def test_a_ledger_that_lost_records_vouches_for_nothing():
    """expect fails, too, where the ledger could not read all of torch's records."""
    ledger = ran()

    def lose():
        with RecompileCounter(ledger).expect(0):
            ledger.graphs[0].runs += 1
            ledger.lost.append("odd record")

    with pytest.raises(AssertionError, match="may be too small: odd record"):
        lose()


def test_lists_compare():
    """graph_breaks of two ledgers are equal if their records are."""
    one, two = (GraphBreaks(ran(graph_breaks=[GraphBreak("why", "", "net.py", 3)])) for _ in range(2))
    assert one == two
    assert one != GraphBreaks(ran())
    assert one != "text"
