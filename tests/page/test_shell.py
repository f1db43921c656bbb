"""The shell of a page: its own policy lets in its style and its script, to the letter, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re

from pytest_torchcompile.page.markup import Html, tag
from pytest_torchcompile.page.shell import shell, themed


def policy_of(page: str) -> dict[str, str]:
    content = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = {}
    for rule in content.replace("&#x27;", "'").replace("&#39;", "'").split(";"):
        name, _, value = rule.strip().partition(" ")
        rules[name] = value
    return rules


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_has_the_hashes_of_what_stands_in_the_page():
    """Of the very text between the tags, for a browser hashes that."""
    page = shell("t", Html("p{color:red}"), Html("let a = '<b>';"), tag("p", "x"))
    rules = policy_of(page)
    assert rules["style-src"] == hash_of(re.search("<style>(.*)</style>", page)[1])
    assert rules["script-src"] == hash_of(re.search("<script>(.*)</script>", page)[1])
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_a_title_and_a_text_are_escaped():
    page = shell("</title><script>x", Html(""), Html(""), "<b>")
    assert "</title><script>x" not in page
    assert "<b>" not in page
    assert page.startswith("<!doctype html>\n<html")


def test_both_themes_have_the_same_colours_to_set():
    """A colour that one theme lacks would be the other's."""
    style = themed("p{margin:0}")
    light, by_system, by_choice = re.findall(r"\{([^{}]*color-scheme[^{}]*)\}", style)
    assert set(re.findall(r"--[\w-]+", light)) == set(re.findall(r"--[\w-]+", by_choice))
    assert by_system == by_choice
    assert light != by_choice
    assert style.endswith("p{margin:0}")
