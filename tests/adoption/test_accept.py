"""`pytest-torchcompile accept`: what a run found becomes rules of its matrix, as an edit that keeps everything else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from planted import planted
from runs import Run, compiled

from pytest_torchcompile.adoption.accept_command import add_rules, rules_of
from pytest_torchcompile.adoption.acceptance import CellNeeds, Need
from pytest_torchcompile.checks import compiles
from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.observation import BAD
from pytest_torchcompile.plan.matrix import load_matrix, parse_matrix
from pytest_torchcompile.report.provenance import cell_fingerprint
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation

MODEL = "{factory: 'zoo:anything', inputs: 'zoo:batch'}"
EAGERLY = "a part silently ran eagerly: forward"
COMMENT = "# by hand: this stays\n"


@pytest.fixture
def here(project, monkeypatch):
    """A project whose matrix/smoke.yaml is that of a run, and which holds the run's report."""
    monkeypatch.chdir(project.root)
    (project.root / "tox.ini").touch()
    (project.root / ".compile-matrix").mkdir()

    def put(run: Run, rules: str = "") -> Path:
        axes: dict[str, list] = {}
        for cell in run.cells.values():
            for axis in ("backend", "dynamic", "wrapper", *dict(cell.user)):
                values = axes.setdefault(axis, [])
                if cell.axes[axis] not in values:
                    values.append(cell.axes[axis])
        models = dict.fromkeys(cell.model for cell in run.cells.values())
        file = project.root / "matrix" / "smoke.yaml"
        file.write_text("".join((
            COMMENT, "version: 1\nmodels:\n", *(f"  {name}: {MODEL}  # {name}\n" for name in models),
            f"axes: {json.dumps(axes)}\nchecks: {json.dumps(run.checks)}\n", rules)))
        run.write(project.root / ".compile-matrix")
        return file

    return put


def still_bad(run: Run) -> list[str]:
    """What would fail if the same were observed under the matrix as it is now."""
    found = []
    for planned in load_matrix("matrix/smoke.yaml").cells:
        observation = run.observations[planned.cell.id]
        judgements = apply_xfail(judge_observation(observation, run.checks, planned.limits), planned)
        found += [f"{planned.cell.id}::{name}" for name, each in judgements.items() if each.verdict in BAD]
    return found


def test_graph_breaks_and_coverage(here, capsys):
    """Limits with reason and place, by category; green afterwards, and again nothing changes."""
    run = Run(model=["net", "gpt"], backend=["inductor", "eager"])
    for name in run.ids[:2]:
        run.breaks(name)
        run.section(name, "compiles")["coverage"][0] |= {"share": 0.8, "total": 10, "outside": 2}
    # What runs eagerly without a break needs a limit of its own.
    run.section(run.ids[3], "compiles")["coverage"][0] |= {"share": 0.71239, "total": 10, "outside": 2}
    file = here(run)
    before = file.read_text()
    assert still_bad(run)
    assert main(["accept"]) == 0
    out = capsys.readouterr().out
    added = """
rules:
  # graph breaks
  - limits: {graph_breaks: 1}
    when: {model: net}
    reason: "Tensor.item() at models.py:12"
  # coverage
  - limits: {coverage: 0.8}
    when: {model: net}
"""
    assert file.read_text().startswith(before + added)
    assert "  - limits: {coverage: 0.7123}\n    when: {model: gpt, backend: eager}\n" in file.read_text()
    assert "matrix/smoke.yaml: 3 rules added for 3 cells (graph breaks: 1, coverage: 2)\n" in out
    assert "keeps `pytest-torchcompile gate`" not in out
    assert out.endswith("\nNext:\n  pytest --compile-matrix=matrix/smoke.yaml\n  pytest-torchcompile gate\n")
    assert "+  - limits: {graph_breaks: 1}\n" in out
    assert "\n-" not in out.partition("+++")[2]
    assert still_bad(run) == []
    text = file.read_text()
    assert main(["accept"]) == 0
    assert "matrix/smoke.yaml: nothing to accept: 4 cells as expected\n" in capsys.readouterr().out
    assert file.read_text() == text


