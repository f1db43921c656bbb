"""A library of small programs for the hunt: the layers of ``torch.nn`` with their options, and chains of functions.

Each is plain text, written into a file of its own: what a finding's script copies is then as short as the program.
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["LAYERS", "chain_source", "layer_source"]

_VECTOR: Final = "torch.randn(B, 6)"
_ROWS: Final = "torch.randn(B, 4, 6)"
_SIGNAL: Final = "torch.randn(B, 4, 12)"
_IMAGE: Final = "torch.randn(B, 4, 6, 6)"
_ODD_IMAGE: Final = "torch.randn(B, 4, 7, 5)"
_VOLUME: Final = "torch.randn(B, 4, 4, 4, 4)"
_TOKENS: Final = "torch.randint(0, 10, (B, 5))"

LAYERS: Final[tuple[tuple[str, str], ...]] = (
    # Linear ones
    ("Linear(6, 5)", _VECTOR),
    ("Linear(6, 5, bias=False)", _ROWS),
    ("Bilinear(6, 6, 4)", f"{_VECTOR}, {_VECTOR}"),
    ("Identity()", _VECTOR),
    # Convolutions
    ("Conv1d(4, 6, 3, padding=1)", _SIGNAL),
    ("Conv1d(4, 8, 3, stride=2, groups=2, dilation=2)", _SIGNAL),
    ("Conv1d(4, 4, 3, padding='same', padding_mode='circular')", _SIGNAL),
    ("Conv2d(4, 6, 3, padding=1)", _IMAGE),
    ("Conv2d(4, 4, 3, groups=4, padding=1, bias=False)", _IMAGE),
    ("Conv2d(4, 8, (3, 1), stride=(2, 1), dilation=(1, 2), groups=2)", _ODD_IMAGE),
    ("Conv2d(4, 6, 3, padding='same', padding_mode='reflect')", _IMAGE),
    ("Conv2d(4, 6, 3, padding=1, padding_mode='replicate')", _ODD_IMAGE),
    ("Conv3d(4, 6, 2, padding=1)", _VOLUME),
    ("ConvTranspose1d(4, 6, 3, stride=2, output_padding=1)", _SIGNAL),
    ("ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)", _IMAGE),
    ("ConvTranspose2d(4, 4, 3, groups=2, dilation=2)", _IMAGE),
    ("ConvTranspose3d(4, 6, 2)", _VOLUME),
    ("Fold((5, 5), (2, 2))", "torch.randn(B, 8, 16)"),
    ("Unfold((2, 3), dilation=2, padding=1, stride=2)", _ODD_IMAGE),
    # Pooling
    ("MaxPool1d(3, stride=2, padding=1, ceil_mode=True)", _SIGNAL),
    ("MaxPool2d(2)", _IMAGE),
    ("MaxPool2d(3, stride=2, padding=1, dilation=2, ceil_mode=True)", _ODD_IMAGE),
    ("MaxPool2d(2, return_indices=True)", _IMAGE),
    ("MaxPool3d(2, return_indices=True)", _VOLUME),
    ("AvgPool1d(3, padding=1, count_include_pad=False)", _SIGNAL),
    ("AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)", _ODD_IMAGE),
    ("AvgPool2d(2, divisor_override=3)", _IMAGE),
    ("AvgPool3d(2, ceil_mode=True)", _VOLUME),
    ("LPPool1d(2, 3)", _SIGNAL),
    ("LPPool2d(1.5, 3, stride=2)", _IMAGE),
    ("FractionalMaxPool2d(2, output_size=3, _random_samples=torch.full((1, 4, 2), 0.5).expand(2, 4, 2))",
     "torch.randn(2, 4, 6, 6)"),
    ("AdaptiveAvgPool1d(5)", _SIGNAL),
    ("AdaptiveAvgPool2d((3, None))", _ODD_IMAGE),
    ("AdaptiveAvgPool2d(4)", _ODD_IMAGE),
    ("AdaptiveAvgPool3d(3)", _VOLUME),
    ("AdaptiveMaxPool1d(5, return_indices=True)", _SIGNAL),
    ("AdaptiveMaxPool2d(4)", _ODD_IMAGE),
    ("AdaptiveMaxPool3d(3)", _VOLUME),
    # Padding, shuffling, resizing
    ("ReflectionPad1d((2, 1))", _SIGNAL),
    ("ReflectionPad2d((1, 2, 0, 3))", _IMAGE),
    ("ReflectionPad3d(1)", _VOLUME),
    ("ReplicationPad2d((1, -2, 0, 3))", _IMAGE),
    ("ReplicationPad3d(1)", _VOLUME),
    ("CircularPad2d((1, 2, 0, 3))", _IMAGE),
    ("ZeroPad2d((-1, 2, 1, -2))", _IMAGE),
    ("ConstantPad1d((-2, 3), 1.5)", _SIGNAL),
    ("PixelShuffle(2)", _IMAGE),
    ("PixelUnshuffle(2)", _IMAGE),
    ("ChannelShuffle(2)", _IMAGE),
    ("Upsample(scale_factor=1.5, mode='nearest')", _IMAGE),
    ("Upsample(size=(9, 4), mode='nearest-exact')", _IMAGE),
    ("Upsample(scale_factor=2, mode='bilinear', align_corners=True)", _ODD_IMAGE),
    ("Upsample(scale_factor=1.7, mode='bilinear', recompute_scale_factor=True)", _ODD_IMAGE),
    ("Upsample(size=(9, 4), mode='bicubic')", _ODD_IMAGE),
    ("Upsample(scale_factor=1.5, mode='linear')", _SIGNAL),
    ("Upsample(scale_factor=1.5, mode='trilinear')", _VOLUME),
    # Norms
    ("BatchNorm1d(6)", _VECTOR),
    ("BatchNorm1d(4, momentum=None)", _SIGNAL),
    ("BatchNorm2d(4)", _IMAGE),
    ("BatchNorm2d(4, affine=False)", _IMAGE),
    ("BatchNorm2d(4, track_running_stats=False)", _IMAGE),
    ("BatchNorm3d(4)", _VOLUME),
    ("GroupNorm(2, 4)", _IMAGE),
    ("GroupNorm(4, 4, affine=False)", _IMAGE),
    ("GroupNorm(1, 4)", _SIGNAL),
    ("InstanceNorm1d(4, affine=True)", _SIGNAL),
    ("InstanceNorm2d(4)", _IMAGE),
    ("InstanceNorm2d(4, affine=True, track_running_stats=True)", _IMAGE),
    ("InstanceNorm3d(4)", _VOLUME),
    ("LayerNorm(6)", _ROWS),
    ("LayerNorm((4, 6), bias=False)", _ROWS),
    ("LayerNorm(6, elementwise_affine=False)", _ROWS),
    ("RMSNorm(6)", _ROWS),
    ("RMSNorm((4, 6), elementwise_affine=False)", _ROWS),
    ("LocalResponseNorm(2)", _IMAGE),
    ("CrossMapLRN2d(2)", _IMAGE),
    # Activations
    ("ELU(alpha=0.5)", _ROWS),
    ("ELU(inplace=True)", _ROWS),
    ("CELU(alpha=0.5)", _ROWS),
    ("SELU()", _ROWS),
    ("GELU()", _ROWS),
    ("GELU(approximate='tanh')", _ROWS),
    ("GLU(dim=1)", _ROWS),
    ("Hardshrink()", _ROWS),
    ("Hardsigmoid()", _ROWS),
    ("Hardswish()", _ROWS),
    ("Hardtanh(-0.5, 0.7)", _ROWS),
    ("LeakyReLU(0.2, inplace=True)", _ROWS),
    ("LogSigmoid()", _ROWS),
    ("LogSoftmax(dim=1)", _ROWS),
    ("Mish()", _ROWS),
    ("PReLU(4)", _ROWS),
    ("ReLU(inplace=True)", _ROWS),
    ("ReLU6()", _ROWS),
    ("RReLU()", _ROWS),
    ("SiLU(inplace=True)", _ROWS),
    ("Sigmoid()", _ROWS),
    ("Softmax(dim=-1)", _ROWS),
    ("Softmax2d()", _IMAGE),
    ("Softmin(dim=0)", _ROWS),
    ("Softplus(beta=2, threshold=1)", _ROWS),
    ("Softshrink(0.3)", _ROWS),
    ("Softsign()", _ROWS),
    ("Tanhshrink()", _ROWS),
    ("Threshold(0.1, 20.0)", _ROWS),
    # Randomness
    ("Dropout(0.3)", _ROWS),
    ("Dropout2d(0.3)", _IMAGE),
    ("AlphaDropout(0.3)", _ROWS),
    ("FeatureAlphaDropout(0.3)", _IMAGE),
    # Tables, sequences, attention
    ("Embedding(10, 6)", _TOKENS),
    ("Embedding(10, 6, padding_idx=3)", _TOKENS),
    ("Embedding(10, 6, max_norm=1.0)", _TOKENS),
    ("Embedding(10, 6, scale_grad_by_freq=True)", _TOKENS),
    ("EmbeddingBag(10, 6)", _TOKENS),
    ("EmbeddingBag(10, 6, mode='max', padding_idx=2)", _TOKENS),
    ("EmbeddingBag(10, 6, mode='sum', include_last_offset=False)", _TOKENS),
    ("RNN(6, 5, batch_first=True)", _ROWS),
    ("GRU(6, 5, num_layers=2)", _ROWS),
    ("LSTM(6, 5, batch_first=True, bidirectional=True)", _ROWS),
    ("LSTM(6, 5, proj_size=3)", _ROWS),
    ("LSTMCell(6, 5)", _VECTOR),
    ("GRUCell(6, 5, bias=False)", _VECTOR),
    ("RNNCell(6, 5, nonlinearity='relu')", _VECTOR),
    ("MultiheadAttention(6, 2, batch_first=True)", ", ".join([_ROWS] * 3)),
    ("MultiheadAttention(6, 3, bias=False, add_zero_attn=True)", ", ".join([_ROWS] * 3)),
    ("TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)", _ROWS),
    ("TransformerEncoderLayer(6, 2, 8, dropout=0.0, norm_first=True, activation='gelu')", _ROWS),
    ("TransformerDecoderLayer(6, 2, 8, dropout=0.0)", f"{_ROWS}, {_ROWS}"),
    # Distances and losses
    ("CosineSimilarity(dim=1)", f"{_ROWS}, {_ROWS}"),
    ("PairwiseDistance(p=1.5, keepdim=True)", f"{_VECTOR}, {_VECTOR}"),
    ("L1Loss(reduction='none')", f"{_ROWS}, {_ROWS}"),
    ("SmoothL1Loss(beta=0.0)", f"{_ROWS}, {_ROWS}"),
    ("HuberLoss(delta=0.5, reduction='sum')", f"{_ROWS}, {_ROWS}"),
    ("KLDivLoss(reduction='batchmean', log_target=True)", f"{_ROWS}, {_ROWS}"),
    ("PoissonNLLLoss(full=True)", f"{_ROWS}, {_ROWS}.abs()"),
    ("GaussianNLLLoss(full=True)", f"{_ROWS}, {_ROWS}, {_ROWS}.abs()"),
    ("BCEWithLogitsLoss(pos_weight=torch.full((6,), 2.0))", f"{_VECTOR}, torch.rand(B, 6)"),
    ("SoftMarginLoss()", f"{_VECTOR}, torch.randn(B, 6).sign()"),
    ("MultiLabelSoftMarginLoss()", f"{_VECTOR}, torch.rand(B, 6).round()"),
    ("MultiMarginLoss(p=2)", f"{_VECTOR}, torch.randint(0, 6, (B,))"),
    ("MultiLabelMarginLoss(reduction='none')", f"{_VECTOR}, torch.randint(0, 6, (B, 6))"),
    ("HingeEmbeddingLoss()", f"{_VECTOR}, torch.randn(B, 6).sign()"),
    ("CosineEmbeddingLoss(margin=0.2)", f"{_VECTOR}, {_VECTOR}, torch.randn(B).sign()"),
    ("TripletMarginLoss(p=1, swap=True)", f"{_VECTOR}, {_VECTOR}, {_VECTOR}"),
    ("MarginRankingLoss(margin=0.1)", f"{_VECTOR}, {_VECTOR}, torch.randn(B, 6).sign()"),
    ("NLLLoss(ignore_index=2, reduction='sum')", f"{_VECTOR}, torch.randint(0, 6, (B,))"),
    ("CrossEntropyLoss(label_smoothing=0.1, ignore_index=2)", f"{_VECTOR}, torch.randint(0, 6, (B,))"),
    ("CrossEntropyLoss(weight=torch.arange(6.0), reduction='none')", f"{_VECTOR}, torch.softmax({_VECTOR}, 1)"),
    ("CTCLoss(zero_infinity=True)", "torch.randn(7, B, 5).log_softmax(2), torch.randint(1, 5, (B, 3)), "
                                    "torch.full((B,), 7), torch.full((B,), 3)"),
)
"""The layer's constructor and its batch, whose first dim is ``B`` where it has one."""

