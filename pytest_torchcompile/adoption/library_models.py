"""Models of public libraries, tiny where the library lets one choose, with random weights; nothing is downloaded.

``transformers:bert`` (a type of model), ``transformers:BertModel`` (a class), ``timm:resnet18``,
``torchvision:resnet18`` and ``diffusers:unet`` name one. What the tables of
:mod:`pytest_torchcompile.zoo.real` have is made as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from pytest_torchcompile.errors import Unavailable, UsageError, nearest
from pytest_torchcompile.zoo.real import LIBRARIES, find_attribute

__all__ = ["LibraryModel", "build", "find_model"]

SMALL: Final[dict[str, int]] = {
    # What configurations of transformers call their sizes.
    "vocab_size": 101, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "hidden_dim": 64, "n_inner": 64, "moe_intermediate_size": 32,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "embedding_size": 16, "max_position_embeddings": 128, "n_positions": 128, "num_experts": 4,
    "num_local_experts": 4, "image_size": 32, "patch_size": 8, "projection_dim": 16, "sliding_window": 16,
}
_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
"""Those of the large vocabularies are outside of a small one."""


@dataclass(frozen=True)
class LibraryModel:
    """A model of a library: its class or name there, and what it is made with."""

    library: str
    wanted: str
    settings: Mapping[str, Any]

    def make(self) -> nn.Module:
        """Make it. Raises :class:`~pytest_torchcompile.errors.Unavailable` where the library is missing or too old."""
        _, make = LIBRARIES[self.library]
        return make(self.wanted, self.settings)

    @property
    def code(self) -> str:
        """Python that makes the same model: an import and a function ``model``."""
        arguments = [f"{name}={value!r}" for name, value in self.settings.items()]
        head = f'    """{self.wanted} of {self.library}, with random weights; nothing is downloaded."""'
        if self.library == "transformers":
            lines = [f"from transformers import {self.wanted}", "", "", "def model():", head,
                     *_call(f"config = {self.wanted}.config_class", arguments), f"    return {self.wanted}(config)"]
        elif self.library == "diffusers":
            lines = [f"from diffusers import {self.wanted}", "", "", "def model():", head,
                     *_call(f"return {self.wanted}", arguments)]
        elif self.library == "timm":
            lines = ["import timm", "", "", "def model():", head,
                     *_call("return timm.create_model", [repr(self.wanted), "pretrained=False", *arguments])]
        else:
            lines = ["import torch", "import torchvision", "", "", "def model():", head,
                     *_call(f"made = torchvision.models.{self.wanted}", arguments),
                     "    # A head of zeros would make every output zero.",
                     "    for weight in getattr(made, \"heads\", torch.nn.Identity()).parameters():",
                     "        torch.nn.init.normal_(weight, std=0.1)", "    return made"]
        return "\n".join(lines)


def _call(function: str, arguments: list[str]) -> list[str]:
    """A call, with an argument on each line."""
    if not arguments:
        return [f"    {function}()"]
    return [f"    {function}(", *(f"        {argument}," for argument in arguments), "    )"]


def build(source: str) -> nn.Module:
    """Make the model that ``source`` names; raises as :func:`find_model`."""
    return find_model(source).make()


def find_model(source: str) -> LibraryModel:
    """The model that ``library:NAME`` names.

    Raises :class:`UsageError` for a name that the library does not have, or of which no tiny model is known, and for a
    library that is not installed.
    """
    library, _, name = source.partition(":")
    try:
        find_attribute(library)
    except Unavailable as why:
        raise UsageError(f"--from {source}: {why}") from None
    table, _ = LIBRARIES[library]
    for key, (wanted, settings) in table.items():
        # The tables tell models of two libraries apart by a prefix.
        if name in (key, wanted) or key in (f"timm_{name}", f"tv_{name}"):
            return LibraryModel(library, wanted, settings)
    if library == "transformers":
        return _find_in_transformers(name, table)
    if library == "diffusers":
        raise UsageError(f"--from {source}: no tiny configuration of it is known; {nearest(name, table)}")
    if library == "timm":
        return _find_in_timm(name)
    return _find_in_torchvision(name)


def _find_in_transformers(name: str, table: Mapping[str, Any]) -> LibraryModel:
    types: Mapping[str, Any] = find_attribute("transformers", "CONFIG_MAPPING")
    if name in types:
        try:
            kind = find_attribute("transformers", "MODEL_MAPPING")[types[name]]
        except KeyError:
            raise UsageError(f"--from transformers:{name}: transformers has no plain model of that type; name a "
                             "class") from None
        # Some types have several.
        kind = kind[0] if isinstance(kind, tuple) else kind
    else:
        try:
            kind = find_attribute("transformers", name)
        except Unavailable:
            kind = None
    config = getattr(kind, "config_class", None)
    if kind is None or config is None:
        known = nearest(name, [*table, *types])
        raise UsageError(f"--from transformers:{name}: transformers has no such model; {known}")
    return LibraryModel("transformers", kind.__name__, small_settings(config))


def small_settings(config: Any) -> dict[str, Any]:
    """Small sizes for a class of configurations, as far as it has them; also of the parts of a multi-modal one."""
    usual = config()
    settings: dict[str, Any] = {}
    for name, size in SMALL.items():
        value = getattr(usual, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            settings[name] = size
    for name, token in _TOKENS.items():
        if isinstance(getattr(usual, name, None), int):
            settings[name] = token
    if hasattr(usual, "use_cache"):
        settings["use_cache"] = False
    for name, part in getattr(config, "sub_configs", {}).items():
        # A part may be of any type (AutoConfig), which has no sizes of its own.
        if isinstance(part, type) and hasattr(part, "model_type") and part.model_type:
            settings[name] = small_settings(part)
    return settings


def _find_in_timm(name: str) -> LibraryModel:
    known = find_attribute("timm", "list_models")()
    if name not in known:
        raise UsageError(f"--from timm:{name}: timm has no such model; {nearest(name, known)}")
    # Fewer classes than ImageNet's thousand: less to compute, and no size of another dim.
    return LibraryModel("timm", name, {"num_classes": 7})


def _find_in_torchvision(name: str) -> LibraryModel:
    known = find_attribute("torchvision", "models", "list_models")()
    if name not in known:
        raise UsageError(f"--from torchvision:{name}: torchvision has no such model; {nearest(name, known)}")
    # As for timm: a small last layer whose size is no other dim's.
    return LibraryModel("torchvision", name, {"num_classes": 7})
