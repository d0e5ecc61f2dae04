"""Localises faults of going on: what a resumed run has lost of its state, samples, schedule, log or patience."""
import itertools
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from resume_programs import (TINY, Stopping, global_state, held, loaded, require_close, require_equal, said_by, shared, stop,
                             trained, write_corpus)

from refimpl import tensorfile
from refimpl.comm import Mesh, run_threads
from refimpl.models import Config, init
from refimpl.text import ByteTokenizer
from refimpl.train import Data, Evaluation, Options, Sampler, latest
from refimpl.train.checkpoint import read_manifest
from refimpl.train.log import read_log

LLAMA = {"norm": "rms_norm", "positions": "rope", "ffn": "swiglu", "biases": (), "tied": False}
MODELS = {
    "gpt2": Config(vocab_size=17, n_layers=2, n_heads=4, d_model=8, max_seq_len=6, dropout=0.2),
    "shared": Config(vocab_size=17, n_layers=1, n_heads=9, n_kv_heads=3, head_dim=2, d_model=8, d_ff=19, max_seq_len=6,
                     dropout=0.2, **LLAMA | {"biases": ("qkv",)}),          # on 2 and 4 ranks some kv heads are on two of them
}
DATA = Data(np.arange(300) * 31 % 97 % 17)
N, SAVED, KILLED = 6, 3, 5                              # steps, of which the third is saved, and after the fifth comes the kill
OPTIONS = Options(steps=N, batch_size=5, seq_len=6, accumulate=2, lr=1e-2, clip=0.5, schedule="cosine", warmup=2, floor=0.1,
                  save_every=SAVED, seed=3)             # micro-batches of 3 and 2: uneven shares, and some are empty
HOW = {
    "gpt2": ("gpt2", {}),
    "gpt2, zero": ("gpt2", {"zero": True}),
    "gpt2, zero, merged, float32": ("gpt2", {"zero": True, "merged": True, "dtype": "float32"}),
    "gpt2, bfloat16": ("gpt2", {"dtype": "bfloat16"}),
    "shared heads": ("shared", {}),
    "shared heads, merged": ("shared", {"merged": True}),
    "shared heads, zero": ("shared", {"zero": True}),
    "shared heads, zero, bfloat16": ("shared", {"zero": True, "dtype": "bfloat16"}),
    "gpt2, ring": ("gpt2", {"attention": "ring", "layout": "zigzag"}),                      # on meshes that cut sequences
    "shared heads, all to all, zero": ("shared", {"attention": "all_to_all", "layout": "striped", "sequence_parallel": True,
                                                  "zero": True}),
}


def run_in_two(cfg, options, mesh, folder, mesh_after=None, **after):
    """A run that is killed after step 5, and what comes of the checkpoint of step 3: (before, resumed, its result)."""
    before = stop(Stopping(DATA, cfg, options, mesh, folder), KILLED)
    mesh.world.barrier()
    path = latest(folder / "checkpoints")
    assert path.name == f"step-{SAVED:08d}"
    resumed = Stopping(DATA, cfg, replace(options, **after), mesh_after or mesh, folder)
    resumed.resume(path)
    return before, resumed


@pytest.mark.parametrize("how", HOW)
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(ranks, tmp_path, how):
    model, changes = HOW[how]
    cfg, options = MODELS[model], replace(OPTIONS, **changes)

    def check(mesh):
        folder = shared(mesh.world, tmp_path) / str(mesh)
        straight = Stopping(DATA, cfg, options, mesh)
        straight.look = SAVED
        losses = straight.run().losses
        before, resumed = run_in_two(cfg, options, mesh, folder)
        assert held(before) != held(resumed) == straight.seen
        result = resumed.run()
        assert result.losses == losses[SAVED:] and len(losses) == N
        assert held(resumed) == held(straight) and resumed.state.optimizer.t == N
        assert resumed.state.optimizer.lr == straight.state.optimizer.lr == pytest.approx(1e-3)
    if ranks.size < 4:
        ranks.run_meshes(check, cut="attention" in changes)
    if ranks.size == 4:                                 # in turn
        meshes = list(ranks.cut_meshes() if "attention" in changes else ranks.meshes())
        one = meshes[list(HOW).index(how) % len(meshes)]
        ranks.run(lambda comm: check(Mesh(**one, comm=comm)))


