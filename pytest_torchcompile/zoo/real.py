"""Architectures of public libraries for ``matrix/real.yaml``: two layers, some dozens of channels, random weights.

Nothing is downloaded. :func:`build` makes a model by its name here, and each inputs function one batch of a kind.
A model whose library is missing, or too old to have it, is :class:`~pytest_torchcompile.errors.Unavailable`, so its
cells are skipped with that reason. To add a model, add a line to the table of its library.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from pytest_torchcompile.errors import Unavailable, UsageError, nearest

__all__ = [
    "LIBRARIES", "build", "condition_latents", "decoder_tokens", "find_attribute", "flux_latents", "images",
    "images_and_tokens", "joint_latents", "labels", "latents", "melody", "pixel_values", "series", "spectrogram",
    "speech", "timestep_latents", "tokens", "waveform",
]

VOCABULARY: Final = 101
CLASSES: Final = 7
WIDTH: Final = 32

# What most text models of transformers call their sizes.
_BERT: Final = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 128,
}
# Dropout is drawn differently by compiled code only on purpose; the table leaves each model's own default.
_LLAMA: Final = _BERT | {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
                         "eos_token_id": 2}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION: Final = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}
_SPEECH: Final = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2],
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}

TRANSFORMERS: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    # text encoders
    "bert": ("BertModel", _BERT),
    "roberta": ("RobertaModel", _BERT),
    "distilbert": ("DistilBertModel", {
        "vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "albert": ("AlbertModel", _BERT | {"embedding_size": 16}),
    "electra": ("ElectraModel", _BERT | {"embedding_size": 16}),
    "mpnet": ("MPNetModel", _BERT),
    "deberta_v2": ("DebertaV2Model", _BERT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}),
    "modernbert": ("ModernBertModel", _BERT | {"pad_token_id": 0, "local_attention": 8}),
    "longformer": ("LongformerModel", _BERT | {"attention_window": 8, "pad_token_id": 1}),
    # decoders
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128, "use_cache": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", _BERT | {"use_cache": False}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA | {"sliding_window": 16}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", _LLAMA | {"head_dim": 8, "sliding_window": 16}),
    "phi3": ("Phi3ForCausalLM", _LLAMA),
    "opt": ("OPTForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": WIDTH, "use_cache": False}),
    "bloom": ("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "falcon": ("FalconForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "use_cache": False}),
    # encoder-decoders
    "t5": ("T5Model", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "use_cache": False}),
    "bart": ("BartModel", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 128, "use_cache": False}),
    # mixtures of experts
    "mixtral": ("MixtralForCausalLM", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "olmoe": ("OlmoeForCausalLM", _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "switch_transformers": ("SwitchTransformersModel", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "num_experts": 4, "expert_capacity": 16, "use_cache": False, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}),
    # state space and linear recurrences
    "mamba": ("MambaForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}),
    "mamba2": ("Mamba2ForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
        "head_dim": 8, "n_groups": 2, "chunk_size": 8, "use_cache": False}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 64, "lru_width": WIDTH, "attention_window_size": 16, "use_cache": False}),
    # vision
    "vit": ("ViTModel", _VISION),
    "dinov2": ("Dinov2Model", {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}),
    "beit": ("BeitModel", _VISION | {"use_relative_position_bias": True}),
    "swin": ("SwinModel", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "convnext": ("ConvNextModel", {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}),
    "resnet": ("ResNetModel", {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}),
    "mobilenet_v2": ("MobileNetV2Model", {"depth_multiplier": 0.25, "image_size": 32}),
    "segformer": ("SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
        "decoder_hidden_size": WIDTH, "num_labels": CLASSES}),
    # audio and series
    "wav2vec2": ("Wav2Vec2Model", _SPEECH),
    "hubert": ("HubertModel", _SPEECH),
    "whisper": ("WhisperModel", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 64, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "ast": ("ASTModel", {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "patch_size": 8, "num_mel_bins": 16, "max_length": 40, "frequency_stride": 8, "time_stride": 8}),
    "encodec": ("EncodecModel", {
        "num_filters": 8, "hidden_size": WIDTH, "codebook_size": 32, "codebook_dim": WIDTH, "num_lstm_layers": 1,
        "upsampling_ratios": [4, 2], "sampling_rate": 800, "target_bandwidths": [1.5, 3.0]}),
    "patchtst": ("PatchTSTForPrediction", {
        "num_input_channels": 3, "context_length": 32, "prediction_length": 8, "patch_length": 8, "patch_stride": 8,
        "d_model": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}),
    # multi-modal
    "clip": ("CLIPModel", {
        "text_config": _BERT | {"eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16}),
    "siglip": ("SiglipModel", {"text_config": _BERT, "vision_config": _VISION}),
    "blip": ("BlipForImageTextRetrieval", {
        "text_config": _BERT | {"is_decoder": True, "encoder_hidden_size": WIDTH, "bos_token_id": 1,
                                "pad_token_id": 0, "sep_token_id": 2, "eos_token_id": 2},
        "vision_config": _VISION, "projection_dim": 16, "image_text_hidden_size": 16}),
    "vilt": ("ViltModel", _BERT | {"image_size": 32, "patch_size": 8}),
}
"""Name to the class in transformers and the arguments of its configuration."""

_BLOCKS: Final = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_DENOISER: Final = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8,
                    "patch_size": 2, "in_channels": 4}

DIFFUSERS: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    "unet": ("UNet2DModel", _BLOCKS | {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8}),
    "unet_condition": ("UNet2DConditionModel", _BLOCKS | {
        "sample_size": 16, "cross_attention_dim": WIDTH, "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}),
    "autoencoder_kl": ("AutoencoderKL", _BLOCKS | {
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"), "latent_channels": 4}),
    "dit": ("DiTTransformer2DModel", _DENOISER | {"out_channels": 8, "num_embeds_ada_norm": 1000}),
    "sd3": ("SD3Transformer2DModel", _DENOISER | {
        "out_channels": 4, "joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH, "pooled_projection_dim": 16,
        "pos_embed_max_size": 16}),
    "flux": ("FluxTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": WIDTH, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8)}),
}
"""Name to the class in diffusers and its arguments."""

TIMM: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    "timm_efficientnet": ("efficientnet_lite0", {"num_classes": CLASSES}),
    "timm_mobilenetv3": ("mobilenetv3_small_050", {"num_classes": CLASSES}),
    "timm_vit": ("vit_tiny_patch16_224", {
        "num_classes": CLASSES, "img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}),
    "timm_convnext": ("convnext_atto", {"num_classes": CLASSES}),
}
"""Name to the name in timm and the arguments of ``timm.create_model``."""

TORCHVISION: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    "tv_resnet18": ("resnet18", {"num_classes": CLASSES, "width_per_group": 64}),
    "tv_shufflenet": ("shufflenet_v2_x0_5", {"num_classes": CLASSES}),
    "tv_densenet": ("DenseNet", {
        "num_classes": CLASSES, "growth_rate": 8, "block_config": (2, 2), "num_init_features": 16}),
    "tv_vit": ("VisionTransformer", {
        "num_classes": CLASSES, "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4,
        "hidden_dim": WIDTH, "mlp_dim": 64}),
}
"""Name to the class or function in ``torchvision.models`` and its arguments."""


def build(name: str) -> nn.Module:
    """Make the model that one of the tables has under this name."""
    for table, make in LIBRARIES.values():
        if name in table:
            wanted, settings = table[name]
            return make(wanted, settings)
    known = itertools.chain.from_iterable(table for table, _ in LIBRARIES.values())
    raise UsageError(f"there is no model {name!r} in pytest_torchcompile.zoo.real; {nearest(name, known)}")


def _make_transformers(wanted: str, settings: Mapping[str, Any]) -> nn.Module:
    kind = find_attribute("transformers", wanted)
    model: nn.Module = kind(kind.config_class(**settings))
    return model


def _make_diffusers(wanted: str, settings: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = find_attribute("diffusers", wanted)(**settings)
    return model


def _make_timm(wanted: str, settings: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = find_attribute("timm", "create_model")(wanted, pretrained=False, **settings)
    return model


def _make_torchvision(wanted: str, settings: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = find_attribute("torchvision", "models", wanted)(**settings)
    if isinstance(head := getattr(model, "heads", None), nn.Module):
        # A vision transformer's head is zeros at first, and so would be every output.
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.1)
    return model


_Maker = Callable[[str, Mapping[str, Any]], nn.Module]
LIBRARIES: Final[dict[str, tuple[Mapping[str, tuple[str, Mapping[str, Any]]], _Maker]]] = {
    "transformers": (TRANSFORMERS, _make_transformers), "diffusers": (DIFFUSERS, _make_diffusers),
    "timm": (TIMM, _make_timm), "torchvision": (TORCHVISION, _make_torchvision)}
"""Library to its table, and what makes a model of a row of it."""


def find_attribute(library: str, *path: str) -> Any:
    """Something of a library; Unavailable where the library is missing, broken or too old for it."""
    try:
        found = importlib.import_module(library)
        for name in path:
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        extra = {"transformers": "real", "diffusers": "real"}.get(library, "real-vision")
        raise Unavailable(f"{library} cannot be imported ({error}); pip install pytest-torchcompile[{extra}]") from None
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        # RuntimeError: a CUDA build of torchvision beside a CPU build of torch.
        reason = " ".join(str(error).split())[:200]
        raise Unavailable(f"{library} here does not give {'.'.join(path)}: {reason}") from None
    return found


# ------------------------------------------------------------------------------------------------- batches
def tokens(B: int, S: int) -> dict[str, Tensor]:  # noqa: N803 (dims are called as a matrix calls them)
    """Text without padding; 0, 1 and 2 mean padding, beginning and end in most vocabularies."""
    ids = torch.randint(3, VOCABULARY, (B, S))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def decoder_tokens(B: int, S: int, T: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Text for an encoder, and for its decoder."""
    return tokens(B, S) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (B, T))}


