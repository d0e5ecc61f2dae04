"""The ops.  Each is one function from arrays to (y, vjp): forward and backward side by side.

Read arithmetic.py, linear.py, norms.py, activations.py, softmax.py, attention.py, blockwise.py, losses.py; then reductions.py,
elementwise.py, shaping.py, indexing.py, matmul.py, rope.py, conv.py, random.py.  corners.py says what happens where a slope is
infinite, axes.py what an axis number may be.
"""
from refimpl.ops.activations import gelu_erf, gelu_tanh, quick_gelu, relu, silu, swiglu
from refimpl.ops.arithmetic import add, divide, mul, scale, subtract, where
from refimpl.ops.attention import attention
from refimpl.ops.blockwise import blockwise_attention
from refimpl.ops.conv import depthwise_conv, fft_conv
from refimpl.ops.elementwise import erf, exp, log, power, sigmoid, softplus, sqrt, tanh
from refimpl.ops.indexing import embedding, gather, scatter_add
from refimpl.ops.linear import linear, product
from refimpl.ops.losses import IGNORE, cross_entropy
from refimpl.ops.mask import CAUSAL, Mask
from refimpl.ops.matmul import einsum, matmul
from refimpl.ops.norms import layer_norm, rms_norm
from refimpl.ops.random import dropout
from refimpl.ops.reductions import cumsum, max, mean, norm, sum
from refimpl.ops.rope import interleaved_to_half, rope
from refimpl.ops.shaping import concat, pad, repeat, reshape, slice_axis, split, stop_gradient, straight_through, transpose
from refimpl.ops.softmax import log_softmax, logsumexp, softmax

__all__ = ["CAUSAL", "IGNORE", "Mask", "add", "attention", "blockwise_attention", "concat", "cross_entropy", "cumsum",
           "depthwise_conv", "divide", "dropout", "einsum", "embedding", "erf", "exp", "fft_conv", "gather", "gelu_erf",
           "gelu_tanh", "interleaved_to_half", "layer_norm", "linear", "log", "log_softmax", "logsumexp", "matmul", "max",
           "mean", "mul", "norm", "pad", "power", "product", "quick_gelu", "relu", "repeat", "reshape", "rms_norm", "rope",
           "scale", "scatter_add", "sigmoid", "silu", "slice_axis", "softmax", "softplus", "split", "sqrt", "stop_gradient",
           "straight_through", "subtract", "sum", "swiglu", "tanh", "transpose", "where"]
