"""The lines of a mutation's function for one choice: what the choice decides is decided, the rest stays as it is.

So a script has three lines where the function has twenty. No torch: syntax trees alone.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

__all__ = ["specialised_lines", "without_gradients"]

_PLAIN: Final = (str, int, float, bool, tuple, list, dict, type(None))
_BUILTINS: Final = {"int": int, "float": float, "str": str}


def specialised_lines(function: Callable[..., Any], known: Mapping[str, Any],
                      renamed: Mapping[str, str]) -> list[str] | None:
    """The body of a function where some parameters are known; None where it ends before its last line.

    Args:
        function: Not a method; its source is read.
        known: Values of parameters, which are plain data.
        renamed: Other names for the other parameters.

    A last ``return`` is one of the lines.
    """
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        # What it is for is said where it stands.
        body = body[1:]
    decided = _Decided(dict(known), dict(renamed)).statements(body)
    for place, statement in enumerate(decided):
        ends = any(isinstance(node, ast.Return) for node in _own_nodes(statement))
        if ends and (place < len(decided) - 1 or not isinstance(statement, ast.Return)):
            return None
    module = ast.fix_missing_locations(ast.Module(decided, []))
    return ast.unparse(module).splitlines()


def without_gradients(lines: Iterable[str]) -> list[str]:
    """The same lines for tensors of which none wants a gradient: none carries that on to another tensor.

    What then has a name for the next line alone has none.
    """
    tree = _Ungraded().visit(ast.parse("\n".join(lines)))
    body: list[ast.stmt] = []
    for statement in tree.body:
        if body and _hands_on(statement, body[-1]):
            body[-1] = ast.Assign(statement.targets, body[-1].value)  # type: ignore[attr-defined]
        else:
            body.append(statement)
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))).splitlines()


class _Ungraded(ast.NodeTransformer):
    """Takes ``.requires_grad_(tensor.requires_grad)`` off."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave what it is called on; other arguments change what a tensor wants."""
        changed: Any = self.generic_visit(node)
        if isinstance(changed.func, ast.Attribute) and changed.func.attr == "requires_grad_" and len(changed.args) == 1:
            asked = changed.args[0]
            if isinstance(asked, ast.Attribute) and asked.attr == "requires_grad":
                changed = changed.func.value
        call: ast.AST = changed
        return call


def _hands_on(statement: ast.stmt, before: ast.stmt) -> bool:
    """Whether ``before`` gives a value a name, and ``statement`` gives that value its place."""
    if not isinstance(statement, ast.Assign) or not isinstance(before, ast.Assign):
        return False
    name = before.targets[0]
    return isinstance(name, ast.Name) and isinstance(statement.value, ast.Name) and statement.value.id == name.id


def _own_nodes(statement: ast.AST) -> Iterable[ast.AST]:
    """All of a statement, without what functions and lambdas in it do when they are called."""
    yield statement
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(statement):
        yield from _own_nodes(child)


class _Decided(ast.NodeTransformer):
    """Puts in what is known. Names that get a value nobody knows yet are forgotten."""

    def __init__(self, known: dict[str, Any], renamed: dict[str, str], *, sure: bool = True) -> None:
        """``sure``: these lines run in any case; what others assign is known to no line behind them."""
        self.known, self.renamed, self.sure = known, renamed, sure

    def statements(self, body: Iterable[ast.stmt]) -> list[ast.stmt]:
        """What is left of them."""
        left: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                # Its annotation says nothing that a script needs.
                statement = ast.Assign([statement.target], statement.value)
            if isinstance(statement, ast.If):
                left += self._branch(statement)
            elif isinstance(statement, ast.Assign):
                if not self._remember(statement):
                    left.append(self._with_value(statement))
            else:
                self._forget(statement)
                left.append(self.visit(statement))
        return left

    def _branch(self, statement: ast.If) -> list[ast.stmt]:
        test = self.visit(statement.test)
        if isinstance(test, ast.Constant):
            return self.statements(statement.body if test.value else statement.orelse)
        parts = []
        for branch in (statement.body, statement.orelse):
            parts.append(_Decided(dict(self.known), self.renamed, sure=False).statements(branch))
        self._forget(statement)
        if not any(parts):
            return []
        return [ast.If(test, parts[0] or [ast.Pass()], parts[1])]

    def _remember(self, statement: ast.Assign) -> bool:
        """Whether the value is known; then so are its names, and no line is needed."""
        target: Any = statement.targets[0]
        names: list[Any] = [target]
        if isinstance(target, ast.Tuple):
            names = list(target.elts)
        if not self.sure or len(statement.targets) > 1 or not all(isinstance(name, ast.Name) for name in names):
            return False
        is_known, value = self._value_of(statement.value)
        if not is_known:
            return False
        values = [value]
        if isinstance(target, ast.Tuple):
            values = list(value)
        for name, each in zip(names, values, strict=True):
            self.known[name.id] = each
        return True

    def _with_value(self, statement: ast.Assign) -> ast.stmt:
        value = self.visit(statement.value)
        self._forget(statement)
        return ast.Assign([self.visit(target) for target in statement.targets], value)

    def _forget(self, statement: ast.AST) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.known.pop(node.id, None)

    def _value_of(self, expression: ast.expr) -> tuple[bool, Any]:
        """Whether it hangs on nothing but what is known, and what it is then."""
        for node in ast.walk(expression):
            unknown = isinstance(node, ast.Name) and node.id not in self.known and node.id not in _BUILTINS
            if unknown or isinstance(node, (ast.Lambda, ast.comprehension, ast.Starred)):
                return False, None
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "a mutation", "eval")
        try:
            value = eval(code, {"__builtins__": {}} | _BUILTINS, self.known)
        except Exception:
            return False, None
        return isinstance(value, _PLAIN), value

    def visit(self, node: ast.AST) -> Any:
        """Put in a value where it is known."""
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            is_known, value = self._value_of(node)
            if is_known and not isinstance(node, ast.Constant):
                text = repr(value)
                if isinstance(value, float) and not math.isfinite(value):
                    text = f"float({text!r})"
                return ast.parse(text, mode="eval").body
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """By its other name."""
        return ast.Name(self.renamed.get(node.id, node.id), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``getattr(torch, 'float16')`` is ``torch.float16``."""
        changed: Any = self.generic_visit(node)
        called = changed.func
        if isinstance(called, ast.Name) and called.id == "getattr" and len(changed.args) == 2:
            owner, name = changed.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                return ast.Attribute(owner, name.value, ast.Load())
        call: ast.expr = changed
        return call

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """An entry of a dict that stands there is the entry."""
        changed: Any = self.generic_visit(node)
        if isinstance(changed.value, ast.Dict) and isinstance(changed.slice, ast.Constant):
            for key, value in zip(changed.value.keys, changed.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == changed.slice.value:
                    entry: ast.expr = value
                    return entry
        subscript: ast.expr = changed
        return subscript

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Without annotations, which name what a script does not import."""
        arguments = node.args
        for each in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                each.annotation = None
        node.returns = None
        return self.generic_visit(node)