def pixel_values(B: int, H: int = 32, W: int = 32) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Images as transformers calls them."""
    return {"pixel_values": torch.randn(B, 3, H, W)}


def images(B: int, H: int = 32, W: int = 32) -> Tensor:  # noqa: N803 (dims)
    """Images as the only argument."""
    return torch.randn(B, 3, H, W)


def images_and_tokens(B: int, S: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Images and a text for each."""
    return tokens(B, S) | pixel_values(B)


def waveform(B: int, L: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Samples of sound."""
    return {"input_values": torch.randn(B, L)}


def melody(B: int, L: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Samples of sound, in one channel."""
    return {"input_values": torch.randn(B, 1, L)}


def spectrogram(B: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Frames of 16 bands."""
    return {"input_values": torch.randn(B, 40, 16)}


def speech(B: int, T: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Bands by frames for an encoder, text for its decoder."""
    return {"input_features": torch.randn(B, 16, 32), "decoder_input_ids": torch.randint(3, VOCABULARY, (B, T))}


def series(B: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Three channels, 32 steps."""
    return {"past_values": torch.randn(B, 32, 3)}


def latents(B: int, H: int, W: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """What an autoencoder takes."""
    return {"sample": torch.randn(B, 3, H, W)}


def timestep_latents(B: int, H: int, W: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Noisy latents, each at a time of its own."""
    return {"sample": torch.randn(B, 4, H, W), "timestep": torch.randint(0, 1000, (B,))}


def condition_latents(B: int, H: int, W: int, S: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """The same, with an encoded text."""
    return timestep_latents(B, H, W) | {"encoder_hidden_states": torch.randn(B, S, WIDTH)}


def labels(B: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Noisy latents for the class-conditional transformer."""
    return {"hidden_states": torch.randn(B, 4, 8, 8), "timestep": torch.randint(0, 1000, (B,)),
            "class_labels": torch.randint(0, 1000, (B,))}


def joint_latents(B: int, H: int, W: int, S: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Noisy latents and a text that one transformer attends to together."""
    return {"hidden_states": torch.randn(B, 4, H, W), "timestep": torch.randint(0, 1000, (B,)),
            "encoder_hidden_states": torch.randn(B, S, WIDTH), "pooled_projections": torch.randn(B, 16)}


def flux_latents(B: int, L: int, S: int) -> dict[str, Tensor]:  # noqa: N803 (dims)
    """Packed latents, a text, and the place of each in the image."""
    return {"hidden_states": torch.randn(B, L, 4), "encoder_hidden_states": torch.randn(B, S, WIDTH),
            "pooled_projections": torch.randn(B, 16), "timestep": torch.rand(B),
            "img_ids": torch.randint(0, 8, (L, 3)), "txt_ids": torch.zeros(S, 3)}