def test_what_is_compared_would_tell():
    """Dropout, clipping, accumulation, the schedule and every moment have a part in the run, so a loss of one is seen."""
    cfg = MODELS["shared"]
    wanted = Stopping(DATA, cfg, OPTIONS, Mesh())
    losses = wanted.run().losses
    assert all(a.max() > 0 for a in wanted.state.optimizer.v.values())
    for other, changes in ((replace(cfg, dropout=0.0), {}), (cfg, {"clip": 0.0}), (cfg, {"warmup": 0}), (cfg, {"seed": 4}),
                           (cfg, {"schedule": "constant"})):
        assert Stopping(DATA, other, replace(OPTIONS, **changes), Mesh()).run().losses[2:] != losses[2:], (other, changes)


PAIRS = [("dp=1", "dp=2"), ("dp=3", "tp=2"), ("tp=3", "dp=2,tp=2"), ("tp=4", "dp=3"), ("dp=2,tp=2", "tp=3"), ("tp=2", "dp=1"),
         ("dp=2", "tp=4"), ("tp=5", "dp=5"), ("dp=2,tp=3", "dp=4"),
         ("cp=2", "dp=1"), ("tp=2", "dp=2,cp=2"), ("dp=2,cp=2,tp=2", "cp=3")]


def dims(text):
    return {axis: int(n) for axis, _, n in (part.partition("=") for part in text.split(","))}


def size(text):
    return int(np.prod(list(dims(text).values())))


def plan(text):
    return {"attention": "ring", "layout": "zigzag", "sequence_parallel": True} if "cp" in text else {}


@pytest.mark.parametrize("before, after", PAIRS)
@pytest.mark.parametrize("zero", list(itertools.product((False, True), repeat=2)), ids=("", "zero-", "-zero", "zero-zero"))
def test_a_run_goes_on_on_another_mesh(tmp_path, before, after, zero):
    """What arrives is bit for bit what was saved, and what comes of it is what comes of it anywhere."""
    number = PAIRS.index((before, after))
    cfg, merged = MODELS["shared"], number % 2 == 1
    losses, final = serial_run()

    def first(comm):
        mesh = Mesh(**dims(before), comm=comm)
        options = replace(OPTIONS, zero=zero[0], **plan(before))
        stop(Stopping(DATA, cfg, replace(options, merged=merged), mesh, tmp_path), KILLED)
        at_save = stop(Stopping(DATA, cfg, options, mesh), SAVED)
        return global_state(at_save)
    saved = run_threads(size(before), first)[0]
    require_equal(loaded(latest(tmp_path / "checkpoints")), saved)

    def second(comm):
        mesh = Mesh(**dims(after), comm=comm)
        options = replace(OPTIONS, zero=zero[1], merged=not merged, **plan(after))
        trainer = Stopping(DATA, cfg, options, mesh, tmp_path)
        trainer.resume(latest(tmp_path / "checkpoints"))
        arrived = global_state(trainer)
        return arrived, trainer.run().losses, global_state(trainer)
    arrived, rest, end = run_threads(size(after), second)[0]
    require_equal(arrived, saved)
    np.testing.assert_allclose(rest, losses[SAVED:], rtol=1e-12, atol=0)
    require_close(end, final, 1e-11)                    # six updates, whose own differences come on top
    require_close(loaded(latest(tmp_path / "checkpoints")), final, 1e-11)


def serial_run(cache=[]):
    if not cache:
        trainer = Stopping(DATA, MODELS["shared"], OPTIONS, Mesh())
        cache.append((trainer.run().losses, global_state(trainer)))
    return cache[0]


def test_the_same_ranks_go_on_as_another_mesh(ranks, tmp_path):
    cfg = MODELS["shared"]
    losses, final = serial_run()

    def check(comm):
        for number, (a, b) in enumerate(itertools.permutations(ranks.meshes(), 2)):
            folder, zero = shared(comm, tmp_path) / f"{a} {b}", number % 2 == 0
            _, resumed = run_in_two(cfg, replace(OPTIONS, zero=zero), Mesh(**a, comm=comm), folder, Mesh(**b, comm=comm),
                                    zero=not zero)
            np.testing.assert_allclose(resumed.run().losses, losses[SAVED:], rtol=1e-12, atol=0)
            end = global_state(resumed)
            if comm.rank == 0:
                require_close(end, final, 1e-11)
    if ranks.size in (2, 3, 4):
        ranks.run(check)


