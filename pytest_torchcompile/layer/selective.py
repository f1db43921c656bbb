"""Which modules of a model are compiled, and which inside of them are not, by name patterns."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.errors import nearest
from pytest_torchcompile.layer.compiled_modules import Unregistered
from pytest_torchcompile.layer.config import CompileConfig

__all__ = ["Selection", "frame_of", "inner_blocks", "is_inlined"]


class Selection:
    """What ``allowlist`` and ``blocklist`` mean for one model.

    A pattern is a glob of qualified names (as in ``named_modules``, the model itself is ``''``) or of class names;
    ``*`` matches dots as well. Of allowed modules that contain each other the outermost is compiled; of one that has
    no ``forward`` (a ModuleList) its children. Raises :class:`ValueError` for a pattern that matches nothing, with
    the nearest name, and where nothing is left to compile.
    """

    def __init__(
        self,
        model: nn.Module,
        allowlist: Iterable[str] = (),
        blocklist: Iterable[str] = (),
        recursive: bool = True,
    ) -> None:
        """``recursive``: what a blocked module calls is blocked too."""
        self.model = model
        self.recursive = recursive
        self._names: dict[int, list[str]] = {}
        # A module in two places has two names, and a pattern may know either.
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._modules = {id(module): module for module in model.modules()}
        blocked = self._matching("blocklist", blocklist)
        allowed = {id(model)}
        if tuple(allowlist):
            allowed = self._matching("allowlist", allowlist)
        allowed -= self._covered(blocked)
        if not allowed:
            raise ValueError("blocklist leaves nothing to compile: it matches the model, or all of allowlist")
        self.whole = id(model) in allowed
        """The model itself is compiled."""
        self.compiled: list[nn.Module] = []
        """What is compiled instead: parts of the model."""
        inside = set(self._modules)
        if not self.whole:
            self.compiled = self._outermost(allowed)
            # What lies outside of compiled parts runs eagerly anyway.
            inside = self._inside_all(map(id, self.compiled))
        self.blocked = self._blocked_parts(blocked & inside)

    @classmethod
    def of(cls, model: nn.Module, config: CompileConfig) -> Selection:
        """What a config selects."""
        return cls(model, config.allowlist, config.blocklist, config.blocklist_recursive)

    def put(self, compile_part: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], None]:
        """Make blocked parts invisible to torch.compile, and compile the others in place; return what undoes both.

        A blocked part gets a subclass of its class with a disabled ``forward``, as ``fully_shard`` and
        ``parametrize`` do; a compiled one a ``_compiled_call_impl``, as ``nn.Module.compile`` does (torch 2.8 to 2.15),
        which neither a copy nor a pickle of the module keeps. The names and values of its state stay what they are.
        """
        undoing = [_block(part, self.recursive) for part in self.blocked]
        undoing += [_replace_call(part, compile_part(part)) for part in self.compiled]

        def undo() -> None:
            # Emptied, so that a second call undoes nothing twice.
            while undoing:
                undoing.pop()()

        return undo

    def _matching(self, field: str, patterns: Iterable[str]) -> set[int]:
        """The modules that any of the patterns matches, by name or by class."""
        matching: set[int] = set()
        for pattern in patterns:
            mine = {key for key in self._modules if self._matches(key, pattern)}
            if not mine:
                known = set().union(*self._names.values(), map(_class_name, self._modules.values())) - {""}
                raise ValueError(f"{field}: {pattern!r} matches no module of {type(self.model).__name__}, by name or "
                                 f"by class; {nearest(pattern, known)}")
            matching |= mine
        return matching

    def _matches(self, key: int, pattern: str) -> bool:
        names = (*self._names[key], _class_name(self._modules[key]))
        return any(fnmatchcase(name, pattern) for name in names)

    def _inside_all(self, keys: Iterable[int]) -> set[int]:
        """These modules and all that is inside of them."""
        inside: set[int] = set()
        for key in keys:
            inside.update(map(id, self._modules[key].modules()))
        return inside

    def _covered(self, blocked: set[int]) -> set[int]:
        """The modules that are not compiled because of the blocked ones."""
        if not self.recursive:
            return blocked
        return self._inside_all(blocked)

    def _blocked_parts(self, blocked: set[int]) -> list[nn.Module]:
        """The modules whose ``forward`` has to be made invisible."""
        if self.recursive:
            return self._outermost(blocked)
        # One that has no forward and one of its children may both be blocked.
        return list(dict.fromkeys(self._callable_parts_of(blocked)))

    def _outermost(self, chosen: set[int]) -> list[nn.Module]:
        inner: set[int] = set()
        for key in chosen:
            inner |= self._inside_all([key]) - {key}
        return self._callable_parts_of(chosen - inner)

    def _callable_parts_of(self, keys: set[int]) -> list[nn.Module]:
        """In the model's own order."""
        parts: list[nn.Module] = []
        for key, module in self._modules.items():
            if key in keys:
                parts += _callable_parts(module)
        return parts


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module, or where nobody calls it, those of its children."""
    if type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [module]
    parts: list[nn.Module] = []
    for child in module.children():
        parts += _callable_parts(child)
    return parts


def frame_of(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, a bound method that calls ``module.forward``, in a frame that Dynamo takes.

    Dynamo skips files of torch, so that ``nn.Sequential().compile()`` compiles nothing; ``torch.compile`` puts such
    modules into a frame of ``torch._dynamo.external_utils.wrap_inline`` (``OptimizedModule._initialize``, torch 2.8
    to 2.15), and so does this. ``OptimizedModule`` itself would leave an attribute of its own in the model.
    """
    from torch._dynamo import external_utils

    if is_inlined(module):
        return external_utils.wrap_inline(call)
    return call


