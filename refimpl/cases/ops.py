"""The cases of the ops that do not communicate."""
import numpy as np

from refimpl.cases.makers import Case, bools, case, given, grouped, ids, qkv, shifted, uniform
from refimpl.ops import CAUSAL, IGNORE, Mask

BROADCASTS = [
    case("same shape", uniform(3, 5), uniform(3, 5)), case("b repeated", uniform(2, 3, 5), uniform(5)),
    case("a repeated", uniform(5), uniform(2, 3, 5)), case("both repeated", uniform(3, 1), uniform(1, 7)),
    case("inner axis repeated", uniform(2, 1, 5), uniform(2, 3, 5)), case("scalar", uniform(), uniform(3)),
    case("both scalar", uniform(), uniform()), case("size 1 against size 1", uniform(1, 1), uniform(1)),
    case("no rows", uniform(0, 3), uniform(3)), case("size 1 repeated no times", uniform(1), uniform(0))]

SOFTMAX = [
    case("matrix", uniform(3, 5, scale=4)), case("vector", uniform(7)), case("one class", uniform(3, 1)),
    case("no rows", uniform(0, 4)), case("no classes", uniform(3, 0)), case("equal", given([[2.0] * 5])),
    case("huge", uniform(3, 5, scale=16384)), case("masked", given([[-np.inf, 1, 2], [-np.inf] * 3, [0, -np.inf, 1]]))]
UNARY = [
    case("matrix", uniform(3, 5, scale=4)), case("scalar", uniform()), case("one", given([-2.7])), case("empty", uniform(0, 3)),
    case("at zero", given([0.0, -0.0, 1e-9]))]
POSITIVE = [case("matrix", uniform(3, 5, mean=2)), case("scalar", uniform(mean=2)), case("empty", uniform(0, 3, mean=2)),
            case("wide", given([0.01, 1.0, 1000.0]))]

