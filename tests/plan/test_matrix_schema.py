"""The JSON Schema of matrix files says what the reader says, as far as form goes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix_schema import matrix_schema
from tests.plan.test_matrix import DESIGN, files
from tests.plan.test_matrix_messages import CASES

SCHEMA = matrix_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())

# What needs the file as a whole, the project's code, or the text behind a value.
ONLY_THE_READER = {
    "duplicate key", "model name no",
    "unknown axis", "axis in capitals", "axis no factory takes", "axis name a keyword",
    "values equal in Python", "ids that coincide",
    "backend of no module", "model: no module", "model: no attribute",
    "user value on", "user value 12:30", "user value octal", "user value date", "user value 1.10",
    "user value infinite",
    "unknown axis in rule", "unknown model in rule", "unknown value in rule", "value in rule of another type",
    "value in rule equal in Python",
    "check not in matrix", "limit of no check",
    "also a check that every cell has", "also a check without anything to judge",
    "rule for nothing", "rule in the shadow", "zero cells",
    "factory: unknown argument", "factory: argument name", "inputs: argument a dim", "axis an argument too",
    "axes of a model: misspelt axis", "axes of a model: axis no factory takes", "rule of not for nothing",
    "model: dim name", "model: unknown dim", "model: cycle of dims", "model: no size",
}
NO_PLAIN_DATA = {"merge key", "complex key", "python object", "own tag", "alias to itself"}


class _Plain(yaml.SafeLoader):
    """YAML as editors read it: dates are texts."""


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(("timestamp", "value"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def errors(data):
    """What the schema has against the data."""
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_is_a_schema():
    """It is valid itself, and plain JSON."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_accepts_the_design():
    """The example that uses everything."""
    assert errors(yaml.load(DESIGN, _Plain)) == []


@pytest.mark.parametrize("strategy", [
    "full", "pairwise", "{pairwise: {strength: 3}}", "{sample: {n: 200, seed: 1}}", "{sample: {n: 1}}",
])
def test_accepts_strategies(project, strategy):
    """Each form of a strategy, to the schema and to the reader."""
    text = f"{project.head}strategy: {strategy}"
    assert errors(yaml.load(text, _Plain)) == []
    assert project.load(text).cells


def test_accepts_a_check_of_some_cells(project):
    """The rule `also`, and how long fuzzing may take."""
    text = f"{project.head}fuzz_seconds: 2.5\nrules: [{{also: [fuzz, randomness], when: {{model: gpt}}}}]"
    assert errors(yaml.load(text, _Plain)) == []
    assert project.load(text).fuzz_seconds == 2.5


def test_accepts_what_a_model_says_of_itself(project):
    """Arguments, axes and the mode of its modules; and a rule with `not`."""
    text = """
version: 1
models:
  gpt:
    factory: {call: "zoo:gpt", width: 8}
    inputs: {call: "zoo:anything", kind: text, padded: true}
    axes: {backend: [eager], depth: [1, 2]}
    mode_of_modules: keep
rules: [{limits: {graph_breaks: 1}, when: {model: gpt, not: {depth: 1}}}]
"""
    assert errors(yaml.load(text, _Plain)) == []
    assert len(project.load(text).cells) == 2


def test_accepts_shipped_matrices(request):
    """What we ship is an example to follow."""
    for path in Path(request.config.rootpath, "matrix").glob("*.yaml"):
        assert errors(yaml.load(path.read_text(), _Plain)) == []


@pytest.mark.parametrize("case", sorted(set(CASES) - ONLY_THE_READER - NO_PLAIN_DATA))
def test_refuses_what_the_reader_refuses(case):
    """An editor shows the mistake while the file is written."""
    text, _ = CASES[case]
    assert errors(yaml.load(text, _Plain))


@pytest.mark.parametrize("case", sorted(ONLY_THE_READER))
def test_what_the_schema_cannot_see(case):
    """The list of exceptions above is no longer than it must be."""
    text, _ = CASES[case]
    assert errors(yaml.load(text, _Plain)) == []


@settings(max_examples=50)
@given(files())
def test_accepts_what_the_reader_accepts(project, case):
    """Whatever expands is fine with the schema."""
    axes, rules = case
    data = {"version": 1, "models": {"m1": {"factory": "zoo:anything", "inputs": "zoo:batch"},
                                     "m2": {"factory": "zoo:anything", "inputs": "zoo:batch"}},
            "axes": axes, "rules": rules}
    try:
        project.load(json.dumps(data))
    except MatrixError:
        return
    assert errors(data) == []
