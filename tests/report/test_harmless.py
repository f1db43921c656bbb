"""What a crashed cell wrote is shown in the terminal, to CI and in files, and nowhere obeyed."""

from __future__ import annotations

import re

import pytest
from runs import Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.observation import Failure, Judgement, Observation, Problem
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.report.terminal import failure_text

COMMANDS = ["::error::seen", "  ::error file=a.py,line=1::seen", "\t::set-output name=a::seen",
            "\x1b[0m::add-mask::seen", "\u00a0::stop-commands::seen", "100%\r::warning::seen", "x ##[error]seen",
            "##vso[task.complete]seen", "##teamcity[buildStop]seen", "\x0b::debug::seen", ":::error::seen"]
HOSTILE = "\n".join([*COMMANDS, "\x1b]0;title\x07\x1b[2J\x9b31m\x00\x08 \u202egnp.exe seen"])
OBEYED = re.compile(r"^\s*::|##\w*\[|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", re.MULTILINE)
"""Lines that GitHub's runner takes for a command (ActionCommand.cs trims, and looks for ``##[`` anywhere), Azure's and
TeamCity's too; and what a terminal obeys."""


def obeyed(text):
    """What of a text would be obeyed; lines end as .NET's ReadLine has it."""
    return OBEYED.findall(text.replace("\r\n", "\n").replace("\r", "\n"))


@pytest.mark.parametrize("text", [*COMMANDS, HOSTILE])
def test_nothing_is_obeyed(text):
    assert obeyed(text)
    shown = harmless_text(text)
    assert not obeyed(shown)
    assert "seen" in shown
    assert harmless_text(shown) == shown


@pytest.mark.parametrize("text", ["", "a\n\tb é 😀", "std::vector<int>::at", "::"[:1], "# 1, ## 2"])
def test_other_text_stays(text):
    assert harmless_text(text) == text


def test_a_failure_in_the_terminal():
    """Indented as it is there, a command would still be one."""
    judged = {"compiles": Judgement("crash", (Problem(HOSTILE, HOSTILE, HOSTILE),))}
    text = failure_text("compiles", judged, f"again {HOSTILE}")
    assert not obeyed(text)
    assert text.count("seen") == 4 * HOSTILE.count("seen")


def test_every_output_of_a_report(tmp_path, capsys, monkeypatch):
    """The gate's text, annotations, Markdown and JUnit, the page and the playbook of a cell that crashed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    run = Run(wrapper=["none", HOSTILE.replace("/", "")])
    run.observations[run.ids[0]] = Observation(run.ids[0], failure=Failure("crash", HOSTILE, evidence=HOSTILE))
    run.breaks(run.ids[1], {"reason": HOSTILE, "hint": HOSTILE, "file": "a\n::error::b.py"})
    (report,) = run.write(tmp_path)
    assert main(["gate", report, "--github", "--junit", "j.xml", "--summary", "s.md"]) == 1
    told = capsys.readouterr().out
    ours = [line for line in told.splitlines() if re.match(r"::error (file=[^:]*)?title=torch\.compile gate::", line)]
    assert ours
    assert not obeyed("\n".join(line for line in told.splitlines() if line not in ours))
    assert not obeyed("\n".join(line[2:] for line in ours))
    assert main(["html", report, "--output", "p.html"]) == 0
    assert main(["playbook", report, "--output", "p.md"]) == 0
    assert not obeyed(capsys.readouterr().out)
    for name in ("j.xml", "s.md", "step.md", "p.html", "p.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "seen" in text, name
        assert not obeyed(text), name


def test_a_report_that_cannot_be_read(tmp_path, capsys):
    """Its name and its keys are in the sentence."""
    path = tmp_path / "a\n::error::b.json"
    path.write_text("[")
    assert main(["gate", str(path)]) == 2
    assert not obeyed(capsys.readouterr().out)
    assert main(["gate", str(path), "--\x1b[2J\n::error::"]) == 4
    assert not obeyed(capsys.readouterr().err)
