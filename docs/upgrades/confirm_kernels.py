"""Confirms changed kernels of real models with torch alone.

``python confirm_kernels.py write FILE MODEL ...``, by the Python of each environment, keeps the kernels that Inductor
generates for the first two batches. ``python confirm_kernels.py compare OLD NEW`` then tells of each kernel the lines
that came and went. Only models and batches come from the package; texts are those of ``run_and_get_code``.
"""

import difflib
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

KERNEL = re.compile(r"^(cpp_\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)'''\)", re.MULTILINE | re.DOTALL)
SHOWN = 4
"""Lines of each difference, as the page has them."""


def write(file: str, names: list[str]) -> None:
    """Compile the models, and keep ``{model: {"first cpp_...": [lines]}}``."""
    import torch
    from confirm_real import build
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    # As a cell has it, so that eager and compiled code draw the same numbers. With 2.13 it decides about kernels too.
    config.fallback_random = True
    kept: dict[str, dict[str, list[str]]] = {}
    for name in names:
        model, batches = build(name)
        torch._dynamo.reset()
        compiled, kept[name] = torch.compile(model), {}
        for when, batch in zip(("first", "second"), batches, strict=False):
            # Of itself it forgets what was compiled before, and the second size would be compiled as a first one is.
            with torch.no_grad(), patch.object(torch._dynamo, "reset"):
                _, codes = run_and_get_code(compiled, *batch.args, **batch.kwargs)
            for kernel, text in KERNEL.findall("\n".join(codes)):
                kept[name][f"{when} {kernel}"] = text.strip().splitlines()
        print(torch.__version__, name, len(kept[name]), "kernels")
    Path(file).write_text(json.dumps(kept))


def compare(old_file: str, new_file: str) -> None:
    """Print each kernel that is not the same, with the first lines that came and went."""
    old, new = (json.loads(Path(file).read_text()) for file in (old_file, new_file))
    for name in old:
        changed = 0
        # In their order: a kernel is called after its operators, which another version may call otherwise.
        for was, now in zip_longest(old[name].items(), new[name].items(), fillvalue=("none", [])):
            kernel = was[0] if was[0] == now[0] else f"{was[0]}, now {now[0]}"
            lines = difflib.unified_diff(was[1], now[1], lineterm="", n=0)
            differing: dict[str, None] = {}
            for line in lines:
                if line[:3] not in ("---", "+++") and line[:2] != "@@":
                    differing[f"{line[0]} {line[1:].strip()}"] = None
            if differing:
                changed += 1
                shown = " · ".join(list(differing)[:SHOWN])
                print(f"{name} {kernel}: {shown} and {max(0, len(differing) - SHOWN)} more lines")
        print(f"{name}: {changed} of {len(new[name])} kernels changed")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3:])
    else:
        compare(*sys.argv[2:])
