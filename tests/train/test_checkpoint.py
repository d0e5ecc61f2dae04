"""Localises faults of checkpoints: what comes back as something else than was saved, or not at all after a kill."""
import errno
import json
import os
import subprocess
import sys
import tracemalloc
import zlib
from itertools import count
from pathlib import Path

import checkpoint_programs as programs
import numpy as np
import pytest
from checkpoint_programs import Operations, arrays, complete_ones, everything, part, pieces, require_whole, save_step

from refimpl import tensorfile
from refimpl.comm import CommError, SerialComm, run_threads
from refimpl.train import checkpoint
from refimpl.train.checkpoint import CheckpointError, Piece, Wanted, latest, read_manifest, save

SERIAL = SerialComm()
BITS = np.array([0x8000000000000000, 0x7ff8000000000001, 0xfff8dead0000beef, 0x7ff0000000000001, 1, 0x000fffffffffffff,
                 0x7ff0000000000000, 0], "uint64")     # -0.0, quiet and signalling nan payloads, subnormals, inf, 0.0


def load(path, wanted, comm):
    """What was loaded; the step has to be the one in the folder's name."""
    step, arrays = checkpoint.load(path, wanted, comm)
    assert path.name == f"step-{step:08d}"
    return arrays


def shared(comm, tmp_path):
    """Rank 0's folder: ranks of MPI have one each."""
    return Path(comm.gather_texts(str(tmp_path))[0])


def tensors():
    return {"w": np.arange(35.0).reshape(5, 7), "bits": BITS.view("float64"), "few": np.arange(2), "none": np.zeros((0, 3)),
            "scalar": BITS.view("float64")[3].reshape(()), "half": np.array([0x7c01, 0x8000, 1], "uint16").view("float16"),
            "single": np.array(0x7f800001, "uint32").view("float32"), "flag": np.array([True, False, True])}


def require_equal(found, whole):
    assert list(found) == list(whole)
    for name, a in whole.items():
        assert (found[name].dtype, found[name].shape, found[name].tobytes()) == (a.dtype, a.shape, a.tobytes()), name


def same_error(comm, path, act, *words):
    """`act` raises, on all ranks, one sentence that has these words; -> it."""
    with pytest.raises(CheckpointError) as caught:
        act()
    sentence = str(caught.value)
    assert set(comm.gather_texts(sentence)) == {sentence}
    for word in words:
        assert word in sentence, sentence
    return sentence