def test_a_place_in_a_library_is_the_same_on_each_machine(here):
    """Its path begins where the library's does, not at the root of somebody's environment."""
    run = Run(model=["net"], backend=["eager"])
    run.breaks(run.ids[0], {"file": "/home/me/.venv/lib/python3.11/site-packages/lib/layers.py"})
    file = here(run)
    assert main(["accept"]) == 0
    assert 'reason: "Tensor.item() at lib/layers.py:12"' in file.read_text()


def test_what_an_allowed_break_explains_needs_no_limit(here):
    """Coverage follows from the breaks, where no whole function was given up."""
    run = planted(liars=(), broken=2)
    for name in run.ids:
        run.section(name, "compiles")["breaks"] = 1
    file = here(run)
    assert main(["accept"]) == 0
    assert "graph_breaks: 1" in file.read_text()
    assert "coverage" not in file.read_text()
    assert still_bad(run) == []


def test_recompiles(here):
    """Those that no size explains, and late ones."""
    run = Run(model=["net"], backend=["inductor", "eager"])
    run.checks.append("shape_stability")
    for name in run.ids:
        run.recompiles(name, 2)
        late = [compiled(during="call 2 (B=4)", kind="recompile", cause="value", reason="self.n == 3")] * 3
        run.section(name, "shape_stability").update(raised=None, calls=["call 2"], late=late, sizes=2, between=[])
    file = here(run)
    assert main(["accept"]) == 0
    assert "  # recompiles\n  - limits: {unexplained: 2}\n    when: {model: net}\n" in file.read_text()
    assert "  - limits: {late_recompiles: 3}\n    when: {model: net}\n" in file.read_text()
    assert still_bad(run) == []


def test_wrong_numbers_are_never_accepted(here, capsys):
    """The planted liar is left, with what to type; its kin with graph breaks are accepted."""
    run = planted(broken=1)
    file = here(run)
    assert main(["accept"]) == 1
    out = capsys.readouterr().out
    assert "liar" not in "".join(line for line in out.splitlines() if line.startswith("+"))
    assert "8 verdicts are left as they are:\n" in out
    assert ("  liar-inductor-default-auto-none::equivalence: wrong numbers are accepted only by name: --wrong-numbers "
            "liar-inductor-default-auto-none:equivalence (") in out
    assert len(still_bad(run)) == 8
    assert "xfail" not in file.read_text()


def test_wrong_numbers_that_are_named(here, capsys):
    """Only that check of that cell; every other one stays a failure."""
    run = planted(broken=0)
    file = here(run)
    one, other = run.ids
    assert main(["accept", "--wrong-numbers", f"{one}:equivalence", "--wrong-numbers", f"{one}::gradients"]) == 1
    assert "  - xfail: {model: liar, dynamic: auto}\n    checks: [equivalence, gradients]\n" in file.read_text()
    left = [f"{one}::training_steps", f"{one}::smoketest", *(f"{other}::{name}" for name in (
        "equivalence", "gradients", "training_steps", "smoketest"))]
    assert sorted(still_bad(run)) == sorted(left)
    # The cell is decided by that rule: the next check is added to it by hand.
    assert main(["accept", "--wrong-numbers", f"{one}:smoketest"]) == 1
    assert "decides this cell already: add the check there" in capsys.readouterr().out


