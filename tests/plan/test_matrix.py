"""Matrix: what a file expands to."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import subprocess
import sys
import time

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pytest_torchcompile.cell import AXES, DEFAULTS
from pytest_torchcompile.checks import CHECKS, default_limits
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import MARKS, ModelEntry, find_root, load_matrix

HEAD = "version: 1\nmodels: {gpt: {factory: zoo:anything, inputs: zoo:batch}}\n"

DESIGN = """
version: 1
models:
  mini_gpt:
    factory: zoo:anything
    inputs: zoo:batch
    loss: zoo:gpt
    dims: {B: 2, S: {buckets: [32, 64, 128], multiple_of: 1, max: 128}, T: S + 1}
  tiny: {factory: zoo:anything, inputs: zoo:batch}
axes:
  mode: [default, reduce-overhead, max-autotune]
  dynamic: [auto, static, dynamic]
  backend: [inductor, aot_eager, eager]
  wrapper: [none, checkpoint]
  width: [64]
rules:
  - exclude: {backend: [eager, aot_eager], mode: [reduce-overhead, max-autotune]}
    reason: modes change only what Inductor does
  - xfail: {wrapper: checkpoint, backend: inductor, dynamic: auto}
    reason: known
    issue: owner/repo#123
    until: 2027-03-01
    checks: [graph_breaks, recompiles]
  - skip: {wrapper: checkpoint, dynamic: auto}
    reason: later
  - limits: {recompiles: 1, graph_breaks: 2}
    when: {model: mini_gpt, dynamic: auto}
  - limits: {graph_breaks: 1, coverage: 0.5}
    when: {model: mini_gpt, wrapper: none}
"""


def test_whole_file(project):
    """Models, axes, verbs and limits of a file that uses them all."""
    matrix = project.load(DESIGN, today=datetime.date(2027, 3, 1))
    assert len(matrix.cells) + len(matrix.excluded) == 2 * 3 * 3 * 3 * 2
    assert len(matrix.excluded) == 2 * 2 * 2 * 3 * 2
    assert {each.reason for each in matrix.excluded} == {"modes change only what Inductor does"}
    assert {each.rule for each in matrix.excluded} == {"m.yaml:17"}
    by_id = {each.cell.id: each for each in matrix.cells}
    assert len(by_id) == len(matrix.cells)
    known = by_id["mini_gpt-inductor-default-auto-checkpoint-width=64"]
    assert (known.outcome, known.reason, known.issue, known.until, known.checks, known.rule) == (
        "xfail", "known", "owner/repo#123", "2027-03-01", ("graph_breaks", "recompiles"), "m.yaml:19")
    assert known.limits == {"coverage": 1.0, "steps": 3, "graph_breaks": 2, "recompiles": 1}
    later = by_id["tiny-eager-default-auto-checkpoint-width=64"]
    assert (later.outcome, later.reason, later.rule) == ("skip", "later", "m.yaml:24")
    assert later.limits == {"coverage": 1.0, "steps": 3, "graph_breaks": 0}
    plain = by_id["mini_gpt-eager-default-auto-none-width=64"]
    assert (plain.outcome, plain.reason, plain.rule) == ("run", "", "")
    assert plain.limits == {"coverage": 0.5, "steps": 3, "graph_breaks": 1, "recompiles": 1}  # later ones win
    assert matrix.notes == ()
    assert matrix.checks == tuple(name for name, check in CHECKS.items() if not check.on_request)
    assert matrix.sha256 == hashlib.sha256(DESIGN.encode()).hexdigest()
    assert (matrix.root, matrix.path) == (project.root, project.file)
    assert str(matrix.strategy) == "full"
    assert matrix.left_out == 0


def test_model_entry(project):
    """The entry of a model is plain data, with its place, and goes through JSON."""
    matrix = project.load(DESIGN)
    entry = matrix.models["mini_gpt"]
    assert entry == ModelEntry(
        "mini_gpt", "zoo:anything", "zoo:batch", "zoo:gpt",
        {"B": Dim(size=2), "S": Dim(buckets=(32, 64, 128), max=128), "T": Dim(expression="S + 1")},
        "m.yaml:4:3")
    assert ModelEntry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry
    assert matrix.models["tiny"].loss is None
    assert matrix.models["tiny"].dims == {}


def test_only_models(project):
    """Without axes every model is one cell, at the defaults, under every check."""
    (planned,) = project.load(HEAD).cells
    assert planned.cell.axes == DEFAULTS | {"model": "gpt"}


def test_user_axes(project):
    """An axis that the package does not know becomes the cell's own, with the type it is written in."""
    values = "[64, 0.5, 1e-3, -2, true, null, '1.10', no_, ~x, 'on']"
    cells = project.load(f"{HEAD}axes: {{knob: {values}, a: [x]}}").cells
    assert [each.cell.user for each in cells] == [
        (("a", "x"), ("knob", value))
        for value in (64, 0.5, 0.001, -2, True, None, "1.10", "no_", "~x", "on")
    ]


