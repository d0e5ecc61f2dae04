"""The ops.  Each is one function from arrays to (y, vjp): forward and backward side by side.

Read arithmetic.py, linear.py, norms.py, activations.py, attention.py, losses.py; then shaping.py, indexing.py, random.py.
"""
from refimpl.ops.activations import gelu_tanh, softmax
from refimpl.ops.arithmetic import add, mul, scale, sum
from refimpl.ops.attention import CAUSAL, Mask, attention
from refimpl.ops.indexing import embedding
from refimpl.ops.linear import linear, product
from refimpl.ops.losses import IGNORE, cross_entropy
from refimpl.ops.norms import layer_norm
from refimpl.ops.random import dropout
from refimpl.ops.shaping import reshape, transpose

__all__ = ["CAUSAL", "IGNORE", "Mask", "add", "attention", "cross_entropy", "dropout", "embedding", "gelu_tanh", "layer_norm",
           "linear", "mul", "product", "reshape", "scale", "softmax", "sum", "transpose"]
