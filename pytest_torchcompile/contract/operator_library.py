"""A library of single operators for the hunt: what a chain mixes with others is seen here alone.

A chain hides what one operator does to one number: its first layer spreads a NaN over the whole row. Batches are long
enough for a vectorised loop and its rest (AVX-512 takes 16 numbers of float32 at once).
"""

from __future__ import annotations

from typing import Final

__all__ = ["OPERATORS", "operator_source"]

_NUMBERS: Final = "torch.randn(B, 37)"
_WHOLE_NUMBERS: Final = "torch.randint(-9, 9, (B, 37))"
_IMAGE: Final = "torch.randn(B, 2, 6, 7)"
_BYTES: Final = "torch.randint(0, 255, (B, 2, 6, 7)).to(torch.uint8)"
_SCORES: Final = "torch.randn(B, 5)"

_POINTWISE: Final = (
    "x.abs()", "x.acosh()", "x.acos()", "x.asinh()", "x.asin()", "x.atanh()", "x.atan()", "x.ceil()", "x.cosh()",
    "x.cos()", "x.digamma()", "x.erf()", "x.erfc()", "x.erfinv()", "x.exp()", "x.exp2()", "x.expm1()", "x.floor()",
    "x.frac()", "x.i0()", "x.lgamma()", "x.log()", "x.log10()", "x.log1p()", "x.log2()", "x.logit()", "x.neg()",
    "x.nan_to_num()", "x.reciprocal()", "x.relu()", "x.round()", "x.round(decimals=1)", "x.rsqrt()", "x.sigmoid()",
    "x.sign()", "x.signbit()", "x.sinc()", "x.sinh()", "x.sin()", "x.sqrt()", "x.square()", "x.tanh()", "x.tan()",
    "x.trunc()", "x.isinf()", "x.isnan()", "x.isfinite()", "x.angle()", "x * 0", "x * 0.0", "x + 0", "0 - x", "x / 3",
    "1 / x", "x // 3", "x // 0.1", "1 // x", "x // float('inf')", "x % 3", "x % 0.7", "x % -3", "x % float('inf')",
    "x.fmod(3)", "torch.div(x, 3, rounding_mode='trunc')", "x ** 2", "x ** 3", "x ** -1", "x ** 0", "x ** 0.5",
    "x ** -0.5", "2 ** x", "0 ** x", "x.clamp(-1, 1)", "x.clamp_min(2)", "x.hypot(x.flip(1))", "x.atan2(x.flip(1))",
    "x.copysign(x.flip(1))", "x.nextafter(x.flip(1))", "x.maximum(x.flip(1))", "x.fmax(x.flip(1))",
    "x.logaddexp(x.flip(1))", "x.xlogy(x.flip(1))", "x.heaviside(x.flip(1))", "x.ldexp(torch.tensor(3))",
    "x.lerp(x.flip(1), 0.3)", "x.to(torch.float16)", "x.to(torch.bfloat16)", "x.to(torch.float64)",
    "torch.special.entr(x)", "torch.special.erfcx(x)", "torch.special.i0e(x)", "torch.special.i1(x)",
    "torch.special.ndtr(x)", "torch.special.ndtri(x)", "torch.special.log_ndtr(x)", "torch.special.zeta(x, x.flip(1))",
    "torch.special.bessel_j0(x)", "torch.polygamma(1, x)", "F.celu(x)", "F.elu(x)", "F.gelu(x)",
    "F.gelu(x, approximate='tanh')", "F.hardshrink(x)", "F.hardsigmoid(x)", "F.hardswish(x)", "F.leaky_relu(x)",
    "F.logsigmoid(x)", "F.mish(x)", "F.relu6(x)", "F.selu(x)", "F.silu(x)", "F.softplus(x)", "F.softshrink(x)",
    "F.softsign(x)", "F.tanhshrink(x)", "F.threshold(x, 0.5, 3.0)",
)
_ALONG_A_ROW: Final = (
    "x.sum(1)", "x.mean(1)", "x.prod(1)", "x.amax(1)", "x.argmax(1)", "x.argmin(1)", "tuple(x.max(1))", "x.var(1)",
    "x.std(1, correction=0)", "x.logsumexp(1)", "x.nansum(1)", "x.nanmean(1)", "tuple(x.median(1))", "x.cumsum(1)",
    "x.cumprod(1)", "tuple(x.cummax(1))", "x.logcumsumexp(1)", "tuple(x.sort(dim=1, stable=True))", "tuple(x.topk(3))",
    "x.softmax(1)", "x.log_softmax(1)", "x.all(1)", "x.any(1)", "x.count_nonzero(1)", "x.norm(dim=1)", "x.norm(3, 1)",
    "x.norm(float('inf'), 1)", "F.normalize(x, dim=1)", "F.layer_norm(x, x.shape[1:])", "F.rms_norm(x, x.shape[1:])",
    "x.quantile(0.3, 1)", "torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))",
    "torch.isin(x, torch.tensor([0.0, 1.0]))",
)
_OF_WHOLE_NUMBERS: Final = (
    "x // 3", "x % 3", "x % -3", "x.fmod(3)", "x / 3", "x ** 2", "x << 2", "x >> 1", "x.gcd(x.flip(1))", "~x",
    "x.to(torch.int8)", "x.to(torch.uint8)", "x.to(torch.int8).sum(1)", "x.to(torch.uint8) * 200", "x.abs()",
    "x.sign()", "x.cumsum(1)", "x.float().round().long()", "torch.bincount(x.flatten() + 9, minlength=18)",
)
_OF_IMAGES: Final = (
    "F.max_pool2d(x, 2, return_indices=True)", "F.max_pool2d(x, 3, 2, 1, ceil_mode=True)",
    "F.adaptive_max_pool2d(x, (2, 3), return_indices=True)", "F.adaptive_avg_pool2d(x, (2, 3))",
    "F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)", "F.interpolate(x, (4, 9), mode='bilinear')",
    "F.interpolate(x, (4, 9), mode='bicubic')", "F.interpolate(x, (4, 9), mode='nearest-exact')",
    "F.interpolate(x, (4, 9), mode='bilinear', antialias=True)", "F.pad(x, (2, 1, 1, 2), mode='reflect')",
    "F.pixel_unshuffle(x[..., :6], 2)", "F.unfold(x, 3, padding=1, stride=2)",
    "F.grid_sample(x, x.permute(0, 2, 3, 1), align_corners=False)",
    "F.grid_sample(x, x.permute(0, 2, 3, 1), padding_mode='border', align_corners=True)",
)
_OF_BYTES: Final = ("F.interpolate(x, (4, 9), mode='bilinear')", "x + 200", "x * 3", "x.sum()", "x.float() / 255")
_LOSSES: Final = (
    "F.cross_entropy(x, y)", "F.cross_entropy(x, y, label_smoothing=0.1)", "F.cross_entropy(x, y - 1, ignore_index=-1)",
    "F.multi_margin_loss(x, y)", "F.multilabel_margin_loss(x, F.pad(y[:, None], (0, 4), value=-1))",
    "F.multilabel_margin_loss(x, torch.stack([y, 0 * y - 1, y, y, y], 1))",
    "F.nll_loss(x, y, torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]))", "F.soft_margin_loss(x, x.sign())",
    "F.binary_cross_entropy_with_logits(x, x.sigmoid())", "F.huber_loss(x, x.flip(1))",
    "F.kl_div(x, x.softmax(1), reduction='batchmean')",
    "F.poisson_nll_loss(x, y[:, None].float().expand_as(x), full=True)",
)

OPERATORS: Final[tuple[tuple[str, str], ...]] = (
    *((operator, _NUMBERS) for operator in (*_POINTWISE, *_ALONG_A_ROW)),
    *((operator, _WHOLE_NUMBERS) for operator in _OF_WHOLE_NUMBERS),
    *((operator, _IMAGE) for operator in _OF_IMAGES),
    *((operator, _BYTES) for operator in _OF_BYTES),
    *((operator, f"{_SCORES}, torch.randint(0, 5, (B,))") for operator in _LOSSES),
)
"""Expressions of ``x`` (of losses: and of labels ``y``), and the batch that they are called with."""

_FILE: Final = '''"""{about}"""
import torch
import torch.nn.functional as F


class Operator(torch.nn.Module):
    def forward(self, {given}):
        return {operator}


def model():
    return Operator()


def inputs(B):
    return ({batch},)
'''


def operator_source(number: int) -> str:
    """The file of an operator of :data:`OPERATORS`: the functions ``model()`` and ``inputs(B)``."""
    operator, batch = OPERATORS[number]
    given = "x, y" if batch.startswith(_SCORES) else "x"
    return _FILE.format(about=operator, given=given, operator=operator, batch=batch)
