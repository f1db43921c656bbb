"""What the generated code itself says of memory: shapes of inputs and buffers, and which of them each call is given.

Read from the syntax tree, and from nothing that the explanation is made of. What a library returns is asked of torch:
its call is run on meta tensors, as the code writes it.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._inductor.select_algorithm import extern_kernels

SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "bool": 1,
         "int8": 1, "uint8": 1}


@dataclass
class Memory:
    """The tensors of one generated graph."""

    shapes: dict[str, tuple[tuple, str]] = field(default_factory=dict)
    """Name to shape and dtype, where the code says them."""
    storage: dict[str, str] = field(default_factory=dict)
    """Name to the name of the memory that it lies in."""
    calls: list[tuple[str, set[str]]] = field(default_factory=list)
    """Each call of a kernel, with the memory that it is given and that holds its result."""
    made_by: dict[str, ast.expr] = field(default_factory=dict)
    """Name to the expression that it stands for."""
    results: dict[int, ast.expr] = field(default_factory=dict)
    """Number of a call of an operator, which may return several tensors, to the call."""

    def takes_place_of(self, name):
        """The names whose memory it is given, one after the other."""
        while self.storage.get(name, name) != name:
            name = self.storage[name]
            yield name

    def root(self, name):
        """The memory behind a name."""
        while self.storage.get(name, name) != name:
            name = self.storage[name]
        return name

    def value_of(self, expression):
        """What an expression of the code is, on meta tensors: nothing is computed."""
        values = {"torch": torch, "aten": torch.ops.aten, "extern_kernels": extern_kernels,
                  "reinterpret_tensor": _reinterpreted, "rand_strided": _empty, "empty_strided_cpu": _empty,
                  "empty_strided_cuda": _empty, "empty_strided_cpu_pinned": _empty}
        for node in ast.walk(expression):
            if isinstance(node, ast.Name) and node.id in self.made_by and node.id not in values:
                values[node.id] = self.value_of(self.made_by[node.id])
        return eval(compile(ast.Expression(expression), "generated code", "eval"), values)

    def results_of(self, call):
        """Shapes and dtypes of the results of one call, if it returns several."""
        value = self.value_of(self.results[call]) if call in self.results else None
        several = value if isinstance(value, (tuple, list)) else ()
        tensors = [part for part in several if isinstance(part, torch.Tensor)]
        return Counter((tuple(part.shape), str(part.dtype).removeprefix("torch.")) for part in tensors)


def _empty(size, stride, dtype=None, device=None):
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _reinterpreted(tensor, size, stride, offset=0):
    return torch.as_strided(tensor, size, stride, offset)


def read_memory(code):
    """The memory of a module that Inductor wrote."""
    tree, memory = ast.parse(code), Memory()
    defined = set(re.findall(r"^(\w+)\s*=\s*async_compile\.\w+\(", code, re.M))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in {"call", "get_args", "benchmark_compiled_module"}:
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    _read_assignment(memory, node.targets[0].id, node.value)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            for node in function.body:
                _read_call(memory, node, defined)
            for block in function.body:
                for node in getattr(block, "body", ()):
                    _read_call(memory, node, defined)
    return memory


def _read_assignment(memory, name, value):
    memory.made_by.setdefault(name, value)
    if isinstance(value, ast.Name):
        memory.storage[name] = value.id
    elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
        memory.storage[name] = value.value.id
    elif isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        if called == "reinterpret_tensor":
            memory.storage[name] = ast.unparse(value.args[0])
        elif called.startswith("empty_strided") or called == "rand_strided":
            dtypes = [ast.unparse(part) for part in (*value.args, *(given.value for given in value.keywords))]
            dtype = next(text for text in dtypes if text.startswith("torch."))
            memory.shapes[name] = ast.literal_eval(value.args[0]), dtype.removeprefix("torch.")


def _read_call(memory, statement, defined):
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call):
        return
    # Triton's kernels have a method for it, and are given a stream and memory to work with.
    called = ast.unparse(value.func).removesuffix(".run")
    if called in defined or called.startswith(("extern_kernels.", "torch.ops.", "aten.")):
        given = {node.id for part in (*value.args, *(keyword.value for keyword in value.keywords))
                 for node in ast.walk(part) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.Assign):
            given.add(statement.targets[0].id)
            if called.startswith(("torch.ops.", "aten.")):
                memory.results[len(memory.calls)] = value
        names = {name for name in given if re.match(r"buf\d|arg\d|primals_|tangents_|[a-z_]+\d*$", name)
                 and not re.match(r"stream\d|workspace_\d", name)}
        short = re.sub(r"^extern_kernels\.|^torch\.ops\.", "", called)
        memory.calls.append((short, names - {"reinterpret_tensor", "torch", "c_void_p"}))


def differences(explained):
    """Where kernels of an explanation and the generated code disagree, in words."""
    found = []
    codes = [stage.text for stage in explained.stages if stage.stage == "code"]
    post_grad = [stage for stage in explained.stages if stage.stage == "post_grad"]
    for graph, code in enumerate(codes):
        memory = read_memory(code)
        kernels = [kernel for kernel in explained.kernels if kernel.graph == graph]
        if [kernel.name for kernel in kernels] != [name for name, _given in memory.calls]:
            found.append(f"graph {graph}: {[k.name for k in kernels]} but the code calls {memory.calls}")
            continue
        types = {node.name: node.type for node in post_grad[graph].nodes}
        for call, (kernel, (_name, given)) in enumerate(zip(kernels, memory.calls, strict=False)):
            try:
                results = memory.results_of(call)
            except Exception as error:
                found.append(f"{kernel.name}: what it returns can't be told: {error!r}")
                continue
            told = Counter((tensor.shape, tensor.dtype) for tensor in kernel.writes)
            if results and told != results:
                found.append(f"{kernel.name}: writes {dict(told)}, and returns {dict(results)}")
            # What a library returns and nobody reads has no name in the code.
            nameless = {tensor.name for tensor in kernel.writes if results and tensor.name not in memory.made_by}
            ours = {memory.root(tensor.name) for tensor in (*kernel.reads, *kernel.writes)} - nameless
            theirs = {memory.root(name) for name in given}
            if ours != theirs:
                found.append(f"{kernel.name}: touches {sorted(ours)}, the code gives it {sorted(theirs)}")
            written = {tensor.name for tensor in kernel.writes}
            for name in written:
                if lost := written & set(memory.takes_place_of(name)):
                    found.append(f"{kernel.name}: {name} takes the place of {lost}, which is nowhere then")
            for tensor in (*kernel.reads, *kernel.writes):
                found += _wrong_shape(kernel, tensor, memory, types)
    return found


def _wrong_shape(kernel, tensor, memory, types):
    if tensor.name in memory.shapes:
        shape, dtype = memory.shapes[tensor.name]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            yield f"{kernel.name}: {tensor} is {dtype}{shape} in the code"
        whole = math.prod(shape) * SIZES[dtype]
        # What is scattered, as by the backward of an embedding, goes to as many places as there are indices.
        scattered = tensor.of.startswith(("index_put", "index_add", "scatter"))
        if tensor.bytes > whole or (tensor in kernel.writes and tensor.bytes != whole and not scattered):
            yield f"{kernel.name}: {tensor} has {whole} bytes in the code"
    if tensor.of in types and not tensor.partly and (match := re.match(r"(\w+)\[(.*?)\]", types[tensor.of])):
        sizes = [int(size) for size in match[2].split(",") if size.strip()]
        if math.prod(sizes) != math.prod(tensor.shape):
            yield f"{kernel.name}: {tensor}, but {tensor.of} is {types[tensor.of]} in the graph"