def test_no_rule_hides_wrong_numbers_that_come_later(here, capsys):
    """A check that may tell of them is not named in an xfail: when it does tell of them, it fails."""
    run = Run(model=["net"], backend=["eager"])
    run.checks.append("smoketest")
    smoketest = {"raised": None, "ok": False, "reason": EAGERLY,
                 "phase": "comparison", "step": 1, "seconds": {}, "graphs": 2, "compiles": 2, "evidence": "",
                 "notes": []}
    run.section(run.ids[0], "smoketest").update(smoketest)
    file = here(run)
    assert main(["accept"]) == 0
    assert "  - xfail: {model: net}\n    reason: " in file.read_text()
    assert ("keeps `pytest-torchcompile gate` from passing: smoketest must pass there. In place of its rule, `exclude` "
            "the cell; or excuse it in a policy, which leaves pytest red and lets the gate pass:\n"
            "  allowed_failures:\n    - cells: {") in capsys.readouterr().out
    assert still_bad(run) == []
    run.section(run.ids[0], "smoketest")["reason"] = "output: error is 3.5e+06 times the rounding noise (limit 5)"
    assert still_bad(run) == [f"{run.ids[0]}::smoketest"]


def test_checks_that_never_tell_of_wrong_numbers_are_named(here):
    """Then another check that fails is not hidden."""
    run = Run(model=["net"], backend=["eager"])
    run.checks = ["graph_breaks", "compiles", "recompiles", "shape_stability"]
    run.section(run.ids[0], "shape_stability").update(raised=None, calls=[], late=[], sizes=1, between=[])
    file = here(run)
    assert main(["accept"]) == 0
    assert "  - xfail: {model: net}\n    checks: [shape_stability]\n" in file.read_text()


def test_a_mild_failure_beside_named_wrong_numbers(here, capsys):
    """The rule that names checks does not name what may tell of other wrong numbers."""
    run = planted(broken=0)
    one = run.ids[0]
    here(run)
    run.section(one, "smoketest")["reason"] = EAGERLY
    run.write(Path(".compile-matrix"))
    named = [f"--wrong-numbers={one}:{name}" for name in ("equivalence", "gradients", "training_steps")]
    assert main(["accept", *named]) == 1
    assert (f"  {one}::smoketest: to name it beside would hide its wrong numbers too: --wrong-numbers {one}:smoketest "
            "does (") in capsys.readouterr().out


def test_cells_that_were_not_run(here, capsys):
    """Of a run of a part the others are told."""
    run = Run(model=["net"], backend=["eager", "inductor"])
    file = here(run)
    report = Path(".compile-matrix/report.json")
    block = run.reports()[0].block
    block["cells"][1] |= {"selected": False, "checks": {}, "observation": None, "status": "not_run"}
    block["cells"][1]["evidence_sha256"] = cell_fingerprint(block["cells"][1])
    report.write_text(json.dumps({"compile_matrix": block}))
    before = file.read_text()
    assert main(["accept"]) == 0
    assert capsys.readouterr().out.endswith("\n1 cell of the matrix was not run: net-inductor-default-auto-none: run "
                                            "the whole matrix, then accept again\n")
    assert file.read_text() == before


def test_a_run_that_raises(here):
    """Expected to fail as a whole, which hides no wrong numbers; a bug that is known has its issue."""
    run = Run(model=["net"], backend=["inductor"], wrapper=["none", "tp"])
    error = {"type": "AttributeError", "phase": "backward", "text": "'Tensor' object has no attribute '_local_tensor'",
             "traceback": "", "at": 0}
    for name in run.ids:
        for sections in (run.observations[name].sections, *(rank["sections"] for rank in run.observations[name].ranks)):
            sections["compiles"]["error"] = error
            sections["graph_breaks"]["raised"] = sections["recompiles"]["raised"] = "AttributeError"
    file = here(run)
    assert main(["accept"]) == 0
    text = file.read_text()
    assert ("  # failures of torch\n  - xfail: {model: net, wrapper: none}\n    reason: \"compiles: the compiled run "
            "raised AttributeError in backward") in text
    assert text.count("issue: pytorch/pytorch#191113\n") == 1
    assert "checks: [compiles, graph_breaks" not in text.partition("rules:")[2]
    assert still_bad(run) == []