def test_alias_and_block_styles(project):
    """Anchors, aliases, block lists and a byte order mark are YAML, and read."""
    axes = "axes:\n  mode: &m\n  - default\n  - max-autotune\n"
    rules = ("rules:\n- {limits: {recompiles: 1}, when: {mode: *m}}\n"
             "- limits:\n    graph_breaks: 1\n    coverage: 0\n")
    text = "\ufeff" + HEAD + axes + rules
    assert {tuple(sorted(each.limits.items())) for each in project.load(text).cells} == {
        (("coverage", 0), ("graph_breaks", 1), ("recompiles", 1), ("steps", 3))}


def test_backends_and_wrappers_of_others(project):
    """module:attribute is a backend or a wrapper, and so is a backend that another package registers."""
    axes = "{backend: ['zoo:batch', eager], wrapper: ['zoo:gpt']}"
    cells = project.load(f"{HEAD}axes: {axes}").cells
    assert [each.cell.backend for each in cells] == ["zoo:batch", "eager"]


def test_installed_backend(project, monkeypatch):
    """An entry point of torch's group is a backend."""
    monkeypatch.setattr("pytest_torchcompile.plan.axes.installed", lambda: frozenset({"hidet"}))
    (planned,) = project.load(f"{HEAD}axes: {{backend: [hidet]}}").cells
    assert planned.cell.backend == "hidet"


def test_ids_that_coincide_across_axes(project, monkeypatch):
    """Names that look alike once they are joined are refused, as nobody could name one of the cells."""
    monkeypatch.setattr("pytest_torchcompile.plan.axes.installed", lambda: frozenset({"x-y", "y"}))
    entry = "{factory: zoo:anything, inputs: zoo:batch}"
    text = f"version: 1\nmodels: {{a: {entry}, a-x: {entry}}}\naxes: {{backend: [x-y, y]}}"
    assert project.mistakes(text) == [
        "m.yaml:1:1: 2 cells have the id 'a-x-y-default-auto-none'; rename a model, or a value of an axis"]


def test_expired_xfail(project):
    """From the day after `until` the rule is as if it were not there, and a note says so."""
    text = HEAD + ("rules:\n- {xfail: {mode: default}, reason: known, until: 2026-05-01}\n"
                   "- {skip: {mode: default}, reason: later}\n")
    with pytest.raises(MatrixError, match=r"m.yaml:5:3: this skip rule decides nothing"):
        project.load(text, today=datetime.date(2026, 5, 1))
    matrix = project.load(text, today=datetime.date(2026, 5, 2))
    assert [each.outcome for each in matrix.cells] == ["skip"]
    assert matrix.cells[0].expired is None
    text = HEAD + "rules:\n- {xfail: {mode: default}, reason: known, until: 2026-05-01}\n"
    (planned,) = project.load(text, today=datetime.date(2026, 5, 2)).cells
    assert (planned.outcome, planned.expired.where) == ("run", "m.yaml:4")
    assert matrix.notes == (
        "m.yaml:4: this xfail expired on 2026-05-01, its cells are expected to pass: known",)


RANGED = """version: 1
models:
  m: {factory: zoo:anything, inputs: zoo:batch, dims: {B: {choices: [4, 6]}, T: {min: 400, max: 1600, multiple_of: 8}}}
axes: {backend: [eager]}
"""


def test_a_range_is_said_to_be_one_size(project):
    """Who writes a range expects it to vary, and outside of fuzz it does not; the note has the sizes that do."""
    assert project.load(RANGED).notes == (
        "m.yaml:3:3: m runs with T = 1000 only, for min and max are the bounds of what the check fuzz draws; "
        "T: {choices: [1000, 400, 1600]} has it vary",)


