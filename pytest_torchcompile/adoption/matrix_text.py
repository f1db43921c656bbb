"""The matrix of an examined model, as the YAML text that `init` writes and that `--compile-model` runs.

Without a file: ``pytest --compile-model=module:Class`` expands to an ordinary matrix in memory. It has a name in place
of a file, ``model:module:Class`` or ``model:module:Class,module:function`` with inputs. The name is what reports, node
ids and commands to run again say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pytest_torchcompile.adoption.example_inputs import BATCH, LEFT_OUT, Examined, Request, examine_apart
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.matrix import Matrix, ModelEntry, find_root, parse_matrix
from pytest_torchcompile.plan.matrix_path import MODEL_PREFIX
from pytest_torchcompile.plan.targets import Targets
from pytest_torchcompile.quantity import first_names

__all__ = [
    "SCHEMA_FILE",
    "MatrixModel",
    "examine_target",
    "left_out_text",
    "matrix_in_memory",
    "matrix_text",
    "matrix_to_fill_in",
    "model_lines",
    "name_of_model",
    "text_of_model",
]

SCHEMA_FILE: Final = "matrix.schema.json"
"""Beside the matrix, for editors."""
_COLUMN: Final = 48
"""Where comments begin."""
_MOST_LEFT_OUT: Final = 8
"""Arguments that are named where more were left out."""

_HEAD: Final = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
#
# What torch.compile is tried on. Each model with each combination of the axes is a cell; each check judges it.
#   pytest --compile-matrix                        runs all cells
#   pytest --compile-matrix -m "compile_cell(backend='aot_eager')"      runs some
#   pytest-torchcompile cells                      prints the cells, without running any
#   pytest-torchcompile accept                     allows what the last run found, each with its reason, below `rules`
version: 1
"""
_BY_NAME: Final = ", ".join(sorted(name for name, record in CHECKS.items() if record.on_request))
_TAIL: Final = f"""\
# Limits and known failures. `pytest-torchcompile accept` writes here what a first run needs; by hand:
# rules:
#   - limits: {{graph_breaks: 1}}
#     when: {{model: NAME}}
#     reason: a branch on a tensor's value
#   - xfail: {{model: NAME, backend: inductor}}
#     reason: known
#     issue: pytorch/pytorch#1

# checks: [compiles, equivalence]               # all by default, but for those that run only if named:
#   {_BY_NAME}
"""


@dataclass(frozen=True)
class MatrixModel:
    """What a matrix says of one model."""

    name: str
    factory: str
    inputs: str
    """YAML: ``module:function``, or a mapping of it and what it is called with."""
    dims: dict[str, list[int]]
    phase: str

    @classmethod
    def of(cls, examined: Examined) -> MatrixModel:
        """The model as it was examined; guessed inputs are in the matrix itself."""
        inputs = examined.inputs
        if not inputs:
            # As JSON, which is YAML too: texts with brackets and colons in them need quotes.
            texts = [f"{tensor.name}: {json.dumps(str(tensor))}" for tensor in examined.tensors]
            texts += [f"{name}: {LEFT_OUT}" for name in examined.left_out]
            inputs = f"{{{', '.join([f'call: {json.dumps(BATCH)}', *texts])}}}"
        return cls(examined.name, examined.factory, inputs, examined.dims, examined.phase)


def matrix_text(model: MatrixModel) -> str:
    """The whole file."""
    phases = {
        "training": "train(), with a backward pass; or inference: eval(), without",
        "inference": "eval(): no backward pass of it works; training has one",
    }
    lines = [
        _HEAD, "models:", *model_lines(model), "",
        "axes:",
        _with_comment("  backend: [eager, aot_eager, inductor]", "what captures, what differentiates, what makes code"),
        _with_comment("  # mode: [default, max-autotune]", "for inductor"),
        _with_comment("  # dynamic: [auto, dynamic]", "auto: static at first, dynamic from the second size on"),
        _with_comment(f"  phase: [{model.phase}]", phases[model.phase]),
        _with_comment("  # width: [32, 64]", "an axis of your own: a keyword of the factory"),
        "",
        _TAIL,
    ]
    return "\n".join(lines)