def rewritten(path, **changes):
    """The manifest, with changes."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def renewed(path):
    """A manifest that agrees with the files, whatever they hold."""
    rewritten(path, files=[{"name": f.name, "bytes": f.stat().st_size, "crc32": zlib.crc32(f.read_bytes())}
                           for f in sorted(path.glob("rank-*"))])


# -- round trips -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows_or_columns", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
def test_what_is_saved_on_one_cut_loads_bit_for_bit_on_another(ranks, tmp_path, rows_or_columns):
    before, after = rows_or_columns
    whole = tensors()

    def check(comm):
        path = save(shared(comm, tmp_path), 7, pieces(whole, comm, before), {"lr": 0.1}, comm)
        boxes = {n: part(a.shape, comm.rank, comm.size, after) or tuple(slice(0, k) for k in a.shape) for n, a in whole.items()}
        found = load(path, {n: Wanted(a.shape, boxes[n], a.dtype) for n, a in whole.items()}, comm)
        require_equal(found, {n: a[boxes[n]] if a.ndim else a for n, a in whole.items()})
        require_equal(load(path, everything(whole), SERIAL), whole)
        assert read_manifest(path)["about"] == {"lr": 0.1} and latest(path.parent) == path
    ranks.run(check)


@pytest.mark.parametrize("before, after", [(1, 4), (3, 2), (8, 5), (5, 8), (2, 1)])
def test_other_ranks_than_those_that_saved_load_it(tmp_path, before, after):
    whole = tensors()
    path = run_threads(before, lambda comm: save(tmp_path, 1, pieces(whole, comm), {}, comm))[0]

    def check(comm):
        box = part((5, 7), comm.rank, comm.size, 1)
        wanted = everything(whole) | {"w": Wanted((5, 7), box, np.dtype("float64"))}
        require_equal(load(path, wanted, comm), whole | {"w": whole["w"][box]})
    run_threads(after, check)


def test_whole_arrays_of_rank_0_make_one_file(ranks, tmp_path):
    def check(comm):
        whole = tensors()
        path = save(shared(comm, tmp_path), 1, pieces(whole, SERIAL) if comm.rank == 0 else {}, {}, comm)
        require_equal(load(path, everything(whole), comm), whole)
        assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    ranks.run(check)


def test_the_files_by_hand(tmp_path):
    a = np.arange(6.0).reshape(2, 3)
    rows = [{"a": Piece(a[rank:rank + 1], (rank, 0), (2, 3))} for rank in range(2)]
    run_threads(2, lambda comm: save(tmp_path, 200, rows[comm.rank], {"x": 1}, comm))
    file = tmp_path / "step-00000200" / "rank-00001.safetensors"
    assert tensorfile.read(file)["a"].tolist() == [[3, 4, 5]]
    assert json.loads(tensorfile.read_header(file)[1]["a"]) == {"start": [1, 0], "shape": [2, 3]}
    manifest = json.loads((file.parent / "manifest.json").read_text())
    assert manifest["files"][1] == {"name": file.name, "bytes": len(file.read_bytes()), "crc32": zlib.crc32(file.read_bytes())}
    assert (manifest["format"], manifest["step"], manifest["about"], len(manifest["files"])) == (1, 200, {"x": 1}, 2)


def test_what_is_loaded_is_this_ranks_own(tmp_path):
    path = save_step(tmp_path, 1, SERIAL)
    load(path, everything(arrays(1)), SERIAL)["w"][:] = 0
    require_whole(path)


def test_a_checkpoint_of_nothing_loads_as_nothing(ranks, tmp_path):
    def check(comm):
        assert load(save(shared(comm, tmp_path), 0, {}, {}, comm), {}, comm) == {}
    ranks.run(check)


def test_no_more_is_allocated_than_is_wanted(tmp_path):
    big = np.zeros((1000, 1000))
    path = save(tmp_path, 1, {"big": Piece(big, (0, 0), big.shape)}, {}, SERIAL)
    tracemalloc.start()
    try:
        load(path, {"big": Wanted(big.shape, (slice(3, 5), slice(0, 1000)), big.dtype)}, SERIAL)
        assert tracemalloc.get_traced_memory()[1] < big.nbytes / 2          # the crc reads 1 MiB at a time
    finally:
        tracemalloc.stop()


# -- which stay --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keep, stay", [(0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5]), (4, [2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_last_ones_stay(tmp_path, keep, stay):
    for step in range(1, 6):
        save_step(tmp_path, step, SERIAL, keep)
    assert [require_whole(path) for path in complete_ones(tmp_path)] == stay and len(list(tmp_path.iterdir())) == len(stay)


def test_the_one_just_written_stays_though_later_ones_are_there(tmp_path):
    for step in (8, 9, 3):
        save_step(tmp_path, step, SERIAL, 1)
    assert [require_whole(path) for path in complete_ones(tmp_path)] == [3, 9]


def test_parts_of_killed_runs_are_removed_and_nothing_else(tmp_path):
    for name in ("step-00000001.part", "step-00000004.part", "step-1.part", "notes", "step-00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "params.part").write_text("")
    save_step(tmp_path, 1, SERIAL, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"notes", "params.part", "step-00000001", "step-00000007", "step-1.part"}


def test_the_latest_is_the_one_of_the_highest_step_that_is_complete(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    for step in (99, 100):
        save_step(tmp_path, step, SERIAL)
    for name in ("step-00000101", "step-00000102.part", "step-200", "step-00000300x"):
        (tmp_path / name).mkdir()
    for name in ("step-00000102.part", "step-200", "step-00000300x"):
        (tmp_path / name / "manifest.json").write_text("{}")
    assert latest(tmp_path).name == "step-00000100"


def test_a_step_that_is_there_is_not_saved_again(ranks, tmp_path):
    def check(comm):
        folder = shared(comm, tmp_path)
        path = save_step(folder, 1, comm)
        (folder / "step-00000002").mkdir(exist_ok=True)                         # empty, so that a rename would replace it
        same_error(comm, path, lambda: save_step(folder, 1, comm), f"{path} is there already: remove it, or save to another")
        same_error(comm, path, lambda: save_step(folder, 2, comm), "00000002 is there already", f"checkpoint is {path}")
        require_whole(path)
        assert not list(folder.glob("*.part"))
    ranks.run(check)


@pytest.mark.parametrize("step, keep", [(-1, 2), (10 ** 8, 2), (1, -1)])
def test_senseless_numbers_are_refused(tmp_path, step, keep):
    with pytest.raises(CheckpointError, match=f"step must be 0 to 99999999 and keep at least 0, got {step} and {keep}"):
        save(tmp_path, step, {}, {}, SERIAL, keep)


# -- kills, full disks -------------------------------------------------------------------------------------------------

def ran(program, folder, *numbers):
    """What the program printed; a time limit is a failure."""
    done = subprocess.run([sys.executable, programs.__file__, program, str(folder), *map(str, numbers)], capture_output=True,
                          text=True, timeout=60, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [1, 3])
def test_a_kill_at_any_operation_leaves_only_whole_checkpoints(tmp_path, size):
    assert int(ran("killed_everywhere", tmp_path / "a", size).split()[3]) > 20


def test_a_kill_at_any_moment_leaves_what_was_saved(tmp_path):
    assert "60 kills" in ran("killed_at_random", tmp_path, 60)


def test_all_is_on_the_disk_before_it_gets_its_name_and_before_the_old_is_removed(tmp_path, monkeypatch):
    programs.prepared(tmp_path / "a")
    seen = Operations().patch(monkeypatch).seen
    path = save_step(tmp_path / "a", 3, SERIAL)
    part, old = path.with_suffix(".part"), path.with_name("step-00000001")
    assert {operation for operation, _ in seen} == {"mkdir", "write", "fsync", "rename", "unlink", "rmdir"}
    named, unnamed = seen.index(("rename", str(part))), seen.index(("rename", str(old)))
    for file in ("rank-00000.safetensors", "manifest.json"):
        writes = [i for i, operation in enumerate(seen) if operation == ("write", str(part / file))]
        assert writes and max(writes) < seen.index(("fsync", str(part / file))) < named
    inside = [i for i, (_, where) in enumerate(seen[:named]) if where.startswith(str(part))]
    assert max(inside) == seen.index(("fsync", str(part)))
    assert seen[named + 1] == ("fsync", str(path.parent)) and named + 1 < unnamed
    assert seen[unnamed + 1] == ("fsync", str(path.parent)) and {o for o, _ in seen[unnamed + 2:]} == {"unlink", "rmdir"}


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_of_any_operation_is_the_same_sentence_on_every_rank_and_loses_nothing(tmp_path, size):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def check(comm):
        try:
            save_step(tmp_path / "a", 3, comm)
        except ValueError as error:
            return str(error)
    for at in count():
        programs.prepared(tmp_path / "a")
        with pytest.MonkeyPatch.context() as patch:
            seen = Operations(at, fail).patch(patch).seen
            said = run_threads(size, check)
        found = [require_whole(path) for path in complete_ones(tmp_path / "a")]
        if len(seen) <= at:
            assert said == [None] * size and found == [2, 3] and at > 20
            break
        if said == [None] * size:                       # it was only that the folder was there already
            assert found == [2, 3] and at == 0
            continue
        assert len(set(said)) == 1 and "No space left on device" in said[0] and "rank " in said[0], (at, said)
        assert found in ([1, 2], [1, 2, 3], [2, 3]) and said[0].endswith(f"checkpoint is {latest(tmp_path / 'a')}")
        assert not (tmp_path / "a/step-00000003.part").exists()


def test_a_full_disk_is_the_same_sentence_on_every_rank(tmp_path):
    said = json.loads(ran("full_disk", tmp_path))
    file = tmp_path / "step-00000002.part/rank-00001.safetensors"
    assert said == [f"saving step-00000002: rank 1 failed at {file}: File too large; the latest complete checkpoint is "
                    f"{tmp_path / 'step-00000001'}"] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_disk_that_is_full_for_one_rank_is_the_same_sentence_on_every_rank(ranks, tmp_path, monkeypatch):
    last = f"rank-{ranks.size - 1:05d}.safetensors"
    write = tensorfile.write

    def failing(path, *args):
        write(path, *args)
        if path.name == last and "00000002" in path.parent.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(tensorfile, "write", failing)

    def check(comm):
        folder = shared(comm, tmp_path)
        for step, left in ((2, "there is no complete checkpoint yet"), (1, ""), (2, "complete checkpoint is /")):
            if step == 1:
                path = save_step(folder, 1, comm)
                continue
            file = folder / f"step-00000002.part/{last}"
            same_error(comm, file, lambda: save_step(folder, 2, comm), f"rank {comm.size - 1} failed at {file}: No space", left)
            assert not list(folder.glob("*.part"))
            comm.barrier()                              # the next save makes one
        require_whole(path)
    ranks.run(check)


def test_a_file_in_place_of_the_folder_is_named_on_every_rank(ranks, tmp_path):
    def check(comm):
        folder = shared(comm, tmp_path) / "file"
        if comm.rank == 0:
            folder.write_text("mine")
        comm.barrier()
        same_error(comm, folder, lambda: save_step(folder, 1, comm), f"rank 0 failed at {folder}: File exists; there is no")
        same_error(comm, folder, lambda: save_step(folder / "sub", 1, comm), f"rank 0 failed at {folder}", "Not a directory")
        assert folder.read_text() == "mine"
    ranks.run(check)


@pytest.mark.parametrize("piece, about, words", [
    (Piece(np.zeros((2, 3)), (0, 2), (2, 4)), {}, "shape (2, 3) from (0, 2) on does not lie in an array of shape (2, 4)"),
    (Piece(np.zeros(3), (-1,), (4,)), {}, "tensor 'a': a part of shape (3,) from (-1,) on does not lie in"),
    (Piece(np.zeros(3), (), (4,)), {}, "from () on does not lie in an array of shape (4,)"),
    (Piece(np.zeros(3, "complex128"), (0,), (3,)), {}, "tensor 'a' has dtype complex128"),
    (Piece(np.zeros(3), (0,), (3,)), {"loss": float("nan")}, "not JSON compliant"),
    (Piece(np.zeros(3), (0,), (3,)), {"text": "x" * 10_000_000}, "no manifest.json of at most 10000000 bytes"),
], ids=("place", "negative", "axes", "dtype", "nan", "too much"))
def test_what_could_not_be_loaded_is_not_saved(ranks, tmp_path, piece, about, words):
    def check(comm):
        folder = shared(comm, tmp_path)
        mine = {"a": piece} if comm.rank == comm.size - 1 else {}
        same_error(comm, folder, lambda: save(folder, 1, mine, about, comm), "saving step-00000001: ", words)
        assert not list(folder.iterdir())
    ranks.run(check)


# -- damaged and hostile checkpoints -----------------------------------------------------------------------------------

DAMAGES = {
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "but 288 bytes of crc32"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "but 288 bytes of crc32"),
    "empty": (lambda file: file.write_bytes(b""), "has 0 bytes of crc32 0, but 288 bytes"),
    "a bit": (lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])), "it is damaged, or"),
    "missing": (lambda file: file.unlink(), "is missing: the checkpoint is not complete"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "is missing: the checkpoint is not complete"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "is missing: the checkpoint is not complete"),
    "a loop": (lambda file: (file.unlink(), file.symlink_to(file)), "is missing: the checkpoint is not complete"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_named_on_every_rank(ranks, tmp_path, case):
    damage, words = DAMAGES[case]

    def check(comm):
        whole = {"a": np.arange(comm.size * 20.0)}
        path = save(shared(comm, tmp_path), 1, pieces(whole, comm), {}, comm)
        last = path / f"rank-{comm.size - 1:05d}.safetensors"
        if comm.rank == 0:
            assert last.stat().st_size == 288
            damage(last)
        comm.barrier()
        same_error(comm, path, lambda: load(path, everything(whole), comm), str(last), words)
    ranks.run(check)


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    paths = [run_threads(2, lambda comm: save_step(tmp_path, step, comm))[0] for step in (1, 2)]
    file = "rank-00001.safetensors"
    (paths[1] / file).write_bytes((paths[0] / file).read_bytes())
    with pytest.raises(CheckpointError, match=f"{file} has .* it is damaged, or another file"):
        load(paths[1], everything(arrays(2)), SERIAL)


F8 = np.dtype("float64")
WANTED = {
    "missing": ({"more": Wanted((2,), (slice(0, 2),), F8)}, "tensor 'more' is not in this checkpoint"),
    "unwanted": ({"w": None}, "has a tensor 'w' that nobody wants"),
    "shape": ({"w": Wanted((5, 4), (slice(0, 5), slice(0, 4)), F8)}, "tensor 'w' has shape (5, 3) and dtype float64 there, but "
              "(5, 4) and float64 are wanted"),
    "axes": ({"w": Wanted((15,), (slice(0, 15),), F8)}, "but (15,) and float64 are wanted"),
    "dtype": ({"w": Wanted((5, 3), (slice(0, 5), slice(0, 3)), np.dtype("float32"))}, "but (5, 3) and float32 are wanted"),
}


@pytest.mark.parametrize("case", WANTED)
def test_what_does_not_fit_is_named_on_every_rank_though_one_alone_wants_it(ranks, tmp_path, case):
    changes, words = WANTED[case]

    def check(comm):
        path = save_step(shared(comm, tmp_path), 1, comm)
        wanted = everything(arrays(1))
        if comm.rank == comm.size - 1 or case == "unwanted":
            wanted = {name: w for name, w in (wanted | changes).items() if w}
        same_error(comm, path, lambda: load(path, wanted, comm), str(path), words)
    ranks.run(check)


def test_a_tensor_that_one_rank_wants_is_wanted(tmp_path):
    path = save_step(tmp_path, 1, SERIAL)

    def check(comm):
        mine = [name for i, name in enumerate(arrays(1)) if i % 2 == comm.rank]
        require_equal(load(path, {name: everything(arrays(1))[name] for name in mine}, comm), {n: arrays(1)[n] for n in mine})
    run_threads(2, check)


@pytest.mark.parametrize("starts, size, words", [
    ((0, 4), 4, "has a hole: the pieces hold 6 of its 7 elements"), ((0, 2), 5, "has pieces that overlap"),
    ((0, 2), 6, "has pieces that overlap"), ((1, 4), 7, "has a hole"), ((0, 0), 3, "has pieces that overlap")])
def test_holes_and_overlaps_are_refused_wherever_they_are(tmp_path, starts, size, words):
    size = max(size, starts[1] + 3)
    path = run_threads(2, lambda comm: save(tmp_path, 1, {"a": Piece(np.ones(3), (starts[comm.rank],), (size,))}, {}, comm))[0]
    with pytest.raises(CheckpointError, match=f"step-00000001: tensor 'a' {words}"):
        load(path, {"a": Wanted((size,), (slice(0, 1),), np.dtype("float64"))}, SERIAL)


def test_two_numbers_without_axes_overlap(tmp_path):
    path = run_threads(2, lambda comm: save(tmp_path, 1, {"a": Piece(np.ones(()), (), ())}, {}, comm))[0]
    with pytest.raises(CheckpointError, match="tensor 'a' has pieces that overlap"):
        load(path, {"a": Wanted((), (), np.dtype("float64"))}, SERIAL)


BOXES = [(slice(0, 5), slice(1, 4)), (slice(-1, 2), slice(0, 3)), (slice(0, 5),), (slice(3, 2), slice(0, 3))]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_box_outside_its_array_is_refused(tmp_path, box):
    path = save_step(tmp_path, 1, SERIAL)
    with pytest.raises(CheckpointError, match="tensor 'w': a part of shape .* from .* on does not lie in an array of shape"):
        load(path, everything(arrays(1)) | {"w": Wanted((5, 3), box, np.dtype("float64"))}, SERIAL)


def entry(name="rank-00000.safetensors", size=100, crc=0):
    return {"name": name, "bytes": size, "crc32": crc}


def manifest(**changes):
    return json.dumps({"format": 1, "step": 1, "about": {}, "files": [entry()]} | changes).encode()


HOSTILE = {
    "nothing": (b"", "is not JSON"),
    "not utf-8": (b'{"\xff": 1}', "is not JSON"),
    "deep nesting": (b"[" * 100_000, "is not JSON"),
    "deep nesting inside": (manifest(about={"a": 7}).replace(b"7", b'{"a":' * 50_000 + b"7" + b"}" * 50_000), "is not JSON"),
    "a number of 10000 digits": (manifest(step=7).replace(b"7", b"7" * 10_000), "is not JSON"),
    "nan": (manifest(about={"a": float("nan")}), "is not JSON: it has no NaN"),
    "infinity": (manifest(about={"a": -float("inf")}), "is not JSON: it has no -Infinity"),
    "a name twice": (manifest()[:-1] + b', "step": 2}', "is not JSON: it has a name twice"),
    "a name twice inside": (manifest(about={"a": 7}).replace(b'"a": 7', b'"a": 7, "a": 8'), "it has a name twice"),
    "too long": (manifest() + b" " * 10_000_000, "no manifest.json of at most 10000000 bytes"),
    "a list": (b"[]", "is not of format 1"),
    "a number": (b"1", "is not of format 1"),
    "no format": (b'{"step": 1, "about": {}, "files": []}', "is not of format 1, the one that this program reads"),
    "another format": (manifest(format=2), "is not of format 1"),
    "a format that is a list": (manifest(format=[1]), "is not of format 1"),
    "no files": (b'{"format": 1, "step": 1, "about": {}}', "must have a step from 0"),
    "something more": (manifest(more=1), "must have a step from 0"),
    "a step below 0": (manifest(step=-1), "must have a step from 0"),
    "a step that is true": (manifest(step=True), "must have a step from 0"),
    "a step that is 1.0": (manifest(step=1.0), "must have a step from 0"),
    "a step of 20 digits": (manifest(step=10 ** 20), "must have a step from 0"),
    "about that is a list": (manifest(about=[]), "must have a step from 0"),
    "files that are an object": (manifest(files={}), "must have a step from 0"),
    "a file that is text": (manifest(files=["rank-00000.safetensors"]), "a file has a name like"),
    "a file without crc": (manifest(files=[{"name": "rank-00000.safetensors", "bytes": 1}]), "a file has a name like"),
    "bytes below 0": (manifest(files=[entry(size=-1)]), "a file has a name like"),
    "bytes as text": (manifest(files=[entry(size="100")]), "a file has a name like"),
    "a crc of 33 bits": (manifest(files=[entry(crc=2 ** 32)]), "a file has a name like"),
    "a name that is a number": (manifest(files=[entry(1)]), "a file has a name like"),
    "10**18 bytes": (manifest(files=[entry(size=10 ** 18)]), f"but {10 ** 18} bytes of crc32 0 were saved"),
    "10**300 bytes": (manifest(files=[entry(size=10 ** 300)]), "a file has a name like"),
    **{f"the name {name!r}": (manifest(files=[entry(name)]), "a file has a name like") for name in (
        "../../secret", "/etc/passwd", "../rank-00000.safetensors", "rank-00000.safetensors/../../x", "manifest.json", "",
        "rank-00000.safetensors\n", "rank-00000.safetensors\0", "rank-0000\u0660.safetensors", "rank-.safetensors",
        "rank-00000xsafetensors")},
    "a file twice": (None, "has pieces that overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_are_refused_without_allocation(tmp_path, case):
    text, words = HOSTILE[case]
    path = save_step(tmp_path, 1, SERIAL)
    if text is None:
        rewritten(path, files=2 * read_manifest(path)["files"])
    else:
        (path / "manifest.json").write_bytes(text)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            load(path, everything(arrays(1)), SERIAL)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000 + 3 * len(text or b"")
    finally:
        tracemalloc.stop()
    assert words in str(caught.value) and "step-00000001" in str(caught.value) and len(str(caught.value)) < 600


PLACES = {
    "none": ({}, "the place of tensor 'a' is not JSON"),
    "no JSON": ({"a": "x"}, "the place of tensor 'a' is not JSON"),
    "deep nesting": ({"a": "[" * 100_000}, "the place of tensor 'a' is not JSON"),
    "a surrogate": ({"a": "\ud800"}, "the place of tensor 'a' is not JSON"),
    "a list": ({"a": "[]"}, "must be two lists of counts, start and shape, not []"),
    "no shape": ({"a": '{"start": [0]}'}, "must be two lists of counts"),
    "something more": ({"a": '{"start": [0], "shape": [3], "more": 1}'}, "must be two lists of counts"),
    "below 0": ({"a": '{"start": [-1], "shape": [3]}'}, "must be two lists of counts"),
    "true": ({"a": '{"start": [false], "shape": [3]}'}, "must be two lists of counts"),
    "a number": ({"a": '{"start": 0, "shape": [3]}'}, "must be two lists of counts"),
    "huge": ({"a": '{"start": [0], "shape": [%d]}' % 10 ** 300}, "must be two lists of counts"),
    "beyond the end": ({"a": '{"start": [1], "shape": [3]}'},
                       "a part of shape (3,) from (1,) on does not lie in an array of shape (3,)"),
    "other axes": ({"a": '{"start": [0, 0], "shape": [3, 1]}'}, "does not lie in an array of shape (3, 1)"),
    "bigger": ({"a": '{"start": [0], "shape": [%d]}' % 10 ** 18}, f"has shape ({10 ** 18},)"),
}


@pytest.mark.parametrize("case", PLACES)
def test_hostile_places_are_refused(tmp_path, case):
    metadata, words = PLACES[case]
    path = save(tmp_path, 1, {"a": Piece(np.ones(3), (0,), (3,))}, {}, SERIAL)
    tensorfile.write(path / "rank-00000.safetensors", {"a": np.ones(3)}, metadata)
    renewed(path)
    with pytest.raises(CheckpointError) as caught:
        load(path, everything({"a": np.ones(3)}), SERIAL)
    assert words in str(caught.value) and len(str(caught.value)) < 600


TOKENS = [b"9" * 30, b"-1", b"[", b"]", b"{", b"}", b'"', b",", b"NaN", b"1e999", b"true", b"\\ud800", b" "]


def mutated(data, rng):
    """A few bytes changed, left out, doubled, or put in."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        i, n, how = int(rng.integers(len(data))), int(rng.integers(1, 9)), rng.integers(6)
        if how == 0:
            data[i] ^= 1 << int(rng.integers(8))
        elif how == 1:
            data[i:i + n] = rng.bytes(n)
        elif how == 2:
            del data[i:i + n]
        elif how == 3:
            data[i:i] = data[max(0, i - n):i]
        elif how == 4:
            data[i:i] = TOKENS[rng.integers(len(TOKENS))]
        else:
            del data[i:]
        data = data or bytearray(b"0")
    return bytes(data)


