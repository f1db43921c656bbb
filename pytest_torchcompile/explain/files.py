"""Files of an explanation: every graph, kernel and guard as a file of its own, beside the page and a manifest."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.cell import file_word
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.graph_drawing import MOST_DRAWN, dot_text, export_text, svg_text
from pytest_torchcompile.explain.graph_texts import STAGES
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.lowering.kernel_records import KernelCall, readable_bytes, readable_shape
from pytest_torchcompile.report.safe_output import FOLDER, make_folder

if TYPE_CHECKING:
    from pytest_torchcompile.explain.roofline import Roofline

__all__ = ["EXPLAINED", "folder_of", "write_files"]

EXPLAINED: Final = f"{FOLDER}/explain"
"""Where the folder of each explained model is."""
_MANIFEST: Final = "manifest.json"


def folder_of(name: str) -> Path:
    """The folder of a cell or a model.

    >>> folder_of("net:Model").as_posix()
    '.compile-matrix/explain/net_Model'
    """
    return Path(EXPLAINED) / file_word(name)


def write_files(
    explained: Explanation, folder: Path, trace: Path | None = None, roofline: Roofline | None = None
) -> list[Path]:
    """Write everything into ``folder``, in place of what an earlier explanation left there; returns the files.

    :param trace: torch's structured trace, which is copied under the name of what was explained.
    :param roofline: of its kernels, for a file and a section of the page.
    """
    # Only what a manifest of ours stands beside is removed.
    if (folder / _MANIFEST).is_file():
        shutil.rmtree(folder)
    make_folder(Path(FOLDER))
    written = []
    what: dict[str, str] = {}
    for name, meaning, text in _contents(explained, roofline):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
        what[name] = meaning
    # Torch writes the tensors of these.
    from pytest_torchcompile.explain.runnable import write_runnables

    runnables = write_runnables(explained, folder)
    what |= runnables
    written += [folder / name for name in runnables]
    if trace is not None and trace.is_file():
        name = f"{file_word(explained.name)}.trace.log"
        shutil.copyfile(trace, folder / name)
        what[name] = "torch's structured trace, for tlparse"
        written.append(folder / name)
    manifest = {"name": explained.name, "torch": explained.torch_version, "settings": explained.settings, "files": what}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return [*written, folder / _MANIFEST]


def _contents(explained: Explanation, roofline: Roofline | None) -> Iterator[tuple[str, str, str]]:
    """Each file's name, what it is, and its text."""
    yield "index.html", "all stages side by side, in a browser", explanation_page(explained, roofline)
    if roofline is not None:
        yield "roofline.svg", "kernels below the machine's roof", str(roofline.figure())
        text = json.dumps(roofline.to_dict(), indent=1) + "\n"
        yield "roofline.json", "each kernel's work, least time and measured time", text
    yield "explanation.txt", "what the terminal shows", "\n".join(explanation_lines(explained)) + "\n"
    yield "explanation.json", "everything, for programs", json.dumps(explained.to_dict(), indent=1) + "\n"
    for stage in explained.stages:
        name = f"graphs/{_safe(stage.compile_id)}-{stage.stage}-{stage.graph}"
        yield f"{name}.py", STAGES[stage.stage], stage.text
        if not stage.nodes:
            continue
        yield f"{name}.dot", f"{stage.stage} as a graph for Graphviz", dot_text(stage)
        if len(stage.nodes) <= MOST_DRAWN:
            yield f"{name}.svg", f"{stage.stage} as a picture", svg_text(stage)
        if stage.stage == "forward":
            dynamo = explained.stages_of(stage.compile_id, "dynamo")
            text = export_text(stage, dynamo[0] if dynamo else None)
            yield f"{name}.export.txt", f"{stage.stage} as torch.export prints a program", text
    for number, kernel in enumerate(explained.kernels):
        if kernel.source:
            suffix = "cpp" if 'extern "C"' in kernel.source else "py"
            yield f"kernels/{number:03}-{kernel.name[:80]}.{suffix}", "a generated kernel", _kernel_text(kernel, suffix)
    for change in explained.passes:
        yield f"passes/{change.stem}.before.py", "a graph before a pass", change.before
        yield f"passes/{change.stem}.after.py", "the same after it", change.after
        yield f"passes/{change.stem}.diff", "what the pass changed", change.diff
    lines = []
    for guard in explained.guards:
        lines.append("\t".join((guard.kind, guard.source, guard.text, guard.why or guard.broken_by)))
    yield "guards.tsv", "kind, what is guarded, the guard, and what would break it", "\n".join(lines) + "\n"
    for number, bytecode in enumerate(explained.bytecode):
        text = f"{bytecode.function} before Dynamo\n\n{bytecode.before}\nafter Dynamo\n\n{bytecode.after}"
        yield f"bytecode/{number}.txt", f"bytecode of {bytecode.function}", text


def _safe(compile_id: str) -> str:
    return re.sub(r"\W", "_", compile_id)


def _kernel_text(kernel: KernelCall, suffix: str) -> str:
    """The code below a comment that says what it computes and touches."""
    mark = "//" if suffix == "cpp" else "#"
    lines = [f"{kernel.name}: {kernel.kind}, {kernel.stage} of compile {kernel.compile_id}",
             f"computes {', '.join(operator.node for operator in kernel.operators) or 'copies'}"]
    for word, tensors in (("reads", kernel.reads), ("writes", kernel.writes)):
        for tensor in tensors:
            shape = readable_shape(tensor.shape, tensor.dtype)
            lines.append(f"{word} {tensor.name} {shape} {readable_bytes(tensor.bytes)}")
    for operator in kernel.kept_inside:
        lines.append(f"keeps {operator.node} inside, {readable_bytes(operator.bytes)}")
    lines += [f"from {place}" for place in kernel.places]
    return "\n".join(f"{mark} {line}" for line in lines) + f"\n{kernel.source}\n"
