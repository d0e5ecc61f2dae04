"""The op and decoder suite on any array module: every result held against numpy's.

`exact`: the same bits, which the double owes.  A real device sums in another order and has its own exp: then within the
rounding that the dtype must make (check/tools.py).
"""
import numpy as np

from refimpl.array import to_host
from refimpl.autograd import REGISTRY, bfloat16
from refimpl.cases import CASES
from refimpl.check.tools import EXACT, cast, conditioned, cotangents, evaluate
from refimpl.comm import Mesh, shares
from refimpl.models import Config
from refimpl.models import parameters as table
from refimpl.models import placements
from refimpl.parallel import gather, shard
from refimpl.train import AdamW, Batch, gradients

CONFIG = Config(vocab_size=11, n_layers=2, n_heads=4, d_model=16, max_seq_len=8, d_ff=24, dropout=0.25)
SERIAL = Mesh()
ROWS = table(CONFIG, SERIAL)
B, T = 3, 6
ALLOWED = {"float64": EXACT, "float32": 16 * 2.0 ** -23}    # of the scale; float32: times √n, 8 for each side's own rounding


def case_names():
    return [(name, case.name) for name, cases in CASES.items() for case in cases]


def check_case(xp, op_name, case_name, dtype, exact=True):
    """One case of an op: forward and vjp, everything stays on the device, no argument is written to."""
    op = REGISTRY[op_name]
    case = next(c for c in CASES[op_name] if c.name == case_name)
    args = cast(case.arrays, dtype)
    ys, vjp = evaluate(op, args, case.static)
    dy = cast(cotangents(ys, "dy"), dtype)
    expected = [*ys, *as_tuple(vjp(*dy))]

    moved, moved_dy = ([None if a is None else xp.asarray(a) for a in group] for group in (args, dy))
    y, vjp = op.array(*moved, **case.static)
    got = [*as_tuple(y), *as_tuple(vjp(*moved_dy))]
    assert len(got) == len(expected)
    n = max(1, *(a.size for a in args if a is not None))
    high = cast(args, "float64"), cast(dy, "float64")
    scales = conditioned(op, *high, case.static)[1] if not exact else [0.0] * len(expected)
    allowed = ALLOWED[dtype] * (np.sqrt(n) if dtype == "float32" else 1)
    for a, e, scale in zip(got, expected, scales):
        assert (a is None) == (e is None)
        if e is not None:
            compare(xp, a, e, None if exact else allowed * scale)
    for a, m in zip([*args, *dy], [*moved, *moved_dy]):
        assert a is None or a.tobytes() == to_host(m).tobytes(), "an argument was written to"


def compare(xp, a, expected, allowed):
    """On the device, of the right shape and dtype, and equal: bit for bit where `allowed` is None."""
    expected = np.asarray(expected)
    assert type(a).__module__ == xp.__name__, f"{type(a)} is not an array of {xp.__name__}"
    assert (a.shape, a.dtype) == (expected.shape, expected.dtype)
    a = to_host(a)
    if allowed is None:
        assert a.tobytes() == expected.tobytes()
    else:
        with np.errstate(invalid="ignore"):             # inf - inf, which are equal
            off = np.where((a == expected) | (a != a) & (expected != expected), 0, np.abs(a.astype("float64") - expected))
        assert off.max(initial=0) <= allowed, f"off by {off.max():.1e}, allowed is {allowed:.1e}"


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


# -- the decoder ----------------------------------------------------------------------------------------------------


def parameters(xp, dtype="float64", mesh=SERIAL):
    """This rank's parameters with nothing at zero, so that every path carries a gradient."""
    draw = np.random.default_rng(0)
    whole = {name: draw.normal(0, 0.3, row.shape) + (row.scale is None) for name, row in ROWS.items()}
    return shard({name: xp.asarray(a.astype(dtype)) for name, a in whole.items()}, placements(CONFIG, mesh), mesh)


def batch(mesh=SERIAL):
    """This rank's samples, on the host: the ops move tokens and targets to the parameters."""
    draw = np.random.default_rng(1)
    tokens, targets = draw.integers(0, CONFIG.vocab_size, (2, B, T))
    targets[1, ::2] = -100
    ends = np.cumsum((0, *shares(B, mesh.dp.size)))
    rows = np.arange(ends[mesh.dp.rank], ends[mesh.dp.rank + 1])
    return Batch(rows, tokens[rows], targets[rows])


def trained(xp, dtype, mesh=SERIAL, steps=3):
    """AdamW steps with dropout -> the losses, the global gradients of the first step, the global parameters after the last."""
    params, optimizer, losses, first = parameters(xp, dtype, mesh), AdamW(1e-2), [], {}
    for step in range(steps):
        g = gradients(params, [batch(mesh), batch(mesh)], CONFIG, mesh, seed=7, step=step)
        params = optimizer.step(params, g.grads)
        losses.append(g.loss)
        first = first or gather(g.grads, placements(CONFIG, mesh), mesh)
    return losses, first, gather(params, placements(CONFIG, mesh), mesh)


def check_bfloat16(xp):
    """Rounding is bit arithmetic: the same bits on the device."""
    x = np.array([[1 + 2 ** -8, -3e38, np.inf], [-0.0, 1e-40, 3.4e38]], "float32")
    assert to_host(bfloat16(xp.asarray(x))).tobytes() == bfloat16(x).tobytes()


def check_decoder(xp, dtype, mesh=SERIAL, exact=True):
    """Losses, all gradients and the parameters after AdamW steps, on any mesh."""
    allowed = 1000 * ALLOWED[dtype]                     # thousands of summands; three steps multiply what the first one made
    losses, grads, params = trained(xp, dtype, mesh)
    want_losses, want_grads, want_params = trained(np, dtype, mesh)
    for loss, want in zip(losses, want_losses, strict=True):
        assert abs(loss - want) <= (0 if exact else allowed * want)
    for name, row in ROWS.items():
        scale = np.abs(want_grads[name.removesuffix("b") + "w" if row.gauge else name]).max()
        compare(xp, grads[name], want_grads[name], None if exact else allowed * scale)
        if exact or not row.gauge:                      # the update of a gauge is that of its rounding
            compare(xp, params[name], want_params[name], None if exact else allowed)
