"""Localises an op that computes something other than the published operator of that name: ONNX's own node test cases.

The onnx package carries inputs and outputs for every operator.  ADAPTERS turn an operator with its attributes into calls
of our ops; EXCLUDED says which of these operators' cases have no counterpart here, and why.  Other operators are not ours.
Forward only: ONNX has no gradients.  Each case is also there with the node expanded into its function body; those are the
same numbers once more and are not collected.

Equal means: integers, booleans and moved elements bit for bit; else |y - expected| <= 8·√n·eps·scale, eps of the dtype, n
the size of the largest array and scale the largest |expected|: both sides round (test_torch_ops.py derives half of it).
"""
import math
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from typing import Any, Callable

import numpy as np
import onnx
import pytest

from refimpl import ops
from refimpl.ops.rope import rotate

# -- the cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One case.  inputs: arrays in the operator's order, None where one is left out; outputs: the expected arrays."""
    name: str
    op: str
    attributes: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def has(self, k: int) -> bool:
        return len(self.inputs) > k and self.inputs[k] is not None


def collect() -> list[Node]:
    """Every case of one node, on a node of an operator in ADAPTERS."""
    from onnx.backend.test.case.node import collect_testcases
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # the package provokes overflows on purpose
        cases = collect_testcases()
    found = []
    for case in cases:
        node, *more = case.model.graph.node
        if not more and node.op_type in ADAPTERS:
            (given, expected), = case.data_sets
            rest = iter(given)
            inputs = tuple(next(rest) if name else None for name in node.input)
            expected = iter(expected)
            outputs = tuple(next(expected) if name else None for name in node.output)
            found.append(Node(case.name, node.op_type, attributes_of(node), inputs, outputs))
    return found


def attributes_of(node: Any) -> dict[str, Any]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}


# -- adapters: (inputs..., attributes...) -> the output or a tuple of the first outputs; None where it is not ours -----------


def forward(op: Any, *arrays: Any, **static: Any) -> Any:
    return op.array(*arrays, **static)[0]


def plain(op: Any) -> Callable:
    return lambda *arrays: forward(op, *arrays)


def folded(*arrays: Any) -> Any:
    return reduce(lambda a, b: forward(ops.add, a, b), arrays)


def with_axis_last(op: Any) -> Callable:
    """An op over the last axis, along another one."""
    def run(x, axis=-1):
        order = [k for k in range(x.ndim) if k != axis % x.ndim] + [axis % x.ndim]
        y = forward(op, forward(ops.transpose, x, axes=tuple(order)))
        return forward(ops.transpose, y, axes=tuple(int(k) for k in np.argsort(order)))
    return run


def reduction(op: Any) -> Callable:
    def run(x, axes=None, keepdims=1, noop_with_empty_axes=0):
        none = axes is None or axes.size == 0
        axis = (() if noop_with_empty_axes else None) if none else tuple(axes.tolist())
        return forward(op, x, axis=axis, keepdims=bool(keepdims))
    return run


def over_merged(op: Any) -> Callable:
    """An op that reduces one axis, over several: they are moved to the end and merged."""
    def run(x, axes=None, keepdims=1, noop_with_empty_axes=0):
        reduced = sorted(a % x.ndim for a in axes.tolist()) if axes is not None and axes.size else list(range(x.ndim))
        kept = [a for a in range(x.ndim) if a not in reduced]
        merged = forward(ops.reshape, forward(ops.transpose, x, axes=(*kept, *reduced)),
                         shape=(*(x.shape[a] for a in kept), math.prod(x.shape[a] for a in reduced)))
        shape = tuple(1 if a in reduced else n for a, n in enumerate(x.shape) if keepdims or a not in reduced)
        return forward(ops.reshape, np.asarray(forward(op, merged)), shape=shape)
    return run


def gemm(a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0):
    a, b = (forward(ops.transpose, m, axes=(1, 0)) if t else m for m, t in ((a, transA), (b, transB)))
    y = forward(ops.scale, forward(ops.linear, a, b), by=alpha)
    return y if c is None else forward(ops.add, y, forward(ops.scale, c, by=beta))


def matmul(a, b):
    """Vectors are matrices of one row or column."""
    rows, columns = a.ndim > 1, b.ndim > 1
    y = forward(ops.matmul, a if rows else a[None], b if columns else b[:, None])
    shape = y.shape[:-2] + y.shape[-2:-1] * rows + y.shape[-1:] * columns
    return forward(ops.reshape, y, shape=shape)


