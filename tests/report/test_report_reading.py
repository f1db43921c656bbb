"""Reports are read strictly, from files of any kind; what cannot be read is told in one line, never as a traceback."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Run

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.report import reading
from pytest_torchcompile.report.provenance import (
    CI_VARIABLES,
    add_seal,
    cell_fingerprint,
    fingerprint,
    is_sealed,
    run_provenance,
)
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.schema import SCHEMA_VERSION, STEPS, block_schema, report_schema
from pytest_torchcompile.report.strictjson import StrictError, compile_schema, dumps, loads

STORED = Path(__file__).parents[1] / "reports"


def refused(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ReportError) as caught:
        read_report(path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path}: ", "")


@pytest.mark.parametrize(("text", "message"), [
    ("", "is empty; expected a JSON report, for example .compile-matrix/report.json"),
    ("{", "cannot be read as JSON: ends in line 1, before it is complete"),
    ('{"a" 1}', "cannot be read as JSON: line 1, column 6: Expecting ':' delimiter"),
    ('{"a": NaN}', "cannot be read as JSON: NaN is no JSON"),
    ('{"a": 1, "b": {"c": 1, "c": 1}}', "cannot be read as JSON: the key 'c' is given twice in one object"),
    ("[" * 100_000, "cannot be read as JSON: is nested too deeply"),
    (f'{{"a": {"9" * 5000}}}', "cannot be read as JSON: Exceeds the limit"),
    (b"\xff\xfe", "byte 0 is not UTF-8, so this is no report"),
    ("[]", "holds no block 'compile_matrix'; expected the JSON report of `pytest --compile-matrix`"),
    ('{"tests": []}', "holds no block 'compile_matrix'; was it run with --compile-matrix, or did a test use our "
     "fixtures?"),
    ('{"compile_matrix": []}', "compile_matrix has no schema_version of the form MAJOR.MINOR"),
    ('{"compile_matrix": {"schema_version": "2.0"}}', "is of schema 2.0, and this version reads 1.x; update"),
    ('{"compile_matrix": {"schema_version": "0.9"}}', "is of schema 0.9, and this version reads 1.x; read it with"),
    ('{"compile_matrix": {"schema_version": "1.1"}}', "compile_matrix: the key 'run' is missing"),
])  # fmt: skip
def test_what_cannot_be_read_is_told(text, message, tmp_path):
    assert refused(text, tmp_path).startswith(message)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda b: b["cells"][1].pop("status"), "compile_matrix.cells[1]: the key 'status' is missing"),
    (lambda b: b["cells"][1]["checks"]["compiles"].update(verdict="good"),
     "compile_matrix.cells[1].checks.compiles.verdict: found 'good', expected one of pass, skip,"),
    (lambda b: b["shard"].update(index="1"), "compile_matrix.shard.index: found '1', expected a whole number"),
    (lambda b: b["shard"].update(index=0), "compile_matrix.shard.index: found 0, expected at least 1"),
    (lambda b: b.update(finished=1), "compile_matrix.finished: found 1, expected true or false"),
    (lambda b: b["cells"][0]["axes"].update(mode=[]), "compile_matrix.cells[0].axes.mode: found a list, expected"),
    (lambda b: b["matrix"].update(sha256="ab"), "compile_matrix.matrix.sha256: found 'ab', expected the form"),
    (lambda b: b["matrix"].update(checks=["a", "a"]), "compile_matrix.matrix.checks: 'a' is listed twice"),
    (lambda b: b["cells"][0]["observation"].update(failure={"kind": 1}),
     "compile_matrix.cells[0].observation.failure"),
    (lambda b: b["environment"].update(devices="cpu"), "compile_matrix.environment.devices: found 'cpu', expected"),
])  # fmt: skip
def test_what_the_schema_does_not_allow_is_told_with_its_place(edit, message, tmp_path):
    block = Run().blocks()[0]
    edit(block)
    assert refused(json.dumps({"compile_matrix": block}), tmp_path).startswith(message)


def test_files_that_are_no_files(tmp_path):
    (tmp_path / "report-1.json").touch()
    with pytest.raises(ReportError, match=r"report-2.json: no such file; did you mean .*report-1.json"):
        read_report(tmp_path / "report-2.json")
    with pytest.raises(ReportError, match=r"is a folder; expected report files; it holds report-1\.json"):
        read_report(tmp_path)
    with pytest.raises(ReportError, match="cannot be read"):
        read_report("a\0b")


@pytest.mark.parametrize("kind", ["fifo", "zero", "link to zero"])
def test_what_never_ends_is_not_read(tmp_path, kind):
    """A FIFO nobody writes to hung, and /dev/zero was read for ever; also as a policy or a baseline."""
    path = tmp_path / "r.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ReportError, match="is no regular file; expected a report, for example"):
        read_report(path)
    good_folder = tmp_path / "good"
    good_folder.mkdir()
    (good,) = Run().write(good_folder)
    command = [sys.executable, "-m", "pytest_torchcompile", "gate", good]
    for option, code in (("--baseline", 2), ("--policy", 4)):
        done = subprocess.run([*command, option, str(path)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert "is no regular file; expected a " in done.stdout + done.stderr


def test_a_link_to_a_report_is_read(tmp_path):
    (report,) = Run().write(tmp_path)
    (tmp_path / "link.json").symlink_to(report)
    assert read_report(tmp_path / "link.json").cells


def test_a_report_has_a_largest_size(tmp_path, monkeypatch):
    """The file is not read beyond it, so a sparse one does not fill the memory."""
    path = tmp_path / "r.json"
    with path.open("wb") as file:
        file.truncate(reading.MAX_BYTES + 1)
    seen = []
    monkeypatch.setattr(reading, "_decode", lambda data, name: seen.append(data))
    with pytest.raises(ReportError, match=r"r\.json: is longer than 512 MiB, too long for a report"):
        read_report(path)
    assert seen == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    (tmp_path / "r.json").touch(0o000)
    with pytest.raises(ReportError, match="cannot be read: Permission denied"):
        read_report(tmp_path / "r.json")


def test_a_newer_minor_and_unknown_keys_are_read(tmp_path):
    block = Run().blocks()[0] | {"schema_version": "1.99", "new": 1}
    (tmp_path / "r.json").write_text("\ufeff" + json.dumps({"compile_matrix": block}), encoding="utf-8")
    assert gate([read_report(tmp_path / "r.json")]).code == 0


def old(block):
    """The block as schema 1.0 had it."""
    block = {key: value for key, value in block.items() if key != "run"} | {"schema_version": "1.0"}
    block = {key: value for key, value in block.items() if not key.startswith("tests") and key != "head_sha256"}
    new = ("planned", "evidence_sha256")
    return block | {"cells": [{k: v for k, v in cell.items() if k not in new} for cell in block["cells"]]}


def test_a_report_of_schema_1_0_is_brought_up(tmp_path):
    """It can be shown and compared with; but it holds nothing that its verdicts could be judged by again."""
    (tmp_path / "r.json").write_text(json.dumps({"compile_matrix": old(Run().blocks()[0])}))
    outcome = gate([read_report(tmp_path / "r.json")])
    assert outcome.code == 2
    assert "schema 1.0, which keeps no evidence" in outcome.findings[0].text
    assert gate(Run().reports(), baseline=[read_report(tmp_path / "r.json")]).code == 0
    assert len(STEPS) == int(SCHEMA_VERSION.partition(".")[2])


def test_a_report_that_claims_an_older_schema_is_refused(tmp_path):
    """Or it would escape being judged again."""
    block = Run().blocks()[0] | {"schema_version": "1.0"}
    assert refused(json.dumps({"compile_matrix": block}), tmp_path) == \
        "says that it is of schema 1.0, but has keys of a later one"


def test_a_journal_says_what_its_report_says():
    """Folded from its lines, it is the same block."""
    journal, report = (read_report(STORED / f"shard-1.{ending}") for ending in ("jsonl", "json"))
    assert journal.block == report.block
    assert journal.journal
    assert not journal.partial


def journal(change, tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text(change((STORED / "shard-1.jsonl").read_text()))
    return path


def test_the_journal_of_a_killed_run_is_partial(tmp_path):
    """Up to the torn line everything counts."""
    report = read_report(journal(lambda text: text[:len(text) // 2], tmp_path))
    assert report.partial == "the run did not end by itself: it was killed, or is still going on"
    assert report.cells[0]["status"] in ("pass", "not_run")
    assert {check["verdict"] for check in report.cells[1]["checks"].values()} == {"not_run"}
    assert gate([report, read_report(STORED / "shard-2.json")]).code == 2


@pytest.mark.parametrize(("change", "message"), [
    (lambda text: text[:100], ":1: cannot be read as JSON"),
    (lambda text: text.replace('"verdict": "pass"', '"verdict": "skip"', 1),
     ":2: the line is not as it was written: it was damaged or edited since"),
    (lambda text: text + '{"kind": "end"}\n', "the key 'exit_status' is missing"),
    (lambda text: text.replace('"kind": "end"', '"kind": "what"'), "is no line of a journal"),
    (lambda text: text + text.splitlines()[-1] + "\n", "a line after the end"),
    (lambda text: "".join([*text.splitlines(True)[:2], *text.splitlines(True)[1:]]), ":3: .* has a verdict already"),
])  # fmt: skip
def test_damaged_journals(change, message, tmp_path):
    with pytest.raises(ReportError, match=message):
        read_report(journal(change, tmp_path))


def test_a_seal_tells_every_change(tmp_path):
    """Of one byte anywhere; without it the report is judged all the same, and with a wrong one it is not."""
    text = add_seal(json.dumps({"a": "é", "b": [1, 2]}))
    assert json.loads(text)["b"] == [1, 2]
    data = text.encode()
    assert is_sealed(data)
    for k in range(len(data) - 1):
        assert not is_sealed(data[:k] + bytes([data[k] ^ 1]) + data[k + 1:])
    assert not is_sealed(data.replace(b'"b": ', b'"b":'))
    path = tmp_path / "r.json"
    path.write_text(add_seal(json.dumps({"compile_matrix": Run().blocks()[0]})))
    assert read_report(path).sealed
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, indent=1))
    outcome = gate([read_report(path)])
    assert outcome.code == 2
    assert outcome.findings[0].text == f"{path}: its seal is wrong: the file was changed or formatted anew since its " \
                                       "run wrote it"
    outcome = gate(Run().reports(), baseline=[read_report(path)])
    assert (outcome.code, outcome.findings[0].text) == (2, f"the baseline's {path} has a seal that is wrong")
    del content["compile_matrix_seal"]
    path.write_text(json.dumps(content, indent=1))
    assert not read_report(path).sealed
    assert gate([read_report(path)]).code == 0


def test_a_report_of_schema_1_2_has_no_fingerprint_of_its_run(tmp_path):
    """It is judged as it was; one of this schema that lacks it is refused, and so is one that says to be older."""
    block = Run().blocks()[0]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"compile_matrix": block | {"schema_version": "1.2"}}))
    with pytest.raises(ReportError, match=r"says that it is of schema 1\.2 or older, but has keys of a later one"):
        read_report(path)
    path.write_text(json.dumps({"compile_matrix": block | {"head_sha256": None}}))
    with pytest.raises(ReportError, match="head_sha256: found null, expected a fingerprint"):
        read_report(path)
    del block["head_sha256"]
    path.write_text(json.dumps({"compile_matrix": block | {"schema_version": "1.2"}}))
    assert gate([read_report(path)]).code == 0


@pytest.mark.parametrize(("key", "value"), [("environment", {"torch": "2.0.0"}), ("run", {"started": "2020"}),
                                            ("run", {"ci": {"GITHUB_RUN_ID": "8"}}),
                                            ("matrix", {"path": "b/smoke.yaml"}),
                                            ("run", {"git": {"commit": "a" * 40, "changed": False, "prefix": ""}})])
def test_what_a_report_is_of_has_a_fingerprint(key, value):
    """An edited version of torch, commit or matrix is seen without a seal too."""
    (report,) = Run().reports()
    assert gate([report]).code == 0
    report.block[key] |= value
    outcome = gate([report])
    assert outcome.code == 2
    assert outcome.findings[0].text == "report.json: its environment, run or matrix is not as it was written: it was " \
                                       "damaged or edited since"


def test_evidence_does_not_depend_on_order_and_sees_every_value():
    cell = Run().blocks()[0]["cells"][0]
    turned = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in cell.items()}
    assert cell_fingerprint(turned) == cell_fingerprint(cell) == cell["evidence_sha256"]
    changed = copy.deepcopy(cell)
    changed["observation"]["sections"]["compiles"]["graphs"][0]["runs"] = True
    assert cell_fingerprint(changed) != cell_fingerprint(cell)
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint({"a": float("inf")})


def test_what_is_written_is_strict_json():
    assert loads(dumps({"a": float("nan"), "b": [float("-inf"), Path("x")]})) == {"a": "nan", "b": ["-inf", "x"]}
    with pytest.raises(StrictError):
        loads('{"a": Infinity}')


def test_no_environment_variable_but_the_allowed_ones(tmp_path):
    """A token in a variable that we do not know of never reaches a report."""
    secret = "ghp_secret"
    names = ("GITHUB_TOKEN", "ACTIONS_RUNTIME_TOKEN", "AWS_SECRET_ACCESS_KEY", "CI_JOB_TOKEN", "GITHUB_SHA_TOKEN")
    told = run_provenance(tmp_path, dict.fromkeys(names, secret) | {"GITHUB_RUN_ID": "7", "GITHUB_JOB": ""})
    assert told["ci"] == {"GITHUB_RUN_ID": "7"}
    assert secret not in json.dumps(told)
    words = ("TOKEN", "SECRET", "KEY", "PASS", "URL")
    assert not [name for name in CI_VARIABLES if any(word in name for word in words)]


def test_a_run_tells_the_version_of_every_package(tmp_path, monkeypatch):
    """Of one that is installed twice it is the one that is imported; an upgrade of it is another list."""
    from importlib import metadata

    assert run_provenance(tmp_path, {})["packages"]["pytest"] == metadata.version("pytest")
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        made = tmp_path / folder / f"Some_Thing-{version}.dist-info"
        made.mkdir(parents=True)
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Some_Thing\nVersion: {version}\n")
        # What an interrupted installation leaves.
        (tmp_path / folder / "~broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    packages = run_provenance(tmp_path, {})["packages"]
    assert packages["some-thing"] == "2.0"
    assert list(packages) == sorted(packages)


def test_the_validator_and_jsonschema_agree():
    """The published schema says to other tools what the reader enforces."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(report_schema())
    ours = compile_schema(block_schema())
    stored = json.loads((STORED / "broken-2.json").read_text())
    for content in ({"compile_matrix": Run().blocks()[0]}, stored):
        validator.validate(content)
        assert ours(content["compile_matrix"]) is None
    block = stored["compile_matrix"]
    for path in _paths(block):
        for value in (None, True, 1, 1.5, -1, "x", [], {}):
            broken = copy.deepcopy(block)
            place = broken
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            assert (ours(broken) is None) == validator.is_valid({"compile_matrix": broken}), (path, value)


