"""How much travels: payload elements of one training step by mesh axis, from the configuration alone."""
import math

from refimpl.comm import Mesh, shares
from refimpl.models import Config, parameters
from refimpl.parallel import Rows, box
from refimpl.parallel.cuts import overlap


def step_payload(cfg: Config, mesh: Mesh, batch_size: int, seq_len: int, zero: bool = False) -> dict[str, tuple[int, str]]:
    """mesh axis -> (elements that a rank hands to collectives in one step, the formula in words).

    tp   (4·L + 2)·b·T·D + 3·b·T: two all_reduces forward (g) and two backward (f) per layer, one g of the embedding and one f
         of the head, each of b·T·D; of the loss 3 numbers a token, where all targets count; b = this rank's samples
    dp   one all_reduce of the rank's gradients, and one of (loss, count);  with `zero` (ZeRO-1) the gradients go into
         reduce_scatters, and an all_gather of the rank's own rows follows

    Clipping adds one number over each axis that cuts a parameter.
    Error: ValueError for a model with gradients that are summed over tp as well (shared kv heads, norms of q and k)
    Reference: Shoeybi et al. 2019, section 3
    """
    if mesh.tp.size > 1 and (cfg.qk_norm or any(overlap(row.placement) for row in parameters(cfg, mesh).values())):
        raise ValueError("step_payload: the gradients of shared kv heads and of the norms of q and k travel over tp as well")
    b = shares(batch_size, mesh.dp.size)[mesh.dp.rank]
    out = {}
    if mesh.tp.size > 1:
        L, T, D = cfg.n_layers, seq_len, cfg.d_model
        out["tp"] = (4 * L + 2) * b * T * D + 3 * b * T, f"(4·L + 2)·b·T·D + 3·b·T = {4 * L + 2}·{b}·{T}·{D} + 3·{b}·{T}"
    if mesh.dp.size > 1:
        own, rows = local_parameters(cfg, mesh), local_rows(cfg, mesh) if zero else 0
        out["dp"] = own + rows + 2, f"the rank's parameters + 2 = {own} + 2" + (f" + its rows, {rows}" if zero else "")
    return out


def local_parameters(cfg: Config, mesh: Mesh) -> int:
    """Number of parameters that this rank holds."""
    return sum(elements(box(row.placement, row.shape, mesh)) for row in parameters(cfg, mesh).values())


def local_rows(cfg: Config, mesh: Mesh) -> int:
    """Of these, those whose state this rank keeps with ZeRO-1: AdamW's m and v have as many elements each."""
    return sum(elements(box(Rows(row.placement), row.shape, mesh)) for row in parameters(cfg, mesh).values())


def elements(part: tuple[slice, ...]) -> int:
    return math.prod(s.stop - s.start for s in part)
