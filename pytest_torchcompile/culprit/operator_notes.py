"""Operator notes: every operator that runs, with its inputs and results, eagerly and in AOTAutograd's graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.places import place_of_stack

__all__ = ["NotingBackend", "OperatorNote", "OperatorTrace"]

_MOST_ELEMENTS: Final = 1 << 27
"""Of all tensors that are kept; from there on operators are noted no more."""


@dataclass(frozen=True)
class OperatorNote:
    """One operator that ran."""

    operator: Any
    """The ``OpOverload``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """As they were before it ran."""
    results: tuple[torch.Tensor, ...]
    place: str = ""
    """``file:line``, where it is known."""

    @property
    def name(self) -> str:
        """``aten.native_group_norm_backward.default``."""
        return str(self.operator)


class _Notes:
    """Notes, up to an amount of memory."""

    def __init__(self) -> None:
        self.notes: list[OperatorNote] = []
        self._room = _MOST_ELEMENTS

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: str = "") -> Any:
        """Run an operator and note it."""
        if self._room < 0 or _is_view(operator):
            return operator(*args, **kwargs)
        before_args, before_kwargs = pytree.tree_map_only(torch.Tensor, _kept_copy, (args, kwargs))
        result = operator(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        kept = tuple(_kept_copy(tensor) for tensor in tensors)
        self._room -= sum(tensor.numel() for tensor in (*kept, *_tensors_in((before_args, before_kwargs))))
        self.notes.append(OperatorNote(operator, before_args, before_kwargs, kept, place))
        return result


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Keeps strides where memory is dense: a fault may hang on them.
    return tensor.detach().clone()


def _is_view(operator: Any) -> bool:
    return bool(getattr(operator, "is_view", False))


class OperatorTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator below autograd while it is entered: what eager runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = _Notes()

    @property
    def notes(self) -> list[OperatorNote]:
        """In the order in which they ran."""
        return self._notes.notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._notes.run(func, args, kwargs or {})


class _NotingInterpreter(fx.Interpreter):
    """Runs a graph node by node."""

    def __init__(self, module: fx.GraphModule, notes: _Notes) -> None:
        super().__init__(module)
        self._notes = notes
        self._node: fx.Node | None = None

    def run_node(self, node: fx.Node) -> Any:
        self._node = node
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, OpOverload) or self._node is None:
            return super().call_function(target, args, kwargs)
        return self._notes.run(target, args, kwargs, place_of_stack(self._node.meta.get("stack_trace") or ""))


class NotingBackend:
    """AOTAutograd with nothing behind it, as the backend ``aot_eager``; every operator is noted with its line."""

    def __init__(self) -> None:
        """Make one for a compile.

        ``torch._dynamo.backends.common.aot_autograd``: torch 2.8 to 2.15. Raises InstrumentError where it is missing.
        """
        self._notes = _Notes()
        aot_autograd = private_name("torch._dynamo.backends.common", "aot_autograd", "makes graphs of the backward",
                                    "operators can't be compared")
        self._compile = aot_autograd(fw_compiler=self._noted, bw_compiler=self._noted)

    @property
    def notes(self) -> list[OperatorNote]:
        """In the order in which they ran."""
        return self._notes.notes

    def __call__(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        """Compile one graph, as Dynamo calls it."""
        with _cache_off():
            return self._compile(module, example_inputs)

    def _noted(self, module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(arguments: Any) -> Any:
            values = list(arguments)
            # Boxed: the caller wants its list emptied.
            arguments.clear()
            return _NotingInterpreter(module, self._notes).run(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextlib.contextmanager
def _cache_off() -> Iterator[None]:
    # A graph out of a cache would not be ours.
    import torch._functorch.config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False):
        yield