def model_lines(model: MatrixModel) -> Iterator[str]:
    """The entry below the key ``models``."""
    yield f"  {model.name}:"
    yield _with_comment(f"    factory: {model.factory}", "returns the module; called with axes of your own")
    yield _with_comment(f"    inputs: {model.inputs}", "returns one batch; called with the sizes below")
    yield _with_comment("    # loss: module:function", "called with output and batch; else every output counts")
    if not model.dims:
        return
    yield _with_comment("    dims:", "the k-th batch has the k-th size of each")
    for name, sizes in model.dims.items():
        text = str(sizes[0])
        if len(sizes) > 1:
            text = f"{{choices: [{', '.join(map(str, sizes))}]}}"
        yield f"      {name}: {text}"


def matrix_to_fill_in() -> str:
    """A file whose model is still to be named."""
    blank = MatrixModel("my_model", "my_package.models:MyModel", "my_package.inputs:batch", {"B": [4, 6, 10]},
                        "training")
    place = "models:\n  # Fill in: your class, or a function without arguments, and what makes a batch for it.\n"
    return matrix_text(blank).replace("models:\n", place, 1)


def _with_comment(line: str, comment: str) -> str:
    """The line with a comment, in the column of all comments where that can be."""
    return f"{line:<{_COLUMN - 1}} # {comment}"


# ------------------------------------------------------------------------------------------------------- without a file
def name_of_model(model: str, inputs: str) -> str:
    """The name of the matrix of a model."""
    return MODEL_PREFIX + ",".join(filter(None, (model, inputs)))


def text_of_model(name: str, base: Path) -> str:
    """The matrix of that name as YAML: the model is made and tried in a process of its own.

    ``base``: the folder in which it was asked for. Raises :class:`UsageError`, in one sentence, for a model that is not
    there, can't be made or called, or whose inputs can't be guessed.
    """
    model, _, inputs = name.removeprefix(MODEL_PREFIX).partition(",")
    request = Request(str(_root_of(base)), model, inputs, where="--compile-model", where_inputs="--compile-inputs",
                      factory_option="by --compile-model", inputs_option="--compile-inputs module:function")
    return matrix_text(MatrixModel.of(examine_target(request)))


def examine_target(request: Request) -> Examined:
    """Examine a model, after what is wrong with the names was told from the source alone."""
    refuse_wrong_names(request)
    return examine_apart(request)


def refuse_wrong_names(request: Request) -> None:
    """Raise UsageError for a model or inputs that the source does not have; nothing is imported."""
    targets = Targets(Path(request.root))
    for target, where in ((request.factory, request.where), (request.inputs, request.where_inputs)):
        mistake = targets.mistake(target) if target else None
        if mistake:
            raise UsageError(f"{where}: {mistake}{_hint_of_src(mistake, request.root)}")


def _hint_of_src(mistake: str, root: str) -> str:
    """Where packages lie in a folder of their own, and nobody has installed them."""
    if "no module" in mistake and Path(root, "src").is_dir():
        return "; PYTHONPATH=src finds modules in src"
    return ""


def matrix_in_memory(name: str, text: str, base: Path) -> Matrix:
    """The matrix of that name, from the text of :func:`text_of_model`."""
    root = _root_of(base)
    matrix = parse_matrix(text.encode(), root / "model", root, shown=name)
    return replace(matrix, notes=(*matrix.notes, *map(_note_of_inputs, matrix.models.values())))


def _note_of_inputs(model: ModelEntry) -> str:
    """What the model is called with, in one line: a guess is to be seen."""
    words = [f"inputs by {model.inputs}"]
    guessed = model.arguments_of("inputs")
    given = [f"{name}: {text}" for name, text in guessed.items() if text != LEFT_OUT]
    if given:
        words = [f"inputs guessed, {', '.join(given)}"]
    for name, dim in model.dims.items():
        words.append(f"{name} = {', '.join(map(str, dim.listed or (dim.size,)))}")
    if left_out := [name for name, text in guessed.items() if text == LEFT_OUT]:
        words.append(left_out_text(left_out))
    return f"{model.name}: {'; '.join(words)}"


def left_out_text(names: Sequence[str]) -> str:
    """Which optional arguments nobody gave, so that a green cell says nothing of them."""
    defaults = "its default" if len(names) == 1 else "their defaults"
    return f"left at {defaults}, so not tried: {first_names(names, _MOST_LEFT_OUT)}"


def _root_of(base: Path) -> Path:
    """Where modules are looked up: as for a matrix in this folder's own folder ``matrix``."""
    return find_root(base.absolute() / "matrix" / "default.yaml")