def reshape(x, shape, allowzero=0):
    """A size 0 means x's own, unless allowzero."""
    sizes = tuple(x.shape[k] if n == 0 and not allowzero else n for k, n in enumerate(shape.tolist()))
    return forward(ops.reshape, x, shape=sizes)


def flatten(x, axis=1):
    axis = axis if axis >= 0 else axis + x.ndim
    return forward(ops.reshape, x, shape=(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def squeeze(x, axes):
    gone = {a % x.ndim for a in axes.tolist()}
    return forward(ops.reshape, x, shape=tuple(n for k, n in enumerate(x.shape) if k not in gone))


def unsqueeze(x, axes):
    rank = x.ndim + axes.size
    new, sizes = {a % rank for a in axes.tolist()}, iter(x.shape)
    return forward(ops.reshape, x, shape=tuple(1 if k in new else next(sizes) for k in range(rank)))


def split(x, sizes=None, axis=0, num_outputs=None, outputs=0):
    n, parts = x.shape[axis], num_outputs or outputs
    if sizes is None:
        each = -(-n // parts)                           # the last one may be smaller
        sizes = np.diff([min(each * k, n) for k in range(parts + 1)])
    return forward(ops.split, x, sizes=tuple(sizes.tolist()), axis=axis)


def slices(x, starts, ends, axes=None, steps=None):
    for k, (start, stop) in enumerate(zip(starts.tolist(), ends.tolist())):
        axis = k if axes is None else int(axes[k])
        start, stop, _ = slice(start, stop).indices(x.shape[axis])
        x = forward(ops.slice_axis, x, axis=axis, start=start, stop=max(start, stop))
    return x


def pad(x, pads, value=0.0, axes=None, mode="constant"):
    """Padded with zeros; where a padded array of ones has none, `value`."""
    axes = np.arange(x.ndim) if axes is None else axes
    inside = np.ones_like(x)
    for axis, before, after in zip(axes.tolist(), *np.split(pads, 2)):
        x, inside = (forward(ops.pad, a, axis=axis, before=int(before), after=int(after)) for a in (x, inside))
    return forward(ops.where, inside == 1, x, np.asarray(value, x.dtype))


def gather(x, ids, axis=0):
    """Ids of any shape, along any axis: ours picks along the first, by a vector."""
    order = (axis, *(k for k in range(x.ndim) if k != axis))
    y = forward(ops.gather, forward(ops.transpose, x, axes=order), ids.reshape(-1))
    y = forward(ops.reshape, y, shape=(*ids.shape, *y.shape[1:]))
    front, back = list(range(ids.ndim)), list(range(ids.ndim, y.ndim))
    return forward(ops.transpose, y, axes=(*back[:axis], *front, *back[axis:]))


def scatter_nd(x, ids, updates, reduction="none"):
    return forward(ops.add, x, forward(ops.scatter_add, updates, ids[:, 0], n=len(x)))


def scatter_elements(x, ids, updates, axis=0, reduction="none"):
    added = forward(ops.scatter_add, updates.reshape(-1), ids.reshape(-1), n=x.size)
    return forward(ops.add, x, added.reshape(x.shape))


def layer_norm(x, g, b, axis=-1, epsilon=1e-5):
    """Over all axes from `axis` on, merged into one."""
    lead = x.shape[:axis % x.ndim]
    y = forward(ops.layer_norm, x.reshape(*lead, g.size), g.reshape(-1), b.reshape(-1), eps=epsilon)
    return y.reshape(x.shape), None, None


def rms_norm(x, g, axis=-1, epsilon=1e-5):
    lead = x.shape[:axis % x.ndim]
    return forward(ops.rms_norm, x.reshape(*lead, g.size), g.reshape(-1), eps=epsilon).reshape(x.shape)


def rotary(x, cos, sin, positions=None, interleaved=0, rotary_embedding_dim=0, num_heads=0):
    """The kernel of `rope`: the cases' cos and sin are any numbers, not those of angles."""
    heads = x if x.ndim == 4 else split_heads(x, num_heads)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    R = rotary_embedding_dim or heads.shape[-1]
    y = rotate(heads, cos[:, None], sin[:, None], "interleaved" if interleaved else "half", R)
    return y if x.ndim == 4 else merge_heads(y)


def split_heads(x, heads):
    """(B, T, H·K) -> (B, H, T, K)"""
    x = forward(ops.reshape, x, shape=(*x.shape[:2], heads, x.shape[2] // heads))
    return forward(ops.transpose, x, axes=(0, 2, 1, 3))


def merge_heads(x):
    x = forward(ops.transpose, x, axes=(0, 2, 1, 3))
    return forward(ops.reshape, x, shape=(*x.shape[:2], x.shape[2] * x.shape[3]))


def attention(q, k, v, mask=None, past_k=None, past_v=None, lengths=None, is_causal=0, scale=None, left_window_size=-1,
              q_num_heads=0, kv_num_heads=0, **ignored):
    """ONNX's query i sits behind the past, at position past + i, and sees no later key: keys from past + T on are never
    seen, and without them ours, aligned bottom right, means the same.  `lengths` are those of padded sequences, each
    computed alone without its padding.  A mask whose rows are equal or disjoint is one of documents."""
    flat = q.ndim == 3
    if flat:
        q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    past = past_k.shape[2] if past_k is not None else 0
    if past:
        k, v = (forward(ops.concat, *pair, axis=2) for pair in ((past_k, k), (past_v, v)))
    present = (k, v) if past_k is not None else ()
    rule = ops.Mask(causal=bool(is_causal), window=None if left_window_size < 0 else left_window_size + 1)
    B, _, T, _ = q.shape
    ends = lengths.tolist() if lengths is not None else [min(past + T, k.shape[2]) if is_causal else k.shape[2]] * B
    documents = documents_of(mask)
    y = [forward(ops.attention, q[b:b + 1], k[b:b + 1, :, :end], v[b:b + 1, :, :end], *documents, mask=rule, scale=scale)
         for b, end in enumerate(ends)]
    y = forward(ops.concat, *y, axis=0)
    return merge_heads(y) if flat else y, *present


def documents_of(mask):
    """bool[T, S] as ids of queries [1, T] and of keys [1, S]."""
    if mask is None:
        return ()
    rows = [row.tobytes() for row in mask]
    kinds = {row: n for n, row in enumerate(dict.fromkeys(rows))}
    keys = [next((kinds[rows[i]] for i in range(len(mask)) if mask[i, j]), -1) for j in range(mask.shape[1])]
    return np.array([[kinds[row] for row in rows]]), np.array([keys])


def is_of_documents(mask):
    return mask.dtype == bool and mask.ndim == 2 and all(
        (a == b).all() or not (a & b).any() for a in mask for b in mask)


def cross_entropy(x, targets, reduction="mean", ignore_index=-100, outputs=0):
    """Classes are axis 1 in ONNX, the last one here.  "none" is the sum of one; the mean divides once, by the count."""
    logits = forward(ops.transpose, x, axes=(0, *range(2, x.ndim), 1))
    back = (0, x.ndim - 1, *range(1, x.ndim - 1))
    log_p = forward(ops.transpose, forward(ops.log_softmax, logits), axes=back) if outputs > 1 else None
    if reduction == "none":
        rows = zip(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        each = [forward(ops.cross_entropy, row, np.asarray(t), ignore_index=ignore_index)[0] for row, t in rows]
        return np.array(each).reshape(targets.shape), log_p
    total, count = forward(ops.cross_entropy, logits, targets, ignore_index=ignore_index)
    return (total if reduction == "sum" else forward(ops.scale, np.asarray(total), by=1 / int(count))), log_p


def dropout(x, rate=None, training=None, **ignored):
    """At rate 0, which is what inference means, whatever the rate of training."""
    y = forward(ops.dropout, x, *map(np.arange, x.shape), rate=0.0, shape=x.shape)
    return y, np.ones(x.shape, bool)


def causal_conv(x, w, bias=None, past=None, activation="none"):
    """(B, D, T) and (D, 1, W).  The past is put in front and its outputs are cut off; what comes before it is 0."""
    W = w.shape[2]
    past = np.zeros((*x.shape[:2], W - 1), x.dtype) if past is None else past
    whole = forward(ops.concat, past, x, axis=2)
    y = forward(ops.depthwise_conv, whole.swapaxes(1, 2), w[:, 0].T).swapaxes(1, 2)
    y = forward(ops.slice_axis, y, axis=2, start=W - 1)
    y = y if bias is None else forward(ops.add, y, bias[:, None])
    present = forward(ops.slice_axis, whole, axis=2, start=whole.shape[2] - (W - 1))
    return (y if activation == "none" else forward(ops.silu, y)), present


ADAPTERS: dict[str, Callable] = {
    "Add": plain(ops.add), "Sub": plain(ops.subtract), "Mul": plain(ops.mul), "Div": plain(ops.divide), "Sum": folded,
    "Mean": lambda *xs: forward(ops.scale, folded(*xs), by=1 / len(xs)), "Neg": lambda x: forward(ops.scale, x, by=-1),
    "Reciprocal": lambda x: forward(ops.power, x, exponent=-1), "Where": plain(ops.where), "Identity": plain(ops.stop_gradient),
    "Exp": plain(ops.exp), "Log": plain(ops.log), "Sqrt": plain(ops.sqrt), "Tanh": plain(ops.tanh), "Erf": plain(ops.erf),
    "Sigmoid": plain(ops.sigmoid), "Softplus": plain(ops.softplus), "Relu": plain(ops.relu),
    "Pow": lambda x, n: forward(ops.power, x, exponent=float(n)),
    "Gelu": lambda x, approximate="none": forward(ops.gelu_tanh if approximate == "tanh" else ops.gelu_erf, x),
    "Swish": lambda x, alpha=1.0: forward(ops.silu, x), "SwiGLU": lambda a, b, alpha=1.0: forward(ops.swiglu, a, b),
    "MatMul": matmul, "Gemm": gemm,
    "Einsum": lambda a, b, equation: forward(ops.einsum, a, b, spec=equation if "->" in equation else equation + "->"),
    "ReduceSum": reduction(ops.sum), "ReduceMean": reduction(ops.mean), "ReduceMax": reduction(ops.max),
    "ReduceL2": over_merged(ops.norm), "ReduceLogSumExp": over_merged(ops.logsumexp),
    "CumSum": lambda x, axis, exclusive=0, reverse=0: forward(ops.cumsum, x, axis=int(axis)),
    "Reshape": reshape, "Flatten": flatten, "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Split": split, "Slice": slices,
    "Transpose": lambda x, perm=None: forward(ops.transpose, x, axes=tuple(perm or reversed(range(x.ndim)))),
    "Concat": lambda *parts, axis: forward(ops.concat, *parts, axis=axis), "Pad": pad, "Gather": gather,
    "ScatterND": scatter_nd, "ScatterElements": scatter_elements,
    "Softmax": with_axis_last(ops.softmax), "LogSoftmax": with_axis_last(ops.log_softmax),
    "LayerNormalization": layer_norm, "RMSNormalization": rms_norm, "RotaryEmbedding": rotary, "Attention": attention,
    "FlexAttention": attention, "SoftmaxCrossEntropyLoss": cross_entropy, "Dropout": dropout,
    "CausalConvWithState": causal_conv,
}
COUNTS_OUTPUTS = {"Split", "SoftmaxCrossEntropyLoss"}   # adapters that ask how many outputs are wanted
MOVES = {"Identity", "Where", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Split", "Slice", "Transpose", "Concat", "Pad",
         "Gather", "Neg", "Relu", "ReduceMax"}                          # elements are moved or picked: equal bit for bit
ARITHMETIC = set(ADAPTERS) - MOVES | {"Neg", "Relu"}

# -- what is left out, and why: the first row that applies ----------------------------------------------------------------

ANY = set(ADAPTERS)
EXCLUDED: list[tuple[set[str], Callable[[Node], bool], str]] = [
    (ANY, lambda n: not all(hasattr(a, "dtype") for a in (*n.inputs, *n.outputs) if a is not None),
     "a sequence or an optional value: ops take arrays"),
    (ANY, lambda n: any(a is not None and str(a.dtype) in ("float16", "bfloat16") for a in n.inputs),
     "16-bit floats: ops are for float64 and float32, lower precision is emulated at declared points"),
    (ARITHMETIC, lambda n: n.inputs[0].dtype.kind in "iu", "arithmetic on integers: ops are for floats"),
    ({"Pow"}, lambda n: n.inputs[1].ndim > 0, "an array of exponents: power has one exponent"),
    ({"Einsum"}, lambda n: len(n.inputs) != 2, "one operand: einsum has two (sum, transpose are ops of their own)"),
    ({"CumSum"}, lambda n: bool(n.attributes.get("exclusive") or n.attributes.get("reverse")),
     "exclusive or reverse: cumsum has one form"),
    ({"ReduceMax", "ReduceLogSumExp"}, lambda n: n.inputs[0].size == 0, "over nothing, where ONNX gives -inf: an error here"),
    ({"ReduceMax"}, lambda n: n.inputs[0].dtype == bool, "the maximum of booleans: ops are for floats"),
    ({"Slice"}, lambda n: n.has(4) and bool((n.inputs[4] != 1).any()), "steps other than 1: slice_axis has none"),
    ({"Pad"}, lambda n: n.attributes.get("mode", "constant") != "constant", "edge, reflect or wrap: pad puts constants"),
    ({"Gather"}, lambda n: bool((n.inputs[1] < 0).any()), "negative ids: they are an error here (a GPU wraps them silently)"),
    ({"ScatterND", "ScatterElements"}, lambda n: n.attributes.get("reduction", "none") != "add",
     "replacing, max, min, mul: scatter_add adds"),
    ({"Swish", "SwiGLU"}, lambda n: n.attributes.get("alpha", 1.0) != 1, "alpha other than 1: silu and swiglu have none"),
    ({"SoftmaxCrossEntropyLoss"}, lambda n: n.has(2), "weights of classes: cross_entropy has none"),
    ({"Dropout"}, lambda n: n.has(2) and bool(n.inputs[2]) and (not n.has(1) or bool(n.inputs[1])),
     "training: the mask comes from a generator of its own, ours from the hash"),
    ({"FlexAttention"}, lambda n: bool({"score_mod", "prob_mod"} & set(n.attributes)), "a graph as an argument"),
    ({"Attention", "FlexAttention"}, lambda n: n.inputs[2].shape[-1] != n.inputs[1].shape[-1],
     "v of another width than k: attention has one K"),
    ({"Attention"}, lambda n: n.attributes.get("softcap", 0) > 0, "softcap: attention has none"),
    ({"Attention"}, lambda n: n.has(3) and not is_of_documents(n.inputs[3]),
     "an arbitrary or additive mask: attention takes rules (Mask) and documents"),
    ({"Attention"}, lambda n: n.attributes.get("right_window_size", -1) >= 0, "a window of two sizes: Mask's has one"),
    ({"Attention"}, lambda n: n.has(4) and n.inputs[0].shape[2] > n.inputs[1].shape[2],
     "more queries than new keys: the last of them sit behind the last key, ours end with it"),
]


def why_not(node: Node) -> str | None:
    return next((reason for operators, applies, reason in EXCLUDED if node.op in operators and applies(node)), None)


# -- the tests ----------------------------------------------------------------------------------------------------------

NODES = collect()
COVERED = [node for node in NODES if why_not(node) is None]


@pytest.mark.parametrize("node", COVERED, ids=lambda node: node.name)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")     # ONNX tests infinities, too
def test_the_op_gives_what_onnx_says(node):
    known = {"outputs": len(node.outputs)} if node.op in COUNTS_OUTPUTS else {}
    y = ADAPTERS[node.op](*node.inputs, **node.attributes, **known)
    y = y if isinstance(y, tuple) else (y,)
    assert y[0] is not None
    for got, expected in zip(y, node.outputs):
        if got is not None and expected is not None:
            require_equal(node, np.asarray(got), np.asarray(expected))


def require_equal(node, got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if node.op in MOVES or expected.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    n = max(a.size for a in (*node.inputs, expected) if a is not None)
    scale = np.abs(expected[finite]).max(initial=0)
    wrong = np.abs(got[finite] - expected[finite]).max(initial=0)
    allowed = 8 * math.sqrt(n) * float(np.finfo(expected.dtype).eps) * scale
    assert wrong <= allowed, f"{node.name} is off by {wrong:.1e}, allowed is {allowed:.1e}"


def test_every_case_of_our_operators_is_covered_or_excluded_for_a_reason(capsys):
    assert {node.op for node in NODES} == set(ADAPTERS), "an operator without a case"
    reasons = Counter(reason for node in NODES if (reason := why_not(node)))
    with capsys.disabled():                             # part of the report of a passing run
        print(f"\nONNX {onnx.__version__}, {len(ADAPTERS)} operators: {len(COVERED)} cases covered, {reasons.total()} not:")
        for reason, count in reasons.most_common():
            print(f"  {count:4d}  {reason}")
    assert len(COVERED) + reasons.total() == len(NODES)
    assert {reason for _, _, reason in EXCLUDED} == set(reasons), "a reason that no case needs"
    assert set(ADAPTERS) == {node.op for node in COVERED}, "an operator of which nothing is covered"