TABLE = {
    "add": BROADCASTS,
    "mul": BROADCASTS,
    "scale": [
        case("matrix", uniform(3, 5), by=-0.75), case("scalar", uniform(), by=1 / 3), case("empty", uniform(0, 4), by=2.0),
        case("by zero", uniform(7), by=0.0), case("by an integer", uniform(7), by=3)],
    "subtract": BROADCASTS,
    "divide": [(name, (a, shifted(b)), static) for name, (a, b), static in BROADCASTS] + [
        case("by itself", given([2.0, -3.0]), given([2.0, -3.0]))],
    "where": [
        case("matrix", bools(3, 5), uniform(3, 5), uniform(3, 5)), case("broadcast", bools(3, 1), uniform(5), uniform(2, 1, 5)),
        case("scalar", bools(), uniform(), uniform()), case("empty", bools(0, 3), uniform(3), uniform(0, 3)),
        case("all of a", given([True] * 3), uniform(3), uniform(3))],
    "mean": [
        case("all", uniform(3, 5)), case("last axis", uniform(2, 3, 5), axis=-1),
        case("two axes", uniform(2, 3, 5), axis=(0, 2)),
        case("kept axis", uniform(2, 3, 5), axis=1, keepdims=True), case("one", uniform(1, 1), axis=0),
        case("no rows", uniform(0, 3), axis=1), case("primes", uniform(11, 13), axis=0)],
    "max": [
        case("all", uniform(3, 5)), case("last axis", uniform(2, 3, 5), axis=-1),
        case("two axes", uniform(2, 3, 5), axis=(0, 2)),
        case("kept axis", uniform(2, 3, 5), axis=1, keepdims=True), case("one", uniform(1, 1), axis=0),
        case("no rows", uniform(0, 3), axis=1)],
    "cumsum": [
        case("matrix", uniform(3, 5)), case("first axis", uniform(7, 2), axis=0), case("middle", uniform(2, 3, 5), axis=1),
        case("one", uniform(1)), case("empty", uniform(3, 0)), case("no rows", uniform(0, 3))],
    "norm": [
        case("matrix", uniform(3, 5)), case("first axis", uniform(7, 2), axis=0),
        case("kept axis", uniform(2, 3), keepdims=True),
        case("one", uniform(3, 1, mean=2)), case("no rows", uniform(0, 3))],
    "exp": UNARY, "tanh": UNARY, "sigmoid": UNARY, "softplus": UNARY, "erf": UNARY, "silu": UNARY, "quick_gelu": UNARY,
    "gelu_erf": UNARY,
    "relu": [case("matrix", uniform(3, 5, scale=4)), case("scalar", uniform()), case("empty", uniform(0, 3))],
    "log": POSITIVE, "sqrt": POSITIVE,
    "power": POSITIVE + [
        case("square", uniform(3, 5), exponent=2.0), case("cube", uniform(3, 5), exponent=3),
        case("first", uniform(3), exponent=1),
        case("inverse square root", uniform(3, 5, mean=2), exponent=-0.5)],
    "sum": [
        case("all", uniform(3, 5)), case("last axis", uniform(2, 3, 5), axis=-1),
        case("two axes", uniform(2, 3, 5), axis=(0, 2)), case("kept axis", uniform(2, 3, 5), axis=1, keepdims=True),
        case("all kept", uniform(3, 5), keepdims=True), case("over nothing", uniform(3, 0), axis=1),
        case("no axis", uniform(3, 5), axis=()), case("one", uniform(1, 1), axis=0), case("scalar", uniform())],
    "linear": [
        case("bias", uniform(2, 3, 5), uniform(5, 7), uniform(7)), case("no bias", uniform(3, 5), uniform(5, 7)),
        case("bias None", uniform(3, 5), uniform(5, 7), None), case("vector", uniform(5), uniform(5, 7), uniform(7)),
        case("no rows", uniform(2, 0, 5), uniform(5, 3), uniform(3)),
        case("no inputs", uniform(2, 0), uniform(0, 3), uniform(3)),
        case("no outputs", uniform(2, 3), uniform(3, 0), uniform(0)),
        case("ones", uniform(1, 1), uniform(1, 1), uniform(1)),
        case("primes", uniform(11, 13), uniform(13, 17), uniform(17))],
    "column_parallel_linear": [
        case("bias", uniform(2, 3, 5), uniform(5, 8), uniform(8)), case("no bias", uniform(3, 5), uniform(5, 7)),
        case("four pieces", uniform(2, 3, 5), uniform(5, 8), uniform(8), pieces=4),
        case("no rows", uniform(2, 0, 5), uniform(5, 3), uniform(3)), case("vector", uniform(5), uniform(5, 6), pieces=2),
        case("no outputs", uniform(2, 3), uniform(3, 0), uniform(0), pieces=2)],
    "row_parallel_linear": [
        case("one piece", uniform(2, 3, 5), uniform(5, 7)), case("three pieces", uniform(3, 6), uniform(6, 5), pieces=3),
        case("four pieces", uniform(2, 3, 8), uniform(8, 5), pieces=4), case("no inputs", uniform(2, 0), uniform(0, 3)),
        case("no rows", uniform(0, 4), uniform(4, 3), pieces=2), case("vector", uniform(4), uniform(4, 3), pieces=4)],
    "matmul": [
        case("matrix", uniform(3, 5), uniform(5, 7)), case("batch", uniform(2, 3, 5), uniform(2, 5, 7)),
        case("b repeated", uniform(2, 3, 5), uniform(5, 7)), case("both repeated", uniform(2, 1, 3, 5), uniform(3, 5, 2)),
        case("ones", uniform(1, 1), uniform(1, 1)), case("no rows", uniform(0, 5), uniform(5, 3)),
        case("nothing summed", uniform(3, 0), uniform(0, 5)), case("primes", uniform(11, 13), uniform(13, 17))],
    "einsum": [
        case("matrix", uniform(3, 5), uniform(5, 7), spec="ab,bc->ac"),
        case("scores", uniform(2, 3, 5, 4), uniform(2, 3, 7, 4), spec="bhtk,bhsk->bhts"),
        case("heads", uniform(2, 5, 6), uniform(6, 3, 4), spec="btd,dhk->bhtk"),
        case("outer", uniform(3), uniform(5), spec="a,b->ba"), case("inner", uniform(3, 5), uniform(5, 3), spec="ab,ba->"),
        case("batch only", uniform(3, 5), uniform(3, 5), spec="ab,ab->ab"),
        case("empty", uniform(0, 5), uniform(5, 2), spec="ab,bc->ca")],
    "log_softmax": SOFTMAX[:4] + SOFTMAX[5:7],
    "logsumexp": SOFTMAX[:4] + SOFTMAX[5:7] + [
        case("kept axis", uniform(3, 5), keepdims=True), case("masked", given([[-np.inf, 1, 2], [0, -np.inf, 1]]))],
    "stop_gradient": [case("matrix", uniform(3, 5)), case("scalar", uniform()), case("empty", uniform(0, 3))],
    "straight_through": [
        case("matrix", given([[1.0, 0.0], [0.0, 1.0]]), uniform(2, 2)), case("scalar", uniform(), uniform()),
        case("empty", uniform(0, 3), uniform(0, 3))],
    "swiglu": [
        case("matrix", uniform(3, 5, scale=4), uniform(3, 5)), case("scalar", uniform(), uniform()),
        case("empty", uniform(0, 3), uniform(0, 3)), case("large", given([-1e4, -30.0, 0.0, 30.0, 1e4]), uniform(5))],
    "rms_norm": [
        case("matrix", uniform(2, 3, 5), uniform(5)), case("1+w", uniform(2, 3, 5), uniform(5), gain="1+w"),
        case("vector", uniform(7), uniform(7)), case("one channel", uniform(3, 1), uniform(1), eps=0.1),
        case("no rows", uniform(0, 3), uniform(3)), case("primes", uniform(11, 13), uniform(13)),
        case("zeros", given([[0.0] * 5, [1.0] * 5]), uniform(5), eps=0.1),
        case("large eps", uniform(3, 5), uniform(5), eps=0.5)],
    "rope": [
        case("half", uniform(2, 3, 5, 8), given(range(5))),
        case("interleaved", uniform(2, 3, 5, 8), given(range(5)), pairing="interleaved"),
        case("far away", uniform(3, 4), given([0, 1048575, 7]), theta=5e5),
        case("a part", uniform(3, 8), given(range(3)), rotated=4),
        case("nothing", uniform(3, 4), given(range(3)), rotated=0), case("no rows", uniform(2, 0, 4), given([], "int64")),
        case("one pair", uniform(1, 2), given([11])), case("no batch", uniform(0, 3, 4), given(range(3)))],
    "depthwise_conv": [
        case("four taps", uniform(2, 7, 3), uniform(4, 3)), case("one tap", uniform(2, 5, 3), uniform(1, 3)),
        case("more taps than positions", uniform(2, 3, 5), uniform(7, 5)),
        case("one position", uniform(1, 1, 1), uniform(4, 1)),
        case("no positions", uniform(2, 0, 3), uniform(4, 3)), case("no batch", uniform(0, 5, 3), uniform(4, 3))],
    "fft_conv": [
        case("odd", uniform(2, 7, 3), uniform(7, 3)), case("even", uniform(2, 8, 3), uniform(8, 3)),
        case("one position", uniform(2, 1, 3), uniform(1, 3)), case("no positions", uniform(2, 0, 3), uniform(0, 3)),
        case("prime", uniform(1, 13, 2), uniform(13, 2)), case("no batch", uniform(0, 5, 3), uniform(5, 3))],
    "gather": [
        case("matrix", uniform(7, 5), ids(4, below=7)), case("repeated", uniform(3, 5), given([1, 1, 2])),
        case("vector", uniform(7), ids(4, below=7)), case("no ids", uniform(7, 5), ids(0, below=7)),
        case("three axes", uniform(3, 2, 5), given([2, 0, 2, 2]))],
    "scatter_add": [
        case("matrix", uniform(4, 5), ids(4, below=7), n=7), case("repeated", uniform(3, 5), given([1, 1, 2]), n=3),
        case("vector", uniform(4), ids(4, below=7), n=7), case("nothing", uniform(0, 5), ids(0, below=7), n=7),
        case("three axes", uniform(4, 2, 5), given([2, 0, 2, 2]), n=3)],
    "concat": [
        case("two", uniform(3, 2), uniform(3, 5)), case("three", uniform(1, 5), uniform(2, 5), uniform(3, 5), axis=0),
        case("one", uniform(3, 2)), case("with an empty one", uniform(3, 0), uniform(3, 2)),
        case("middle axis", uniform(2, 3, 5), uniform(2, 1, 5), axis=1)],
    "split": [
        case("two", uniform(3, 7), sizes=(2, 5)), case("one", uniform(3, 2), sizes=(2,)),
        case("first axis", uniform(6, 5), sizes=(1, 2, 3), axis=0), case("with an empty one", uniform(3, 2), sizes=(0, 2))],
    "slice_axis": [
        case("middle", uniform(3, 7), start=2, stop=5), case("all", uniform(3, 7)),
        case("nothing", uniform(3, 7), start=3, stop=3),
        case("first axis", uniform(7, 3), axis=0, start=1)],
    "pad": [
        case("both ends", uniform(3, 5), before=2, after=1), case("nothing", uniform(3, 5)),
        case("first axis", uniform(3, 5), before=1, axis=0), case("empty", uniform(3, 0), after=2)],
    "repeat": [
        case("heads", uniform(2, 2, 3, 5), times=2, axis=1), case("last axis", uniform(3, 5), times=3),
        case("once", uniform(3, 5)), case("never", uniform(3, 5), times=0), case("first axis", uniform(3), times=2, axis=0)],
    "layer_norm": [
        case("no bias", uniform(2, 3, 5), uniform(5)), case("bias None", uniform(3, 5), uniform(5), None),
        case("matrix", uniform(2, 3, 5), uniform(5), uniform(5)), case("vector", uniform(7), uniform(7), uniform(7)),
        case("one channel", uniform(3, 1), uniform(1), uniform(1)), case("two", uniform(3, 2), uniform(2), uniform(2)),
        case("no rows", uniform(0, 3), uniform(3), uniform(3)), case("primes", uniform(11, 13), uniform(13), uniform(13)),
        case("equal values", given([[2.0] * 5, [0.0] * 5]), uniform(5), uniform(5)),
        case("far from 0", uniform(3, 5, mean=100), uniform(5), uniform(5)),
        case("large eps", uniform(3, 5), uniform(5), uniform(5), eps=0.5)],
    "gelu_tanh": [
        case("matrix", uniform(3, 5, scale=4)), case("scalar", uniform()), case("one", given([-2.7])),
        case("empty", uniform(0, 3)), case("large", given([-1e4, -30.0, 0.0, 30.0, 1e4]))],
    "softmax": SOFTMAX,
    "attention": [
        case("all visible", *qkv(2, 3, 5, 5, 7)), case("causal", *qkv(2, 2, 5, 5, 3), mask=CAUSAL),
        case("fewer queries", *qkv(1, 2, 2, 5, 3), mask=CAUSAL), case("one query", *qkv(1, 2, 1, 7, 3), mask=CAUSAL),
        case("rows without a key", *qkv(1, 2, 5, 3, 4), mask=CAUSAL), case("no keys", *qkv(1, 2, 3, 0, 4)),
        case("no queries", *qkv(1, 2, 0, 3, 4), mask=CAUSAL), case("ones", *qkv(1, 1, 1, 1, 1), mask=CAUSAL),
        case("no batch", *qkv(0, 2, 3, 3, 4)), case("primes", *qkv(1, 3, 11, 13, 5), mask=CAUSAL),
        case("two kv heads for four", *grouped(2, 4, 2, 3, 5, 3)), case("one kv head", *grouped(1, 3, 1, 5, 5, 4), mask=CAUSAL),
        case("window", *qkv(1, 2, 7, 7, 3), mask=Mask(causal=True, window=3)),
        case("two-sided window", *qkv(1, 2, 5, 5, 3), mask=Mask(window=2)),
        case("prefix", *qkv(1, 2, 5, 5, 3), mask=Mask(causal=True, prefix=3)),
        case("documents", *qkv(2, 2, 4, 4, 3), given([[0, 0, 1, 1], [0, 1, 1, 2]]), given([[0, 0, 1, 1], [0, 1, 1, 2]]),
             mask=CAUSAL),
        case("a document without keys", *qkv(1, 1, 2, 3, 3), given([[0, 9]]), given([[0, 0, 1]])),
        case("positions in another order", *qkv(1, 2, 4, 5, 3), None, None, given([7, 0, 3, 4]), given([4, 0, 8, 3, 1]),
             mask=CAUSAL),
        case("positions and documents", *qkv(2, 1, 3, 3, 3), given([[0, 0, 1], [2, 0, 1]]), given([[1, 0, 0], [1, 1, 2]]),
             given([0, 2, 1]), given([1, 2, 0]), mask=Mask(causal=True, window=2)),
        case("own scale", *qkv(1, 2, 3, 5, 4), scale=0.5), case("huge scores", *qkv(1, 1, 3, 5, 4, scale=128), mask=CAUSAL),
        case("equal scores", given(np.zeros((1, 1, 3, 4))), uniform(1, 1, 5, 4), uniform(1, 1, 5, 4), mask=CAUSAL)],
    "cross_entropy": [
        case("matrix", uniform(3, 5, scale=4), ids(3, below=5)), case("batch", uniform(2, 3, 7), ids(2, 3, below=7)),
        case("some ignored", uniform(5, 7), ids(5, below=7, but={1: IGNORE, 4: IGNORE})),
        case("all ignored", uniform(2, 3, 5), given([[IGNORE] * 3] * 2)),
        case("own ignore_index", uniform(5, 7), ids(5, below=7, but={0: 0, 2: 3}), ignore_index=3),
        case("smoothed over all", uniform(5, 7), ids(5, below=7, but={1: IGNORE}), smoothing=0.1),
        case("smoothed over the others", uniform(5, 7), ids(5, below=7), smoothing=0.1, smoothing_over="others"),
        case("one class smoothed over the others", uniform(3, 1), ids(3, below=1), smoothing=0.1, smoothing_over="others"),
        case("z-loss", uniform(5, 7), ids(5, below=7, but={1: IGNORE}), z_loss=0.01),
        case("both", uniform(5, 7), ids(5, below=7), smoothing=0.2, z_loss=1e-4),
        case("one row", uniform(7), given(2)), case("one class", uniform(3, 1), ids(3, below=1)),
        case("no rows", uniform(0, 5), ids(0, below=5)), case("equal", given([[2.0] * 5] * 3), ids(3, below=5)),
        case("huge", uniform(3, 5, scale=16384), ids(3, below=5)),
        case("32-bit targets", uniform(3, 5), given([4, IGNORE, 0], "int32"))],
    "embedding": [
        case("matrix", uniform(7, 5), ids(2, 3, below=7)), case("repeated", uniform(3, 5), given([1, 1, 2])),
        case("one id", uniform(7, 5), given(3)), case("no ids", uniform(7, 5), ids(0, below=7)),
        case("one row", uniform(1, 3), ids(4, below=1)), case("no channels", uniform(3, 0), ids(2, below=3)),
        case("8-bit ids", uniform(7, 5), given([[6, 0], [0, 6]], "uint8"))],
    "dropout": [
        case("matrix", uniform(5, 7), given(range(5)), given(range(7)), key=1, rate=0.5, shape=(5, 7)),
        case("a part", uniform(2, 3, 5), given([4, 9]), given([6, 7, 8]), given(range(5)), key=2, rate=0.25, shape=(1, 16, 5)),
        case("none", uniform(3, 5), given(range(3)), given(range(5)), key=3, rate=0.0, shape=(3, 5)),
        case("empty", uniform(0, 5), given([], "int64"), given(range(5)), key=4, rate=0.5, shape=(1, 5)),
        case("one", uniform(1), given([11]), key=5, rate=0.5, shape=(12,))],
    "reshape": [
        case("merge", uniform(2, 3, 5), shape=(6, 5)), case("split", uniform(3, 8), shape=(3, 2, 4)),
        case("flatten", uniform(2, 3, 5), shape=(-1,)), case("scalar", uniform(1, 1), shape=()),
        case("empty", uniform(0, 3), shape=(3, 0, 2)), case("same", uniform(2, 3), shape=(2, 3))],
    "transpose": [
        case("matrix", uniform(3, 5), axes=(1, 0)), case("heads", uniform(2, 3, 5, 7), axes=(0, 2, 1, 3)),
        case("cycle", uniform(2, 3, 5), axes=(2, 0, 1)), case("negative axes", uniform(2, 3, 5), axes=(-1, 0, -2)),
        case("empty", uniform(2, 0, 3), axes=(1, 2, 0)), case("same", uniform(2, 3), axes=(0, 1)),
        case("scalar", uniform(), axes=())],
}
TABLE["blockwise_attention"] = [
    *((name, makers, {"block_q": 2, "block_k": 3} | static) for name, makers, static in TABLE["attention"]),
    case("one block", *qkv(2, 2, 5, 5, 3), mask=CAUSAL), case("blocks of one", *qkv(1, 2, 4, 5, 3), block_q=1, block_k=1),
    case("long blocks of keys", *qkv(1, 1, 7, 7, 3), block_q=1, block_k=7)]
CASES = {op: [Case(name, tuple(None if make is None else make(f"{op}/{name}/{k}") for k, make in enumerate(makers)), static)
              for name, makers, static in rows] for op, rows in TABLE.items()}
