"""What is told of a finding: the history, what is not needed, where it comes in, words for a search. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_torchcompile.contract.stand_in import path_of, stand_in_words
from pytest_torchcompile.culprit.culprit_record import Culprit, culprit_text
from pytest_torchcompile.fuzz.drawn_call import as_code, as_plain

if TYPE_CHECKING:
    from pytest_torchcompile.contract.contract_search import ContractFinding

__all__ = ["FindingText", "finding_record", "finding_text", "operator_script_of", "search_line"]

_WORDS: Final = {"value": "wrong result", "gradient": "wrong gradient", "crash": "segfault", "hang": "hangs"}
_MOVED: Final = {
    "compiled": "the compiled side moved: eager is what is expected, or nearer to it",
    "eager": "the eager side moved: compiled code is nearer to what is expected",
}
_MOST_KINDS: Final = 3


class FindingText(NamedTuple):
    """One line, and what stands below it."""

    message: str
    evidence: str


def finding_record(finding: ContractFinding, layers: Iterable[tuple[str, str]], script: str) -> dict[str, Any]:
    """A finding as plain data; ``layers``: path and class of the module's innermost parts."""
    failing, told = finding.failing, finding.told
    culprit = {}
    if finding.culprit is not None:
        culprit = {"culprit": finding.culprit}
    gone = {path_of(each) for each in finding.without}
    left = [kind for path, kind in layers if path not in gone]
    return {
        "kind": told.kind, "where": told.where, "message": told.message, "at": told.at, "moved": told.moved,
        "history": as_plain(failing.sequence), "code": as_code(failing.sequence), "drawn": as_code(failing.drawn),
        "cut": failing.cut, "without": list(finding.without), "stage": finding.stage,
        "search": search_line(finding, left), "script": script, **culprit,
    }


def search_line(finding: ContractFinding, layers: Iterable[str]) -> str:
    """Words for a search: the kind, the stage, the layers that are left, what the caller did."""
    told = finding.told
    words = [_WORDS.get(told.kind, told.kind)]
    if told.where in ("eager", "compiled"):
        words.append(told.where)
    elif finding.stage:
        words.append(finding.stage)
    words += list(dict.fromkeys(layers))[:_MOST_KINDS]
    for each in finding.failing.sequence:
        for name, choice in each.mutations:
            words += [name, choice.partition(" ")[0]]
    return " ".join(dict.fromkeys(words))


def finding_text(record: Mapping[str, Any]) -> FindingText:
    """What is said of a record."""
    place = ""
    if record["where"] and record["kind"] not in ("crash", "hang"):
        place = f"{record['where']}: "
    lines = []
    if record["drawn"] != record["code"]:
        lines.append(f"found as {record['drawn']}")
    if record["without"]:
        lines.append(f"with {stand_in_words(record['without'])} it is the same")
    # Older records do not tell.
    if moved := record.get("moved"):
        lines.append(_MOVED[moved])
    if record["stage"]:
        lines.append(f"the backend {record['stage']!r} shows it, and none with less of the compiler")
    if record.get("culprit"):
        lines += culprit_text(Culprit.from_dict(record["culprit"])).splitlines()
    if record["cut"]:
        lines.append(f"not shrunk to the end: the {record['cut']} ran out")
    lines.append(f"to look for it in torch's tracker: {record['search']}")
    message = f"{record['kind']}: after {record['code']}: {place}{record['message'].removeprefix(place)}"
    scripts = [record["script"]]
    if operator := operator_script_of(record):
        scripts += ["", "# What is left of it, by itself:", operator]
    return FindingText(message, "\n".join([*lines, "", *scripts]).strip())


def operator_script_of(record: Mapping[str, Any]) -> str:
    """The script of the operator to blame with its real inputs, or of the smallest graph; empty where there is none."""
    culprit = Culprit.from_dict(record.get("culprit") or {"backend": ""})
    return culprit.operator_script or culprit.script
