"""The shell of a page: one file that loads nothing, whose policy allows its own style and script and no others."""

from __future__ import annotations

import base64
import hashlib

from pytest_torchcompile.page.markup import Child, Html, tag, variables

__all__ = ["shell", "themed"]


def shell(title: str, style: Html, script: Html, *body: Child) -> str:
    """A whole page; hashes of style and script go into it."""
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_content_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title), tag("style", style),
    )  # fmt: skip
    whole = tag("html", head, tag("body", *body, tag("script", script)), lang="en", class_="no-js")
    return f"<!doctype html>\n{whole}\n"


def themed(*rules: str) -> Html:
    """A style sheet that begins with the colours of both themes."""
    light, dark = _colour_variables(dark=False), _colour_variables(dark=True)
    return Html("\n".join((
        f":root{{{light}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
        f":root[data-theme=dark]{{{dark}}}",
        *rules,
    )))  # fmt: skip


def _colour_variables(dark: bool) -> str:
    colours = [f"--{name}:{value}" for name, value in variables(dark).items()]
    return ";".join(["color-scheme:dark" if dark else "color-scheme:light", *colours])


def _content_policy(style: str, script: str) -> str:
    return (f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'")  # fmt: skip


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