def is_inlined(module: Any) -> bool:
    """Whether :func:`frame_of` lets Dynamo trace the module's own call, its hooks among it; else only ``forward``."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(module.forward) or getattr(module, "_is_fsdp_managed_module", False))


def _replace_call(part: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    own = vars(part)
    before = own.get(_CALL)
    own[_CALL] = call

    def undo() -> None:
        # Marked, so that a call that was put on top of it does not put it back later.
        call._dropped = True  # type: ignore[attr-defined]
        if own.get(_CALL) is call:
            del own[_CALL]
            if before is not None and not hasattr(before, "_dropped"):
                own[_CALL] = before

    return undo


def inner_blocks(model: nn.Module) -> dict[nn.Module, str]:
    """The direct children of the model's outermost ``nn.ModuleList``\\ s, each once, with their names.

    These are what is compiled, checkpointed or sharded one by one.
    """
    names: dict[nn.Module, str] = {}
    for name, block in _blocks_inside(model, ""):
        # A block that stands in two places has the name of the first.
        names.setdefault(block, name)
    return names


def _blocks_inside(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for inner, child in module.named_children():
        path = f"{name}.{inner}" if name else inner
        if isinstance(module, nn.ModuleList):
            yield path, child
        else:
            yield from _blocks_inside(child, path)


_CALL: Final = "_compiled_call_impl"
_COUNT: Final = "_torchcompile_blocks"
"""In a blocked class: how many compiled models want it blocked (copies of a model may share parts)."""


def _block(part: nn.Module, recursive: bool) -> Callable[[], None]:
    if _COUNT not in vars(type(part)):
        part.__class__ = _blocked_class(type(part), recursive)
    blocked: Any = type(part)
    setattr(blocked, _COUNT, getattr(blocked, _COUNT) + 1)

    def undo() -> None:
        setattr(blocked, _COUNT, getattr(blocked, _COUNT) - 1)
        # Else somebody has put a subclass on top.
        if not getattr(blocked, _COUNT) and type(part) is blocked:
            part.__class__ = blocked.__mro__[2]

    return undo


def _blocked_class(before: Any, recursive: bool) -> Any:
    def reduced(self: Any, protocol: Any) -> Any:
        made = before.__reduce_ex__(self, protocol)
        # How Python makes an object without calling it, whatever the protocol.
        if made[1][:1] == (type(self),):
            return (copyreg._reconstructor, (before, object, None), *made[2:])  # type: ignore[attr-defined]
        return made

    body = {
        "forward": _disabled_forward(before.forward, recursive), "__module__": before.__module__,
        "__qualname__": before.__qualname__, "__doc__": before.__doc__, "__reduce_ex__": reduced, _COUNT: 0,
    }  # fmt: skip
    return type(before)(before.__name__, (Unregistered, before), body)


def _disabled_forward(forward: Any, recursive: bool) -> Any:
    disable: Any = torch.compiler.disable
    return disable(forward, recursive=recursive, reason="it is in the blocklist")
