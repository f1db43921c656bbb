"""Culprit: what is told of it, and the issue draft. No torch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_torchcompile.culprit.culprit_record import Culprit, culprit_text, issue_text

FOUND = Culprit("inductor", sign="numbers", subsystem="lowerings", number=3, step="relu", operator="aten.relu.default",
                place="models.py:41", left=("relu",), places=("models.py:41",), size=43, script="import torch\n",
                torch="2.13.0")


def test_a_lowering_is_told_with_its_line():
    assert culprit_text(FOUND) == (
        "operator: aten.relu.default at models.py:41: Inductor's lowering number 3 (relu)\n"
        "smallest graph: 1 of 43 operators: relu")


@pytest.mark.parametrize(("subsystem", "words"), [
    ("post_grad_passes", "Inductor's passes after autograd: number 3 (pass_pattern_1)"),
    ("joint_graph_passes", "Inductor's passes over the joint graph: number 3"),
    ("pre_grad_passes", "Inductor's passes before autograd: number 3"),
    ("inductor_max_fusion_size", "Inductor's fusion (right with max_fusion_size = 1)"),
    ("inductor_cpp.simdlen", "Inductor's vectorised code (right with cpp.simdlen = 0)"),
    ("inductor_emulate_precision_casts", "what torch's setting emulate_precision_casts changes (right without it)"),
    ("decomposition", "the decomposition number 3"),
])
def test_every_part_has_words(subsystem, words):
    told = Culprit("inductor", subsystem=subsystem, number=3, step="pass_pattern_1", left=("neg", "exp"),
                   places=("models.py:7",))
    assert culprit_text(told).startswith(f"operator: neg, exp at models.py:7: {words}")


def test_an_operator_that_is_wrong_by_itself():
    told = Culprit("aot_eager", operator="aten.native_group_norm_backward.default", place="models.py:41",
                   noise="8660000.0", own_fault=True, remark="mixed memory formats")
    assert culprit_text(told) == (
        "operator: aten.native_group_norm_backward.default at models.py:41, 8.66e+06 times the noise, wrong on its own "
        "inputs (mixed memory formats)")


def test_no_answer_is_one_sentence_and_accuses_nobody():
    told = Culprit("inductor", why_not="the time was over")
    assert culprit_text(told) == "operator: not found: the time was over"
    assert issue_text(told) == ""


def test_a_record_survives_json_and_newer_keys():
    plain = json.loads(json.dumps(FOUND.to_dict())) | {"of_a_newer_version": 1}
    assert Culprit.from_dict(plain) == FOUND


def test_an_issue_draft_has_script_part_and_search_words():
    text = issue_text(FOUND, "collected")
    assert text.startswith("# [inductor] wrong result: aten.relu.default\n")
    assert "```python\nimport torch\n```" in text
    assert "`torch._inductor.compiler_bisector` blames Inductor's lowering number 3 (relu)." in text
    assert "`inductor wrong result relu`" in text
    assert text.rstrip().endswith("collected")


def test_an_issue_says_what_came_of_the_script_by_itself():
    shown = issue_text(replace(FOUND, shown="AssertionError: Tensor-likes are not close!"))
    assert "it ends with:\n\n```text\nAssertionError: Tensor-likes are not close!\n```\n" in shown
    agrees = replace(FOUND, why_not_alone="eager and compiled agree there")
    assert "**Before you file it:** it was not shown in a process of its own: eager and compiled agree there." in (
        issue_text(agrees))
    assert culprit_text(agrees).endswith(
        "script: not shown in a process of its own: eager and compiled agree there")
    assert issue_text(replace(FOUND, needs_more="ModuleNotFoundError: No module named 'models'")) == ""
