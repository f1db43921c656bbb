"""Reports read from files: the report of a finished run, or the journal of one that was killed.

The one way to a report for everybody who judges or shows one (`gate`, `html`, `playbook`)::

    reports = [read_report(path) for path in paths]     # ReportError: not readable, not ours, not of this format
    merged = merge(reports)                             # .cells, .problems; see report/merging.py

What is returned holds to the published schema in every value, so that no reader needs to look again.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import ReportError, UsageError, nearest
from pytest_torchcompile.observation import BAD
from pytest_torchcompile.report.earlier import LATER_RUN, RENAMED
from pytest_torchcompile.report.provenance import SEAL, fingerprint, head_fingerprint, is_sealed
from pytest_torchcompile.report.record import Record
from pytest_torchcompile.report.safe_output import JOURNAL_FILE, MODEL_REPORT, REPORT_FILE
from pytest_torchcompile.report.schema import SCHEMA_VERSION, block_schema, line_schemas, upgrade_block
from pytest_torchcompile.report.strictjson import StrictError, Validator, compile_schema, loads

__all__ = ["Report", "default_report", "model_report_hint", "read_content", "read_report"]

KEY: Final = "compile_matrix"
MAX_BYTES: Final = 512 << 20
"""No report is as long; one of a thousand cells has some tens of MiB."""
_JOURNAL: Final = re.compile(r'\s*\{"kind": "plan"')


@dataclass(frozen=True)
class Report:
    """One run, or one shard of a run."""

    name: str
    """The file, as it was named."""
    block: dict[str, Any]
    """As the current schema has it (:func:`~pytest_torchcompile.report.schema.block_schema`)."""
    sealed: bool = False
    """Is the file, to the last byte, as the run wrote it?"""
    journal: bool = False
    """Read from a journal?"""
    torn: bool = False
    """Was the journal's last line cut?"""
    seal_broken: bool = False
    """Is there a seal that does not hold?"""
    later_run: str = ""
    """The run that began after this one and left no report; empty if none did."""
    others_failed: tuple[str, ...] = ()
    """Tests of the same pytest run that failed, and are no checks of cells and use none of our fixtures."""

    @property
    def cells(self) -> list[dict[str, Any]]:
        """What the run says of each cell of its shard."""
        cells: list[dict[str, Any]] = self.block["cells"]
        return cells

    @property
    def shard(self) -> tuple[int, int]:
        """(index from 1, number of shards)."""
        return self.block["shard"]["index"], self.block["shard"]["of"]

    @property
    def partial(self) -> str:
        """Why the report is only a part of its run; empty if it is whole."""
        run = self.block["run"] or {"exit_status": 0, "finished": ""}
        status = run["exit_status"]
        if self.torn or status is None or run["finished"] is None:
            return "the run did not end by itself: it was killed, or is still going on"
        # With 4 our run ends where a cell tells of a mistake in the matrix or its models; nothing is missing then.
        if status == 4 and self._tells_mistake():
            return ""
        # With 5 pytest says that it ran nothing, which is right for a shard that has no cells.
        if status not in (0, 1) and not (status == 5 and not self.cells):
            return f"pytest ended with {status}: interrupted, an error of its own, or nothing selected"
        return "" if self.block["finished"] else "planned verdicts never came"


    def _tells_mistake(self) -> bool:
        """Has every cell its verdicts, and fails one of them for a mistake that only a rank could find?"""
        told = False
        for cell in self.cells:
            if any(check["verdict"] == "not_run" for check in cell["checks"].values()) or cell["status"] == "not_run":
                return False
            failure = (cell["observation"] or {}).get("failure") or {}
            told = told or (failure.get("kind") == "usage" and cell["status"] in BAD)
        return told


def read_report(path: str | Path) -> Report:
    """Read a report or a journal.

    Raises :class:`~pytest_torchcompile.errors.ReportError`: no such file, no UTF-8, no (strict) JSON, cut off, not one
    of ours, of a newer major version, or with a value that the schema does not allow.
    """
    name = str(path)
    data = _read_bytes(Path(path), name)
    text = _decode(data, name)
    if not text or text.isspace():
        raise ReportError(f"{name}: is empty; expected a JSON report, for example .compile-matrix/report.json")
    if _JOURNAL.match(text):
        return _read_journal(name, text)
    sealed = is_sealed(data)
    content = _parse_content(text, name, sealed)
    block = _check_block(content[KEY], name)
    return Report(name, block, sealed, seal_broken=SEAL in content and not sealed,
                  later_run=_later_run_text(content, name),
                  others_failed=tuple(_other_failures(content.get("tests"), block)))


