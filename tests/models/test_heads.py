"""Localises heads that are shared out wrongly: a query that meets another kv head than on one rank, a hole between two ranks, a
shared kv head whose gradient lacks the queries of another rank.

Shape letters: H query heads, G kv heads, K head dim.
"""
from dataclasses import replace

import numpy as np
import pytest

from refimpl.autograd import LayoutError, Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.comm.paper import paper_mesh
from refimpl.models import Config, Context, parameters, placements
from refimpl.models.attention import attention
from refimpl.models.placements import heads, kv_of_head
from refimpl.ops import sum as total
from refimpl.parallel import Cut, Placement, Reduction, gather, gradient_norm, reduce_from, reduce_gradients, shard
from refimpl.train import AdamW

D, K, B, T = 12, 2, 2, 5
SERIAL = Mesh()
GROUPS = [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (9, 1), (12, 4), (12, 3), (16, 2), (15, 5), (71, 1), (10, 5)]


def config(H: int, G: int) -> Config:
    return Config(vocab_size=5, n_layers=1, n_heads=H, n_kv_heads=G, d_model=D, head_dim=K, max_seq_len=T, positions="none")


# -- who has which heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("H, G", GROUPS)
def test_every_head_is_on_a_rank_and_there_is_no_hole(H, G):
    for tp in range(1, H + 1):
        q, kv = heads(config(H, G), tp)
        assert len(q) == len(kv) == tp
        assert [h for start, stop in q for h in range(start, stop)] == list(range(H))           # each once, in order
        assert {g for start, stop in kv for g in range(start, stop)} == set(range(G))
        assert max(b - a for a, b in q) - min(b - a for a, b in q) <= 1
        for (a, b), (first, last) in zip(q, kv):        # the kv heads of its queries, and no other
            assert set(range(first, last)) == {h // (H // G) for h in range(a, b)}


@pytest.mark.parametrize("H, G", GROUPS)
def test_query_head_h_uses_kv_head_h_over_group_wherever_it_lies(ranks, H, G):
    """Whole: ⌊h/(H/G)⌋, so 0, 0, 1, 1 for 4 and 2."""
    def check(comm: Comm):
        if comm.size <= H:
            mesh = Mesh(tp=comm.size, comm=comm)
            q, kv = (bounds[comm.rank] for bounds in heads(config(H, G), comm.size))
            mine = kv_of_head(config(H, G), mesh)
            assert [kv[0] + g for g in mine] == [h // (H // G) for h in range(*q)]
            assert set(mine) == set(range(kv[1] - kv[0]))
    ranks.run(check)


@pytest.mark.parametrize("H, G, tp, q, kv", [
    (4, 2, 2, ((0, 2), (2, 4)), ((0, 1), (1, 2))),
    (8, 2, 4, ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (0, 1), (1, 2), (1, 2))),
    (9, 3, 2, ((0, 5), (5, 9)), ((0, 2), (1, 3))),
    (9, 3, 4, ((0, 3), (3, 5), (5, 7), (7, 9)), ((0, 1), (1, 2), (1, 3), (2, 3))),
    (8, 1, 3, ((0, 3), (3, 6), (6, 8)), ((0, 1), (0, 1), (0, 1)))])
def test_shares_worked_by_hand(H, G, tp, q, kv):
    assert heads(config(H, G), tp) == (q, kv)


def test_parameters_are_cut_between_heads():
    """9 query and 3 kv heads of 2 channels on 2 ranks."""
    table = placements(config(9, 3), paper_mesh("tp=2"))
    assert [table[f"layers.0.attn.{n}"].bounds for n in ("q.w", "k.w", "v.b", "o.w")] == [
        ((0, 10), (10, 18)), ((0, 4), (2, 6)), ((0, 4), (2, 6)), ((0, 10), (10, 18))]


@pytest.mark.parametrize("H, G", [(3, 3), (3, 1), (2, 1), (1, 1)])
def test_more_ranks_than_heads_are_the_same_sentence_on_every_rank(ranks, H, G):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        for ask in (parameters, placements, kv_of_head):
            if comm.size > H:
                words = f"^tp={comm.size} needs at least as many heads, the model has n_heads {H}$"
                with pytest.raises(ValueError, match=words):
                    ask(config(H, G), mesh)
            else:
                ask(config(H, G), mesh)
    ranks.run(check)


# -- what they compute -----------------------------------------------------------------------------------------------


def weights(cfg: Config) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {name: draw.normal(0, 0.5, row.shape) for name, row in parameters(cfg, SERIAL).items() if ".attn." in name}


def reduced(grads: dict[str, Tensor], mesh: Mesh, table: dict[str, Placement]) -> dict[str, Tensor]:
    reduction = Reduction(mesh, table)
    for name, g in grads.items():
        reduction.add(name, g)
    return reduction.finish()


def attend(cfg: Config, whole: dict[str, np.ndarray], mesh: Mesh = SERIAL, reduce=reduced):
    """Of the layer: y, and the gradients of Σ y·c by all of its weights, the whole of them on every rank."""
    draw, table = np.random.default_rng(4), placements(cfg, mesh)
    x, c = Tensor(draw.normal(size=(B, T, D))), Tensor(draw.normal(size=(B, T, D)))

    def loss(p: Params):
        y = attention(x, p / "layers.0.attn", cfg, Context(mesh, np.arange(B), np.arange(T)))[0]
        return total(y * c), y
    (_, y), grads = value_and_grad(loss, shard(whole, table, mesh))
    return y.array, gather(reduce(grads, mesh, table), table, mesh)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


def by_hand(cfg: Config, w: dict[str, np.ndarray], kv_head) -> np.ndarray:
    """The layer head by head in plain numpy; query head h uses kv head kv_head(h)."""
    x = np.random.default_rng(4).normal(size=(B, T, D))
    q, k, v = (x @ w[f"layers.0.attn.{n}.w"] + w[f"layers.0.attn.{n}.b"] for n in "qkv")
    out = []
    for h in range(cfg.n_heads):
        mine, its = slice(h * K, h * K + K), slice(kv_head(h) * K, kv_head(h) * K + K)
        s = q[:, :, mine] @ k[:, :, its].swapaxes(1, 2) / np.sqrt(K) + np.triu(np.full((T, T), -np.inf), 1)
        p = np.exp(s) / np.exp(s).sum(axis=2, keepdims=True)
        out.append(p @ v[:, :, its])
    return np.concatenate(out, axis=2) @ w["layers.0.attn.o.w"] + w["layers.0.attn.o.b"]


@pytest.mark.parametrize("H, G", [(8, 2), (8, 4), (9, 3), (8, 1), (8, 8), (12, 4)])
def test_output_and_gradients_on_any_number_of_ranks_are_those_worked_by_hand(ranks, H, G):
    cfg, whole = config(H, G), weights(config(H, G))
    want, want_grads = attend(cfg, whole)
    assert close(want, by_hand(cfg, whole, lambda h: h // (H // G)))
    scale = max(np.abs(g).max() for g in want_grads.values())

    def check(comm: Comm):
        y, grads = attend(cfg, whole, Mesh(tp=comm.size, comm=comm))
        assert close(y, want)
        assert all(np.abs(grads[name] - g).max() <= 1e-12 * scale for name, g in want_grads.items())
    ranks.run(check)


def test_reduce_gradients_takes_one_bucket_though_the_ranks_hold_differently_much():
    cfg, whole = config(8, 4), weights(config(8, 4))
    run_threads(3, lambda comm: attend(cfg, whole, Mesh(tp=3, comm=comm), reduce_gradients), timeout=20)


def repeated(whole: dict[str, np.ndarray], order: list[int]) -> dict[str, np.ndarray]:
    """The weights of a layer that has a kv head for each query head: `order` says which one it is a copy of."""
    columns = np.array([g * K + c for g in order for c in range(K)])
    return {name: a[..., columns] if name.split(".")[-2] in "kv" else a for name, a in whole.items()}


@pytest.mark.parametrize("H, G", [(4, 2), (8, 2), (9, 3), (4, 1), (4, 4)])
def test_grouped_heads_are_those_of_repeated_weights_and_not_of_tiled_ones(H, G):
    """0, 0, 1, 1 and not 0, 1, 0, 1; with G = 1 (multi-query) and G = H (multi-head) both are the same."""
    cfg, whole = config(H, G), weights(config(H, G))
    y, grads = attend(cfg, whole)
    order = [h // (H // G) for h in range(H)]
    full, full_grads = attend(replace(cfg, n_kv_heads=H), repeated(whole, order))
    assert close(full, y)
    for n in ("k.w", "v.w", "v.b"):                     # a shared head's gradient: the sum of its copies'
        g = full_grads[f"layers.0.attn.{n}"]
        copies = g.reshape(*g.shape[:-1], G, H // G, K).sum(axis=-2).reshape(*g.shape[:-1], G * K)
        assert close(grads[f"layers.0.attn.{n}"], copies)
    tiled = attend(replace(cfg, n_kv_heads=H), repeated(whole, [h % G for h in range(H)]))[0]
    assert close(tiled, by_hand(cfg, whole, lambda h: h % G))
    assert close(tiled, y) if G in (1, H) else np.abs(tiled - y).max() > 0.01 * np.abs(y).max()


def test_the_gradient_of_a_shared_head_is_the_sum_over_its_queries_on_all_its_holders(ranks):
    """One position, so each head's output is v.  Heads of one channel, o = 1, dy = 1, x = 3: each query adds 3 to its v."""
    H, G = 6, 2
    cfg = Config(vocab_size=2, n_layers=1, n_heads=H, n_kv_heads=G, d_model=1, head_dim=1, max_seq_len=1, positions="none",
                 biases=())
    shapes = {"q": (1, H), "k": (1, G), "v": (1, G), "o": (H, 1)}
    whole = {f"layers.0.attn.{n}.w": np.ones(shape) for n, shape in shapes.items()}

    def check(comm: Comm):
        if comm.size > H:
            return
        mesh, x = Mesh(tp=comm.size, comm=comm), Tensor(np.full((1, 1, 1), 3.0))
        table, ctx = placements(cfg, mesh), Context(mesh, np.arange(1), np.arange(1))
        value, grads = value_and_grad(lambda p: total(attention(x, p / "layers.0.attn", cfg, ctx)[0]),
                                      shard(whole, table, mesh))
        assert float(value) == 18                       # six heads of v = 3
        own, mine = grads["layers.0.attn.v.w"].array[0].tolist(), kv_of_head(cfg, mesh)
        assert own == [3 * mine.count(g) for g in range(len(own))]      # its own queries
        summed = reduced(grads, mesh, table)
        assert (summed["layers.0.attn.v.w"].array == 9).all()           # three queries, wherever they lie
        assert gather(summed, table, mesh)["layers.0.attn.v.w"].tolist() == [[9, 9]]
    ranks.run(check)


def test_gradients_of_shared_heads_are_not_reduced_nor_used_without_the_table():
    """Two ranks hold the middle one of three heads: their parts of its gradient must not be taken for the whole."""
    def on_rank(comm):
        mesh = Mesh(tp=2, comm=comm)
        table = {"w": Cut(0, ((0, 2), (1, 3)))}
        params = shard({"w": np.arange(3.0)}, table, mesh)
        _, grads = value_and_grad(lambda p: reduce_from(total(p["w"], axis=0), comm=mesh.tp), params)
        for call in (lambda: reduce_gradients(grads, mesh), lambda: gather(grads, table, mesh),
                     lambda: gradient_norm(grads, table, mesh), lambda: AdamW(0.1).step(params, grads)):
            with pytest.raises(LayoutError, match="overlap over tp, so its holders|is partial over tp: reduce_gradients first"):
                call()
        assert gather(reduce_gradients(grads, mesh, table), table, mesh)["w"].tolist() == [1, 2, 1]
    run_threads(2, on_rank)