def test_a_broken_file_in_the_cache_is_no_failure_of_torch(here, capsys):
    """A compile that was interrupted left it; the cell passes once it is gone, and a strict xfail would fail then."""
    run = Run(model=["net"], backend=["inductor"])
    library = "/tmp/torchinductor_me/zt/c1.main.so"
    sections = run.observations[run.ids[0]].sections
    sections["compiles"]["error"] = {"type": "InductorError", "phase": "forward", "traceback": "", "at": 0,
                                     "text": f"InductorError: ImportError: {library}: file too short"}
    sections["graph_breaks"]["raised"] = sections["recompiles"]["raised"] = "InductorError"
    file = here(run)
    before = file.read_text()
    assert main(["accept"]) == 1
    assert file.read_text() == before
    assert f"says nothing of the model: `rm {library}`, and run again" in capsys.readouterr().out
    found = compiles.CHECK.judge(sections["compiles"], {})
    problem = next(iter(found))
    assert problem.message.endswith(f"in forward: a broken file in torch's cache, {library}")
    assert problem.hint.endswith(f"`rm {library}`, and run again")


def test_a_crash_is_accepted_and_what_says_nothing_is_not(here, capsys):
    """A time-out and an error say little of torch; a verdict that never came says nothing."""
    run = Run(model=["net", "gpt", "slow", "broken"], backend=["eager"])
    net, gpt, slow, broken = run.ids
    run.fails(gpt, "crash", "the process of this cell ended by SIGSEGV")
    run.fails(slow, "timeout", "took more than 300 s")
    run.fails(broken, "user", "eager raises too")
    run.stored[net, "recompiles"] = "not_run"
    file = here(run)
    assert main(["accept"]) == 1
    out = capsys.readouterr().out
    assert "  - xfail: {model: gpt}\n    reason: \"graph_breaks: the process" in file.read_text().replace(
        "compiles: the process", "graph_breaks: the process")
    assert (f"  3 verdicts of {slow}: it ran out of time, which says little of the model: raise --compile-timeout "
            "(") in out
    assert f"  3 verdicts of {broken}: it could not be judged: eager raises too\n" in out
    assert f"  {net}::recompiles: it has no verdict: run the matrix to its end\n" in out
    assert file.read_text().count("xfail") == 1


def test_a_mistake_is_told_once(here, capsys):
    """Not once for each check of each cell."""
    run = Run(model=["net"], backend=["eager", "inductor"])
    mistake = "matrix/smoke.yaml:4:3: cannot import 'zoo': ModuleNotFoundError: No module named 'lib' (zoo.py:2)"
    for name in run.ids:
        run.fails(name, "usage", mistake)
    here(run)
    assert main(["accept"]) == 1
    out = capsys.readouterr().out
    assert f"  6 verdicts of {', '.join(run.ids)}: it could not be judged: {mistake}\n" in out
    assert out.count("cannot import") == 1


def test_a_stale_rule_is_named(here, capsys):
    """An expected failure that passes is for a person to take out."""
    run = Run(model=["net"], backend=["eager"])
    here(run, "rules:\n  - xfail: {model: net}\n    checks: [recompiles]\n    reason: known\n")
    assert main(["accept"]) == 1
    assert ("net-eager-default-auto-none::recompiles: it passes, although matrix/smoke.yaml:8 expects it to fail: "
            "remove that rule, or the check from it\n") in capsys.readouterr().out


def test_only_an_edit_is_printed(here, capsys):
    """--dry-run."""
    run = Run(model=["net"], backend=["eager"])
    run.breaks(run.ids[0])
    file = here(run)
    before = file.read_text()
    assert main(["accept", "--dry-run"]) == 0
    assert "matrix/smoke.yaml: 1 rule would be added for 1 cell (graph breaks: 1)\n" in capsys.readouterr().out
    assert file.read_text() == before


