"""How much travels: payload elements of one training step by mesh axis, from the configuration alone."""
import math

from refimpl.comm import Mesh, shares
from refimpl.models import Config, Plan, parameters
from refimpl.models.placements import kv_of_head
from refimpl.parallel import Rows, SequenceLayout, box
from refimpl.parallel.cuts import overlap


def step_payload(cfg: Config, mesh: Mesh, batch_size: int, seq_len: int, zero: bool = False, plan: Plan = Plan()
                 ) -> dict[str, tuple[int, str]]:
    """mesh axes -> (elements that a rank hands to collectives in one step, the formula in words).

    tp      (4·L + 2)·b·T·D + 3·b·T: two all_reduces forward (g) and two backward (f) per layer, one g of the embedding and one
            f of the head, each of b·T·D; of the loss 3 numbers a token, where all targets count; b samples and T positions are
            this rank's.  With plan.block 7·L: g twice more where blocks are made again, and one f each of q and of k and v
    dp, cp  one all_reduce of the rank's gradients, and one of (loss, count), over both together;  with `zero` (ZeRO-1) the
            gradients go into reduce_scatters over dp, if cp = 1, and an all_gather of the rank's own rows follows
    cp      what attention sends as well: see `attention_payload`

    Clipping adds one number over each axis that cuts a parameter.
    Error: ValueError for rings of all_to_all groups (plan.ring), and for gradients that are summed over tp as well (shared kv
           heads, norms of q and k, sequence_parallel)
    Reference: Shoeybi et al. 2019, section 3
    """
    if plan.ring > 1 and mesh.cp.size > 1:
        raise ValueError("step_payload: rings of groups that exchange heads for tokens are not in the formula")
    over_tp = cfg.qk_norm or plan.sequence_parallel or any(overlap(row.placement) for row in parameters(cfg, mesh).values())
    if mesh.tp.size > 1 and over_tp:
        raise ValueError("step_payload: the gradients of shared kv heads, of the norms of q and k, and with sequence_parallel "
                         "of norms and biases travel over tp as well")
    b, L, D = shares(batch_size, mesh.dp.size)[mesh.dp.rank], cfg.n_layers, cfg.d_model
    T = SequenceLayout(plan.layout, seq_len).sizes(mesh.cp.size)[mesh.cp.rank]
    out = {}
    if mesh.tp.size > 1:
        n = 7 if plan.block else 4
        out["tp"] = (n * L + 2) * b * T * D + 3 * b * T, f"({n}·L + 2)·b·T·D + 3·b·T = {n * L + 2}·{b}·{T}·{D} + 3·{b}·{T}"
    samples = "+".join(axis for axis in ("dp", "cp") if axis in mesh.wide(("dp", "cp")))
    if samples:
        own, rows = local_parameters(cfg, mesh), local_rows(cfg, mesh) if zero else 0
        if zero and mesh.cp.size > 1:
            raise ValueError("step_payload: with cp > 1 and ZeRO-1 gradients travel over dp+cp, and rows over dp")
        out[samples] = own + rows + 2, f"the rank's parameters + 2 = {own} + 2" + (f" + its rows, {rows}" if zero else "")
    if mesh.cp.size > 1:
        n, words = out.get("cp", (0, ""))
        each = attention_payload(cfg, mesh, b, seq_len, plan)
        out["cp"] = n + L * each, words + (" + " if words else "") + f"attention of {L} layers, {each} each"
    return out


def attention_payload(cfg: Config, mesh: Mesh, b: int, S: int, plan: Plan) -> int:
    """Elements that a rank's attention hands to collectives over cp, forward and backward, in a layer of b samples.

    With T of its S positions, T' of the next rank's, H query and G kv heads of this tp rank, K wide, cp = p even shares give
    ring              2·b·G·K·(2·(S - T') + (S - T))        = 6·(p - 1)·b·(S/p)·G·K
    naive, blockwise  2·b·G·K·(T + S)                       all_gather, and reduce_scatter back (with plan.block 2·T + S)
    all_to_all        b·K·(2·(H·T + h·S) + 2·(G·T + g·S))   h, g of the heads are its own in between

    Reference: Liu et al. 2023, section 3; Jacobs et al. 2023, section 3
    """
    p, rank, K = mesh.cp.size, mesh.cp.rank, cfg.head_dim
    sizes, heads = SequenceLayout(plan.layout, S).sizes(p), kv_of_head(cfg, mesh)
    T, H, G = sizes[rank], len(heads), len(set(heads))
    if heads != [h * G // H for h in range(H)]:         # each query head has its own copy (models/attention.py, grouped)
        G = H
    if plan.attention == "ring":
        return 2 * b * G * K * (2 * (S - sizes[(rank + 1) % p]) + (S - T))
    if plan.attention == "all_to_all":
        of_q = shares(H, p)
        if any(n % (H // G) for n in of_q):
            G = H
        h, g = of_q[rank], of_q[rank] * G // H
        return b * K * (2 * (H * T + h * S) + 2 * (G * T + g * S))
    return 2 * b * G * K * (T * (2 if plan.block else 1) + S)


def local_parameters(cfg: Config, mesh: Mesh) -> int:
    """Number of parameters that this rank holds."""
    return sum(elements(box(row.placement, row.shape, mesh)) for row in parameters(cfg, mesh).values())


def local_rows(cfg: Config, mesh: Mesh) -> int:
    """Of these, those whose state this rank keeps with ZeRO-1: AdamW's m and v have as many elements each."""
    return sum(elements(box(Rows(row.placement), row.shape, mesh)) for row in parameters(cfg, mesh).values())


def elements(part: tuple[slice, ...]) -> int:
    return math.prod(s.stop - s.start for s in part)
