"""Which modules of a model are compiled, and which inside of them are not, by name patterns."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.errors import nearest
from pytest_torchcompile.layer.config import CompileConfig

__all__ = ["Selection", "Unregistered", "inner_blocks"]


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
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._modules = {id(module): module for module in model.modules()}
        blocked = self._matching("blocklist", blocklist)
        allowed = self._matching("allowlist", allowlist) if tuple(allowlist) else {id(model)}
        covered = self._covered(blocked)
        if allowed & covered:
            allowed -= covered
            if not allowed:
                raise ValueError("blocklist leaves nothing to compile: it matches the model, or all of allowlist")
        self.whole = id(model) in allowed
        """The model itself is compiled."""
        self.compiled = [] if self.whole else self._outermost(allowed)
        """What is compiled instead: parts of the model."""
        within = [model] if self.whole else self.compiled
        self.blocked = self._blocked_parts(blocked & {i for part in within for i in self._inside(id(part))})

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
            while undoing:
                undoing.pop()()

        return undo

    def _matching(self, field: str, patterns: Iterable[str]) -> set[int]:
        found: set[int] = set()
        for pattern in patterns:
            mine = {i for i, module in self._modules.items()
                    if any(fnmatchcase(name, pattern) for name in (*self._names[i], type(module).__name__))}
            if not mine:
                known = {name for names in self._names.values() for name in names if name}
                known |= {type(module).__name__ for module in self._modules.values()}
                raise ValueError(f"{field}: {pattern!r} matches no module of {type(self.model).__name__}, by name or "
                                 f"by class; {nearest(pattern, known)}")
            found |= mine
        return found

    def _inside(self, module: int) -> set[int]:
        return {id(part) for part in self._modules[module].modules()}

    def _covered(self, blocked: set[int]) -> set[int]:
        """The modules that are not compiled because of the blocked ones."""
        if not self.recursive:
            return blocked
        return {i for module in blocked for i in self._inside(module)}

    def _blocked_parts(self, blocked: set[int]) -> list[nn.Module]:
        """The modules whose ``forward`` has to be made invisible."""
        if self.recursive:
            return self._outermost(blocked)
        parts = [part for i, module in self._modules.items() if i in blocked for part in _callable_parts(module)]
        return list(dict.fromkeys(parts))

    def _outermost(self, chosen: set[int]) -> list[nn.Module]:
        inner = {i for module in chosen for i in self._inside(module) if i != module}
        outer = [module for i, module in self._modules.items() if i in chosen - inner]
        return [part for module in outer for part in _callable_parts(module)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for child in module.children() for part in _callable_parts(child)]
    return [module]


def _replace_call(part: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    own = vars(part)
    before = own.get(_CALL)
    own[_CALL] = call

    def undo() -> None:
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
        part.__class__ = _blocked(type(part), recursive)
    blocked: Any = type(part)
    setattr(blocked, _COUNT, getattr(blocked, _COUNT) + 1)

    def undo() -> None:
        setattr(blocked, _COUNT, getattr(blocked, _COUNT) - 1)
        if not getattr(blocked, _COUNT) and type(part) is blocked:  # else somebody has put a subclass on top
            part.__class__ = blocked.__mro__[2]

    return undo


def _blocked(before: Any, recursive: bool) -> Any:
    def reduced(self: Any, protocol: Any) -> Any:
        made = before.__reduce_ex__(self, protocol)
        if made[1][:1] == (type(self),):  # how Python makes an object without calling it, whatever the protocol
            return (copyreg._reconstructor, (before, object, None), *made[2:])  # type: ignore[attr-defined]
        return made

    body = {
        "forward": _disabled(before.forward, recursive), "__module__": before.__module__,
        "__qualname__": before.__qualname__, "__doc__": before.__doc__, "__reduce_ex__": reduced, _COUNT: 0,
    }  # fmt: skip
    return type(before)(before.__name__, (Unregistered, before), body)


def _disabled(forward: Any, recursive: bool) -> Any:
    disable: Any = torch.compiler.disable
    return disable(forward, recursive=recursive, reason="it is in the blocklist")


class Unregistered:
    """First base of the classes that the layer makes: the user's ``__init_subclass__`` does not hear of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: a registry of model classes must not have them."""
