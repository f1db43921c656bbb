"""No old green: a run marks the report that it finds, before anything can end the run.

A run leaves files in ``.compile-matrix/``. Who reads them later must never take those of an earlier run for its own:

1. *Before pytest reads its options* (in ``pytest_addoption``, the first hook that we get) the report and the journal
   that are there are marked: "a later run began at that time". A mistake on the command line, in a conftest or in the
   matrix ends the run after that. What is left then says that it is of an earlier run, and the gate ends with 2.
2. *At session start* the journal is replaced, at once, by one with the plan of this run (:mod:`.journal`).
3. *At the end* the report is replaced, at once, by that of this run (:mod:`.keeping`). It has no mark.

So a kill at any moment leaves a marked report beside a journal without an end, and neither is judged as green. Nothing
is deleted: the marked report is whole, and ``gate --earlier`` judges it.

The mark is in the file itself, not beside it, because CI often collects ``report.json`` alone. It is one more key at
the end of the JSON object, or one more line of the journal. The seal, where it holds, is made anew with it.

No mark is left by what ends or changes the run before pytest loads this plugin, or hides its options: ``-c`` or ``-p``
that name nothing, a mistake in the ini file, an ``@file`` of arguments, ``PYTEST_DISABLE_PLUGIN_AUTOLOAD``. The exit
code is then all there is, besides ``gate --commit`` and a policy's ``max_age``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.report.provenance import add_seal, fingerprint, remove_seal
from pytest_torchcompile.report.record import utc_time
from pytest_torchcompile.report.safe_output import (
    FOLDER,
    JOURNAL_FILE,
    MODEL_FOLDER,
    REPORT_FILE,
    behind_link,
    replace_file,
)
from pytest_torchcompile.report.strictjson import dumps

__all__ = ["INTERRUPTED", "INTERRUPTED_RUN", "LATER_RUN", "RENAMED", "later_run_mark", "left_by_earlier_runs",
           "mark_earlier", "mark_interrupted", "planned_in", "start_told_by"]

LATER_RUN: Final = "compile_matrix_later_run"
"""The key that the mark is, at the top of a report."""
INTERRUPTED: Final = "compile_matrix_interrupted"
"""The key, beside the mark, of what later runs were to judge that were killed: cells, and node ids of tests."""
INTERRUPTED_RUN: Final = "compile_matrix_interrupted_run"
"""The key, beside these, of the last run that was killed: the mark that it left, or what its journal says."""
LATER_LINE: Final = "later_run"
"""The kind of line that it is in a journal."""
_ONLY_SHOWS: Final = frozenset({
    "-h", "--help", "-V", "--version", "--co", "--collect-only", "--collectonly", "--fixtures", "--funcargs",
    "--fixtures-per-test", "--markers", "--cache-show", "--setup-plan",
})
"""Options of pytest with which nothing is judged, so that a report stays that of the last run."""
_OURS: Final = "--compile-"
_RUNS_CELLS: Final = {"--compile-matrix": FOLDER, "--compile-model": MODEL_FOLDER}
"""Options that run cells, and so write a report, and the folder that it is in."""
_NAMES_MODEL: Final = "model:"
"""How the name of a matrix begins that is made for one model."""
RENAMED: Final = "earlier."
"""How the name of a file begins that there was no room to mark."""
_TAKE_A_VALUE: Final = frozenset({
    "-k", "-m", "-c", "-o", "-p", "-r", "-W", "-n", "--config-file", "--override-ini", "--deselect", "--ignore",
    "--ignore-glob", "--rootdir", "--confcutdir", "--basetemp", "--durations", "--maxfail", "--tb", "--dist", "--tx",
    "--junitxml", "--json-report-file", "--import-mode", "--log-level", "--color", "--capture",
})
"""Options that want a value: what follows is none that pytest obeys, but its value, or a mistake."""
_TAIL: Final = 4000
"""Bytes from the end in which a mark is looked for."""


def left_by_earlier_runs(root: Path, base: Path, arguments: Sequence[str]) -> list[Path]:
    """The report and the journal that this run will replace, named by arguments that nobody has read yet.

    ``root`` has ``.compile-matrix``, unless an argument names another folder; ``base`` is where pytest was started.
    Without a matrix, tests that use our fixtures are in pytest-json-report's file.
    """
    if _only_shows(arguments):
        return []
    paths = list(map(base.joinpath, _values_of(arguments, "--json-report-file")))
    # That is where pytest-json-report writes, unless an option says otherwise.
    if "--json-report" in arguments:
        paths.append(base / ".report.json")
    for folder in _values_of(arguments, "--compile-folder"):
        # The last one counts, as pytest reads options.
        root = base / folder
    for folder in sorted(_folders_of_runs(arguments)):
        paths += _files_of_matrix_run(root, folder)
    return list(filter(Path.is_file, paths))


def _only_shows(arguments: Sequence[str]) -> bool:
    """Is this no run? A word where a value or a file is wanted (``-k --co``, ``-- --co``) does not say so."""
    before = ""
    for text in arguments:
        # Only files follow, whatever they look like.
        if text == "--":
            return False
        if text in _ONLY_SHOWS and before not in _TAKE_A_VALUE:
            return True
        before = text
    return False


def _folders_of_runs(arguments: Sequence[str]) -> set[str]:
    """Where runs of cells have their files; ``--compile-matrix=model:...`` is a run of one model too."""
    folders: set[str] = set()
    for place, text in enumerate(arguments):
        option, _, value = text.partition("=")
        folder = _RUNS_CELLS.get(option)
        if folder is None:
            continue
        if "=" not in text:
            value = "".join(arguments[place + 1:place + 2])
        folders.add(MODEL_FOLDER if value.startswith(_NAMES_MODEL) else folder)
    return folders


def _files_of_matrix_run(root: Path, folder: str) -> Iterator[Path]:
    # Only torchrun's RANK counts: others may use a variable of that name for something else.
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    for file in (REPORT_FILE, JOURNAL_FILE):
        path = root / folder / Path(file).name
        # A rank after the first has files of its own.
        if rank != "0":
            path = path.parent / f"rank{rank}" / path.name
        yield path


def _values_of(arguments: Sequence[str], option: str) -> Iterator[str]:
    for place, text in enumerate(arguments):
        if text.startswith(f"{option}="):
            yield text.partition("=")[2]
        elif text == option and place + 1 < len(arguments):
            yield arguments[place + 1]


def later_run_mark(arguments: Sequence[str]) -> dict[str, str]:
    """What the mark says: when the later run began, and its command as far as it is ours.

    Other arguments are left out, because a report holds no secrets.
    """
    words: list[str] = []
    value_follows = False
    for text in arguments:
        ours = text.startswith(_OURS)
        if ours or (value_follows and not text.startswith("-")):
            words.append(text)
        elif words[-1:] != ["..."]:
            words.append("...")
        value_follows = ours and "=" not in text
    # A command may name hundreds of files; its beginning tells which one it was.
    return {"began": utc_time(), "command": f"pytest {' '.join(map(_quote_word, words))}"[:300]}


def _quote_word(word: str) -> str:
    # "..." stands for any number of arguments, and is none that a shell has to read.
    return word if word == "..." else shlex.quote(word)


def mark_earlier(path: Path, mark: dict[str, str]) -> None:
    """Mark a report or a journal as of an earlier run; what is no whole file of ours stays as it is.

    Of several later runs the last one is told: the one that whoever reads it has just seen fail.

    Where there is no room for the mark, the file gets another name, which says the same. Raises OSError where that
    can't be done either.
    """
    path = behind_link(path)
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return
    try:
        if path.suffix == ".jsonl":
            _mark_journal(path, data, mark)
        else:
            _mark_report(path, data, mark)
    except OSError:
        # A file that cannot be written to may still be moved, and must not be taken for this run's report.
        path.replace(path.with_name(f"{RENAMED}{path.stem}"))


def planned_in(journal: Path) -> list[str]:
    """Cells and tests that a run was to judge which was killed; none if its journal has an end."""
    lines = journal.read_bytes().rstrip().splitlines()
    if not lines or lines[-1].startswith((b'{"kind": "end"', b'{"kind": "later_run"')):
        return []
    names: list[str] = []
    for line in lines:
        if line.startswith((b'{"kind": "plan"', b'{"kind": "tests_planned"')):
            # The line may be cut off, or edited.
            with suppress(ValueError, TypeError, AttributeError):
                plan = json.loads(line)
                names += [*plan.get("expected", ()), *plan.get("expected_tests", ()), *plan.get("tests", ())]
    return names


def start_told_by(journal: Path) -> str:
    """When the run of a journal began; empty where it does not say so."""
    try:
        with journal.open(encoding="utf-8") as file:
            return str(json.loads(file.readline())["head"]["run"]["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def mark_interrupted(report: Path, names: Sequence[str], began: str) -> None:
    """Note in a marked report what was to be judged anew by a run that was killed. Raises OSError.

    The mark alone goes when a run of a part is taken over. What was in the killed run's hands is then still in doubt,
    and it is that run that is named, not the one that found this out. ``began``: when it did; empty if nobody knows.
    """
    body, was_sealed = remove_seal(report.read_bytes())
    try:
        content = json.loads(body)
        mark = content.pop(LATER_RUN)
        before = content.pop(INTERRUPTED, [])
        interrupted = list(dict.fromkeys([*before, *names]))
        # The mark comes last, because it is looked for at the end of a file.
        killed = {"began": began or "an unknown time", "command": "pytest ..."}
        marked = dumps({**content, INTERRUPTED: interrupted, INTERRUPTED_RUN: killed, LATER_RUN: mark})
    # Not ours, or without a mark.
    except (ValueError, KeyError, AttributeError, TypeError):
        return
    replace_file(report, add_seal(marked) if was_sealed else marked + "\n")


def _mark_report(path: Path, data: bytes, mark: dict[str, str]) -> None:
    body, was_sealed = remove_seal(data)
    # Cut off, or not ours: nobody takes it for a good report.
    if not body.endswith(b"}") or b'"compile_matrix"' not in body:
        return
    body = _without_mark(body)
    marked = f'{body[:-1].decode("utf-8")}, "{LATER_RUN}": {json.dumps(mark)}}}'
    replace_file(path, add_seal(marked) if was_sealed else marked + "\n")


def _without_mark(body: bytes) -> bytes:
    """A report without the mark of a run before, which is the last key of its object."""
    before, found, mark = body.rpartition(f', "{LATER_RUN}": '.encode())
    if not found or len(mark) > _TAIL:
        return body
    try:
        marks = json.loads(b'{"mark": ' + mark)
    # Text of the report that looks like a mark.
    except ValueError:
        return body
    return before + b"}" if marks.keys() == {"mark"} else body


def _mark_journal(path: Path, data: bytes, mark: dict[str, str]) -> None:
    before, _, last = data.rstrip().rpartition(b"\n")
    if last.startswith(b'{"kind": "later_run"'):
        data = before
        last = data.rpartition(b"\n")[2]
    # Without an end its run was killed, which it says by itself.
    if not last.startswith(b'{"kind": "end"'):
        return
    content: dict[str, Any] = {"kind": LATER_LINE, **mark}
    line = json.dumps({**content, "sha256": fingerprint(content)})
    replace_file(path, data.decode("utf-8").rstrip("\n") + f"\n{line}\n")
