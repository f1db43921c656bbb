"""What the page says of generated code: how much of it changed since the baseline, and what differs."""

from __future__ import annotations

import re
from types import SimpleNamespace

from pytest_torchcompile.page.code_section import code_section
from pytest_torchcompile.report.code_changes import CodeStore


def run_of(**kernels):
    """A run of one cell with one graph, or with no code recorded."""
    sections = {}
    if kernels:
        code = [{"graph": "0/0 forward", "key": "g1", "kernels": [[*kernel] for kernel in kernels.items()]}]
        sections = {"compiles": {"code": code}}
    return SimpleNamespace(cells={"net": {"id": "net", "observation": {"sections": sections}}})


def test_nothing_changed():
    """One sentence, and no list."""
    section = code_section(run_of(add_0="k1", mul_1="k2"), run_of(add_0="k1", mul_1="k2"))
    assert "<p>0 of 2 kernels and 0 of 1 graph changed in 1 cell since the baseline.</p>" in section
    assert "<li>" not in section


def test_a_change_is_shown_with_its_difference(tmp_path):
    """Behind its title; what a model wrote into its code is shown as text."""
    old, new = CodeStore(tmp_path / "old"), CodeStore(tmp_path / "new")
    old.keep({"k1": "one\ntwo"})
    new.keep({"k9": "one\n<script>"})
    section = code_section(run_of(add_0="k9", mul_1="k2"), run_of(add_0="k1", mul_1="k2"), (old, new))
    assert "1 of 2 kernels and 0 of 1 graph changed" in section
    shown = r"<li><details><summary>(.*?)</summary><pre>(.*?)</pre></details></li>"
    ((title, difference),) = re.findall(shown, section, re.DOTALL)
    assert title == "changed kernel 0/0 forward: add_0, in 1 cell: net"
    assert difference.splitlines()[-2:] == ["-two", "+&lt;script&gt;"]
    without = code_section(run_of(add_0="k9", mul_1="k2"), run_of(add_0="k1", mul_1="k2"))
    assert "<li>changed kernel 0/0 forward: add_0, in 1 cell: net</li>" in without


def test_many_changes_are_cut():
    """The first hundred are named."""
    section = code_section(run_of(**{f"add_{n}": f"k{n}" for n in range(120)}), run_of(mul_0="x"))
    assert section.count("<li>") == 101
    assert "and 20 more; pytest-torchcompile code has all of them" in section


def test_where_nothing_can_be_said():
    """No baseline, or one that recorded no code."""
    assert code_section(run_of(add_0="k1"), None) is None
    assert code_section(run_of(add_0="k1"), run_of()) is None