@pytest.mark.parametrize("change", [
    lambda text: text + "checks: [compiles, fuzz]\n",
    lambda text: text + "rules: [{also: [fuzz], when: {model: m}}]\n",
    lambda text: text.replace("{min: 400, max: 1600, multiple_of: 8}", "{choices: [1000, 400], max: 1600}"),
    lambda text: text.replace("{min: 400, max: 1600, multiple_of: 8}", "{min: 8, max: 8}"),
    lambda text: text.replace("{min: 400, max: 1600, multiple_of: 8}", "B + 1"),
], ids=["fuzz", "also fuzz", "choices", "one size", "expression"])
def test_no_note_where_sizes_vary_or_cannot(project, change):
    assert project.load(change(RANGED)).notes == ()


def test_checks_restrict_limits(project):
    """Cells carry the limits of the checks that the matrix has, and no others."""
    (planned,) = project.load(HEAD + "checks: [recompiles, graph_breaks]").cells
    assert planned.limits == {"graph_breaks": 0}


def test_limits_are_each_cells_own(project):
    """Changing one cell's limits leaves the others alone."""
    first, second = project.load(HEAD + "axes: {mode: [default, max-autotune]}").cells
    first.limits["coverage"] = 0
    assert second.limits["coverage"] == 1.0


def test_rule_for_cells_that_only_the_strategy_removed(project):
    """Such a rule is no mistake: with another strategy it decides."""
    text = HEAD + "axes: {k: [%s]}\nstrategy: {sample: {n: 1}}\nrules: [{skip: {k: %d}, reason: x}]\n"
    values = ", ".join(map(str, range(20)))
    kept = {project.load(text % (values, k)).cells[0].cell.user for k in (3, 4)}
    assert len(kept) == 1  # one of the two rules at least names a cell that is not in the sample


def test_sample(project):
    """A sample has n cells in the order of the matrix; the seed decides which; others may come and go."""
    text = "axes: {{k: [{}]}}\nstrategy: {{sample: {{n: {}, seed: {}}}}}\n"

    def chosen(count, n, seed):
        matrix = project.load(HEAD + text.format(", ".join(map(str, range(count))), n, seed))
        assert matrix.left_out == count - len(matrix.cells)
        return [each.cell.user[0][1] for each in matrix.cells]

    first = chosen(100, 10, 1)
    assert len(first) == 10
    assert first == sorted(first) == chosen(100, 10, 1)
    assert first != chosen(100, 10, 2)
    assert len(set(first) & set(chosen(101, 10, 1))) >= 9
    assert chosen(5, 10, 1) == [0, 1, 2, 3, 4]
    assert str(project.load(HEAD + text.format("1", 3, 4)).strategy) == "sample of 3, seed 4"


def test_pairwise(project):
    """Every pair of values that some cell has is in a cell that is run; cells that run are preferred."""
    axes = "axes: {a: [1, 2, 3], b: [1, 2, 3], c: [1, 2, 3], d: [1, 2]}\nstrategy: "
    rules = "\nrules:\n- {exclude: {a: 1, b: 1}, reason: x}\n- {skip: {a: 2, d: 1, c: [1, 2]}, reason: x}"
    full = project.load(HEAD + axes + "full" + rules)
    few = project.load(HEAD + axes + "pairwise" + rules)
    more = project.load(HEAD + axes + "{pairwise: {strength: 3}}" + rules)

    def pairs(matrix, outcomes=("run", "skip")):
        return {pair for each in matrix.cells if each.outcome in outcomes
                for pair in itertools.combinations(each.cell.user, 2)}

    assert pairs(few) == pairs(full)
    assert pairs(few, ["run"]) == pairs(full, ["run"])
    assert len(few.cells) <= 14
    assert len(few.cells) < len(more.cells) < len(full.cells)
    assert few.left_out == len(full.cells) - len(few.cells)
    assert str(more.strategy) == "pairwise of strength 3"
    assert few.excluded == full.excluded


# expansion equals brute force

SMALL = {
    "backend": ["inductor", "aot_eager", "eager"],
    "mode": ["default", "reduce-overhead", "max-autotune"],
    "phase": ["training", "inference"],
    "k": [0, 1, "1", True, None],
}