def _paths(block):
    """A place of each kind: every key at its first occurrence."""
    seen = {}

    def walk(value, path):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:1]):
            seen.setdefault((*[p for p in path if isinstance(p, str)][-1:], key), (*path, key))
            if isinstance(inner, (dict, list)) and "sections" not in path:
                walk(inner, (*path, key))

    walk(block, ())
    return list(seen.values())


def test_a_schema_with_an_unknown_keyword_is_refused():
    """Or a rule of the published schema would silently not be enforced."""
    with pytest.raises(ValueError, match="keyword 'maxLength' is not known"):
        compile_schema({"type": "string", "maxLength": 3})


def test_edits_of_one_commit_are_told_apart(tmp_path):
    """By a hash of the difference; nothing of its text is kept."""
    def git(*command):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *command],
                       check=True, capture_output=True)

    file = tmp_path / "m.py"
    file.write_text("a\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    states = [run_provenance(tmp_path, {})["git"]]
    for text in ("secret\n", "c\n"):
        file.write_text(text)
        states.append(run_provenance(tmp_path, {})["git"])
    assert [state["changed"] for state in states] == [False, True, True]
    assert states[0]["diff_sha256"] == ""
    assert len({state["diff_sha256"] for state in states}) == 3
    assert "secret" not in json.dumps(states)
