"""fuzz: no drawn sequence of shapes makes the cell wrong, slow or eager either. The shortest that does is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK"]

_MUTE = "nothing but zeros, NaN or rounding noise"


def measure(run: CellTrial) -> dict[str, Any]:
    """What the search came to on each rung of the backend ladder, and the shortest failing sequence.

    Drops what the cell has compiled: every sequence starts from a fresh compiler state. A model without any size that
    varies is not searched: all sequences would be the same.
    """
    from pytest_torchcompile.fuzz.cell_search import attempts_of, climb, write_test
    from pytest_torchcompile.fuzz.drawn_call import as_code, as_plain, varying_dims
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions

    varied = varying_dims(run.dims)
    if not varied:
        return {"varied": [], "rungs": [], "finding": None}
    options = FuzzOptions(**run.job.fuzz)
    parameter_sizes = {size for parameter in run.pristine.parameters() for size in parameter.shape}
    rungs = climb(attempts_of(run), run.dims, options.budget(), flips=run.train, seed=options.seed,
                  others=parameter_sizes, database=options.database(), key=run.cell.id)
    result = rungs[-1][1]
    return {
        "varied": varied,
        "seed": options.seed,
        "rungs": [{"backend": backend, **{name: getattr(each, name) for name in _COUNTS}} for backend, each in rungs],
        "finding": asdict(result.finding) if result.finding else None,
        "sequence": as_plain(result.sequence),
        "code": as_code(result.sequence),
        "drawn": as_code(result.drawn),
        "kept": result.kept,
        "test": write_test(run, result.sequence) if result.finding else "",
    }


_COUNTS = ("examples", "tries", "calls", "refused", "mute", "compiles", "seconds", "spent")


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section. The limits were applied when sequences were run: other limits need another run."""
    # Older reports do not say which dims vary.
    if not section.get("varied", True):
        yield Problem("nothing to judge: no dim of the model has more than one size, so no sequences of shapes differ",
                      hint="give a dim a range, like {min: 1, max: 64}, or leave the model's cells out: "
                           "-m \"not compile_cell(model='...')\"")
        return
    # With the cell's own backend, unless a cheap one found something.
    last = next(reversed(section["rungs"]), {"tries": 0})
    if not last["tries"]:
        how = ""
        if len(section["rungs"]) > 1:
            how = f" with the backend {last['backend']}"
        yield _untried_problem(last, how)
    elif section["finding"]:
        yield _finding_problem(section, section["finding"])


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


def _finding_problem(section: Mapping[str, Any], finding: Mapping[str, Any]) -> Problem:
    evidence = str(finding["evidence"])
    if section["drawn"] != section["code"]:
        evidence += f"\nfound as {section['drawn']}"
    if section["kept"]:
        evidence += "\nkept from an earlier run in .hypothesis"
    if spent := section["rungs"][-1]["spent"]:
        evidence += f"\nnot shrunk to the end: the {spent} ran out"
    return Problem(f"{finding['kind']}: after {section['code']}: {finding['message']}",
                   f"{evidence}\n\n{section['test']}".strip(),
                   "run the test above by itself; with its line `@settings` removed it looks for other sequences")


CHECK = Check("fuzz", measure, judge)
