"""Commands never replace a file that somebody else wrote."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from runs import Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.report.safe_output import WRITTEN_BY, write_output

WRITERS = [["gate", "--junit"], ["gate", "--summary"], ["html", "-o"], ["html", "-o", "page.html", "--svg"],
           ["playbook", "-o"]]


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A good report in the current folder, which is empty else."""
    monkeypatch.chdir(tmp_path)
    (path,) = Run().write(tmp_path)
    return path


@pytest.mark.parametrize("writer", WRITERS, ids=" ".join)
def test_a_file_of_the_users_stays(writer, report, tmp_path, capsys):
    """One sentence says so; ``--force`` replaces it, and a file of ours is replaced without."""
    command, *options = writer
    theirs = tmp_path / "theirs.md"
    theirs.write_text("# Notes\n")
    assert main([command, report, *options, str(theirs)]) == 4
    assert theirs.read_text() == "# Notes\n"
    assert f"{theirs}: was not written by pytest-torchcompile, so it is not replaced; name another file, or replace " \
           "it by --force" in capsys.readouterr().err
    assert main([command, report, *options, str(theirs), "--force"]) == 0
    text = theirs.read_text()
    assert text.splitlines()[-1].startswith("<!-- written by pytest-torchcompile, ")
    assert "# Notes" not in text
    assert main([command, report, *options, str(theirs)]) == 0
    (tmp_path / "empty").touch()
    assert main([command, report, *options, str(tmp_path / "empty")]) == 0


@pytest.mark.parametrize("edit", [lambda text: text.replace("#", "# Of ours:\n\n#", 1), lambda text: f"{text}More.\n"],
                         ids=["inside", "at the end"])
def test_markdown_that_somebody_has_edited_stays(report, tmp_path, capsys, edit):
    """A playbook is there to be added to."""
    book = tmp_path / "book.md"
    assert main(["playbook", report, "-o", str(book)]) == 0
    book.write_text(edited := edit(book.read_text()))
    assert main(["playbook", report, "-o", str(book)]) == 4
    assert book.read_text() == edited
    assert f"{book}: was edited since pytest-torchcompile wrote it, so it is not replaced" in capsys.readouterr().err
    assert main(["playbook", report, "-o", str(book), "--force"]) == 0


def test_markdown_of_an_earlier_version_is_ours(report, tmp_path):
    """Its line had no checksum."""
    book = tmp_path / "book.md"
    book.write_text(f"# Compiling these models\n{WRITTEN_BY}\n")
    assert main(["playbook", report, "-o", str(book)]) == 0


def test_the_line_is_a_comment(report, tmp_path):
    """Other programs read the files as before."""
    main(["gate", report, "--junit", "gate.xml"])
    main(["html", report, "-o", "page.html", "--svg", "map.svg"])
    for name in ("gate.xml", "map.svg"):
        ElementTree.parse(tmp_path / name)


def test_what_is_no_file_is_not_replaced():
    with pytest.raises(UsageError, match="/dev/null: is no regular file, so it is not replaced; name another file"):
        write_output("/dev/null", "text")
