"""False alarms on the architectures of transformers: ``python benchmarks/transformers_models.py --out found.jsonl``.

Each model type that transformers knows is made tiny, with random weights, from its own configuration: what is known
to make a model large is set to a small number. Those that eager can run and train are compiled and compared, forward
and backward, each in a process of its own. Nothing is downloaded. A line of JSON for each: ``skip`` (why eager does
not run it), or ``ok``, ``problems``, ``noise``, ``notes`` and ``seconds``. The summary names what is not ok.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# A process that is killed would leave its compile workers behind.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import transformers
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.oracle.training import default_loss

WIDTH, INNER, LAYERS, HEADS, WORDS, ROWS, LENGTH, PIXELS = 32, 64, 2, 4, 99, 2, 12, 32
LARGEST = 4_000_000
"""Parameters; with more of them something that makes the model large was not found."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_embed_dim", "decoder_embed_dim",
                     "embedding_size", "emb_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner", "encoder_ffn_dim",
                     "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim",
                     "v_head_dim", "patch_size", "state_size", "sliding_window", "attention_window"), WIDTH // HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "time_step_rank"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size", "num_codebooks"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_mel_bins"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("vocab_size", "char_vocab_size"), WORDS),
    "num_channels": 3, "image_size": PIXELS, "n_groups": 1, "rotary_pct": 0.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    # Random numbers are not what is compared here.
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout",
                     "dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "activation_dropout", "layerdrop",
                     "mask_time_prob"), 0.0),
}
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
"""Attributes that hold a configuration of their own."""
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Attributes with an entry for each layer."""


def shrink(config: Any, depth: int = 2) -> Any:
    """Make a configuration small, and those inside of it."""
    for name, small in SMALL.items():
        if isinstance(getattr(config, name, None), (int, float)):
            _set_if_possible(config, name, small)
    for name in LISTS:
        entries = getattr(config, name, None)
        if isinstance(entries, list):
            _set_if_possible(config, name, entries[:LAYERS])
    for name in PARTS:
        part = getattr(config, name, None)
        if depth and hasattr(part, "to_dict"):
            shrink(part, depth - 1)
    return config


def _set_if_possible(config: Any, name: str, value: Any) -> None:
    """Some values are told for each layer, or are computed from others, and stay as they are."""
    with contextlib.suppress(AttributeError, ValueError, TypeError):
        setattr(config, name, value)


def make_model(model_type: str) -> nn.Module:
    """A tiny model of this type, in training. Raises whatever transformers raises, and ValueError for a large one."""
    torch.manual_seed(0)
    config = shrink(transformers.CONFIG_MAPPING[model_type]())
    made_by = transformers.MODEL_MAPPING[type(config)]
    if isinstance(made_by, tuple):
        made_by = made_by[0]
    model: nn.Module = made_by(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise ValueError(f"too large: {count} parameters")
    return model.train()


def make_inputs(model: nn.Module) -> dict[str, Any]:
    """What its forward takes by name, of the kind that it is mainly for."""
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    torch.manual_seed(0)
    words = torch.randint(3, WORDS - 9, (ROWS, LENGTH))
    offered: dict[str, Any] = {}
    if main in ("input_ids", "pixel_values"):
        offered["input_ids"] = words
    if main == "input_ids":
        offered["attention_mask"] = torch.ones_like(words)
        offered["decoder_input_ids"] = words[:, : LENGTH // 2]
    elif main == "pixel_values":
        offered["pixel_values"] = torch.randn(ROWS, 3, PIXELS, PIXELS)
    elif main == "input_values":
        offered["input_values"] = torch.randn(ROWS, 1600)
    elif main == "input_features":
        offered["input_features"] = torch.randn(ROWS, 40, 16)
    offered["use_cache"] = False
    return {name: value for name, value in offered.items() if name in takes}


def judge(model_type: str, backend: str, steps: int) -> dict[str, Any]:
    """What came of one model, as plain data."""
    try:
        model = make_model(model_type)
        inputs = make_inputs(model)
        loss = default_loss(model(**inputs))
        if loss is None:
            raise ValueError("no output has a gradient")
        loss.backward()
        model.zero_grad()
    # Many cannot be made small in this way, or want other inputs: nothing is said of those.
    except Exception as error:
        return {"type": model_type, "skip": f"{type(error).__name__}: {str(error)[:200]}"}
    began = time.perf_counter()
    try:
        found = compare(model, [((), inputs)], CompileConfig(enabled=True, backend=backend), steps=steps)
    except Exception:
        return {"type": model_type, "ok": False, "problems": [traceback.format_exc()[-2000:]]}
    told = [line for line in str(found).splitlines() if line.startswith(("note", "stages"))]
    return {"type": model_type, "ok": found.ok, "noise": found.noise, "notes": [line[:300] for line in told],
            "problems": [problem.message[:500] for problem in found.problems],
            "seconds": round(time.perf_counter() - began, 1)}


class Children:
    """One forked process for each model: some end theirs, and some take for ever."""

    def __init__(self, out: Path, limit: float) -> None:
        """``limit``: seconds for each."""
        self._out, self._limit = out, limit
        self._running: dict[int, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, model_type: str, backend: str, steps: int) -> None:
        """Fork; nothing has run in this process that a fork does not survive."""
        child = os.fork()
        if child:
            self._running[child] = (model_type, time.monotonic())
            return
        self._write(judge(model_type, backend, steps))
        sys.stdout.flush()
        os._exit(0)

    def look(self) -> None:
        """Take leave of those that have ended, and end those that are over their time."""
        for child, (model_type, began) in [*self._running.items()]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self._running[child]
                if status:
                    self._write({"type": model_type, "ok": False, "problems": [f"its process ended: {status}"]})
            elif time.monotonic() - began > self._limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del self._running[child]
                self._write({"type": model_type, "timeout": self._limit})

    def _write(self, line: dict[str, Any]) -> None:
        with self._out.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def summary_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Counts, and what is not as it should be."""
    skipped = sum("skip" in row for row in rows)
    late = [row["type"] for row in rows if "timeout" in row]
    judged = [row for row in rows if "ok" in row]
    wrong = [row for row in judged if not row["ok"]]
    yield (f"{len(rows)} types: {skipped} not run in eager, {len(late)} not done in time, {len(judged)} judged, "
           f"{len(wrong)} not ok")
    if late:
        yield f"not done in time: {', '.join(late)}"
    for row in wrong:
        yield f"{row['type']}: {row['problems'][0]}"


def main() -> None:
    """Run them all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all that transformers knows")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--steps", type=int, default=1, help="of training")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each model")
    parser.add_argument("-n", type=int, default=2, help="models at a time")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; those there are not run again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = set()
    if options.out.exists():
        known = {json.loads(line)["type"] for line in options.out.read_text().splitlines()}
    waiting = [name for name in options.types or transformers.CONFIG_MAPPING if name not in known]
    children = Children(options.out, options.limit)
    while waiting or children:
        while waiting and len(children) < options.n:
            children.start(waiting.pop(0), options.backend, options.steps)
        children.look()
        time.sleep(0.1)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    print(*summary_lines(rows), sep="\n")


if __name__ == "__main__":
    main()