RULE = "  - limits: {graph_breaks: 1}\n"


@pytest.mark.parametrize(("rules", "expected"), [
    ("", "\nrules:\n  # breaks\n  - limits: {graph_breaks: 3}\n    when: {model: gpt}\n    reason: \"it: [is] #1\"\n"),
    ("rules: []\n", "rules:\n  # breaks\n  - limits: {graph_breaks: 3}\n"),
    ("rules: []  # none yet\nchecks: graph_breaks\n",
     "    reason: \"it: [is] #1\"  # none yet\nchecks: graph_breaks\n"),
    (f"rules:\n{RULE}", f"rules:\n{RULE}  # breaks\n"),
    ("rules:\n- limits: {graph_breaks: 1}  # mine\n\n# below\nchecks: graph_breaks\n",
     "- limits: {graph_breaks: 1}  # mine\n# breaks\n- limits: {graph_breaks: 3}\n  when: {model: gpt}\n"),
    ("rules:\n  - limits: {graph_breaks: 1}\n    reason: >-\n      in two\n      lines\nchecks: graph_breaks\n",
     "      lines\n  # breaks\n  - limits: {graph_breaks: 3}\n"),
    ("rules: [{limits: {graph_breaks: 1}},]  # all\n",
     "rules: [{limits: {graph_breaks: 1}}, {limits: {graph_breaks: 3}, when: {model: gpt}, reason: \"it: [is] #1\"},]"
     "  # all"),
    ("rules:\n  - limits: {graph_breaks: 1}", "graph_breaks: 1}\n  # breaks\n"),
    ("# written by pytest-torchcompile, abc: yours\n",
     "    reason: \"it: [is] #1\"\n# written by pytest-torchcompile, abc: yours\n"),
])
def test_forms_of_the_file(project, rules, expected):
    """Whatever is there stays, to the last character."""
    text = f"{COMMENT}version: 1\nmodels: {{gpt: {{factory: 'zoo:gpt', inputs: 'zoo:batch'}}}}\n{rules}"
    matrix = parse_matrix(text.encode(), project.file, project.root, shown="m.yaml")
    need = Need("breaks", "it: [is] #1", limits=(("graph_breaks", 3),))
    added = rules_of([CellNeeds(matrix.cells[0], [need])], matrix.cells)
    edited = add_rules(text, added, "m.yaml")
    assert expected in edited
    (cell,) = parse_matrix(edited.encode(), project.file, project.root, shown="m.yaml").cells
    assert cell.limits["graph_breaks"] == 3
    lines = iter(edited.splitlines())
    if "[" not in rules:
        assert all(line in lines for line in text.splitlines())


def test_a_file_in_braces(project):
    """It is not edited, and the rules are there to add by hand."""
    text = "{version: 1, models: {gpt: {factory: 'zoo:gpt', inputs: 'zoo:batch'}}}"
    matrix = parse_matrix(text.encode(), project.file, project.root, shown="m.yaml")
    rules = rules_of([CellNeeds(matrix.cells[0], [Need("breaks", "why", limits=(("graph_breaks", 3),))])], matrix.cells)
    with pytest.raises(UsageError, match=r"^m.yaml: not edited: all of it is written in braces; add by hand:\n  # br"):
        add_rules(text, rules, "m.yaml")


@pytest.mark.parametrize("seed", range(12))
def test_rules_are_for_exactly_those_cells(project, seed):
    """Of any choice of cells; and with values that YAML reads as something else."""
    matrix = project.load(f"version: 1\nmodels: {{gpt: {MODEL}, other: {MODEL}}}\n"
                          "axes: {backend: [eager, aot_eager, inductor], dynamic: [auto, static], "
                          "width: [4, 2.5, 'on', 'a b', true], dtype: [float32, bfloat16]}\n")
    draw = random.Random(seed)
    chosen = draw.sample(matrix.cells, draw.choice([1, 2, 7, 30, 119]))
    if seed == 0:
        chosen = list(matrix.cells)
    need = Need("breaks", "why", limits=(("graph_breaks", 3),))
    rules = rules_of([CellNeeds(planned, [need]) for planned in chosen], matrix.cells)
    if seed == 0:
        assert len(rules) == 2
    edited = add_rules(project.file.read_text(), rules, "m.yaml")
    found = {cell.cell.id for cell in project.load(edited).cells if cell.limits["graph_breaks"] == 3}
    assert found == {planned.cell.id for planned in chosen}