# -- the order of the samples ------------------------------------------------------------------------------------------

class Noting(Sampler):
    """Which samples this rank has seen."""

    def batch(self, rows):
        found = super().batch(rows)
        self.corpus_seen.extend(zip(rows.tolist(), found.tokens.tolist()))
        return found


def noting(trainer):
    seen = []
    trainer.sampler = Noting(DATA.train, OPTIONS.seq_len, OPTIONS.seed)
    object.__setattr__(trainer.sampler, "corpus_seen", seen)
    return seen


def test_samples_are_the_same_on_every_mesh_and_after_a_resume(ranks, tmp_path):
    """Sample n of step k is number 5·k + n, in the killed part, in the resumed part, and each is seen by one dp rank alone."""
    cfg = MODELS["gpt2"]
    whole = Sampler(DATA.train, OPTIONS.seq_len, OPTIONS.seed).batch(np.arange(5 * N)).tokens.tolist()
    assert len({tuple(w) for w in whole}) > 5

    def check(mesh):
        folder = shared(mesh.world, tmp_path) / str(mesh)
        trainer = Stopping(DATA, cfg, OPTIONS, mesh, folder)
        seen = noting(trainer)
        stop(trainer, KILLED)
        mesh.world.barrier()
        require_seen(mesh, seen, 0, KILLED, whole)
        resumed = Stopping(DATA, cfg, OPTIONS, mesh, folder)
        seen = noting(resumed)
        resumed.resume(latest(folder / "checkpoints"))
        resumed.run()
        require_seen(mesh, seen, SAVED, N, whole)
    if ranks.size <= 4:
        ranks.run_meshes(check)


def require_seen(mesh, seen, start, end, whole):
    texts = mesh.world.gather_texts(json.dumps(seen))
    if mesh.world.rank == 0:
        by_rank = [[tuple(map(str, row)) for row in json.loads(text)] for text in texts]
        assert all(by_rank[rank] == by_rank[rank - rank % mesh.tp.size] for rank in range(mesh.world.size))
        everybody = sorted((int(n), tokens) for rows in by_rank[::mesh.tp.size] for n, tokens in rows)
        assert everybody == [(n, str(whole[n])) for n in range(5 * start, 5 * end)]


# -- another backend ---------------------------------------------------------------------------------------------------

SHAPE = [*TINY, "--norm", "rms_norm", "--positions", "rope", "--ffn", "swiglu", "--biases", "", "--dropout", "0.1"]
RUN = ["--schedule", "cosine", "--warmup", "2", "--steps", "6", "--clip", "0.5", "--accumulate", "2"]


