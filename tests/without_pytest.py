"""Run by `tox -e layer`, where pytest is not installed: the parts that are no plugin work without it."""

from importlib import import_module
from importlib.util import find_spec

if find_spec("pytest") is not None:
    raise SystemExit("pytest is installed: this proves nothing")

import torch

from pytest_torchcompile.instruments import observe

for name in ("instruments", "oracle", "matrix", "ranks", "runner", "zoo", "verdicts"):
    import_module(f"pytest_torchcompile.{name}")

with observe() as seen:
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
if not seen.graphs or not seen.graphs[0].runs:
    raise SystemExit("nothing was compiled")
print("without pytest: ok")
