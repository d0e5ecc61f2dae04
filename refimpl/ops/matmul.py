"""Matrix products of two arrays: matmul and einsum.  (A layer's product with its weight is `linear`.)"""
import math

from refimpl.autograd import op
from refimpl.ops.arithmetic import check_broadcast, unbroadcast
from refimpl.ops.linear import product


@op(linearity="each")
def matmul(a, b):
    """Batched matrix product; leading axes broadcast.

    Equation:   y = a·b
    Shapes:     a[..., N, D], b[..., D, M] -> y[..., N, M]
    VJP:        da = dy·bᵀ;  db = aᵀ·dy, each summed over the leading axes it was repeated along
    Residuals:  a, b
    Reference:  numpy.matmul, for two or more axes
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: a{list(a.shape)} · b{list(b.shape)}: both need two axes or more, and a's last must equal "
                         f"b's last but one")
    check_broadcast("matmul", a, b, own=2)
    y = product(a, b)

    def vjp(dy):
        da = product(dy, b.swapaxes(-1, -2))
        db = product(a.swapaxes(-1, -2), dy)
        return unbroadcast(da, a.shape), unbroadcast(db, b.shape)
    return y, vjp


@op(linearity="each")
def einsum(a, b, spec=""):
    """Sum of products of two arrays over named axes: "bhtk,bhsk->bhts".

    Every axis of an operand must be in the other operand or in the output (sum it away first otherwise), once each.

    Equation:   y_out = Σ a_left·b_right over the letters that are not in out
    Shapes:     as `spec` says
    VJP:        da = einsum(dy, b) over the letters that are not in left;  db = einsum(a, dy) over those not in right
    Residuals:  a, b
    Reference:  numpy.einsum
    """
    left, right, out = parse(spec, a, b)
    y = contract(a, left, b, right, out)

    def vjp(dy):
        return contract(dy, out, b, right, left), contract(dy, out, a, left, right)
    return y, vjp


def parse(spec, a, b):
    """The three words of a two-operand spec.  Error: ValueError with what is wrong."""
    inputs, arrow, out = spec.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    problem = ("it must read \"ab,bc->ac\"" if not (arrow and comma and f"{left}{right}{out}a".isalpha()) else
               "a letter stands twice in one word" if any(len(set(w)) != len(w) for w in (left, right, out)) else
               "an output letter is in no operand" if set(out) - set(left + right) else
               "a letter is in one operand alone: sum over it first" if (set(left) ^ set(right)) - set(out) else
               "the number of letters and axes differ" if (len(left), len(right)) != (a.ndim, b.ndim) else "")
    sizes = dict(zip(left, a.shape))
    if not problem and any(sizes.get(c, n) != n for c, n in zip(right, b.shape)):
        problem = "a letter has two sizes"
    if problem:
        raise ValueError(f"einsum {spec!r} of a{list(a.shape)} and b{list(b.shape)}: {problem}")
    return left, right, out


def contract(a, left, b, right, out):
    """One batched matrix product: [batch, a's own, summed] · [batch, summed, b's own], then the order of `out`."""
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in left if c in right and c not in out]
    own_a, own_b = [c for c in left if c not in right], [c for c in right if c not in left]
    size = {**dict(zip(left, a.shape)), **dict(zip(right, b.shape))}

    def arranged(x, word, *groups):
        x = x.transpose([word.index(c) for g in groups for c in g])
        return x.reshape([size[c] for c in batch] + [math.prod(size[c] for c in g) for g in groups[1:]])

    y = product(arranged(a, left, batch, own_a, summed), arranged(b, right, batch, summed, own_b))
    y = y.reshape([size[c] for c in batch + own_a + own_b])
    return y.transpose([(batch + own_a + own_b).index(c) for c in out])
