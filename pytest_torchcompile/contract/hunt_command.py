"""The command ``pytest-torchcompile hunt``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_torchcompile.contract.hunt import Hunt
from pytest_torchcompile.contract.hunt_report import (
    issue_draft,
    outcome_elsewhere,
    script_outcome,
    summary,
    torch_version_of,
)
from pytest_torchcompile.errors import OWN_FAILURE, UsageError

__all__ = ["run_command"]


def run_command(given: argparse.Namespace) -> int:
    """Hunt; returns 1 if this run found a cause that the folder did not have, 70 if we failed ourselves, else 0."""
    if given.seconds <= 0:
        raise UsageError(f"--seconds {given.seconds:g}: expected more than 0")
    if given.seed < 0:
        raise UsageError(f"--seed {given.seed}: expected 0 or more")
    device_name = _device_name(given.device)
    others = {path: torch_version_of(path) for path in given.python}
    hunt = Hunt(Path(given.output), given.backend, given.seed, given.seconds, _tell, given.device)
    try:
        hunt.run()
    except KeyboardInterrupt:
        _tell("interrupted; the same command goes on from here")
    for finding in hunt.new:
        script = hunt.folder / f"finding-{finding.number:03}.py"
        elsewhere = {}
        for path, version in others.items():
            elsewhere[f"torch {version} of {path}"] = outcome_elsewhere(script, path, given.device)
        draft = issue_draft(finding, script_outcome(script), elsewhere, device_name)
        script.with_suffix(".md").write_text(draft, encoding="utf-8")
    for line in summary(hunt):
        _tell(line)
    if hunt.new:
        return 1
    return OWN_FAILURE if hunt.failed else 0


def _device_name(device: str) -> str:
    """What a draft calls the device: empty for the CPU.

    Raises UsageError for one that is not here: every program would be left out there, one after the other.
    """
    if device == "cpu":
        return ""
    # Here, so that a hunt on the CPU starts without it.
    import torch

    try:
        torch.ones(1, device=device).item()
    # Each kind of device that torch lacks raises another one.
    except Exception as error:
        raise UsageError(f"--device {device}: torch can't put a tensor there ({str(error).splitlines()[0]}); expected "
                         "cpu, or cuda on a machine with a GPU") from None
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return device


def _tell(line: str) -> None:
    print(line, flush=True)
