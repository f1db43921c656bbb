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
    from pytest_torchcompile.fuzz.drawn_call import code, plain
    from pytest_torchcompile.fuzz.emitted import attempts_of, emitted
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions
    from pytest_torchcompile.fuzz.ladder import climb
    from pytest_torchcompile.fuzz.sizes import varying

    if not (varied := varying(run.dims)):
        return {"varied": [], "rungs": [], "finding": None}
    options = FuzzOptions(**run.job.fuzz)
    rungs = climb(attempts_of(run), run.dims, options.budget(), flips=run.train, seed=options.seed,
                  others={size for p in run.pristine.parameters() for size in p.shape},
                  database=options.database(), key=run.cell.id)
    result = rungs[-1][1]
    return {
        "varied": varied,
        "seed": options.seed,
        "rungs": [{"backend": backend, "examples": each.examples, "tries": each.tries, "calls": each.calls,
                   "refused": each.refused, "mute": each.mute, "compiles": each.compiles, "seconds": each.seconds,
                   "spent": each.spent}
                  for backend, each in rungs],
        "finding": asdict(result.finding) if result.finding else None,
        "sequence": plain(result.sequence),
        "code": code(result.sequence),
        "drawn": code(result.drawn),
        "kept": result.kept,
        "test": emitted(run, result.sequence) if result.finding else "",
    }


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section. The limits were applied when sequences were run: other limits need another run."""
    if not section.get("varied", True):  # older reports do not say
        yield Problem("nothing to judge: no dim of the model has more than one size, so no sequences of shapes differ",
                      hint="give a dim a range, like {min: 1, max: 64}, or leave the model's cells out: "
                           "-m \"not compile_cell(model='...')\"")
        return
    last = next(reversed(section["rungs"]), {"tries": 0})  # with the cell's own backend, unless a cheap one found it
    if not last["tries"]:
        how = f" with the backend {last['backend']}" if section["rungs"][1:] else ""
        if last.get("spent") == "sizes":
            yield Problem(f"no sequence was run{how}: no sizes were found that the dims' expressions go with",
                          hint="see the expressions among the model's dims")
        elif refused := last.get("refused", 0):  # older reports count what was refused among the tries
            also = f", or gives {_MUTE}: {mute}" if (mute := last.get("mute", 0)) else ""
            yield Problem(f"nothing was compared{how}: eager refuses all {refused} call(s) that were drawn{also}",
                          hint="narrow the model's dims to the sizes that it takes")
        elif mute := last.get("mute", 0):
            yield Problem(f"nothing is proved{how}: in all {mute} call(s) that were drawn the model gives {_MUTE}",
                          hint="give it inputs and weights that reach its outputs")
        else:
            yield Problem(f"no sequence was run{how}: the time for fuzzing was over before the first",
                          hint="give more: --compile-fuzz-seconds")
    elif found := section["finding"]:
        drawn = f"\nfound as {section['drawn']}" if section["drawn"] != section["code"] else ""
        kept = "\nkept from an earlier run in .hypothesis" if section["kept"] else ""
        spent = section["rungs"][-1]["spent"]
        cut = f"\nnot shrunk to the end: the {spent} ran out" if spent else ""
        yield Problem(f"{found['kind']}: after {section['code']}: {found['message']}",
                      f"{found['evidence']}{drawn}{kept}{cut}\n\n{section['test']}".strip(),
                      "run the test above by itself; with its line `@settings` removed it looks for other sequences")


CHECK = Check("fuzz", measure, judge)
