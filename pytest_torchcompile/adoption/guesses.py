"""Guesses: which tensors a model's ``forward`` may take, from its parameters' names and the layers that come first.

A guess is only tried (:mod:`.examination`), never believed: the first one that the model takes is used.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import nn
from torch.nn.parameter import is_lazy

from pytest_torchcompile.adoption.example_inputs import ExampleTensor

__all__ = ["Guess", "guesses", "left_out_parameters", "needed_parameters", "sizes_of_parameters"]

Guess = tuple[ExampleTensor, ...]
"""A tensor for each argument."""
_Form = tuple[str, tuple[int | str, ...], str]
"""Dtype, shape and fill of a tensor that has no name yet."""
IMAGE_SIZES: Final = (32, 28, 64, 16, 96, 224, 299)
"""Pixels along one side: of small data sets first, because they take less time."""
MOST: Final = 120
"""Guesses that are tried."""
_WIDTH: Final = 16
"""Features where no layer says how many."""
_FIRST_WORD: Final = 3
"""The least token: 0, 1 and 2 mean padding, beginning and end in most vocabularies."""
_SINGLE: Final = frozenset({"t", "time", "times", "timestep", "timesteps", "sigma", "sigmas", "noise_level"})
"""Parameters that have one number for each sample."""
_COMPANIONS: Final = (("attention_mask",), (), ("attention_mask", "decoder_input_ids"), ("decoder_input_ids",),
                      ("attention_mask", "pixel_values"))
"""Optional parameters that models of transformers may need beside their main input."""


def needed_parameters(model: nn.Module) -> list[str] | None:
    """The parameters of ``forward`` that must be given; None where they can't be given by their names."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            return None
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names


def left_out_parameters(model: nn.Module, guess: Guess) -> list[str]:
    """The optional parameters of ``forward`` that a guess leaves at their default: nothing of them is tried."""
    given = {tensor.name for tensor in guess}
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.default is not parameter.empty and parameter.name not in given:
            names.append(parameter.name)
    return names


def guesses(model: nn.Module) -> Iterator[Guess]:
    """Inputs that the model may take, the likeliest first; none where its arguments have no names."""
    needed = needed_parameters(model)
    if needed is None:
        return
    forms = _forms_of_layers(model)
    known = list(inspect.signature(model.forward).parameters)
    if needed:
        yield from itertools.islice(_combine(needed, forms), MOST)
        return
    if not known:
        return
    # Nothing must be given, as with models of transformers: their main input, and what belongs to it.
    main = str(getattr(model, "main_input_name", known[0]))
    for companions in _COMPANIONS:
        if all(name in known for name in companions):
            yield from itertools.islice(_combine([main, *companions], forms), MOST // len(_COMPANIONS))


def _combine(names: Sequence[str], layers: Sequence[Sequence[_Form]]) -> Iterator[Guess]:
    """Each parameter with each of its forms; those that are likely for all of them first."""
    choices = [_forms_of_parameter(name, number, layers) for number, name in enumerate(names)]
    ranks = [range(len(forms)) for forms in choices]
    # Beyond that many the order does not matter any more, and to sort them all could take for ever.
    picked = list(itertools.islice(itertools.product(*ranks), 20_000))
    for pick in sorted(picked, key=sum):
        tensors = []
        for name, forms, rank in zip(names, choices, pick, strict=True):
            tensors.append(ExampleTensor(name, *forms[rank]))
        yield tuple(tensors)


def _forms_of_parameter(name: str, number: int, layers: Sequence[Sequence[_Form]]) -> list[_Form]:
    """The forms that one parameter may have: those that its name tells first, then those of the layers."""
    forms: list[_Form] = []
    if "mask" in name:
        forms += [("int64", ("B", "S"), "ones"), ("bool", ("B", "S"), "ones"), ("bool", ("S", "S"), "ones")]
    elif name == "edge_index":
        # The edges of a graph as PyTorch Geometric has them: rows of sources and targets. Any batch has four nodes.
        forms.append(("int64", (2, "E"), "0..3"))
    elif name in _SINGLE:
        forms += [("float32", ("B",), ""), ("int64", ("B",), "0..99")]
    # The first parameter goes into the first layer, most often, and the second into the second.
    for layer in sorted(range(len(layers)), key=lambda place: abs(place - number)):
        forms += layers[layer]
    if any(word in name for word in ("ids", "token", "index", "indices", "labels")):
        forms.sort(key=_is_no_whole_number)
    if name == "decoder_input_ids":
        forms = list(map(_with_own_length, forms))
    return list(dict.fromkeys(forms))


def _with_own_length(form: _Form) -> _Form:
    """A decoder's sequences may be longer or shorter than the encoder's, so their length is a dim of its own."""
    dtype, shape, fill = form
    own = []
    for size in shape:
        own.append("T" if size == "S" else size)
    return dtype, tuple(own), fill


def _is_no_whole_number(form: _Form) -> bool:
    return form[0] != "int64"


def _forms_of_layers(model: nn.Module) -> list[list[_Form]]:
    """For each layer that may be an entry, in the model's order, the forms of what it takes; equal ones once."""
    layers: list[list[_Form]] = []
    sequences_first = any(isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) for module in model.modules())
    for module in model.modules():
        forms = _forms_of_layer(module, model)
        if sequences_first:
            # A batch of features would pass for one sequence without a batch.
            forms.sort(key=_has_no_sequence)
        if forms and forms not in layers:
            layers.append(forms)
    # Without a layer that tells its sizes the usual ones are tried: rows, sequences and images of three colours.
    if not layers:
        layers.append([("float32", ("B", _WIDTH), ""), ("float32", ("B", "S", _WIDTH), ""), *_images(3, model)])
    # Each is tried with several sizes, and the time to look is limited.
    return layers[:8]


