"""contract: whatever a caller may legitimately do with the module, the compiled one does what eager does.

Memory formats, inputs that share memory, frozen parameters, autocast, threads, a module that is changed between calls:
what eager refuses is not judged. Histories run in a process of their own, which eager itself may end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.contract.finding_text import finding_text
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.contract.contract_search import ContractFinding
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_PROGRAM = "pytest_torchcompile.run.contract_cell:program_of"
"""Named, not imported: it lies above, and is loaded in the process that histories run in."""


def measure(run: CellTrial) -> dict[str, Any]:
    """What the search came to, and each finding with its history, its script and where it comes in."""
    from pytest_torchcompile.contract.contract_search import search_contract
    from pytest_torchcompile.contract.mutation import NAMES
    from pytest_torchcompile.contract.worker import ProgramSource
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions

    if run.cell.wrapper != "none":
        return {"wrapper": run.cell.wrapper, **_NOTHING}
    options = FuzzOptions(**run.job.fuzz)
    # Plain data: each history runs in a process of its own, which builds the model again.
    source = ProgramSource(_PROGRAM, asdict(run.job), NAMES, dict(run.calls[0].sizes),
                           tuple(options.settings))
    came = search_contract(source, run.dims, options.budget(), flips=run.train, seed=options.seed,
                           database=options.database(), key=f"contract:{run.cell.id}")
    return {
        "wrapper": "none",
        "seed": options.seed,
        "offered": {name: len(choices) for name, choices in came.offered.items()},
        "uncompared": came.uncompared,
        "histories": came.counts["histories"],
        "calls": int(came.counts["calls"]),
        "refused": int(came.counts["refused"]),
        "mute": int(came.counts["mute"]),
        "graphs": int(came.counts["graphs"]),
        "seconds": came.counts["seconds"],
        "in_calls": came.counts["in_calls"],
        "spent": came.result.spent,
        "findings": [_finding_section(run, finding) for finding in came.findings],
    }


_NOTHING: dict[str, Any] = {"offered": {}, "uncompared": [], "histories": 0, "calls": 0, "refused": 0, "mute": 0,
                            "graphs": 0, "seconds": 0.0, "in_calls": 0.0, "spent": "", "findings": []}


def _finding_section(run: CellTrial, finding: ContractFinding) -> dict[str, Any]:
    from pytest_torchcompile.contract.finding_text import finding_record

    layers = []
    for path, part in run.pristine.named_modules():
        # A module with others inside is told by these.
        if not list(part.children()):
            layers.append((path, type(part).__name__))
    return finding_record(finding, layers, _script_of(run, finding))


def _script_of(run: CellTrial, finding: ContractFinding) -> str:
    """The script; empty, with the reason, where the model's source can't be had."""
    from pytest_torchcompile.contract.script import Shown, written_script
    from pytest_torchcompile.loading import resolve

    entry, root, where = run.job.entry, Path(run.job.root), run.matrix
    loss = None
    if entry["loss"]:
        loss = resolve(entry["loss"], root, where)
    arguments = {role: dict(entry["arguments"].get(role, {})) for role in ("factory", "inputs")}
    arguments["factory"] |= dict(run.cell.user)
    training = None
    if entry["mode_of_modules"] == "phase":
        training = run.train
    settings = dict(run.settings)
    # The first stage that shows it is quicker, and tells more than the whole compiler does.
    if finding.stage:
        settings = {"backend": finding.stage, "dynamic": settings.get("dynamic")}
    told = finding.told
    try:
        return written_script(Shown(
            f"{told.kind}: {told.message}", resolve(entry["factory"], root, where),
            resolve(entry["inputs"], root, where), loss, finding.failing.sequence, settings, run.train, training,
            finding.without, run.seed, run.cell.dtype, arguments, run.cell.device, told.kind, told.where,
        ))
    except (OSError, TypeError, SyntaxError) as error:
        return f"# no script: the source of the model can't be read ({type(error).__name__}: {error})"


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; takes no limits."""
    if section["wrapper"] != "none":
        yield Problem(f"nothing to judge: the contract is that of a module as it is, not in the wrapper "
                      f"{section['wrapper']!r}", hint="leave these cells out of the check `contract`")
        return
    for finding in section["findings"]:
        yield Problem(*finding_text(finding), "the script above shows it by itself")
    if section["findings"]:
        return
    if not section["calls"]:
        yield Problem("vacuous: no call was compared: eager refuses every one, or the time was over before the first",
                      hint="give more: --compile-fuzz-seconds")
    elif not section["graphs"]:
        yield Problem("vacuous: no compiled graph ran in any history", hint="see the check `compiles` of this cell")
    elif section["mute"] == section["calls"]:
        yield Problem("vacuous: of every call nothing came but zeros, NaN, rounding noise, or values that eager does "
                      "not repeat", hint="give it inputs and weights that reach its outputs, and seed what it draws")
    elif len(section.get("uncompared", ())) == len(section["offered"]):
        yield Problem("vacuous: no call with a mutation was compared: eager refuses each, or the time was over before "
                      "the first", hint="give more: --compile-fuzz-seconds")


def remark(section: Mapping[str, Any]) -> str:
    """How much was tried."""
    # Older reports do not tell.
    uncompared = section.get("uncompared", [])
    compared = count(len(section["offered"]) - len(uncompared), "mutation")
    told = (f"{section['histories']} histories over {compared}, {section['calls']} calls compared, "
            f"{section['refused']} refused by eager")
    if uncompared:
        told += f"; never compared: {', '.join(uncompared)}"
    return told


CHECK = Check("contract", measure, judge, remark)
