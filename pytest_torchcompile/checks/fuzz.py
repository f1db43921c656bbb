"""fuzz: no drawn sequence of shapes makes the cell wrong, slow or eager either. The shortest that does is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.search import FailingSequence
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_MUTE = "nothing but zeros, NaN or rounding noise"


def measure(run: CellTrial) -> dict[str, Any]:
    """What the search came to on each rung of the backend ladder, and the shortest failing sequences, the worst first.

    Drops what the cell has compiled: every sequence starts from a fresh compiler state. A model without any size that
    varies is not searched: all sequences would be the same.
    """
    from pytest_torchcompile.fuzz.cell_search import all_failing, attempts_of, climb
    from pytest_torchcompile.fuzz.drawn_call import varying_dims
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions

    varied = varying_dims(run.dims)
    if not varied:
        return {"varied": [], "rungs": [], **_NOTHING_FOUND}
    options = FuzzOptions(**run.job.fuzz)
    # A drawn size that is that of a parameter may get the same symbol (duck shapes).
    parameter_sizes: set[int] = set()
    for parameter in run.pristine.parameters():
        parameter_sizes.update(parameter.shape)
    rungs = climb(attempts_of(run), run.dims, options.budget(), flips=run.train, seed=options.seed,
                  others=parameter_sizes, database=options.database(), key=run.cell.id)
    found = [_failing_section(run, failing) for failing in all_failing(rungs)]
    worst = found[0] if found else _NOTHING_FOUND
    tried = []
    for backend, search in rungs:
        counts = {name: getattr(search, name) for name in _COUNTS}
        tried.append({"backend": backend, **counts})
    return {
        "varied": varied,
        "seed": options.seed,
        "rungs": tried,
        **worst,
        "milder": found[1:],
    }


def _failing_section(run: CellTrial, failing: FailingSequence) -> dict[str, Any]:
    """One problem as plain data, with a test that shows it."""
    from pytest_torchcompile.fuzz.cell_search import write_test
    from pytest_torchcompile.fuzz.drawn_call import as_code, as_plain

    return {
        "finding": asdict(failing.problem),
        "sequence": as_plain(failing.sequence),
        "code": as_code(failing.sequence),
        "drawn": as_code(failing.drawn),
        "kept": failing.kept,
        "cut": failing.cut,
        "test": write_test(run, failing.sequence),
    }


_NOTHING_FOUND: Final[dict[str, Any]] = {"finding": None, "sequence": [], "code": "[]", "drawn": "[]", "kept": False,
                                         "cut": "", "test": ""}
_COUNTS = ("examples", "tries", "calls", "refused", "mute", "compiles", "seconds", "spent")


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section. The limits were applied when sequences were run: other limits need another run."""
    # Older reports do not say which dims vary.
    if not section.get("varied", True):
        yield Problem("nothing to judge: no dim of the model has more than one size, so no sequences of shapes differ",
                      hint="give a dim a range, like {min: 1, max: 64}, or leave the model's cells out: "
                           "-m \"not compile_cell(model='...')\"")
        return
    # The worst first. Older reports have one problem.
    for failing in (section, *section.get("milder", ())):
        if failing["finding"]:
            yield _finding_problem(section, failing)
    # With the cell's own backend, unless a cheap one found wrong numbers.
    last = next(reversed(section["rungs"]), {"tries": 0})
    if not last["tries"]:
        how = ""
        if len(section["rungs"]) > 1:
            how = f" with the backend {last['backend']}"
        yield _untried_problem(last, how)


def _untried_problem(last: Mapping[str, Any], how: str) -> Problem:
    """Why no sequence was compared on the last rung."""
    # Older reports count what was refused among the tries.
    refused, mute = last.get("refused", 0), last.get("mute", 0)
    if last.get("spent") == "sizes":
        return Problem(f"no sequence was run{how}: no sizes were found that the dims' expressions go with",
                       hint="see the expressions among the model's dims")
    if refused:
        also = f", or gives {_MUTE}: {mute}" if mute else ""
        return Problem(f"nothing was compared{how}: eager refuses all {refused} call(s) that were drawn{also}",
                       hint="narrow the model's dims to the sizes that it takes")
    if mute:
        return Problem(f"nothing is proved{how}: in all {mute} call(s) that were drawn the model gives {_MUTE}",
                       hint="give it inputs and weights that reach its outputs")
    return Problem(f"no sequence was run{how}: the time for fuzzing was over before the first",
                   hint="give more: --compile-fuzz-seconds")


def _finding_problem(section: Mapping[str, Any], failing: Mapping[str, Any]) -> Problem:
    problem, spent = failing["finding"], section["rungs"][-1]["spent"]
    evidence = str(problem["evidence"])
    if failing["drawn"] != failing["code"]:
        evidence += f"\nfound as {failing['drawn']}"
    if failing["kept"]:
        evidence += "\nkept from an earlier run in .hypothesis"
    # Older reports stopped at the first problem, so that what was spent has cut short the shrinking.
    if cut := failing.get("cut", spent):
        evidence += f"\nnot shrunk to the end: the {cut} ran out"
    return Problem(f"{problem['kind']}: after {failing['code']}: {problem['message']}",
                   f"{evidence}\n\n{failing['test']}".strip(),
                   "run the test above by itself; with its line `@settings` removed it looks for other sequences")


CHECK = Check("fuzz", measure, judge)
