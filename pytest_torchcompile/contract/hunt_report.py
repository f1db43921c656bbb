"""What a hunt leaves for people: a draft of an issue for each finding, and a summary on the terminal. No torch."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.contract.hunt import Hunt, HuntFinding
from pytest_torchcompile.errors import UsageError

__all__ = ["issue_draft", "outcome_elsewhere", "script_outcome", "summary", "torch_version_of"]

SCRIPT_SECONDS: Final = 300.0
"""After so long a script counts as hanging."""
_LAST_LINES: Final = 20
_NOT_TRIED: Final = "not tried: it has no such device"


def torch_version_of(python: str) -> str:
    """The version of torch that another Python has. Raises UsageError where it has none."""
    asked = "from importlib.metadata import version; print(version('torch'))"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False,
                              timeout=SCRIPT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--python {python}: it does not run ({type(error).__name__}); expected a Python that has "
                         "torch") from None
    if done.returncode:
        raise UsageError(f"--python {python}: it has no torch; install one there, or leave it out")
    return done.stdout.strip()


def script_outcome(path: Path, python: str = sys.executable) -> str:
    """What a script prints in a process of its own, and how that ends; empty if it shows nothing."""
    try:
        done = subprocess.run([python, "-W", "ignore", str(path)], capture_output=True, text=True, check=False,
                              timeout=SCRIPT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end in {SCRIPT_SECONDS:g} s"
    lines = (done.stdout + done.stderr).splitlines()[-_LAST_LINES:]
    if done.returncode < 0:
        name = str(-done.returncode)
        with suppress(ValueError):
            name = signal.Signals(-done.returncode).name
        lines.append(f"ended by signal {name}")
    elif done.returncode:
        lines.append(f"exit code {done.returncode}")
    return "\n".join(lines)


def outcome_elsewhere(path: Path, python: str, device: str) -> str:
    """:func:`script_outcome` of another Python; ``_NOT_TRIED`` where its torch can't put a tensor on the device."""
    if device != "cpu":
        asked = f"import torch; torch.ones(1, device={device!r}).item()"
        if subprocess.run([python, "-W", "ignore", "-c", asked], capture_output=True, check=False).returncode:
            return _NOT_TRIED
    return script_outcome(path, python)


def issue_draft(finding: HuntFinding, outcome: str, elsewhere: Mapping[str, str] | None = None,
                device: str = "") -> str:
    """Markdown for a tracker: what is wrong, the script, what it printed here, versions; a person reads it first.

    ``elsewhere``: by the torch of another Python what the script printed there. ``device``: its name, of a GPU.
    """
    record = finding.record
    stage = "No backend of torch alone has it."
    if record["stage"]:
        stage = f"It comes in with the backend `{record['stage']}`."
    elif record["kind"] in ("crash", "hang") and record["where"] == "eager":
        stage = "Eager itself shows it; nothing is compiled."
    said = outcome or "nothing: the script does not show it. What was found may need what ran before, or is ours."
    return "\n".join([
        f"# {record['kind']}: {finding.program}", "",
        f"{record['message']}", "",
        f"After `{record['code']}`. {stage} {_moved_text(record)}".rstrip(), "",
        "## Script", "", "```python", record["script"].rstrip(), "```", "",
        "## What it printed", "", "```", said, "```", "",
        "## Versions", "",
        f"torch {version('torch')}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        f"{', ' if device else ''}{device}", "",
        *_elsewhere_lines(elsewhere or {}),
        f"To look for it in the tracker: {record['search']}", "",
    ])  # fmt: skip


def _elsewhere_lines(elsewhere: Mapping[str, str]) -> Iterable[str]:
    """Which other versions show it, with the last line of each."""
    for torch_there, said in elsewhere.items():
        last = "it does not show it"
        if said == _NOT_TRIED:
            last = _NOT_TRIED
        elif said:
            last = f"it shows it too: `{said.splitlines()[-1]}`"
        yield f"- {torch_there}: {last}"
    if elsewhere:
        yield ""


def _moved_text(record: Mapping[str, Any]) -> str:
    """Which side moved; of an earlier version's record nothing."""
    if not record.get("moved"):
        return ""
    return f"The {record['moved']} side is further from what is expected."


def summary(hunt: Hunt) -> Iterable[str]:
    """The lines that a run ends with."""
    counts = hunt.progress.counts
    yield (f"{counts['programs']} programs, {counts['histories']} histories, {counts['calls']} calls compared, "
           f"{counts['refused']} refused by eager, {counts['mute']} that prove nothing, {counts['graphs']} graphs; "
           "all runs of this folder together")
    for finding in hunt.progress.findings:
        mark = "new" if finding in hunt.new else "   "
        record = finding.record
        yield (f"  {mark} {finding.number:3}  {record['kind']:8} {record['stage'] or record['where'] or '-':26} "
               f"{finding.program:10} {finding.times:3} times  {record['code']}")
    if hunt.progress.skipped:
        some = ", ".join(sorted(hunt.progress.skipped)[:8])
        yield (f"{len(hunt.progress.skipped)} programs could not be searched: {some}; {hunt.folder}/hunt.json has the "
               "reasons")
    if hunt.progress.failed:
        some = ", ".join(sorted(hunt.progress.failed)[:8])
        yield (f"{len(hunt.progress.failed)} programs made pytest-torchcompile itself fail, so nothing is known of "
               f"them: {some}; please report {hunt.folder}/hunt.json")
    found = len(hunt.progress.findings)
    if found:
        yield f"{found} causes, {len(hunt.new)} of them new; scripts and drafts are in {hunt.folder}"
    else:
        yield "nothing found"