@st.composite
def files(draw):
    """A matrix file as data: axes with some of their values, and rules about them."""
    axes = {}
    for name, values in SMALL.items():
        if draw(st.booleans()):
            axes[name] = draw(st.lists(st.sampled_from(values), min_size=1, unique=True).filter(_distinct))
    selector = st.dictionaries(
        st.sampled_from([*axes, "model"]), st.integers(1, 7), min_size=1, max_size=3
    ).map(lambda chosen: {a: _subset({**axes, "model": ["m1", "m2"]}[a], bits) for a, bits in chosen.items()})
    rule = st.one_of(
        st.builds(lambda verb, cells, k: {verb: cells, "reason": f"r{k}"},
                  st.sampled_from(["exclude", "skip", "xfail"]), selector, st.integers()),
        st.builds(lambda n, cells: {"limits": {"recompiles": n}, "when": cells}, st.integers(0, 9), selector),
    )
    return axes, draw(st.lists(rule, max_size=4))


def _distinct(values):
    """1 and true are equal, and 1 and '1' look alike in ids: a matrix refuses both."""
    return len(set(values)) == len(set(map(str, values))) == len(values)


def _subset(values, bits):
    chosen = [value for k, value in enumerate(values) if bits >> k & 1] or values[:1]
    return chosen[0] if len(chosen) == 1 else chosen


def _matches(cell, select):
    """The meaning of a selector, said once more and slowly."""
    return all(
        any(type(cell[axis]) is type(value) and cell[axis] == value
            for value in (values if isinstance(values, list) else [values]))
        for axis, values in select.items()
    )


@given(files())
def test_expansion_equals_brute_force(project, case):
    """The cells are the product less what is excluded; each rule does what it says, or is refused."""
    axes, rules = case
    models = {name: {"factory": "zoo:anything", "inputs": "zoo:batch"} for name in ("m1", "m2")}
    text = json.dumps({"version": 1, "models": models, "axes": axes, "rules": rules})
    names = [*AXES, *(name for name in axes if name not in AXES)]
    lists = [{**{n: [d] for n, d in DEFAULTS.items()}, **axes, "model": ["m1", "m2"]}[n] for n in names]
    expected, excluded, used = [], [], set()
    for values in itertools.product(*lists):
        cell = dict(zip(names, values, strict=True))
        decided = [k for k, rule in enumerate(rules) for verb in ("exclude", "skip", "xfail")
                   if verb in rule and _matches(cell, rule[verb])][:1]
        used.update(decided)
        verb = next(iter(rules[decided[0]])) if decided else "run"
        if verb == "exclude":
            excluded.append(cell)
            continue
        limits = [k for k, rule in enumerate(rules) if "limits" in rule and _matches(cell, rule["when"])]
        used.update(limits)
        reason = rules[decided[0]]["reason"] if decided else ""
        expected.append((cell, verb, reason, rules[limits[-1]]["limits"]["recompiles"] if limits else None))
    if len(used) < len(rules) or not expected:
        event("refused")
        found = project.mistakes(text)
        assert len(found) == len(rules) - len(used) + (not expected)
        return
    event(f"expanded under {len(rules)} rules")
    matrix = project.load(text)
    assert [(each.cell.axes, each.outcome, each.reason, each.limits.get("recompiles"))
            for each in matrix.cells] == expected
    assert [each.cell.axes for each in matrix.excluded] == excluded
    ids = [each.cell.id for each in matrix.cells]
    assert len(set(ids)) == len(ids)


def test_ten_thousand_cells(project):
    """10,000 cells and thirty rules take well under a second of CPU, and a covering array of them a few."""
    rules = "".join(
        f"- {{exclude: {{backend: eager, mode: max-autotune, k: {k}}}, reason: x}}\n"
        f"- {{xfail: {{wrapper: autocast, k: {k}}}, reason: x}}\n"
        f"- {{limits: {{recompiles: 1}}, when: {{dynamic: auto, k: {k}}}}}\n" for k in range(10))
    values = ", ".join(map(str, range(209)))
    axes = ("axes: {mode: [default, max-autotune], dynamic: [auto, static, dynamic],"
            " backend: [inductor, eager], wrapper: [none, autocast], phase: [training, inference],"
            f" k: [{values}]}}\n")
    start = time.process_time()
    matrix = project.load(f"{HEAD}{axes}rules:\n{rules}")
    assert len(matrix.cells) + len(matrix.excluded) == 10_032
    assert time.process_time() - start < 2  # 0.25 s on a quiet machine
    start = time.process_time()
    assert project.load(f"{HEAD}{axes}strategy: pairwise\nrules:\n{rules}").cells
    assert time.process_time() - start < 4  # 0.4 s