def kill_after(folder, step):
    """The run is as a kill has left it: later checkpoints are not there, but their lines in the log are."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[5:]) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    assert latest(folder / "checkpoints").name == f"step-{step:08d}"


@pytest.mark.parametrize("ranks_before, ranks_after, before, after", [
    (0, 2, [], ["--mesh", "tp=2", "--zero"]),
    (0, 2, ["--merged"], ["--mesh", "dp=2", "--zero"]),
    (2, 0, ["--mesh", "dp=2", "--zero"], ["--mesh", "dp=1", "--no-zero"]),
    (2, 0, ["--mesh", "tp=2", "--merged"], []),
    (2, 2, ["--mesh", "dp=2", "--zero"], ["--mesh", "tp=2"]),
], ids=("serial-tp2", "serial-dp2", "dp2-serial", "tp2-serial", "dp2-tp2"))
def test_the_command_goes_on_with_other_ranks(tmp_path, ranks_before, ranks_after, before, after):
    text = write_corpus(tmp_path / "text")
    trained("--text", text, *SHAPE, *RUN, "--out", tmp_path / "straight")
    every = ["--save-every", "1", "--keep", "0"]
    trained("--text", text, *SHAPE, *RUN, "--out", tmp_path / "a", *before, *every, ranks=ranks_before)
    kill_after(tmp_path / "a", 3)
    trained("--out", tmp_path / "a", "--resume", *after, "--no-bar", "--sample", "0", ranks=ranks_after)
    require_same_end(tmp_path / "a", tmp_path / "straight")


def require_same_end(folder, straight):
    a, b = (tensorfile.read(f / "params.safetensors") for f in (folder, straight))
    require_close(a, b, 1e-11)
    losses, wanted = ([row["loss"] for row in read_log(f / "log.jsonl") if "loss" in row] for f in (folder, straight))
    np.testing.assert_allclose(losses, wanted, rtol=1e-12, atol=0)
    assert len(losses) == 6


OTHER = os.environ.get("OTHER_MPI_PYTHON", "")


@pytest.mark.skipif(not OTHER, reason="needs a Python with another MPI, OTHER_MPI_PYTHON: make test-openmpi has one")
def test_a_run_goes_on_under_another_mpi_and_back(tmp_path):
    name = "from mpi4py import MPI; print(MPI.Get_library_version().split()[0])"
    assert said_by(OTHER, name) != said_by(sys.executable, name)
    text = write_corpus(tmp_path / "text")
    trained("--text", text, *SHAPE, *RUN, "--out", tmp_path / "straight")
    trained("--text", text, *SHAPE, *RUN, "--out", tmp_path / "a", "--mesh", "dp=2", "--zero", "--save-every", 1, "--keep", 0,
            ranks=2)
    for step, mesh, python in ((2, "tp=2", OTHER), (4, "dp=2", sys.executable)):
        kill_after(tmp_path / "a", step)
        trained("--out", tmp_path / "a", "--resume", "--mesh", mesh, "--no-bar", "--sample", "0", ranks=2, python=python)
        require_same_end(tmp_path / "a", tmp_path / "straight")


def test_what_threads_have_saved_goes_on_under_mpirun_and_back(tmp_path):
    text = write_corpus(tmp_path / "text")
    trained("--text", text, *SHAPE, *RUN, "--out", tmp_path / "straight")
    options = Options(steps=6, batch_size=3, seq_len=8, accumulate=2, clip=0.5, schedule="cosine", warmup=2, validation=0,
                      save_every=1)
    source = {"text": str(text), "tokenizer": "byte", "vocab_size": 4096, "tokens": ""}
    tokenizer = ByteTokenizer()
    data = Data.split(tokenizer.encode(text.read_text()), options, tokenizer, source)
    cfg = Config(vocab_size=256, n_layers=1, n_heads=2, d_model=8, max_seq_len=8, dropout=0.1, **LLAMA | {"tied": True})
    out = tmp_path / "a"
    run_threads(4, lambda comm: stop(Stopping(data, cfg, options, Mesh(dp=2, tp=2, comm=comm), out), 2))
    trained("--out", out, "--resume", "--mesh", "dp=2", "--zero", "--no-bar", "--sample", "0", "--keep", "0", ranks=2)
    require_same_end(out, tmp_path / "straight")
    kill_after(out, 4)

    def on(comm):
        trainer = Stopping(data, cfg, options, Mesh(dp=3, comm=comm), out)
        trainer.resume(latest(out / "checkpoints"))
        trainer.run()
    run_threads(3, on)
    require_same_end(out, tmp_path / "straight")


# -- early stopping ----------------------------------------------------------------------------------------------------

class Script:
    """Validation losses, the same on every rank."""

    def __init__(self, losses):
        self.losses, self.at = losses, defaultdict(int)

    def __call__(self, params, data, cfg, mesh, options):
        self.at[mesh.world.rank] += 1
        return Evaluation(self.losses[self.at[mesh.world.rank] - 1], None)


LOSSES = [3.0, 2.0, 2.5, 2.4, 2.3, 2.2, 2.1, 2.05, 2.04, 2.03]


@pytest.mark.parametrize("killed, best, waited", [(1, 3.0, 0), (2, 2.0, 0), (3, 2.0, 1), (4, 2.0, 2)])
def test_patience_is_not_renewed_by_a_resume(ranks, tmp_path, monkeypatch, killed, best, waited):
    """The second evaluation is the best; the run ends with the third that is not better, the fifth, wherever it was killed."""
    options = replace(OPTIONS, steps=10, eval_every=1, save_every=1, patience=3, batch_size=2, accumulate=1)
    data, script = Data.split(DATA.train, options), Script(LOSSES)
    monkeypatch.setattr("refimpl.train.loop.evaluate", script)

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path)
        script.at[comm.rank] = 0
        stop(Stopping(data, MODELS["gpt2"], options, mesh, folder), killed)
        comm.barrier()
        trainer = Stopping(data, MODELS["gpt2"], options, mesh, folder)
        trainer.resume(latest(folder / "checkpoints"))
        assert (trainer.best, trainer.waited, script.at[comm.rank]) == (best, waited, killed)
        assert isinstance(trainer.waited, int)
        trainer.run()
        assert trainer.state.optimizer.t == 5 and (trainer.best, trainer.waited) == (2.0, 3)
    if ranks.size <= 4:
        ranks.run(check)


def test_before_the_first_evaluation_there_is_no_best_loss(ranks, tmp_path):
    options = replace(OPTIONS, eval_every=4)
    data = Data.split(DATA.train, options)

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path)
        stop(Stopping(data, MODELS["gpt2"], options, mesh, folder), 4)
        comm.barrier()
        path = latest(folder / "checkpoints")
        assert read_manifest(path)["about"]["best"] is None
        trainer = Stopping(data, MODELS["gpt2"], options, mesh, folder)
        trainer.resume(path)
        assert trainer.best == np.inf and trainer.waited == 0
        trainer.run()
        assert trainer.best < np.inf
    if ranks.size <= 2:
        ranks.run(check)


def test_one_validation_loss_that_is_nan_does_not_erase_the_best(tmp_path, monkeypatch):
    options = replace(OPTIONS, steps=4, eval_every=1, patience=9, batch_size=2, accumulate=1)
    monkeypatch.setattr("refimpl.train.loop.evaluate", Script([2.0, np.nan, 2.5, 2.4]))
    trainer = Stopping(Data.split(DATA.train, options), MODELS["gpt2"], options, Mesh())
    with pytest.raises(ArithmeticError, match="the validation loss is nan at step 2"):
        trainer.run()
    assert (trainer.best, trainer.waited) == (2.0, 0)


# -- the log -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("half", ["", '{"step": 6, "lo', '{"step": 3, "loss": 2.5', "{"])
def test_the_log_has_each_step_once_and_no_half_line(ranks, tmp_path, half):
    options = replace(OPTIONS, eval_every=2)
    data = Data.split(DATA.train, options)

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path)
        Stopping(data, MODELS["gpt2"], options, mesh, folder / "straight").run()
        killed = stop(Stopping(data, MODELS["gpt2"], options, mesh, folder / "a"), KILLED)
        comm.barrier()
        file = folder / "a/log.jsonl"
        if comm.rank == 0:
            assert [row["step"] for row in read_log(file)[1:]] == [1, 2, 2, 3, 4, 4, 5]         # more than was saved
            with open(file, "a") as opened:
                opened.write(half)
        comm.barrier()
        for _ in range(2):                              # a kill, and one more before anything was saved
            resumed = Stopping(data, MODELS["gpt2"], options, mesh, folder / "a")
            resumed.resume(latest(folder / "a/checkpoints"))
            stop(resumed, KILLED)
            comm.barrier()
        resumed = Stopping(data, MODELS["gpt2"], options, mesh, folder / "a")
        resumed.resume(latest(folder / "a/checkpoints"))
        resumed.run()
        comm.barrier()
        assert killed.out == resumed.out
        if comm.rank == 0:
            rows, wanted = ([{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
                             for row in read_log(folder / f / "log.jsonl") if "step" in row] for f in ("a", "straight"))
            assert rows == wanted and [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
            headers = [row for row in read_log(file) if "step" not in row]
            assert len(headers) == 4 and all(row["config"] == MODELS["gpt2"].to_dict() for row in headers)
            assert not list(file.parent.glob("*.part"))
    if ranks.size <= 2:
        ranks.run(check)


def test_the_first_gradient_stays_that_of_the_first_step(tmp_path):
    stop(Stopping(DATA, MODELS["gpt2"], OPTIONS, Mesh(), tmp_path), KILLED)
    first = (tmp_path / "grads_first.safetensors").read_bytes()
    resumed = Stopping(DATA, MODELS["gpt2"], OPTIONS, Mesh(), tmp_path)
    resumed.resume(latest(tmp_path / "checkpoints"))
    resumed.run()
    assert (tmp_path / "grads_first.safetensors").read_bytes() == first


def test_a_trace_of_a_resumed_run_has_its_first_steps_only(tmp_path):
    text = write_corpus(tmp_path / "text")
    trained("--text", text, *TINY, "--steps", "5", "--out", tmp_path / "a", "--save-every", "5")
    for steps, name in ((9, "short"), (19, "long")):
        trained("--out", tmp_path / "b", "--resume", tmp_path / "a/checkpoints", "--steps", steps, "--save-every", "0",
                "--trace", tmp_path / name, "--no-bar", "--sample", "0")
    short, long = ((tmp_path / name).read_text().count('"adamw') for name in ("short", "long"))
    assert short == long > 0


# -- what may change ---------------------------------------------------------------------------------------------------

CFG = MODELS["gpt2"]
CHANGES = {
    "batch_size": ({"options": {"batch_size": 6}}, "batch_size of its options is 5, here it is 6"),
    "seq_len": ({"options": {"seq_len": 5}}, "seq_len of its options is 6, here it is 5"),
    "seed": ({"options": {"seed": 4}}, "seed of its options is 3, here it is 4"),
    "dtype": ({"options": {"dtype": "float32"}}, "dtype of its options is float64, here it is float32"),
    "bfloat16": ({"options": {"dtype": "bfloat16"}}, "dtype of its options is float64, here it is bfloat16"),
    "width": ({"cfg": {"d_model": 12, "head_dim": 3}}, "d_model of its config is 8, here it is 12"),
    "dropout": ({"cfg": {"dropout": 0.1}}, "dropout of its config is 0.2, here it is 0.1"),
    "ffn": ({"cfg": {"ffn": "relu"}}, "ffn of its config is gelu_tanh, here it is relu"),
    "a longer text": ({"data": Data(np.arange(301) * 31 % 97 % 17)}, "train of its data is 300, here it is 301"),
    "another text": ({"data": Data(np.arange(300) * 30 % 97 % 17)}, "crc32 of its data is "),
    "another validation part": ({"data": Data(DATA.train[:290], DATA.train[290:])}, "train of its data is 300, here it is 290"),
}


@pytest.fixture
def saved(tmp_path):
    stop(Stopping(DATA, CFG, OPTIONS, Mesh(), tmp_path / "a"), KILLED)
    return tmp_path / "a"


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_refused_on_every_rank_with_both_values(ranks, saved, change):
    what, words = CHANGES[change]
    cfg, options = replace(CFG, **what.get("cfg", {})), replace(OPTIONS, **what.get("options", {}))

    def check(comm):
        path = latest(shared(comm, saved) / "checkpoints")
        trainer = Stopping(what.get("data", DATA), cfg, options, Mesh(dp=comm.size, comm=comm), path.parents[1])
        params = {name: t.array.tobytes() for name, t in trainer.state.params.items()}
        with pytest.raises(ValueError) as caught:
            trainer.resume(path)
        sentence = str(caught.value)
        assert set(comm.gather_texts(sentence)) == {sentence} and sentence.startswith(f"{path} is of another run: {words}")
        assert {name: t.array.tobytes() for name, t in trainer.state.params.items()} == params
        assert trainer.state.optimizer.t == 0
    if ranks.size in (1, 2, 4):
        ranks.run(check)


def test_other_options_may_change(saved):
    """More steps, another learning rate, other micro-batches, evaluations and checkpoints."""
    options = replace(OPTIONS, steps=8, lr=1e-3, accumulate=1, save_every=2, keep=1, eval_every=1, clip=0.0,
                      decay=("matrices",), weight_decay=0.3, check_replicas=1, merged=True)
    trainer = Stopping(DATA, CFG, options, Mesh(), saved)
    trainer.resume(latest(saved / "checkpoints"))
    trainer.run()
    assert trainer.state.optimizer.t == 8 and [p.name for p in (saved / "checkpoints").iterdir()] == ["step-00000008"]
    assert trainer.state.optimizer.decay == ("matrices",)


def test_a_run_whose_steps_are_raised_is_the_longer_run(tmp_path):
    options = replace(OPTIONS, schedule="constant")
    Stopping(DATA, CFG, options, Mesh(), tmp_path).run()
    resumed, straight = (Stopping(DATA, CFG, replace(options, steps=9), Mesh(), out) for out in (tmp_path, None))
    resumed.resume(latest(tmp_path / "checkpoints"))
    losses = resumed.run().losses
    assert straight.run().losses[N:] == losses and held(straight) == held(resumed)


def test_fewer_steps_than_were_done_are_a_sentence_on_every_rank(ranks, saved):
    def check(comm):
        trainer = Stopping(DATA, CFG, replace(OPTIONS, steps=2), Mesh(dp=comm.size, comm=comm))
        trainer.resume(latest(shared(comm, saved) / "checkpoints"))
        with pytest.raises(ValueError, match="the checkpoint is of step 3, and the run has 2 steps: there is nothing to do"):
            trainer.run()
    if ranks.size <= 2:
        ranks.run(check)


def test_a_run_that_was_killed_at_its_end_writes_what_it_had_not_yet_written(tmp_path):
    """The last checkpoint was there, the parameters were not."""
    options = replace(OPTIONS, save_every=SAVED, steps=SAVED)
    Stopping(DATA, CFG, options, Mesh(), tmp_path).run()
    file = tmp_path / "params.safetensors"
    before = file.read_bytes()
    file.unlink()
    trainer = Stopping(DATA, CFG, options, Mesh(), tmp_path)
    trainer.resume(latest(tmp_path / "checkpoints"))
    assert trainer.run().losses == [] and file.read_bytes() == before


def test_the_command_keeps_the_settings_of_the_run(tmp_path):
    """All but those that are given anew, and in another folder, too."""
    text = write_corpus(tmp_path / "text")
    given = ["--lr", "0.002", "--clip", "0.5", "--decay", "matrices", "--beta1", "0.8", "--dropout", "0.1", "--windows", "3"]
    trained("--text", text, *TINY, *given, "--steps", "3", "--out", tmp_path / "a", "--save-every", "2", "--keep", "0")
    trained("--out", tmp_path / "b", "--resume", tmp_path / "a/checkpoints/step-00000002", "--no-bar", "--sample", "0")
    about = [read_manifest(tmp_path / f / "checkpoints/step-00000003")["about"] for f in "ab"]
    assert about[0] == about[1] and about[0]["options"]["lr"] == 0.002 and about[0]["options"]["decay"] == ["matrices"]
    assert (tmp_path / "a/params.safetensors").read_bytes() == (tmp_path / "b/params.safetensors").read_bytes()


def test_a_resumed_run_keeps_as_many_checkpoints_as_it_should(saved):
    trainer = Stopping(DATA, CFG, replace(OPTIONS, save_every=1, keep=2, steps=7), Mesh(), saved)
    trainer.resume(latest(saved / "checkpoints"))
    trainer.run()
    assert sorted(p.name for p in (saved / "checkpoints").iterdir()) == ["step-00000006", "step-00000007"]


def test_initial_weights_leave_no_trace_in_a_resumed_run(saved, monkeypatch):
    wanted = Stopping(DATA, CFG, OPTIONS, Mesh(), saved)
    wanted.resume(latest(saved / "checkpoints"))
    monkeypatch.setattr("refimpl.train.loop.init", lambda cfg, mesh, seed, *how: init(cfg, mesh, seed + 1, *how))
    other = Stopping(DATA, CFG, OPTIONS, Mesh(), saved)
    assert held_params(other) != held_params(wanted)
    other.resume(latest(saved / "checkpoints"))
    assert held(other) == held(wanted)


def held_params(trainer):
    return {name: t.array.tobytes() for name, t in trainer.state.params.items()}
