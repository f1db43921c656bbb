"""Whose code is it, and what is its name."""

from __future__ import annotations

import os
import sysconfig

import pytest

import pytest_torchcompile
from pytest_torchcompile.ledger.break_sites import code_owner, is_torch, read_code_name

STDLIB = sysconfig.get_path("stdlib")


@pytest.mark.parametrize(("path", "whose"), [
    ("/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", "torch"),
    ("/v/lib/python3.11/site-packages/functorch/einops.py", "torch"),
    ("/v/lib/python3.11/site-packages/triton/language/core.py", "torch"),
    ("/v/lib/python3.11/site-packages/transformers/models/x.py", "third_party"),
    ("/usr/lib/python3/dist-packages/theirs.py", "third_party"),
    ("/v/lib/python3.11/site-packages/theirs/torch/net.py", "third_party"),
    (f"{STDLIB}/logging/__init__.py", "python"), ("<frozen importlib._bootstrap>", "python"),
    ("/root/project/net.py", "mine"), ("/root/project/torch/net.py", "mine"), ("/tmp/x/test_net.py", "mine"),
    ("<string>", "mine"), ("<ipython-input-1>", "mine"),
])  # fmt: skip
def test_owner(path, whose):
    """Torch, installed, Python's, and all the rest, which is the user's."""
    assert code_owner(path, "/root/project") == whose


@pytest.mark.parametrize("file", ["run/runner.py", "ranks/serving.py", "ranks/zygote.py", "oracle/calls.py"])
def test_frames_that_run_a_cell_are_nobodys_callers(file):
    """A break was said to be called by them."""
    assert code_owner(os.path.join(os.path.dirname(pytest_torchcompile.__file__), file), "/root/project") == "ours"


def test_the_project_may_lie_below_pythons_own_folder():
    """A project inside an environment's folder is the user's, not Python's."""
    assert code_owner(f"{STDLIB}/project/net.py", f"{STDLIB}/project") == "mine"
    assert code_owner(os.path.join(os.getcwd(), "net.py")) == "mine"


def test_an_environment_inside_of_the_project_is_pythons():
    """As conda makes it; what lies beside it is the user's."""
    root = os.path.dirname(sysconfig.get_path("data"))
    assert code_owner(f"{STDLIB}/uuid.py", os.path.commonpath([root, STDLIB])) == "python"
    assert code_owner(f"{STDLIB}/uuid.py", "/") == "python"
    assert code_owner("/root/project/net.py", "/") == "mine"


def test_a_source_build_of_torch_is_torch():
    """It is not below site-packages."""
    assert is_torch("/src/pytorch/torch/_dynamo/eval_frame.py")
    assert not is_torch("/src/project/torch/net.py")


@pytest.mark.parametrize(("name", "readable_name", "line"), [
    ("forward", "forward", 0), ("Net.forward", "Net.forward", 0),
    ("torch_dynamo_resume_in_forward_at_17", "forward", 17),
    ("torch_dynamo_resume_in_<lambda>_at_3", "<lambda>", 3),
    ("test_a.<locals>.Net.forward", "Net.forward", 0),
    ("make.<locals>.torch_dynamo_resume_in_f_at_2", "f", 2),
])  # fmt: skip
def test_readable(name, readable_name, line):
    """The author's name, and where a resume function resumes."""
    assert read_code_name(name) == (readable_name, line)
