"""Confirms the graphs of the pages with torch and transformers alone: nothing of the package is imported.

``python confirm_graphs.py write FILE [MODEL ...]``, by the Python of each environment, keeps what AOTAutograd hands to
a backend, and what calls the kernels of Inductor. ``python confirm_graphs.py compare OLD NEW`` then tells which graphs
differ, and in which operators. Graphs that compute the same of the same, in another order, are told apart.
"""

import hashlib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.pgo import reset_code_state
from torch._guards import CompileContext
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.node import map_arg

Batches = list[dict[str, Any]]

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WIDTHS = SIZES | {"vocab_size": 101, "max_position_embeddings": 128}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
LLAMA = WIDTHS | {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CODERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 101, "d_model": 32, "use_cache": False}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertModel", WIDTHS, "text"),
    "modernbert": ("ModernBertModel", WIDTHS | {"pad_token_id": 0, "local_attention": 8}, "text"),
    "longformer": ("LongformerModel", WIDTHS | {"attention_window": 8, "pad_token_id": 1}, "text"),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                                 "use_cache": False}, "text"),
    "llama": ("LlamaForCausalLM", LLAMA, "text"),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, "text"),
    "t5": ("T5Model", {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                       "use_cache": False}, "two texts"),
    "bart": ("BartModel", CODERS | {"max_position_embeddings": 128}, "two texts"),
    "mamba": ("MambaForCausalLM", {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
                                   "use_cache": False}, "text"),
    "vit": ("ViTModel", VISION, "images"),
    "swin": ("SwinModel", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                           "window_size": 4}, "images"),
    "whisper": ("WhisperModel", CODERS | {
        "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, "speech"),
    "clip": ("CLIPModel", {"text_config": WIDTHS | {"eos_token_id": 2}, "vision_config": VISION, "projection_dim": 16},
             "images and text"),
    "vilt": ("ViltModel", WIDTHS | {"image_size": 32, "patch_size": 8}, "images and text"),
}
"""The class in transformers, its sizes, and what it is called with: as matrix/real.yaml has them."""
WITH_INDUCTOR = ("bert", "gpt2", "tiny_head")


# -------------------------------------------------------------------------------------------- the models of smoke.yaml
class TinyHead(nn.Module):
    """One linear layer and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 600)

    def forward(self, x: Tensor) -> Tensor:
        """Shares of 600."""
        return self.linear(x).softmax(dim=-1)


class Block(nn.Module):
    """A block of the transformer below."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.widen, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, and two layers."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(rows, length, 4, 16).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class MiniGPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(97, 64), nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 97, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of ten classes."""
        x = F.relu(self.stem(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)))
        return self.head(self.dropout(x.mean(dim=(2, 3))))


def smoke_models() -> dict[str, tuple[nn.Module, Batches]]:
    """Each with its batches."""
    vectors = [{"x": torch.randn(rows, 64, requires_grad=True)} for rows in (4, 7, 9)]
    texts = [{"ids": torch.randint(97, (3, length))} for length in (16, 32)]
    images = [{"x": torch.randn(rows, 3, 16, 20, requires_grad=True)} for rows in (4, 6)]
    return {"tiny_head": (TinyHead(), vectors), "mini_gpt": (MiniGPT(), texts), "conv_net": (ConvNet(), images)}


# ---------------------------------------------------------------------------------------------------------------- write
def batches_of(kind: str) -> Batches:
    """Three batches of other sizes."""
    made = []
    for length, second, images in ((12, 9, 5), (20, 13, 6), (28, 17, 9)):
        rows = 5 if kind == "images and text" else 3
        batch: dict[str, Any] = {}
        if kind.endswith(("text", "texts")):
            batch["input_ids"] = torch.randint(3, 101, (rows, length))
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if kind.startswith("images"):
            batch["pixel_values"] = torch.randn(images if kind == "images" else rows, 3, 32, 32)
        if kind == "speech":
            batch["input_features"] = torch.randn(3, 16, 32)
        if kind in ("two texts", "speech"):
            batch["decoder_input_ids"] = torch.randint(3, 101, (3, second))
        made.append(batch)
    return made


def programs(names: list[str]) -> Iterator[tuple[str, nn.Module, Batches, str, bool]]:
    """Of each cell of the pages: its name, the model and its batches, the backend, and whether it is trained."""
    for backend, training in itertools.product(("inductor", "aot_eager", "eager"), (True, False)):
        torch.manual_seed(0)
        # Made anew: with a gradient of the cell before, a size was a symbol at once.
        for name, (model, batches) in smoke_models().items():
            if (not names or name in names) and (backend != "inductor" or name in WITH_INDUCTOR):
                yield f"{name} {backend} {training=}", model.train(training), batches, backend, training
    for name, (kind, sizes, batch_kind) in MODELS.items():
        if names and name not in names:
            continue
        import transformers

        maker = getattr(transformers, kind)
        torch.manual_seed(0)
        model = maker(maker.config_class(**sizes)).eval()
        yield f"{name} aot_eager", model, batches_of(batch_kind), "aot_eager", False
        if name in WITH_INDUCTOR:
            yield f"{name} inductor", model, batches_of(batch_kind), "inductor", False


def write(file: str, names: list[str]) -> None:
    """Compile the models, and keep ``{cell: {graph: record}}``."""
    # As a cell has it, so that eager and compiled code draw the same numbers.
    config.fallback_random = True
    kept: dict[str, dict[str, Any]] = {}
    for name, model, batches, backend, training in programs(names):
        torch._dynamo.reset()
        # Which sizes varied in the cell before is forgotten too.
        reset_code_state()
        kept[name] = records = {}
        if backend == "inductor":
            _, codes = run_and_get_code(run_all, torch.compile(model), batches, training)
            records |= {f"module {number}": called_by(code) for number, code in enumerate(codes)}
        else:
            run_all(torch.compile(model, backend=keeping_backend(backend, records)), batches, training)
        print(torch.__version__, name, len(records), "graphs", flush=True)
    Path(file).write_text(json.dumps(kept))


def keeping_backend(backend: str, records: dict[str, Any]) -> Callable[..., Any]:
    """A backend that keeps the graphs that it is given, and runs them as they are."""
    def keep(module: Any, stage: str) -> Any:
        records[f"{CompileContext.current_compile_id()} {stage}"] = graph_record(module)
        return make_boxed_func(module.forward)

    if backend == "eager":
        return lambda module, _: (keep(module, "dynamo"), module.forward)[1]
    # As the backend aot_eager is made, which keeps nothing.
    return aot_autograd(
        fw_compiler=lambda module, _: keep(module, "forward"), bw_compiler=lambda module, _: keep(module, "backward"),
        partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True)


def run_all(compiled: Any, batches: Batches, training: bool) -> None:
    """Call a model with each batch, twice, as a cell does: once every size was met, each is met again."""
    with torch.set_grad_enabled(training):
        for batch in [*batches, *batches]:
            output = compiled(**batch)
            if training:
                output.square().sum().backward()


def graph_record(module: Any) -> dict[str, Any]:
    """A graph's lines with neutral names, its operators, and a hash of each value, whatever the order of lines is."""
    numbers: dict[Any, str] = {}
    values: dict[Any, str] = {}
    lines, computed, operators = [], [], Counter[str]()
    inputs: Counter[str] = Counter()
    for node in module.graph.nodes:
        numbers[node] = f"v{len(numbers)}"
        kept = node.meta.get("val", node.meta.get("example_value"))
        layout = f"{kept.dtype} {list(kept.shape)} {list(kept.stride())}" if isinstance(kept, Tensor) else ""
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if isinstance(node.target, torch._ops.OpOverload):
            target = str(node.target)
        if node.op == "placeholder":
            # A size cannot be taken for a tensor, so each is known by its place among its like.
            like = "tensor" if isinstance(kept, Tensor) else "size"
            inputs[like] += 1
            values[node] = f"{like} {inputs[like]}"
            lines.append(f"{numbers[node]}: {like} {layout}")
            continue
        named = with_operands(node, numbers)
        lines.append(f"{numbers[node]} = {node.op} {target} {named} {layout}")
        values[node] = hashlib.sha256(f"{node.op} {target} {with_operands(node, values)}".encode()).hexdigest()[:16]
        computed.append(values[node])
        operators[target] += 1
    return record_of(lines, operators, computed)


def with_operands(node: Any, texts: dict[Any, str]) -> str:
    """The arguments of a node, with a text for each operand."""
    return str(map_arg((node.args, node.kwargs), lambda operand: Named(texts[operand])))


class Named(str):
    """A text that ``repr`` shows without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def record_of(lines: list[str], operators: Counter[str], computed: list[str]) -> dict[str, Any]:
    """As JSON keeps it, with symbols numbered in their order."""
    symbols: dict[str, str] = {}
    neutral = re.sub(r"\b[su]\d+\b", lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), "\n".join(lines))
    return {"lines": neutral.splitlines(), "operators": operators, "computed": sorted(computed)}


def called_by(code: str) -> dict[str, Any]:
    """What Inductor's module calls to run its graph, by the name of each function; kernels by their numbers."""
    # A class Runner in some versions, a function in others; what follows benchmarks it.
    body = re.split(r"^\s*def call\(.*$", code, flags=re.MULTILINE)[1]
    body = re.split(r"^(?:def |runner = )", body, flags=re.MULTILINE)[0]
    lines, kernels = [], dict[str, str]()
    for line in body.splitlines():
        bare = line.partition("#")[0].strip()
        for name in re.findall(r"\bcpp_fused\w+", bare):
            bare = bare.replace(name, kernels.setdefault(name, f"kernel_{len(kernels)}"))
        if bare:
            lines.append(bare)
    operators = Counter(re.findall(r"^(?:\w+ = )?([a-z][\w.]*)\(", "\n".join(lines), flags=re.MULTILINE))
    return record_of(lines, operators, lines)


# -------------------------------------------------------------------------------------------------------------- compare
def without(graphs: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The graphs that are left when each of the others has taken one with the same lines away."""
    left = Counter("\n".join(graph["lines"]) for graph in others.values())
    kept = {}
    for name, graph in graphs.items():
        text = "\n".join(graph["lines"])
        left[text] -= 1
        if left[text] < 0:
            kept[name] = graph
    return kept


def compare(old_file: str, new_file: str) -> None:
    """Print each graph that is not the same, with the operators that are more or fewer, and the sums."""
    old, new = (json.loads(Path(file).read_text()) for file in (old_file, new_file))
    sums: Counter[str] = Counter()
    for model in new:
        gone, come = without(old[model], new[model]), without(new[model], old[model])
        sums["graphs of the new version"] += len(new[model])
        for name, graph in come.items():
            if name not in gone:
                sums["new"] += 1
                print(f"{model} {name}: new")
                continue
            before = gone.pop(name)
            if before["computed"] == graph["computed"]:
                sums["differ in their order alone"] += 1
                print(f"{model} {name}: the same operations of the same values, in another order")
                continue
            sums["changed"] += 1
            changes = []
            for operator in sorted({*before["operators"], *graph["operators"]}):
                was, now = (each["operators"].get(operator, 0) for each in (before, graph))
                if was != now:
                    changes.append(f"{operator} {was} to {now}")
            print(f"{model} {name}: {', '.join(changes) or 'the same operators of other values'}")
        for name in gone:
            sums["gone"] += 1
            print(f"{model} {name}: gone")
    print(dict(sums))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3:])
    else:
        compare(*sys.argv[2:])
