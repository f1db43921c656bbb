"""Files of an explanation: every graph, kernel and guard as a file of its own, beside the page and a manifest."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.explanation_records import KernelCall, readable_bytes, readable_shape
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.graph_texts import STAGES, Stage
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.report.safe_output import FOLDER, make_folder

__all__ = ["EXPLAINED", "folder_of", "write_files"]

EXPLAINED: Final = f"{FOLDER}/explain"
"""Where the folder of each explained model is."""
_MOST_NODES: Final = 60
"""A graph of more nodes is no picture that anybody reads, so none is written."""
_MANIFEST: Final = "manifest.json"


def folder_of(name: str) -> Path:
    """The folder of a cell or a model.

    >>> folder_of("net:Model").as_posix()
    '.compile-matrix/explain/net_Model'
    """
    return Path(EXPLAINED) / re.sub(r"[^\w.=+@*-]", "_", name)


def write_files(explained: Explanation, folder: Path) -> list[Path]:
    """Write everything into ``folder``, in place of what an earlier explanation left there; returns the files."""
    # Only what a manifest of ours stands beside is removed.
    if (folder / _MANIFEST).is_file():
        shutil.rmtree(folder)
    make_folder(Path(FOLDER))
    written = []
    what: dict[str, str] = {}
    for name, meaning, text in _contents(explained):
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
    manifest = {"name": explained.name, "torch": explained.torch_version, "settings": explained.settings, "files": what}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return [*written, folder / _MANIFEST]


def _contents(explained: Explanation) -> Iterator[tuple[str, str, str]]:
    """Each file's name, what it is, and its text."""
    yield "index.html", "all stages side by side, in a browser", explanation_page(explained)
    yield "explanation.txt", "what the terminal shows", "\n".join(explanation_lines(explained)) + "\n"
    yield "explanation.json", "everything, for programs", json.dumps(explained.to_dict(), indent=1) + "\n"
    for stage in explained.stages:
        name = f"graphs/{_safe(stage.compile_id)}-{stage.stage}-{stage.graph}"
        yield f"{name}.py", STAGES[stage.stage], stage.text
        if stage.nodes and len(stage.nodes) <= _MOST_NODES:
            yield f"{name}.dot", f"{stage.stage} as a graph for Graphviz", _dot_text(stage)
    for number, kernel in enumerate(explained.kernels):
        if kernel.source:
            suffix = "cpp" if 'extern "C"' in kernel.source else "py"
            yield f"kernels/{number:03}-{kernel.name[:80]}.{suffix}", "a generated kernel", _kernel_text(kernel, suffix)
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


def _dot_text(stage: Stage) -> str:
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for node in stage.nodes:
        label = f"{node.name}\\n{node.target}\\n{node.type}".replace('"', "'")
        lines.append(f'  "{node.name}" [label="{label}"]')
        lines += [f'  "{given}" -> "{node.name}"' for given in node.inputs]
    return "\n".join([*lines, "}", ""])
