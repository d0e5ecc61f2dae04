"""Localises faults of the loop: what it logs, what it saves, and what it says when the loss is gone."""
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.analysis import step_payload
from refimpl.autograd import Tensor
from refimpl.comm import Mesh, run_threads
from refimpl.golden import compare, gauge_scales
from refimpl.models import Config, init, parameters
from refimpl.parallel import ATTENTIONS, LAYOUTS
from refimpl.train import AdamW, Data, Options, train

CFG = Config(vocab_size=17, n_layers=2, n_heads=4, d_model=8, max_seq_len=6)
CORPUS = Data(np.arange(300) * 31 % 97 % 17)
OPTIONS = Options(steps=3, batch_size=5, seq_len=6, lr=1e-3)      # 5: the shares of dp are uneven, and some are empty


def test_sharded_training_equals_serial_training(ranks, tmp_path):
    serial = train(CORPUS, CFG, OPTIONS, Mesh(), tmp_path / "serial")
    gauges = {name for name, row in parameters(CFG, Mesh()).items() if row.gauge}

    def check(mesh):
        if mesh.tp.size > 4:
            return
        out = tmp_path / str(mesh)
        result = train(CORPUS, CFG, OPTIONS, mesh, out)
        np.testing.assert_allclose(result.losses, serial.losses, rtol=1e-12)
        mesh.world.barrier()
        if mesh.world.rank == 0:
            for file in ("grads_first", "grads_last"):
                a, b = (tensorfile.read(folder / f"{file}.safetensors") for folder in (out, tmp_path / "serial"))
                worst = compare(a, b, gauge_scales(gauges))[0]
                assert worst.relative <= 1e-11, (file, worst)       # three steps: the updates' own differences come on top
    ranks.run_meshes(check)


def test_the_payload_of_a_step_equals_the_formula(ranks):
    def check(mesh):
        if mesh.tp.size > 4:
            return
        payload = train(CORPUS, CFG, OPTIONS, mesh).payload
        assert payload == {axis: n for axis, (n, _) in step_payload(CFG, mesh, 5, 6).items()}
    ranks.run_meshes(check)


GROUPED = {"two query heads share one": {"n_kv_heads": 2}, "all share one": {"n_kv_heads": 1}, "each has one": {}}


