"""Text of strangers made harmless: what a model or torch wrote is shown, and never obeyed by a terminal or a CI log.

A terminal obeys control characters. GitHub's runner obeys a line of a log that begins with ``::``, after any white
space, and ``##[...]`` anywhere in it; Azure's ``##vso[...]`` and TeamCity's ``##teamcity[...]`` are alike.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["harmless_text"]

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_LINE_END: Final = re.compile(r"\r\n?")
"""GitHub's runner takes a lone carriage return for the end of a line too."""
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters less tab and newline, and those that turn the direction of what is shown."""
_COMMAND: Final = re.compile(r"^(\s*):(?=:)", re.MULTILINE)
_COMMAND_IN_BRACKETS: Final = re.compile(r"##(?=\w*\[)")
_SUSPECT: Final = re.compile(f"{_CONTROL.pattern}|::|##")


def harmless_text(text: str) -> str:
    r"""The text without colours, with control characters as U+FFFD, and with no line that is a CI command.

    >>> harmless_text("\x1b[31mred\x1b[0m \x07")
    'red \ufffd'
    >>> harmless_text("  ::error::never shown as one")
    '  : :error::never shown as one'
    >>> harmless_text("a ##[group] of tests")
    'a ## [group] of tests'
    """
    # Most texts have nothing of the kind, and a report has hundreds of thousands.
    if _SUSPECT.search(text) is None:
        return text
    # Colours go first: what is left of them without their control character would be shown as text.
    text = _LINE_END.sub("\n", _COLOUR.sub("", text))
    text = _CONTROL.sub("\ufffd", text)
    text = _COMMAND.sub(r"\1: ", text)
    return _COMMAND_IN_BRACKETS.sub("## ", text)