@pytest.mark.parametrize("which, agree", [("manifest.json", False), ("rank-00001.safetensors", False),
                                          ("rank-00001.safetensors", True)])
def test_mutated_bytes_load_equal_or_are_refused(tmp_path, which, agree):
    """Where the manifest is made to `agree` with the file, its crc speaks for any data; names, shapes and dtypes remain."""
    path = run_threads(2, lambda comm: save_step(tmp_path, 1, comm))[0]
    good, rng, loaded = (path / which).read_bytes(), np.random.default_rng(3), 0
    whole = arrays(1)
    for _ in range(300):
        (path / which).write_bytes(mutated(good, rng))
        if agree:
            renewed(path)
        tracemalloc.start()
        try:
            found = load(path, everything(whole), SERIAL)
        except CheckpointError as error:
            assert "step-00000001" in str(error) and len(str(error)) < 1000
            continue
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 3_000_000
        loaded += 1
        assert all((found[name].dtype, found[name].shape) == (a.dtype, a.shape) for name, a in whole.items())
        if not agree:
            require_equal(found, whole)
    assert loaded < 150


def test_a_folder_without_manifest_is_no_checkpoint(ranks, tmp_path):
    def check(comm):
        path = shared(comm, tmp_path) / "nowhere"
        same_error(comm, path, lambda: load(path, {}, comm), f"{path} is no complete checkpoint: it has no manifest.json of")
    ranks.run(check)


def test_ranks_that_save_or_load_different_steps_are_told(tmp_path):
    paths = [save_step(tmp_path, step, SERIAL) for step in (1, 2)]
    for act in (lambda comm: save_step(tmp_path, 5 + comm.rank, comm), lambda comm: load(paths[comm.rank], {}, comm)):
        with pytest.raises(CommError, match="the (saving|loading) of step.*the (saving|loading) of step"):
            run_threads(2, act)