# where things are


def test_find_root(tmp_path):
    """The nearest folder with a project file; else the parent of `matrix`; else the file's folder."""
    nested = tmp_path / "project" / "sub" / "matrix" / "m.yaml"
    plain = tmp_path / "project" / "sub" / "plain" / "m.yaml"
    if not any((folder / mark).exists() for folder in tmp_path.parents for mark in MARKS):
        assert find_root(nested) == tmp_path / "project" / "sub"
        assert find_root(plain) == plain.parent
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "tox.ini").touch()
    assert find_root(nested) == find_root(plain) == tmp_path / "project"


def test_root_is_found(project):
    """Without `root` the factories are looked up from the project's folder."""
    project.file.write_text(HEAD)
    (project.root / "pyproject.toml").touch()
    assert load_matrix(str(project.file)).root == project.root


def test_no_torch(project):
    """A matrix is expanded on a machine without torch, hypothesis, pydantic and numpy."""
    project.file.write_text(DESIGN)
    code = ("import sys\n"
            "for name in ('torch', 'hypothesis', 'pydantic', 'numpy', 'pytest'): sys.modules[name] = None\n"
            "from pytest_torchcompile.plan.matrix import load_matrix\n"
            f"print(len(load_matrix({str(project.file)!r}, {str(project.root)!r}).cells))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "60\n"


def test_a_check_of_some_cells_only(project):
    """A rule `also` adds checks to the cells that it matches, with their limits; where both set one, `limits` wins."""
    matrix = project.load(HEAD + """
axes: {backend: [aot_eager, eager], phase: [training, inference]}
checks: [compiles, gradients]
rules:
  - limits: {graph_breaks: 2, fuzz_recompiles: 3}
    when: {backend: aot_eager, phase: training}
  - also: fuzz
    when: {backend: aot_eager}
  - also: [fuzz, randomness]
    when: {phase: training}
""")
    checks = {planned.cell.id.split("-", 1)[1]: matrix.checks_of(planned) for planned in matrix.cells}
    assert checks == {
        "aot_eager-default-auto-none": ["compiles", "gradients", "randomness", "fuzz"],
        "aot_eager-default-auto-none-inference": ["compiles", "fuzz"],
        "eager-default-auto-none": ["compiles", "gradients", "randomness", "fuzz"],
        "eager-default-auto-none-inference": ["compiles"],
    }
    limits = [planned.limits for planned in matrix.cells]
    assert limits[0] == {"coverage": 1.0, "graph_breaks": 2, "fuzz_recompiles": 3}
    assert limits[1] == {"coverage": 1.0, "graph_breaks": 0}
    assert limits[3] == {"coverage": 1.0}
    assert matrix.checks_of(matrix.cells[0], ["fuzz"]) == ["fuzz"]
    assert matrix.checks_of(matrix.cells[3], ["gradients"]) == []


def test_a_limit_and_an_xfail_of_a_check_of_some_cells(project):
    """They may name what only a later rule asks for."""
    matrix = project.load(HEAD + """
axes: {backend: [aot_eager]}
checks: [compiles]
rules:
  - xfail: {backend: aot_eager}
    checks: [fuzz]
    reason: known
  - also: fuzz
    when: {backend: aot_eager}
""")
    assert matrix.cells[0].checks == ("fuzz",)


def test_a_wrapper_has_its_own_default_coverage(project):
    """It is the nature of some to leave layers to eager; a rule of the matrix sets it all the same."""
    assert default_limits(["compiles"], "regional") == {"coverage": 0}
    assert default_limits(["compiles"], "fsdp2@inner_blocks*4") == {"coverage": 0}
    assert default_limits(["compiles"], "mine:wrap") == default_limits(["compiles"]) == {"coverage": 1.0}
    assert default_limits(["recompiles"], "regional") == {}
    matrix = project.load(DESIGN.replace("wrapper: [", "wrapper: [regional, "), today=datetime.date(2027, 3, 1))
    found = {planned.limits["coverage"] for planned in matrix.cells if planned.cell.wrapper == "regional"}
    assert found == {0}
OF_MODELS = """
version: 1
models:
  small:
    factory: {call: "zoo:anything", name: small, width: 8}
    inputs: {call: "zoo:anything", kind: text}
  large:
    factory: zoo:anything
    inputs: zoo:batch
    axes: {backend: [aot_eager, eager], depth: [1, 2], phase: [inference]}
    mode_of_modules: keep
axes:
  backend: [inductor, aot_eager]
"""


def ids(matrix):
    return [planned.cell.id for planned in matrix.cells]


def test_a_model_has_axes_of_its_own(project):
    """They replace the matrix's; an axis of the user's that only one model has is no axis of the others."""
    matrix = project.load(OF_MODELS)
    assert ids(matrix) == [
        "small-inductor-default-auto-none", "small-aot_eager-default-auto-none",
        "large-aot_eager-default-auto-none-inference-depth=1", "large-aot_eager-default-auto-none-inference-depth=2",
        "large-eager-default-auto-none-inference-depth=1", "large-eager-default-auto-none-inference-depth=2"]
    assert matrix.cells[0].cell.user == ()


def test_rules_name_the_values_of_any_model(project):
    """An axis that a model lacks matches no value of a rule, and every `not`."""
    rules = "rules: [{exclude: {depth: 2}, reason: x}, {exclude: {backend: eager}, reason: x}]"
    matrix = project.load(OF_MODELS + rules)
    assert ids(matrix)[2:] == ["large-aot_eager-default-auto-none-inference-depth=1"]
    matrix = project.load(OF_MODELS + "rules: [{exclude: {not: {depth: [1, 2]}}, reason: x}]")
    assert {planned.cell.model for planned in matrix.cells} == {"large"}


@pytest.mark.parametrize(("strategy", "cells"), [("pairwise", 6), ("{sample: {n: 3}}", 3)])
def test_strategies_choose_among_cells_of_different_axes(project, strategy, cells):
    """The rows that a covering array is made from have a number for an axis that a model lacks."""
    assert len(project.load(f"{OF_MODELS}strategy: {strategy}").cells) == cells


def test_not_takes_cells_out_of_a_condition(project):
    """A cell that has all that stands under `not` does not match; one that has a part of it does."""
    axes = "axes: {backend: [eager, aot_eager], phase: [training, inference]}\n"
    rule = "rules: [{exclude: {model: gpt, not: {backend: eager, phase: [training]}}, reason: x}]"
    assert ids(project.load(project.head + axes + rule)) == ["gpt-eager-default-auto-none"]


def test_arguments_are_data_of_the_model(project):
    """As texts, numbers, true, false or null; also after a way through JSON."""
    entry = project.load(OF_MODELS).models["small"]
    assert entry.factory == "zoo:anything"
    assert entry.arguments_of("factory") == {"name": "small", "width": 8}
    assert entry.arguments_of("inputs") == {"kind": "text"}
    assert (entry.mode_of_modules, project.load(OF_MODELS).models["large"].mode_of_modules) == ("phase", "keep")
    assert ModelEntry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


@pytest.mark.parametrize(("installed", "outcome", "limit", "also"), [
    ("2.13.0+cpu", "xfail", 3, ("fuzz",)), ("2.14.0.dev20260901", "xfail", 3, ("fuzz",)), ("2.11.0", "run", 0, ()),
    (None, "xfail", 3, ("fuzz",)),
])
def test_a_rule_for_some_versions_of_torch(project, monkeypatch, installed, outcome, limit, also):
    """With any other it is as if it were not there; where torch is not installed nobody knows, and it holds."""
    monkeypatch.setattr("pytest_torchcompile.plan.matrix.torch_version", lambda: installed)
    project.file.write_text(HEAD + """rules:
- {xfail: {mode: default}, reason: known, torch: ">=2.12"}
- {limits: {graph_breaks: 3}, torch: ">2.11.0"}
- {also: fuzz, when: {mode: default}, torch: "!=2.11.*"}
""")
    (planned,) = load_matrix(str(project.file)).cells
    assert (planned.outcome, planned.limits["graph_breaks"], planned.also) == (outcome, limit, also)
