"""How much travels: payload elements of one training step by mesh axis, from the configuration alone."""
from refimpl.comm import Mesh, shares
from refimpl.models import Config, parameters
from refimpl.parallel import box


def step_payload(cfg: Config, mesh: Mesh, batch_size: int, seq_len: int) -> dict[str, tuple[int, str]]:
    """mesh axis -> (elements that a rank hands to collectives in one step, the formula in words).

    tp   4·L·b·T·D: two all_reduces forward (g) and two backward (f) per layer, each of b·T·D; b = this rank's samples
    dp   one all_reduce of the rank's gradients, and one of (loss, count)
    Reference: Shoeybi et al. 2019, section 3
    """
    b = shares(batch_size, mesh.dp.size)[mesh.dp.rank]
    out = {}
    if mesh.tp.size > 1:
        L, T, D = cfg.n_layers, seq_len, cfg.d_model
        out["tp"] = 4 * L * b * T * D, f"4·L·b·T·D = 4·{L}·{b}·{T}·{D}"
    if mesh.dp.size > 1:
        own = local_parameters(cfg, mesh)
        out["dp"] = own + 2, f"the rank's parameters + 2 = {own} + 2"
    return out


def local_parameters(cfg: Config, mesh: Mesh) -> int:
    """Number of parameters that this rank holds."""
    total = 0
    for row in parameters(cfg, mesh).values():
        n = 1
        for s in box(row.placement, row.shape, mesh):
            n *= s.stop - s.start
        total += n
    return total
