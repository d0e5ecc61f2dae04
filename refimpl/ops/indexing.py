"""embedding: rows of a table, picked by integer ids."""
from refimpl.array import xp_of
from refimpl.autograd import op


def check_ids(op_name, ids, below):
    """Ids must be integers in [0, below): cupy would wrap them round, numpy would count negative ones from the end."""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{op_name}: ids must be integers, got {ids.dtype}")
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < below):
        raise ValueError(f"{op_name}: ids must be in [0, {below}), got {int(ids.min())} to {int(ids.max())}")


@op(linearity="each", named_by=0)
def embedding(w, ids):
    """Row lookup.

    Equation:   y = w[ids]
    Shapes:     w[V, D], ids int[...] -> y[..., D]
    VJP:        dw[v] = Σ dy over the places where ids = v (a token that occurs twice gets both)
    Residuals:  ids
    Reference:  HF `wte`, `wpe`; Megatron VocabParallelEmbedding holds some of the rows
    """
    check_ids("embedding", ids, w.shape[0])
    y = w[ids]
    xp, shape = xp_of(w), w.shape

    def vjp(dy):
        dw = xp.zeros(shape, dy.dtype)
        xp.add.at(dw, ids, dy)                          # dw[ids] += dy would keep only one of equal ids
        return dw, None
    return y, vjp
