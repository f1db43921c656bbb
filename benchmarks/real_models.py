"""Ten real architectures with random weights, and two stand-ins from the zoo, for ``real_cost.py``.

A matrix names their parts as ``real_models:resnet18.build``, and ``.batch`` and ``.loss`` beside it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchcompile import zoo

__all__ = ["available"]

IMAGE = int(os.environ.get("REAL_IMAGE", "224"))
"""Height and width of the images."""
LENGTH = int(os.environ.get("REAL_LENGTH", "128"))
"""Tokens in a sequence."""
WIDTH = int(os.environ.get("REAL_WIDTH", "512"))
"""Hidden size of the text models, whose heads are 64 wide."""
LAYERS = int(os.environ.get("REAL_LAYERS", "6"))
_WORDS = 4096
_CLASSES = 1000


@dataclass(frozen=True)
class Real:
    """One model of the benchmark."""

    library: str
    """What has to be installed; nothing for a stand-in."""
    build: Callable[[], nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Tensor]


def _images(B: int) -> Tensor:  # noqa: N803 (a dim's name)
    return torch.randn(B, 3, IMAGE, IMAGE)


def _image_loss(output: Tensor, batch: Any) -> Tensor:
    labels = torch.arange(output.shape[0], device=output.device) % output.shape[1]
    return nn.functional.cross_entropy(output.float(), labels)


def _tokens(B: int) -> dict[str, Tensor]:  # noqa: N803 (a dim's name)
    ids = torch.randint(0, _WORDS, (B, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _short_tokens(B: int) -> Tensor:  # noqa: N803 (a dim's name)
    return zoo.token_batch(B, 32)


def _library_loss(output: Any, batch: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _image_model(name: str, **options: Any) -> Real:
    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        model: nn.Module = getattr(models, name)(weights=None, num_classes=_CLASSES, **options)
        return model.train()

    return Real("torchvision", build, _images, _image_loss)


def _text_model(name: str, config_name: str, **options: Any) -> Real:
    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        config = getattr(library, config_name)(vocab_size=_WORDS, **options)
        model: nn.Module = getattr(library, name)(config)
        return model.train()

    return Real("transformers", build, _tokens, _library_loss)


_HEADS = max(1, WIDTH // 64)
_USUAL = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": _HEADS,
          "intermediate_size": 4 * WIDTH}

resnet18 = _image_model("resnet18")
vit = _image_model("vit_b_16", image_size=IMAGE)
convnext = _image_model("convnext_tiny")
mobilenet = _image_model("mobilenet_v3_large")
efficientnet = _image_model("efficientnet_b0")
swin = _image_model("swin_t")
llama = _text_model("LlamaForCausalLM", "LlamaConfig", **_USUAL, num_key_value_heads=_HEADS, use_cache=False)
gpt2 = _text_model("GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=LAYERS, n_head=_HEADS, use_cache=False)
bert = _text_model("BertForMaskedLM", "BertConfig", **_USUAL)
t5 = _text_model("T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=64, d_ff=4 * WIDTH, num_layers=LAYERS,
                 num_heads=_HEADS, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
conv_net = Real("", zoo.conv_net, zoo.image_batch, _image_loss)
mini_gpt = Real("", zoo.mini_gpt, _short_tokens, zoo.lm_loss)

_REAL = ("resnet18", "vit", "convnext", "mobilenet", "efficientnet", "swin", "llama", "gpt2", "bert", "t5")
_STAND_INS = {"torchvision": "conv_net", "transformers": "mini_gpt"}
"""What takes the place of the models of a library that is missing."""


def _installed(library: str) -> bool:
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError):  # torchvision raises RuntimeError beside a torch that it was not built for
        return False
    return True


def available(tiny: bool) -> list[str]:
    """The models that this machine can build; with ``tiny`` a stand-in for those of each missing library."""
    found: list[str] = []
    for name in _REAL:
        library = globals()[name].library
        if _installed(library):
            found.append(name)
        elif tiny and _STAND_INS[library] not in found:
            found.append(_STAND_INS[library])
    return found