@pytest.mark.parametrize(("path", "expected"), [
    ("", "report.json: is of a run without a matrix, so there is no file to edit\n"),
    ("model:models:Net,models:batch", "report.json: is of a run without a matrix file; `pytest-torchcompile init "
     "models:Net --inputs models:batch` writes one, then run that and accept\n"),
    ("shipped:smoke", "report.json: is of shipped:smoke, which comes with the package and is not edited; write its "
                      "models to a file of your own, such as matrix/default.yaml\n"),
])
def test_matrices_that_are_no_file(here, capsys, path, expected):
    """One sentence with what to do instead."""
    from pytest_torchcompile.report.provenance import head_fingerprint

    here(Run(model=["net"], backend=["eager"]))
    report = Path(".compile-matrix/report.json")
    content = json.loads(report.read_text())
    content["compile_matrix"]["matrix"]["path"] = path
    content["compile_matrix"]["head_sha256"] = head_fingerprint(content["compile_matrix"])
    Path("report.json").write_text(json.dumps(content))
    assert main(["accept", "report.json"]) == 4
    assert capsys.readouterr().err == expected


def test_other_mistakes(here, capsys, tmp_path, monkeypatch):
    """A report that is not there, or of an earlier run; a cell and a check that are not."""
    run = Run(model=["net"], backend=["eager"])
    here(run)
    for given, expected in (
        ("nett-eager:compiles", "--wrong-numbers nett-eager:compiles: the report has no cell 'nett-eager'; Known: "
                                "net-eager-default-auto-none\n"),
        (f"{run.ids[0]}:gradient", f"--wrong-numbers {run.ids[0]}:gradient: 'gradient' is no check; did you mean "
                                   "'gradients'? Known: "),
    ):
        assert main(["accept", "--wrong-numbers", given]) == 4
        assert capsys.readouterr().err.startswith(expected)
    report = Path(".compile-matrix/report.json")
    content = json.loads(report.read_text())
    marked = {"began": "2026-11-22T10:00:00+00:00", "command": "pytest --compile-matrix"}
    report.write_text(json.dumps({**content, "compile_matrix_later_run": marked}))
    assert main(["accept"]) == 2
    assert capsys.readouterr().err == (".compile-matrix/report.json: is of an earlier run; a later one began and left "
                                       "no report: run the matrix again\n")
    report.unlink()
    assert main(["accept"]) == 2
    assert capsys.readouterr().err == (".compile-matrix/report.json: there is no report here; run `pytest "
                                       "--compile-matrix` first, or name one\n")


def test_a_matrix_that_was_edited_since(here, capsys):
    """Its rules are taken as they are now; a cell that is gone is left out."""
    run = Run(model=["net", "gone"], backend=["eager"])
    file = here(run)
    file.write_text(file.read_text().replace("  gone:", "  new:"))
    assert main(["accept"]) == 0
    out = capsys.readouterr().out
    assert "matrix/smoke.yaml was edited since that run: its cells are judged again by its rules as " in out
    assert "gone-eager-default-auto-none: is no cell of the matrix any more; left out\n" in out
    assert ("\n1 cell of the matrix was not run: new-eager-default-auto-none: run the whole matrix, then accept "
            "again\n") in out
    # The cell that is gone had not been run either: that is nobody's business any more.
    assert "not run: gone" not in out