@pytest.mark.parametrize("attention, block", [*((name, 0) for name in ATTENTIONS), ("blockwise", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_payload_of_cut_sequences_equals_the_formula(ranks, attention, block, layout):
    """Uneven pieces: 6 positions on up to 8 ranks."""
    options = replace(OPTIONS, attention=attention, layout=layout, block=block)
    cfg = replace(CFG, **list(GROUPED.values())[(ATTENTIONS.index(attention) + LAYOUTS.index(layout)) % 3])

    def check(mesh):
        if mesh.tp.size > min(4, cfg.n_kv_heads):
            return
        payload = train(CORPUS, cfg, options, mesh).payload
        assert payload == {axis: n for axis, (n, _) in step_payload(cfg, mesh, 5, 6, plan=options.plan).items()}
    ranks.run_meshes(check, cut=True)


def test_the_log_is_json_lines(tmp_path):
    result = train(CORPUS, CFG, OPTIONS, Mesh(), tmp_path)
    run, *steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert run["config"] == CFG.to_dict() and run["mesh"] == "dp=1"
    assert [row["step"] for row in steps] == [1, 2, 3] and [row["loss"] for row in steps] == result.losses
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grads_first.safetensors", "grads_last.safetensors", "log.jsonl",
                                                          "params.safetensors"]


def test_one_step_is_the_first_and_the_last(tmp_path):
    train(CORPUS, CFG, Options(steps=1, batch_size=2, seq_len=6), Mesh(), tmp_path)
    first, last = (tensorfile.read(tmp_path / f"grads_{which}.safetensors") for which in ("first", "last"))
    assert compare(first, last, {})[0].relative == 0


def test_results_that_rank_0_cannot_write_are_an_error_of_every_rank_before_the_first_step(ranks, tmp_path):
    (tmp_path / "file").write_text("")

    def check(comm):
        with pytest.raises(ValueError, match="the results cannot be written to .*/file: File exists"):
            train(CORPUS, CFG, OPTIONS, Mesh(dp=comm.size, comm=comm), tmp_path / "file")
    ranks.run(check)


def test_training_learns_a_periodic_text():
    # with a period of 5 every token follows from the one before: the loss must go from ln V to nearly 0
    result = train(Data(np.arange(200) % 5), CFG, Options(steps=120, batch_size=4, seq_len=6, lr=1e-2), Mesh())
    assert abs(result.losses[0] - np.log(17)) < 0.1 and result.losses[-1] < 0.1


def test_float32_trains_in_float32_and_near_float64():
    runs = {dtype: train(CORPUS, CFG, Options(steps=3, batch_size=4, seq_len=6, dtype=dtype), Mesh())
            for dtype in ("float32", "float64")}
    assert all(p.dtype == np.float32 for p in runs["float32"].params.values())
    np.testing.assert_allclose(runs["float32"].losses, runs["float64"].losses, rtol=1e-5)


def test_a_lost_loss_stops_with_its_step(monkeypatch):
    def poisoned(cfg, mesh, seed, dtype, xp):
        params = init(cfg, mesh, seed, dtype)
        params["norm.g"].array[:] = np.inf
        return params
    monkeypatch.setattr("refimpl.train.loop.init", poisoned)
    with pytest.raises(ArithmeticError, match="the loss is nan at step 1: try a smaller learning rate than 0.001"), \
            np.errstate(invalid="ignore"):
        train(CORPUS, CFG, OPTIONS, Mesh())


@pytest.mark.parametrize("name", ["steps", "batch_size", "seq_len", "accumulate"])
def test_senseless_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Options(**{name: 0})


def test_clipping_is_that_of_the_whole_gradient_on_every_mesh(ranks):
    """At this bound every step is clipped; the loss of the second tells whether the first was."""
    clipped = train(CORPUS, CFG, replace(OPTIONS, clip=0.01), Mesh())
    free = train(CORPUS, CFG, OPTIONS, Mesh())

    def check(mesh):
        if mesh.tp.size <= 4:
            result = train(CORPUS, CFG, replace(OPTIONS, clip=0.01), mesh)
            np.testing.assert_allclose(result.losses, clipped.losses, rtol=1e-12)
    # AdamW takes no notice of a constant factor but for eps, so the factors of the steps have to differ
    assert clipped.losses[0] == free.losses[0] and clipped.losses[2] != free.losses[2]
    ranks.run_meshes(check)


def test_the_norm_is_logged_and_one_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    train(CORPUS, CFG, replace(OPTIONS, clip=0.5), Mesh(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(line["norm"] > 0 for line in lines[1:])
    monkeypatch.setattr("refimpl.train.loop.gradient_norm", lambda *args: float("inf"))
    with pytest.raises(ArithmeticError, match="the gradient's norm is inf at step 1: try a smaller learning rate than 0.001"):
        train(CORPUS, CFG, replace(OPTIONS, clip=0.5), Mesh())


@pytest.mark.parametrize("every, found", ((1, True), (2, True), (3, False), (0, False)))
def test_copies_are_compared_at_the_start_and_every_so_many_steps(monkeypatch, every, found):
    """From the second update on, rank 1's copy of a bias is another; there are three steps, of which the third sees it."""
    def run(comm):
        class Drifting(AdamW):
            def step(self, params, grads):
                out = super().step(params, grads)
                if self.t == 2 and comm.rank == 1:
                    t = out["norm.b"]
                    out["norm.b"] = Tensor(t.array + 1e-15, t.layout, name="norm.b")
                return out
        optimizers[comm.rank] = Drifting
        if not found:
            return train(CORPUS, CFG, replace(OPTIONS, check_replicas=every), Mesh(dp=2, comm=comm)).losses
        with pytest.raises(ArithmeticError, match="the copies of norm.b are not the same: rank 1 differs from rank 0"):
            train(CORPUS, CFG, replace(OPTIONS, check_replicas=every), Mesh(dp=2, comm=comm))
    optimizers = {}
    monkeypatch.setattr("refimpl.train.loop.AdamW", lambda *args, **kwargs: optimizers[rank_of_this_thread()](*args, **kwargs))
    numbers = {}

    def rank_of_this_thread():
        return numbers[threading.get_ident()]

    def on_rank(comm):
        numbers[threading.get_ident()] = comm.rank
        run(comm)
    run_threads(2, on_rank)


@pytest.mark.parametrize("name, value", (("clip", -1.0), ("clip", float("nan")), ("check_replicas", -1)))
def test_options_that_cannot_be_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got {value}"):
        Options(**{name: value})