def _has_no_sequence(form: _Form) -> bool:
    return "S" not in form[1]


def _forms_of_layer(module: nn.Module, model: nn.Module) -> list[_Form]:
    """The forms of what one layer takes, if it is one that is known, or has weights of its own."""
    # The sizes of lazy modules are 0 until their first call.
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        words = module.num_embeddings
        first = _FIRST_WORD if words > 4 * _FIRST_WORD else 0
        fill = f"{first}..{words - 1}"
        return [("int64", ("B", "S"), fill), ("int64", ("B",), fill)]
    if isinstance(module, nn.Conv1d):
        forms: list[_Form] = [("float32", ("B", module.in_channels or _WIDTH, "S"), "")]
        # Samples of sound, most often, to which the model adds the channel.
        if module.in_channels == 1:
            forms.append(("float32", ("B", "S"), ""))
        return forms
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        return _images(module.in_channels or 3, model)
    if isinstance(module, nn.Conv3d):
        channels = module.in_channels or 3
        return [("float32", ("B", channels, 8, 16, 16), ""), ("float32", ("B", channels, 16, 32, 32), "")]
    if isinstance(module, nn.RNNBase):
        return [_sequence(module.input_size, module.batch_first)]
    if isinstance(module, nn.MultiheadAttention):
        return [_sequence(module.embed_dim, module.batch_first)]
    if isinstance(module, nn.Linear):
        return _features((module.in_features or _WIDTH,))
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return _features(tuple(module.normalized_shape))
    if isinstance(module, nn.BatchNorm1d):
        return _features((module.num_features or _WIDTH,))
    if isinstance(module, nn.BatchNorm2d):
        return _images(module.num_features or 3, model)
    return _forms_of_weights(module)


def _forms_of_weights(module: nn.Module) -> list[_Form]:
    """A layer of the user's own: a matrix of weights takes as many features as one of its sides is long."""
    forms: list[_Form] = []
    for weight in module.parameters(recurse=False):
        if weight.ndim == 2:
            forms += _features((int(weight.shape[0]),)) + _features((int(weight.shape[1]),))
        elif weight.ndim == 1:
            forms += _features((int(weight.shape[0]),))
    return forms


def _features(shape: tuple[int, ...]) -> list[_Form]:
    return [("float32", ("B", *shape), ""), ("float32", ("B", "S", *shape), "")]


def _sequence(width: int, batch_first: bool) -> _Form:
    if batch_first:
        return "float32", ("B", "S", width), ""
    return "float32", ("S", "B", width), ""


def _images(channels: int, model: nn.Module) -> list[_Form]:
    """Square images; first of the size that the model's configuration names, as those of transformers do."""
    wanted: Any = getattr(getattr(model, "config", None), "image_size", None)
    sizes = list(IMAGE_SIZES)
    if isinstance(wanted, int):
        sizes.insert(0, wanted)
    return [("float32", ("B", channels, size, size), "") for size in dict.fromkeys(sizes)]


def sizes_of_parameters(model: nn.Module) -> list[int]:
    """Every size of parameters and buffers, in order; of positions, say, whose length an input must have."""
    sizes: dict[int, None] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        # Those of lazy modules have no sizes before the first call.
        if not is_lazy(tensor):
            sizes.update(dict.fromkeys(tensor.shape))
    return list(sizes)
