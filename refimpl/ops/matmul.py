"""Matrix products of two arrays: matmul and einsum.  (A layer's product with its weight is `linear`.)"""
import math

from refimpl.autograd import REGISTRY, Layout, LayoutError, Tensor, op
from refimpl.autograd.layout import join
from refimpl.ops.arithmetic import check_broadcast, unbroadcast
from refimpl.ops.linear import product


def followed(op_name, args, words):
    """{mesh axis: letter} for the cuts of both operands.  Error: LayoutError where a mesh axis cuts two letters."""
    letters: dict[str, str] = {}
    for operand, word in zip(args, words):
        for mesh_axis, k in getattr(operand, "cut", {}).items():
            if letters.setdefault(mesh_axis, word[k]) != word[k]:
                raise LayoutError(f"{op_name} {','.join(words[:2])}->{words[2]}: its operands are cut over {mesh_axis} along "
                                  f"different axes, {letters[mesh_axis]} and {word[k]}: gather one of them first")
    return letters


def contracted(op_name, words_of):
    """The layout and cut rules of a product: a cut letter that is summed over makes it partial, one of the output cuts it."""
    def layout(args, static):
        tensors = [a for a in args if type(a) is Tensor]
        joined, words = join(REGISTRY[op_name], tensors), words_of(args, static)
        summed = {axis for axis, letter in followed(op_name, args, words).items() if letter not in words[2]}
        return Layout(joined.varies, joined.partial | summed)

    def cut(args, static, y):
        words = words_of(args, static)
        return {axis: words[2].index(letter) for axis, letter in followed(op_name, args, words).items() if letter in words[2]}
    return {"layout": layout, "cut": cut}


def matmul_words(args, static):
    """Letters for the axes: "xyac" · "xycb" -> "xyab", leading ones counted from the end."""
    a, b = (x.ndim if not isinstance(x, Tensor) else x.array.ndim for x in args)
    leading = "opqrstuvwxyz"
    return leading[12 - max(0, a - 2):] + "ac", leading[12 - max(0, b - 2):] + "cb", leading[12 - max(a, b, 2) + 2:] + "ab"


def einsum_words(args, static):
    return parse(static.get("spec", ""), *(x.array if isinstance(x, Tensor) else x for x in args))


@op(linearity="each", **contracted("matmul", matmul_words))
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
        bT, dyT = b.swapaxes(-1, -2), dy.swapaxes(-1, -2)
        da = folded(bT, dyT).T if a.ndim == 2 < b.ndim else product(dy, bT)       # (dy·bᵀ)ᵀ = b·dyᵀ
        db = folded(a, dy) if b.ndim == 2 < a.ndim else product(a.swapaxes(-1, -2), dy)
        return unbroadcast(da, a.shape), unbroadcast(db, b.shape)
    return y, vjp


def folded(a, b):
    """Σ aᵀ·b over the leading axes, which are equal, as one product: the sum over them joins the sum over rows."""
    N = math.prod(a.shape[:-1])
    return product(a.reshape(N, a.shape[-1]).T, b.reshape(N, b.shape[-1]))


@op(linearity="each", **contracted("einsum", einsum_words))
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
