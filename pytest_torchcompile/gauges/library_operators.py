"""Library operators: those whose work stays what it is, compiled or not, for nothing is fused into them.

*Functions* are the other operators that compute much: exp, tanh and the like take tens of instructions an element.

Products of matrices, convolutions, attention, recurrent layers, linear algebra and Fourier transforms are a library's.
An operator of another namespace is one that the compiler does not look into. A product with a vector is none of them:
Inductor writes ``mv`` and ``dot`` as a sum (``torch/_decomp/decompositions.py``, torch 2.8 to 2.15).
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["calls_library", "is_convolution", "is_custom", "is_function"]

_NAMES: Final = re.compile(r"mm$|mm_|baddbmm|convolution|conv\dd|attention|rnn|lstm|gru|cdist"
                            r"|linalg_(?!vector_norm|cross|check)|cholesky|_fft_|geqrf|triangular_solve|lu_solve")
_FUNCTIONS: Final = frozenset({
    "_log_softmax", "_softmax", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "celu", "cos", "cosh",
    "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "gelu", "gelu_backward", "lgamma", "log",
    "log10", "log1p", "log2", "log_sigmoid_forward", "logaddexp", "logit", "logsumexp", "mish", "selu", "sigmoid",
    "silu", "silu_backward", "sin", "sinh", "softplus", "tan", "tanh",
})
_TORCHS_OWN: Final = frozenset({
    "_c10d_functional", "_quantized", "aten", "higher_order", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn",
    "prims", "quantized", "rngprims",
})
"""Namespaces of torch's own operators (torch 2.8 to 2.15); in any other one an operator is a custom one."""
_COMPILED: Final = frozenset({"aten", "prims"})
"""Namespaces that the compiler looks into."""


def calls_library(name: str) -> bool:
    """Whether an operator stays a call of its own when compiled; one of ATen's may be named without its namespace.

    >>> calls_library("addmm"), calls_library("aten::mv"), calls_library("mine::scale")
    (True, False, True)
    """
    namespace, _, operator = name.rpartition("::")
    return bool(namespace and namespace not in _COMPILED) or bool(_NAMES.search(operator))


def is_convolution(name: str) -> bool:
    """Whether an operator of ATen's convolves, forward or backward.

    >>> is_convolution("convolution_backward"), is_convolution("conv2d"), is_convolution("addmm")
    (True, True, False)
    """
    return "conv" in name


def is_custom(name: str) -> bool:
    """Whether an operator is none of torch's own, by its name with the namespace; one without is ATen's.

    >>> is_custom("mine::scale"), is_custom("aten::sort"), is_custom("mkldnn::_linear_pointwise"), is_custom("mm")
    (True, False, False, False)
    """
    namespace = name.rpartition("::")[0]
    return bool(namespace) and namespace not in _TORCHS_OWN


def is_function(name: str) -> bool:
    """Whether an operator of ATen computes exp, tanh or the like of each element, in place or not.

    >>> is_function("tanh_"), is_function("mul")
    (True, False)
    """
    return name.removesuffix("_") in _FUNCTIONS
