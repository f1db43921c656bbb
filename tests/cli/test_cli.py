"""The command line: cells and schema."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from pytest_torchcompile import __version__, cli
from pytest_torchcompile.cli import COMMANDS, main

MATRIX = """version: 1
models: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}
axes: {mode: [default, max-autotune], backend: [inductor, eager]}
rules:
- {exclude: {backend: eager, mode: max-autotune}, reason: no modes there}
- {xfail: {mode: max-autotune}, reason: slow, issue: a/b#1, until: 2999-01-01, checks: [gradients]}
"""


@pytest.fixture
def here(project, monkeypatch):
    """A project as working directory, with matrix/default.yaml."""
    project.file = project.file.with_name("default.yaml")
    project.file.write_text(MATRIX)
    (project.root / "tox.ini").touch()
    monkeypatch.chdir(project.root)
    return project


def test_cells(here, capsys):
    """One line a cell with outcome and reason, then the totals."""
    assert main(["cells"]) == 0
    assert capsys.readouterr().out == """\
gpt-inductor-default-auto-none       run
gpt-inductor-max-autotune-auto-none  xfail  slow (a/b#1; until 2999-01-01; gradients)
gpt-eager-default-auto-none          run
3 cells: 2 run, 1 xfail
1 excluded by matrix/default.yaml:5: no modes there
"""


def test_cells_of_a_shipped_matrix(tmp_path, monkeypatch, capsys):
    """By name, from any folder; mistakes and rules are told under that name."""
    monkeypatch.chdir(tmp_path)
    assert main(["cells", "shipped:smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tiny_head-inductor-default-auto-none", "run"]
    assert lines[-1].startswith("4 excluded by shipped:smoke:2")
    assert main(["cells", "shipped:smok"]) == 4
    assert capsys.readouterr().err == ("'shipped:smok' is not a shipped matrix; did you mean 'smoke'? "
                                       "Known: artifacts, contract, default, fake, fuzz, gpu, multi_gpu, nightly, "
                                       "real, smoke, toolkit\n")


def test_cells_say_what_they_need(here, capsys, monkeypatch):
    """What a larger machine would run is planned; the fake lane needs one process, a single GPU is not worth a word."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    here.file.write_text(MATRIX.partition("axes:")[0] + """axes:
  backend: [eager]
  device: [cpu, cuda]
  wrapper: [none, ddp*4, ddp*200, tp*fake64]
rules:
- {skip: {wrapper: ddp*4, device: cuda}, reason: no such machine}
""")
    assert main(["cells"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0].removeprefix("gpt-eager-default-auto-"): line.split(None, 1)[1] for line in lines[:8]}
    assert said == {
        "none": "run", "none-cuda": "run", "tp_fake64": "run", "tp_fake64-cuda": "run",
        "ddp_4": "run    (needs 4 processes)", "ddp_4-cuda": "skip   no such machine (needs 4 GPUs)",
        "ddp_200": "run    (needs 200 processes)", "ddp_200-cuda": "run    (needs 200 GPUs)",
    }
    assert lines[8:] == [
        "8 cells: 7 run, 1 skip",
        "note: 1 cell runs up to 200 processes at once, each with torch in it, and this machine has 2 cores"]


def test_cells_of_a_strategy(here, capsys):
    """What a strategy leaves out, and expired rules, are said."""
    here.file.write_text(MATRIX.replace("2999", "1999") + "strategy: {sample: {n: 1}}")
    assert main(["cells", "matrix/default.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["1 cell: 1 run", "2 more are left out by the strategy: sample of 1, seed 0"]
    assert lines[-1].startswith("note: matrix/default.yaml:6: this xfail expired on 1999-01-01")


def test_cells_as_json(here, capsys):
    """Every cell with its axes, outcome, rule and limits; excluded ones last."""
    assert main(["cells", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in cells] == ["run", "xfail", "run", "exclude"]
    assert cells[1] == {
        "id": "gpt-inductor-max-autotune-auto-none",
        "axes": {"model": "gpt", "backend": "inductor", "mode": "max-autotune", "dynamic": "auto",
                 "wrapper": "none", "dtype": "float32", "device": "cpu", "phase": "training",
                 "capture": "default", "passes": "none", "compiler": "default", "decompositions": "default"},
        "outcome": "xfail", "reason": "slow", "issue": "a/b#1", "until": "2999-01-01",
        "checks": ["gradients"], "also": [], "rule": "matrix/default.yaml:6",
        "limits": {"coverage": 1.0, "steps": 3, "graph_breaks": 0},
    }
    assert (cells[3]["reason"], cells[3]["rule"]) == ("no modes there", "matrix/default.yaml:5")


def test_cells_of_a_shard(here, capsys):
    """The shards together are the cells; excluded ones are in none."""
    found = []
    for index in (1, 2):
        assert main(["cells", "--json", "--shard", f"{index}/2"]) == 0
        found += [each["id"] for each in json.loads(capsys.readouterr().out)]
    assert len(found) == len(set(found)) == 3
    assert main(["cells", "--shard", "1/2"]) == 0
    assert "1 cell (of 3): " in capsys.readouterr().out


def test_schemas(here, capsys):
    """Both schemas are JSON Schemas of the same draft."""
    for options, title in ((["--matrix"], "pytest-torchcompile matrix"), ([], "pytest-torchcompile report")):
        assert main(["schema", *options]) == 0
        schema = json.loads(capsys.readouterr().out)
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["title"] == title


@pytest.mark.parametrize(("arguments", "expected"), [
    (["cells", "matrix/defualt.yaml"], "matrix/defualt.yaml:1:1: no such file; did you mean "
     "'matrix/default.yaml'? Known: matrix/default.yaml"),
    (["cells", "--shard", "9/8"], "shard '9/8': there is no part 9 of 8; expected 1/8 to 8/8"),
    (["cells", "--jason"], "pytest-torchcompile: unrecognized arguments: --jason"),
    (["cells", "a", "b"], "pytest-torchcompile: unrecognized arguments: b"),
    (["cells", "--shard"], "pytest-torchcompile cells: argument --shard: expected one argument"),
    ([], "pytest-torchcompile: the following arguments are required: COMMAND"),
])
def test_mistakes(here, capsys, arguments, expected):
    """A mistake is one line on stderr and exit code 4, nothing on stdout."""
    assert main(arguments) == 4
    assert capsys.readouterr() == ("", expected + "\n")


def test_version(capsys):
    """As other tools tell it: on stdout, exit code 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pytest-torchcompile {__version__}\n"


def test_unknown_command(capsys):
    """The nearest command."""
    assert main(["cels"]) == 4
    assert capsys.readouterr().err.startswith(
        "pytest-torchcompile: 'cels' is not a command; did you mean 'cells'? Known: ")


def test_mistake_in_the_matrix(here, capsys):
    """The place in the file comes first, as editors and terminals expect."""
    here.file.write_text(MATRIX + "check: []")
    assert main(["cells"]) == 4
    assert capsys.readouterr().err.startswith("matrix/default.yaml:7:1: unknown key 'check' in the matrix; ")


def test_a_module_that_pytest_would_find(here, capsys):
    """pytest reads its own setting, and this command does not: it says so."""
    here.file.write_text("version: 1\nmodels: {m: {factory: 'elsewhere:f', inputs: 'elsewhere:g'}}\n")
    assert main(["cells"]) == 4
    assert "pytest's setting `pythonpath` is not read here: PYTHONPATH=src" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    """-h says what the command does."""
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit, match=r"^0$"):
            main([name, "-h"])
        assert command.help in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["--help"], ["init", "--help"], ["accept", "--help"]], ids=" ".join)