def read_content(path: Path) -> dict[str, Any]:
    """All that a report file holds, with a block as the current schema has it.

    Raises :class:`~pytest_torchcompile.errors.ReportError` as :func:`read_report`, for a journal too, and for a file
    that is not as its run wrote it: who writes it again would give it a seal that holds.
    """
    name = str(path)
    data = _read_bytes(path, name)
    sealed = is_sealed(data)
    content = _parse_content(_decode(data, name), name, sealed)
    block = _check_block(content[KEY], name)
    seal_broken = SEAL in content and not sealed
    stated = block["head_sha256"]
    # Reports of schema 1.2 and older state none.
    head_differs = stated is not None and stated != _fingerprint_or_empty(head_fingerprint, block)
    if seal_broken or head_differs:
        raise ReportError(f"{name}: is not as its run wrote it: it was damaged or edited since; run the matrix again")
    return {**content, KEY: block}


def _parse_content(text: str, name: str, sealed: bool) -> dict[str, Any]:
    try:
        content = loads(text, sealed)
    except StrictError as error:
        raise ReportError(f"{name}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or KEY not in content:
        hint = "expected the JSON report of `pytest --compile-matrix`"
        if isinstance(content, dict) and "tests" in content:
            hint = "was it run with --compile-matrix, or did a test use our fixtures?"
        raise ReportError(f"{name}: holds no block {KEY!r}; {hint}")
    return content


def _later_run_text(content: dict[str, Any], name: str) -> str:
    """A mark counts whatever it holds, and so does the name of a file that there was no room to mark."""
    if LATER_RUN not in content:
        return "a run that could not mark this file" if Path(name).name.startswith(RENAMED) else ""
    mark = content[LATER_RUN]
    if not isinstance(mark, dict):
        return "a run of which nothing is told"
    return f"`{mark.get('command', 'pytest')}` of {mark.get('began', 'an unknown time')}"


def _other_failures(tests: Any, block: dict[str, Any]) -> Iterator[str]:
    """Of pytest-json-report's own part, which may hold anything."""
    if not isinstance(tests, list):
        return
    planned, ours = frozenset(block["matrix"]["cells_planned"]), frozenset(block["tests_planned"])
    for test in tests:
        if not isinstance(test, dict) or test.get("outcome") not in ("failed", "error"):
            continue
        nodeid = str(test.get("nodeid"))
        # An item of a cell is FILE::CELL::CHECK, and the gate judges it anyway.
        _, *names = nodeid.split("::")
        if nodeid not in ours and names and names[0] not in planned:
            yield nodeid


def default_report(command: str) -> str:
    """The report of the last run here; where it left none, its journal. ``command``: of ours, for whom it is.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where there is neither.
    """
    for name in (REPORT_FILE, JOURNAL_FILE):
        if Path(name).exists():
            return name
    raise UsageError(f"there is no {REPORT_FILE} here: run `pytest --compile-matrix` first, or name a report, as in "
                     f"`pytest-torchcompile {command} report.json`{model_report_hint()}")


def model_report_hint() -> str:
    """The end of a text that says that no report is here: a run of one model has its own. Empty where it has none."""
    if not Path(MODEL_REPORT).is_file():
        return ""
    return f"; the last run with --compile-model left {MODEL_REPORT}"


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            inside = sorted(child.name for child in path.glob("*.json*"))
            # A folder of kept runs has hundreds of reports; ten show that the right ones are near.
            holds = f"; it holds {', '.join(inside[:10])}" if inside else ""
            raise ReportError(f"{name}: is a folder; expected report files{holds}")
        return _read_regular_file(path, name)
    except FileNotFoundError:
        others = list(map(str, path.parent.glob("*.json*")))
        hint = f"; {nearest(name, others)}" if others else ""
        if path == Path(REPORT_FILE):
            hint += model_report_hint()
        raise ReportError(f"{name}: no such file{hint}") from None
    except MemoryError:
        raise ReportError(f"{name}: is larger than this machine's memory") from None
    # ValueError: a null character in the name.
    except (OSError, ValueError) as error:
        raise ReportError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read_regular_file(path: Path, name: str) -> bytes:
    """The bytes of a file; a FIFO or a device might never end, or never begin."""
    # Without O_NONBLOCK to open a FIFO waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ReportError(f"{name}: is no regular file; expected a report, for example .compile-matrix/report.json")
        if status.st_size > MAX_BYTES:
            raise ReportError(f"{name}: is longer than {MAX_BYTES >> 20} MiB, too long for a report")
        # The limit again, because the file may grow meanwhile.
        return file.read(MAX_BYTES)


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReportError(f"{name}: byte {error.start} is not UTF-8, so this is no report") from None
    except MemoryError:
        raise ReportError(f"{name}: is larger than this machine's memory") from None


def _check_block(block: Any, name: str) -> dict[str, Any]:
    """Bring a block up to date and hold it against the schema."""
    version = block.get("schema_version") if isinstance(block, dict) else None
    major, minor = _split_version(version, name)
    ours, _ = _split_version(SCHEMA_VERSION, name)
    if major != ours:
        hint = "update pytest-torchcompile" if major > ours else "read it with the version that wrote it"
        raise ReportError(f"{name}: is of schema {version}, and this version reads {ours}.x; {hint}")
    try:
        block = upgrade_block(block, minor)
    except (TypeError, ValueError) as error:
        raise ReportError(f"{name}: {error}") from None
    _require_valid(BLOCK, block, f"{name}: {KEY}")
    # The schema allows null for reports of earlier minors, which have been brought up to this one.
    if minor >= 3 and block["head_sha256"] is None:
        raise ReportError(f"{name}: {KEY}.head_sha256: found null, expected a fingerprint")
    return dict(block)


def _split_version(version: Any, name: str) -> tuple[int, int]:
    """Major and minor. At most six digits, because Python refuses to read numbers of thousands."""
    match = re.fullmatch(r"([0-9]{1,6})\.([0-9]{1,6})", version) if isinstance(version, str) else None
    if match is None:
        raise ReportError(f"{name}: {KEY} has no schema_version of the form MAJOR.MINOR")
    return int(match[1]), int(match[2])


def _require_valid(validator: Validator, value: Any, where: str) -> None:
    mistake = validator(value)
    if mistake is None:
        return
    place, text = mistake
    for step in place:
        where += f"[{step}]" if isinstance(step, int) else f".{step}"
    raise ReportError(f"{where}: {text}")


def _read_journal(name: str, text: str) -> Report:
    """Fold the lines into a block; the last one may be cut."""
    lines = text.splitlines()
    contents: list[Any] = []
    torn = not text.endswith("\n")
    for number, line in enumerate(lines, 1):
        try:
            contents.append(loads(line))
        except StrictError as error:
            # A kill cuts the last line at most.
            if number < len(lines) or number == 1:
                raise ReportError(f"{name}:{number}: cannot be read as JSON: {error}") from None
            torn = True
    marks: dict[str, Any] = {}
    last = contents[-1]
    if len(contents) > 1 and isinstance(last, dict) and last.get("kind") == "later_run":
        marks[LATER_RUN] = last
    later_run = _later_run_text(marks, name)
    block = _check_block(_fold_lines(name, contents), name)
    return Report(name, block, journal=True, torn=torn, later_run=later_run)


def _fold_lines(name: str, contents: Sequence[Any]) -> dict[str, Any]:
    """The block that the run's record would have made of these lines."""
    for number, content in enumerate(contents, 1):
        _require_line(content, number, f"{name}:{number}: ")
    # From here on each line is as the run wrote it; what is left to refuse are lines in an order that no run has.
    record = Record(_with_current_schema(contents[0]["head"]))
    record.expected = contents[0]["expected"]
    record.expected_tests = contents[0].get("expected_tests", [])
    for number, content in enumerate(contents[1:], 2):
        if record.exit_status is not None and content["kind"] != "later_run":
            raise ReportError(f"{name}:{number}: a line after the end")
        if content["kind"] == "end":
            record.leave_out_tests(content.get("tests_deselected", ()))
            record.finish(content["exit_status"], content["finished"], content.get("sources_edited", ()))
        elif content["kind"] == "tests_planned":
            record.expected_tests = [*record.expected_tests, *content["tests"]]
        elif content["kind"] == "test":
            record.add_test(content["test"], content["environment"], content.get("sources"))
        elif content["kind"] == "later_run":
            if number < len(contents):
                raise ReportError(f"{name}:{number}: a line follows the mark of a later run")
        elif content["check"] in record.verdicts.get(content["cell"], {}):
            raise ReportError(f"{name}:{number}: {content['cell']}::{content['check']} has a verdict already")
        else:
            record.add_verdict(content)
    return record.block()


def _require_line(content: Any, number: int, where: str) -> None:
    """Is it a line of a journal, at its place, and as it was written? Takes its fingerprint out of it."""
    kind = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in LINES or (kind == "plan") != (number == 1):
        raise ReportError(f"{where}is no line of a journal")
    _require_valid(LINES[kind], content, where)
    if content.pop("sha256") != _fingerprint_or_empty(fingerprint, content):
        raise ReportError(f"{where}the line is not as it was written: it was damaged or edited since")


def _with_current_schema(head: dict[str, Any]) -> dict[str, Any]:
    """The head of a journal, from which this version makes a block of its own schema, whichever minor wrote it."""
    version = head.get("schema_version")
    major, minor = map(int, SCHEMA_VERSION.split("."))
    # 1.0 had no journals.
    earlier = {f"{major}.{each}" for each in range(1, minor)}
    if version in earlier:
        return {**head, "schema_version": SCHEMA_VERSION}
    return head


def _fingerprint_or_empty(make: Callable[[dict[str, Any]], str], value: dict[str, Any]) -> str:
    """Empty where the value has a number that is too large for a float: no run has written that."""
    try:
        return make(value)
    except ValueError:
        return ""


BLOCK: Final = compile_schema(block_schema())
LINES: Final = {kind: compile_schema(schema) for kind, schema in line_schemas().items()}
