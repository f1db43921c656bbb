"""The JSON Schema of policies says what the reader says, as far as form goes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.policy_schema import policy_schema
from pytest_torchcompile.gate.policyfile import KEYS, parse_policy

SCHEMA = policy_schema()
DOCS = Path(__file__).parents[2] / "docs"
KNOWN = "reason: known\n    issue: us/it#1\n    until: 2027-01-31"


class _Plain(yaml.SafeLoader):
    """YAML as editors read it: dates are texts."""


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith("timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def schema_takes(text):
    return not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(yaml.load(text, _Plain)))


def reader_takes(text):
    try:
        parse_policy(text.encode(), "p.yaml")
    except MatrixError:
        return False
    return True


def test_it_is_a_schema_of_every_key(capsys):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]) == list(KEYS)
    assert main(["schema", "--policy"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_the_policy_of_the_docs():
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "gating.md").read_text(encoding="utf-8"), re.S)
    assert schema_takes(example)


@pytest.mark.parametrize("text", [
    "ran_at_least: 3", "ran_at_least: 0", "ran_at_least: three", "unknown: 1", "gates: smoketest", "gates: [smoketst]",
    "environment: {torch: '2.13.*'}", "devices: [cuda*]", "may_differ: [driver]",
    "tests: {ran_at_least: 1}", "tests: {}",
    "pass_rate: {total: 0.9}", "pass_rate: {total: 1.5}", "pass_rate: {model: {net: 0.5}}",
    "limits: [{graph_breaks: 1}]", "limits: [{when: {model: net}, speedup: 1.1, reason: why}]", "limits: [{}]",
    "limits: [{graph_break: 1}]", "limits: [{graph_breaks: 1.5}]", "limits: []", "limits:",
    f"allowed_failures:\n  - cells: {{model: net}}\n    {KNOWN}",
    f"allowed_failures:\n  - tests: a.py::b\n    checks: [equivalence]\n    {KNOWN}",
    f"allowed_failures:\n  - cells: {{model: net}}\n    tests: a.py::b\n    {KNOWN}",
    f"allowed_failures:\n  - {KNOWN}",
    f"allowed_failures:\n  - cells: {{model: net}}\n    verdicts: skip\n    {KNOWN}",
    "allowed_failures:\n  - cells: {model: net}\n    reason: known",
    "allowed_skips:\n  - cells: {backend: [inductor]}\n    reason: no compiler",
    "allowed_skips:\n  - cells: {}\n    reason: no compiler",
    "baseline: {failures: note}", "baseline: {failures: maybe}", "baseline: {faster: note}",
    "commit: HEAD", "commit: abcdef0", "commit: main", "max_age: 24h", "max_age: 24", "max_age: soon",
    "reuse: forbidden", "reuse: {max_age: 7d, at_most: 0.9}", "reuse: {at_most: 2}", "reuse: allowed",
    "sealed: required", "sealed: yes", "other_tests: fail", "other_tests: warn", "ratchet: true", "ratchet: 1",
    "matrix: shipped:smoke",
])
def test_schema_and_reader_agree(text):
    policy = f"version: 1\n{text}\n"
    assert schema_takes(policy) == reader_takes(policy)


@pytest.mark.parametrize("text", ["version: 2\n", "ran_at_least: 1\n", "version: '1'\n"])
def test_the_version(text):
    assert not schema_takes(text)
    assert not reader_takes(text)