_STEPS: Final = (
    # Layouts
    "x = x.transpose(1, 2)",
    "x = x.flip(1)",
    "x = x.roll(1, -1)",
    "x = x[:, ::2]",
    "x = x[..., 1:]",
    "x = x.contiguous()",
    "x = x.transpose(0, 1).contiguous().transpose(0, 1)",
    "x = x.unfold(1, 2, 1).sum(-1)",
    "x = x.unsqueeze(1).expand(-1, 3, -1, -1)[:, 1]",
    "x = x.as_strided(x.shape, x.stride())",
    "x = torch.cat([x, x.flip(1)], 1)",
    "x = x.repeat_interleave(2, 1)",
    "x = x.movedim(0, -1).clone().movedim(-1, 0)",
    "x = x.diagonal(0, 1, 2).unsqueeze(1).expand_as(x[:, :1, :x.diagonal(0, 1, 2).shape[-1]])",
    "x = torch.stack(x.unbind(1), 1)",
    "x = x.reshape(x.shape[0], -1).view(x.shape)",
    "x = x.narrow(2, 0, x.shape[2] - 1)",
    # Writing into views
    "x = x.clone(); x[:, 0] += 1",
    "x = x.clone(); x.select(1, 0).mul_(2)",
    "x = x.clone(); y = x.view(-1); y[::2] = 0.5; x = x + y.view_as(x)",
    "x = x.clone(); x.transpose(1, 2)[:, 0].copy_(x[:, :, 0])",
    "y = x.clone(); y.flatten()[0] = 3.0; x = x + y",
    "x = x.clone(); x.diagonal(0, 1, 2).fill_(0.25)",
    "x = x.clone(); x[:, :1].add_(x[:, -1:])",
    "x = x.clone(); x.masked_fill_(x > 1, -1.0)",
    "x = x.clone(); x.index_add_(1, torch.tensor([0, 0]), x[:, :1].repeat(1, 2, 1))",
    "x = x.detach().clone().add_(x)",
    # Numbers
    "x = F.softmax(x, 1)",
    "x = F.log_softmax(x.transpose(1, 2), 1)",
    "x = x.cumsum(1)",
    "x = x.cumprod(-1)",
    "x = x.logcumsumexp(1)",
    "x = x.cummax(1).values",
    "x = x.sort(1).values",
    "x = x.sort(dim=-1, descending=True, stable=True).values",
    "x = x.topk(2, 2).values",
    "x = x.kthvalue(1, 1, keepdim=True).values.expand_as(x)",
    "x = x.median(1, keepdim=True).values + x",
    "x = x - x.amax((1, 2), keepdim=True)",
    "x = x / x.norm(dim=-1, keepdim=True)",
    "x = x * x.std(1, keepdim=True)",
    "x = x.var_mean(2, keepdim=True)[0] + x",
    "x = x.renorm(2, 0, 1.0)",
    "x = x.logsumexp(1, keepdim=True) - x",
    "x = x.prod(1, keepdim=True) + x",
    "x = torch.where(x > 0, x, x.neg().exp())",
    "x = x.clamp(-0.5, 0.5)",
    "x = x.round(decimals=1) + x",
    "x = x % 0.7",
    "x = x.remainder(-0.3)",
    "x = x.fmod(0.4)",
    "x = x // 0.5 + x",
    "x = x.floor_divide(0.3) * x",
    "x = x.frac()",
    "x = x.sign() * x.abs().sqrt()",
    "x = x.atan2(x.flip(1))",
    "x = x.hypot(x.roll(1, 1))",
    "x = x.copysign(x.flip(1))",
    "x = x.erfinv()",
    "x = x.abs().lgamma()",
    "x = x.sinc()",
    "x = x.logit(0.1)",
    "x = x.heaviside(x[:, :1].expand_as(x)) * x",
    "x = x.nan_to_num(0.0)",
    "x = x.gather(1, x.argsort(1))",
    "x = x.scatter_add(1, x.argsort(1), x)",
    "x = x.scatter_reduce(1, x.argmax(1, keepdim=True), x[:, :1], 'amax')",
    "x = x.index_select(1, torch.tensor([1, 0, 1]))",
    "x = x[:, torch.tensor([1, 0])]",
    "x = x.take_along_dim(x.argmin(1, keepdim=True), 1) + x",
    "x = x @ x.transpose(1, 2)",
    "x = torch.einsum('bij,bkj->bik', x, x)",
    "x = torch.bmm(x, x.transpose(1, 2)) / 3",
    "x = torch.cdist(x, x + 1)",
    "x = torch.baddbmm(x @ x.mT, x, x.mT, beta=0.5)",
    "x = x.tril(1)",
    "x = x.triu()",
    "x = x.diff(dim=1, prepend=x[:, :1])",
    "x = F.normalize(x, dim=1)",
    "x = F.pad(x, (1, -1))",
    "x = F.pad(x, (1, 1), 'circular')",
    "x = F.layer_norm(x, x.shape[1:])",
    "x = F.scaled_dot_product_attention(x, x, x)",
    "x = F.scaled_dot_product_attention(x, x, x, is_causal=True)",
    "x = F.interpolate(x, scale_factor=1.5, mode='linear')",
    "x = F.max_pool1d(x, 2, 1)",
    "x = F.avg_pool1d(x, 2, 1, ceil_mode=True)",
    "x = F.glu(torch.cat([x, x], 1), 1)",
    "x = F.gelu(x, approximate='tanh')",
    "x = F.hardswish(x)",
    "x = torch.fft.fft(x).real",
    "x = torch.fft.irfft(torch.fft.rfft(x), x.shape[-1])",
    "x = torch.view_as_real(torch.complex(x, x.flip(1)))[..., 1]",
    "x = torch.polar(x.abs(), x).imag",
    "x = x.to(torch.bfloat16).to(x.dtype)",
    "x = (x > 0).to(x.dtype) * x",
    "x = x.double().sum(1, keepdim=True).float() + x",
    "x = x.half().float()",
    "x = (x * 10).to(torch.int32).bitwise_left_shift(1).to(x.dtype)",
    "x = torch.lerp(x, x.flip(1), x.sigmoid())",
    "x = torch.addcdiv(x, x, x.square() + 1, value=0.5)",
    "x = torch.addcmul(x, x, x.flip(2), value=-2)",
    "x = torch.trapezoid(x, dim=1).unsqueeze(1) + x",
    "x = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])) * x",
    "x = torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True) * x",
    "x = x.unflatten(1, (1, -1)).squeeze(1)",
    "x = torch.tensor_split(x, 2, 2)[0]",
    "x = x.chunk(2, 1)[-1]",
    "x, y = x.split([1, x.shape[1] - 1], 1); x = torch.cat([y, x], 1)",
)
"""Steps of a chain: each takes ``x`` of three dims, ``(B, M, N)``, and leaves it with three."""

_LAYER_FILE: Final = '''"""{about}"""
import torch


def model():
    return torch.nn.{layer}


def inputs(B):
    return ({batch},)
'''

_CHAIN_FILE: Final = '''"""{about}"""
import torch
import torch.nn.functional as F


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = torch.nn.Linear(6, 6)

    def forward(self, x):
        x = self.mixed(x)
        {steps}
        return x


def model():
    return Chain()


def inputs(B):
    return (torch.randn(B, 4, 6),)
'''


def layer_source(number: int) -> str:
    """The file of a layer of :data:`LAYERS`: the functions ``model()`` and ``inputs(B)``."""
    layer, batch = LAYERS[number]
    return _LAYER_FILE.format(about=f"torch.nn.{layer}", layer=layer, batch=batch)


def chain_source(seed: int) -> str:
    """The file of a chain of two to five steps, the same for the same seed."""
    drawn = random.Random(seed)
    steps = drawn.sample(_STEPS, drawn.randint(2, 5))
    lines: list[str] = []
    for step in steps:
        # Some steps are two statements.
        lines += step.split("; ")
    return _CHAIN_FILE.format(about=f"chain {seed}", steps="\n        ".join(lines))