def test_help_is_light(here, arguments):
    """No torch, no pytest, no YAML: the help of every command is made before one is run."""
    code = ("import sys\nfor name in ('torch', 'pytest', 'hypothesis', 'yaml'): sys.modules[name] = None\n"
            "from pytest_torchcompile.cli import main\nsys.exit(main())")
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=here.root, text=True, capture_output=True,
                          check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: pytest-torchcompile" in done.stdout


def test_new_commands_tell_their_defaults(capsys):
    """Each option of `init` and `accept` says what holds without it."""
    for name in ("init", "accept"):
        parser = argparse.ArgumentParser()
        COMMANDS[name].arguments(parser)
        for action in parser._actions:
            assert "default: " in action.help or action.dest == "help"


def test_every_option_with_a_value_tells_its_default(capsys):
    """Also where it is none; and `gate` is told from `gates`."""
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        command.arguments(parser)
        takes_value = [action for action in parser._actions if action.option_strings and action.nargs != 0]
        with pytest.raises(SystemExit):
            main([name, "-h"])
        assert capsys.readouterr().out.count("default:") >= len(takes_value), name
    assert "`gates` is another command" in COMMANDS["gate"].help
    assert "It reads no report; `gate` does" in COMMANDS["gates"].help


def test_interrupt(here, capsys, monkeypatch):
    """Ctrl-C ends quietly, with the code that shells expect."""
    def interrupted(given):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "cells", cli.Command("", cli._cells_arguments, interrupted))
    assert main(["cells"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


def run(here, arguments, **options):
    """Run the command in a process of its own, where torch and pytest cannot be imported."""
    code = ("import sys\nfor name in ('torch', 'pytest', 'hypothesis'): sys.modules[name] = None\n"
            "from pytest_torchcompile.cli import main\nsys.exit(main())")
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=here.root, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_closed_pipe(here):
    """`cells | head` is quiet, however long the list is."""
    here.file.write_text(MATRIX.replace("axes: {", f"axes: {{width: [{', '.join(map(str, range(2000)))}], "))
    process = run(here, ["cells"])
    assert process.stdout.readline().startswith("gpt-inductor-default-auto-none-width=0 ")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE


def test_letters_that_the_terminal_lacks(here):
    """A reason in any language is printed somehow, whatever the encoding; and torch is not needed."""
    here.file.write_text(MATRIX.replace("slow", "zu träge \N{SNAIL}"), encoding="utf-8")
    out, err = run(here, ["cells"], env={**os.environ, "PYTHONIOENCODING": "ascii"}).communicate()
    assert err == ""
    assert "zu tr\\xe4ge \\U0001f40c" in out
