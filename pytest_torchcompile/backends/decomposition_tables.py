"""Decomposition tables by name: which operators are written in terms of others before passes and compiler see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from pytest_torchcompile.backends import TABLES
from pytest_torchcompile.errors import InstrumentError, UsageError, nearest
from pytest_torchcompile.loading import kind_of, resolve

__all__ = ["Table", "decomposition_of", "decomposition_table", "needs_table", "refuse_unknown_table"]

Table: TypeAlias = "dict[Any, Callable[..., Any]]"
# What Inductor says of an operator that its own table would have taken apart (_inductor/lowering.py, make_fallback,
# torch 2.8 to 2.15), and of one that it does not know.
_MISSING: Final = ("both a fallback and a decomp for same op", "missing lowering")


def decomposition_table(choice: str | Mapping[Any, Callable[..., Any]] | None, root: Path | None = None) -> Table:
    """The table of a name, of ``module:table`` (a mapping, or a function that returns one), or the mapping itself.

    ``root``: the folder in which such a module is looked for first. Raises :class:`UsageError` for what is no table.
    """
    if choice is None or choice == "none":
        return {}
    if not isinstance(choice, str):
        return dict(choice)
    if choice in TABLES:
        return _table_of_torch(choice)
    refuse_unknown_table(choice, root)
    found = resolve(choice, root or Path.cwd(), "decompositions", Mapping)
    table = found if isinstance(found, Mapping) else found()
    if not isinstance(table, Mapping):
        raise UsageError(f"decompositions {choice!r} gave {kind_of(table)}; expected a mapping of operators, such as "
                         "torch.ops.aten.relu.default, to functions")
    return dict(table)


def refuse_unknown_table(choice: object, root: Path | None = None) -> None:
    """Raise :class:`UsageError` for what can be no table; of ``module:table`` the module is imported."""
    if choice is None or isinstance(choice, Mapping) or choice in TABLES:
        return
    if not isinstance(choice, str):
        raise UsageError(f"decompositions is {choice!r}; expected {', '.join(TABLES)}, module:table, or a mapping of "
                         "operators to functions")
    if ":" not in choice:
        raise UsageError(f"decompositions {choice!r} names no table; expected module:table, or "
                         f"{nearest(choice, TABLES)}")
    resolve(choice, root or Path.cwd(), "decompositions", Mapping)


def _table_of_torch(name: str) -> Table:
    """Torch's own tables.

    Private: ``torch._inductor.decomposition.select_decomp_table`` and
    ``torch._decomp._core_aten_decompositions_post_autograd`` (torch 2.8 to 2.15; 2.13 tried).
    """
    try:
        if name == "inductor":
            from torch._inductor.decomposition import select_decomp_table

            return dict(select_decomp_table())
        from torch._decomp import _core_aten_decompositions_post_autograd

        return dict(_core_aten_decompositions_post_autograd())
    except ImportError as error:
        raise InstrumentError(f"torch {torch.__version__} has no table of decompositions {name!r} where the toolkit "
                              f"looks for it ({error}); please report it with this version") from None


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """How torch writes one overload in terms of others; None where it does not.

    Private: ``torch._decomp.decomposition_table`` (torch 2.8 to 2.15; 2.13 tried).
    """
    try:
        from torch._decomp import decomposition_table as every_decomposition
    except ImportError:
        return None
    found: Callable[..., Any] | None = every_decomposition.get(operator)
    return found


def needs_table(error: BaseException, choice: object) -> UsageError | None:
    """One sentence with the fix, if that is why Inductor failed: it was given what its decompositions take apart."""
    text = str(error)
    if not any(sign in text for sign in _MISSING):
        return None
    line = next(line.strip() for line in text.splitlines() if any(sign in line for sign in _MISSING))
    operator = line.rpartition(": ")[2]
    if choice == "inductor":
        # The table was used before the passes: what it takes apart can only have come by one of them.
        return UsageError(f"Inductor cannot compile {operator} as it is, and a pass has put it in: its decompositions "
                          "take it apart before passes run; have the pass put in what they make of it")
    name = choice if isinstance(choice, str) else "a table of your own"
    return UsageError(f"Inductor cannot compile {operator} as it is: it takes it apart by its own decompositions, and "
                      f"here they are {name}; write `decompositions: inductor`, or `compiler: eager`")
