"""Localises faults of reading a stack's dump: numbers that change on the way, parts of the wrong rank, files that crash it."""
import io
import os
import re
import struct
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm.base import SerialComm
from refimpl.golden.actual import ActualError, read
from refimpl.golden.make import make
from refimpl.golden.recipe import MODELS, Recipe

A = np.arange(6.0).reshape(2, 3) - 2.5
NAMES = ("step1/loss", "step1/act/layers.0.attn.q")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "bundle"
    make(Recipe(replace(MODELS["gpt-micro"], n_layers=1), steps=1, batch_size=1), SerialComm(), out, runs=2)
    return out


def arrays(path):
    """All of one set, read."""
    found, = read(path)
    return {name: dumped.read() for name, dumped in found.items()}


def save(path, a):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, a)


def npy(a, **changes):
    """The bytes of an npy file whose header says something else of the array."""
    out, header = io.BytesIO(), np.lib.format.header_data_from_array_1_0(a) | changes
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue() + a.tobytes()


def zipped(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def without_addresses(text):
    return re.sub("0x[0-9a-f]+", "", text)


def require_refused(path, bundle, capsys, *words):
    """The sentence of the library, and the same of the command, which ends with 2."""
    with pytest.raises(ActualError) as caught:
        for dumped in (dumped for found in read(path) for dumped in found.values()):
            dumped.read()
    assert main(["golden", "check", str(path), "--against", str(bundle)]) == 2
    done = capsys.readouterr()
    assert not done.out and without_addresses(done.err) == without_addresses(f"refimpl golden: {caught.value}\n")
    assert done.err.count("\n") == 1 and all(word in done.err for word in words), done.err


# -- the same numbers from every kind of file --------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("kind", ["safetensors", "npz", "compressed", "npy"])
def test_numbers_and_names_come_as_they_were_written(tmp_path, kind, dtype):
    given = {"step1/loss": np.array(2.5).astype(dtype), "params/layers.0.attn.q.w": A.astype(dtype),
             "step1/act/empty": np.zeros((0, 3), dtype)}
    path = tmp_path / {"safetensors": "a.safetensors", "npy": "a"}.get(kind, "a.npz")
    if kind == "safetensors":
        tensorfile.write(path, given)
    elif kind == "npy":
        for name, a in given.items():
            save(path / f"{name}.npy", a)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, **given)
    found = arrays(path)
    assert found.keys() == given.keys()
    for name, a in given.items():
        assert found[name].dtype == a.dtype and found[name].shape == a.shape and found[name].tobytes() == a.tobytes()
        assert read(path)[0][name].shape == a.shape and name in read(path)[0][name].where


def test_bfloat16_is_widened_exactly(tmp_path):
    bits = np.array([0x3FC0, 0xC000, 0x0001, 0x7F80], "<u2")
    header = b'{"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    found = arrays(tmp_path / "a.safetensors")["a"]
    assert found.dtype == "float32" and found.tolist() == [1.5, -2.0, 2.0 ** -133, np.inf]
    assert read(tmp_path / "a.safetensors")[0]["a"].dtype == "BF16"


@pytest.mark.parametrize("a", [np.asfortranarray(A), A.T, A.astype(">f8"), np.asfortranarray(A.astype(">f4")), A[::-1, ::2]],
                         ids=["fortran", "transposed", "big-endian", "both", "strided"])
def test_the_order_of_memory_and_of_bytes_does_not_matter(tmp_path, a):
    save(tmp_path / "a/x.npy", a)
    np.savez(tmp_path / "a.npz", x=a)
    for found in (arrays(tmp_path / "a")["x"], arrays(tmp_path / "a.npz")["x"]):
        assert found.astype("float64").tolist() == a.tolist() and found.shape == a.shape


def test_an_npy_file_of_version_2_is_read(tmp_path):
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, A, version=(2, 0))
    assert arrays(tmp_path)["x"].tolist() == A.tolist()


def test_files_that_are_no_npy_are_left_alone(tmp_path):
    save(tmp_path / "a/b/x.npy", A)
    (tmp_path / "a/notes.txt").write_text("mine")
    (tmp_path / "a/b/x.npy.bak").write_bytes(b"")
    assert list(arrays(tmp_path)) == ["a/b/x"]
    zipped(tmp_path / "a.npz", {"notes.txt": b"mine", "x.npy": npy(A)})
    assert list(arrays(tmp_path / "a.npz")) == ["x"]


# -- ranks -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("names", [["rank0", "rank1", "rank2"], ["rank_0", "rank_1", "rank_2"],
                                   ["rank-00000", "rank-00001", "rank-00002"], ["rank0", "rank_1", "rank-00002"]])
@pytest.mark.parametrize("kind", [".safetensors", ".npz", ""])
def test_every_rank_has_its_own(tmp_path, kind, names):
    for k, name in enumerate(names):
        path = tmp_path / (name + kind)
        if kind:
            (np.savez if kind == ".npz" else lambda to, **arrays: tensorfile.write(to, arrays))(path, x=A + k)
        else:
            save(path / "step1/act/x.npy", A + k)
    found = read(tmp_path)
    assert [set(arrays) for arrays in found] == [{"x" if kind else "step1/act/x"}] * 3
    assert [next(iter(arrays.values())).read().tolist() for arrays in found] == [(A + k).tolist() for k in range(3)]


def test_ranks_are_in_the_order_of_their_numbers(tmp_path):
    for k in range(11):
        np.savez(tmp_path / f"rank{k}.npz", x=np.array(k))
    assert [int(found["x"].read()) for found in read(tmp_path)] == list(range(11))


@pytest.mark.parametrize("there, said", [((0, 2), "0, 2: rank 1 is"), ((1, 2), "1, 2: rank 0 is"), ((3,), "3: rank 0 is")])
def test_gaps_between_ranks_are_refused(tmp_path, bundle, capsys, there, said):
    for k in there:
        np.savez(tmp_path / f"rank{k}.npz", x=A)
    require_refused(tmp_path, bundle, capsys, f"{tmp_path} has the ranks {said} missing, they must be numbered from 0 on")


def test_two_files_of_one_rank_are_refused(tmp_path, bundle, capsys):
    np.savez(tmp_path / "rank0.npz", x=A)
    np.savez(tmp_path / "rank-00000.npz", x=A)
    require_refused(tmp_path, bundle, capsys, "rank-00000.npz and ", "rank0.npz are of the same rank")


# -- links, pipes and what is not there --------------------------------------------------------------------------------

def test_links_are_not_followed(tmp_path):
    save(tmp_path / "secret/x.npy", A)
    save(tmp_path / "dump/y.npy", A)
    (tmp_path / "dump/x.npy").symlink_to(tmp_path / "secret/x.npy")
    (tmp_path / "dump/more").symlink_to(tmp_path / "secret")
    (tmp_path / "dump/round").symlink_to(tmp_path / "dump")
    os.mkfifo(tmp_path / "dump/pipe.npy")               # which nobody writes to
    assert list(arrays(tmp_path / "dump")) == ["y"]


@pytest.mark.parametrize("name", ["rank1", "rank1.npz"])
def test_a_rank_that_is_a_link_or_a_pipe_is_refused(tmp_path, bundle, capsys, name):
    np.savez(tmp_path / "other.npz", x=A)
    np.savez(tmp_path / "rank0.npz", x=A)
    (tmp_path / name).symlink_to(tmp_path / "other.npz")
    require_refused(tmp_path, bundle, capsys, f"{tmp_path / name} is neither a file nor a folder")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    require_refused(tmp_path, bundle, capsys, f"{tmp_path / name} is neither a file nor a folder")


@pytest.mark.parametrize("name, words", [("nowhere", "is not there: it must be a .safetensors or .npz file, or a folder"),
                                         ("nowhere.npz", "is not there"), ("a.npy", "is neither .safetensors nor .npz"),
                                         ("a.pt", "is neither .safetensors nor .npz"), ("a.pt/x", "is not there"),
                                         ("a" * 300, "cannot be read: File name too long")])
def test_what_is_no_dump_is_refused(tmp_path, bundle, capsys, name, words):
    np.save(tmp_path / "a.npy", A)
    (tmp_path / "a.pt").write_bytes(b"PK")
    require_refused(tmp_path / name, bundle, capsys, words)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, bundle, capsys, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr("pathlib.Path.iterdir", forbidden)
    require_refused(tmp_path, bundle, capsys, f"{tmp_path} cannot be read: Permission denied")


# -- files that lie ----------------------------------------------------------------------------------------------------

OBJECTS = np.array([{"a": 1}, None], object)


def pickled():
    out = io.BytesIO()
    np.save(out, OBJECTS, allow_pickle=True)
    return out.getvalue()


BAD = {
    "pickled objects": (pickled(), "holds object: it must hold numbers"),
    "a bare pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.", "is not a readable npy file"),
    "text": (npy(np.array(["a", "b"])), "it must hold numbers"),
    "complex numbers": (npy(A.astype(complex)), "holds complex128: it must hold numbers"),
    "records": (npy(np.zeros(2, [("a", "f8")])), "it must hold numbers"),
    "dates": (npy(np.zeros(2, "M8[s]")), "it must hold numbers"),
    "empty": (b"", "is not a readable npy file"),
    "half a header": (npy(A)[:40], "is not a readable npy file"),
    "truncated": (npy(A)[:-8], "claims float64 of shape [2, 3], 48 bytes, but has 40"),
    "a byte more": (npy(A) + b"\0", "claims float64 of shape [2, 3], 48 bytes, but has 49"),
    "10^18 numbers": (npy(A, shape=(10 ** 18,)), "claims float64 of shape [1000000000000000000], 8000000000000000000 bytes"),
    "10^40 numbers": (npy(A, shape=(10 ** 20, 10 ** 20)), "claims float64 of shape"),
    "a shape below 0": (npy(A, shape=(-2, -3)), "damaged"),
    "a dtype of megabytes": (npy(A, descr="(1000000,)<f8"), "it must hold numbers"),
    "a dtype that is none": (npy(A, descr="<f3"), "is not a readable npy file"),
    "a header that is a program": (npy(A).replace(b"(2, 3)", b"exit()"), "is not a readable npy file"),
    "a header of 4 GB": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100, "is not a readable npy file"),
    "a version that is none": (b"\x93NUMPY\x09\x00" + npy(A)[8:], "is not a readable npy file: it is of version (9, 0)"),
    "a nested header": (b"\x93NUMPY\x01\x00\x88\x13" + b"(" * 5000, "is not a readable npy file"),
}


@pytest.mark.parametrize("packed", ["npy", "stored", "deflated"])
@pytest.mark.parametrize("what", BAD)
def test_an_npy_file_that_lies_is_one_sentence(tmp_path, bundle, capsys, what, packed):
    data, words = BAD[what]
    if packed == "npy":
        path = tmp_path
        (path / "step1").mkdir()
        (path / "step1/loss.npy").write_bytes(data)
    else:
        path = zipped(tmp_path / "a.npz", {"step1/loss.npy": data}, zipfile.ZIP_DEFLATED if packed == "deflated" else 0)
    if what == "a shape below 0":                       # known when it is read, and not read: the loss has another shape
        with pytest.raises(ActualError, match="is damaged"):
            arrays(path)
        assert main(["golden", "check", str(path), "--against", str(bundle)]) == 1
        assert "has shape [-2, -3], step1/loss has []" in capsys.readouterr().out
    else:
        require_refused(path, bundle, capsys, "step1/loss", words)


def test_an_npz_that_is_no_zip_is_one_sentence(tmp_path, bundle, capsys):
    good = zipped(tmp_path / "good.npz", {"step1/loss.npy": npy(A)}).read_bytes()
    path = tmp_path / "a.npz"
    for data in (b"", b"PK\x05\x06", npy(A), good[:-30], good[: len(good) // 2], b"\0" * 10 ** 5):
        path.write_bytes(data)
        require_refused(path, bundle, capsys, f"{path} is not a readable npz file")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_npz_with_a_name_twice_is_one_sentence(tmp_path, bundle, capsys):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(A))
        archive.writestr("x.npy", npy(A + 1))
    require_refused(path, bundle, capsys, f"{path} has a name twice")


def patched(path, at, value):
    """The npz of one member with another field in both its headers: (local offset, central offset) from their signatures."""
    raw = bytearray(path.read_bytes())
    for signature, offset in zip((b"PK\x03\x04", b"PK\x01\x02"), at):
        start = raw.index(signature) + offset
        raw[start:start + len(value)] = value
    path.write_bytes(raw)
    return path


SIZE, CRC, FLAGS, METHOD = (22, 24), (14, 16), (6, 8), (8, 10)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_npz_whose_sizes_lie_is_one_sentence(tmp_path, bundle, capsys, method):
    """The directory claims 8 GB, and so does the header of the array; there are 48 bytes."""
    loss = npy(A, shape=(10 ** 9,))
    path = zipped(tmp_path / "a.npz", {"step1/loss.npy": loss}, method)
    patched(path, SIZE, struct.pack("<I", (len(loss) - 48 + 8 * 10 ** 9) % 2 ** 32))
    require_refused(path, bundle, capsys, "claims float64 of shape [1000000000], 8000000000 bytes")     # (32 bits cannot)
    loss = npy(A, shape=(10 ** 8,))
    path = zipped(tmp_path / "a.npz", {"step1/loss.npy": loss}, method)
    patched(path, SIZE, struct.pack("<I", len(loss) - 48 + 8 * 10 ** 8))
    with pytest.raises(ActualError, match="step1/loss is damaged"):
        arrays(path)
    assert main(["golden", "check", str(path), "--against", str(bundle)]) == 1         # refused by its shape, and never read
    assert "has shape [100000000], step1/loss has []" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("at, value, words", [(CRC, b"\1\2\3\4", "step1/loss is not a readable npy file: Bad CRC-32"),
                                              (FLAGS, b"\1\0", "is not a readable npz file: "),
                                              (METHOD, b"\x63\0", "is not a r")])
def test_an_npz_that_is_damaged_encrypted_or_packed_otherwise_is_one_sentence(tmp_path, bundle, capsys, at, value, words):
    path = zipped(tmp_path / "a.npz", {"step1/loss.npy": npy(np.array(2.5))})
    require_refused(patched(path, at, value), bundle, capsys, words)


@pytest.mark.parametrize("at", [60, 120, -60])
def test_an_npz_whose_packed_bytes_are_damaged_is_one_sentence(tmp_path, bundle, capsys, at):
    data = npy(np.random.default_rng(0).standard_normal((1, 8, 24)))
    path = zipped(tmp_path / "a.npz", {f"{NAMES[1]}.npy": data}, zipfile.ZIP_DEFLATED)
    raw = bytearray(path.read_bytes())
    at = at if at > 0 else raw.index(b"PK\x01\x02") + at
    raw[at:at + 8] = bytes(b ^ 0x5A for b in raw[at:at + 8])
    path.write_bytes(raw)
    require_refused(path, bundle, capsys, NAMES[1])


def test_a_zip_bomb_is_refused_by_its_shape_before_it_is_unpacked(tmp_path, bundle, capsys):
    """100 kB that unpack to 100 MB of zeros."""
    path, n = tmp_path / "a.npz", 10 ** 8
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("step1/loss.npy", "w") as member:
        member.write(npy(np.zeros(0, "u1"), shape=(n,)))
        for _ in range(n // 10 ** 7):
            member.write(bytes(10 ** 7))
    assert path.stat().st_size < 10 ** 6
    tracemalloc.start()
    try:
        assert main(["golden", "check", str(path), "--against", str(bundle)]) == 1
        assert tracemalloc.get_traced_memory()[1] < 20 * 10 ** 6
    finally:
        tracemalloc.stop()
    assert f"has shape [{n}], step1/loss has []" in " ".join(capsys.readouterr().out.split())


def test_a_damaged_safetensors_file_is_one_sentence(tmp_path, bundle, capsys):
    path = tmp_path / "a.safetensors"
    tensorfile.write(path, {"step1/loss": np.array(2.5)})
    good = path.read_bytes()
    for data in (b"", good[:-1], good + b"\0", b"\xff" * 8 + good[8:], good.replace(b"F64", b"F99"),
                 good.replace(b"[]", b"[9]")):
        path.write_bytes(data)
        require_refused(path, bundle, capsys, str(path))


# -- anything at all ---------------------------------------------------------------------------------------------------

EXAMPLES = 200


@pytest.mark.parametrize("kind", ["safetensors", "npy", "stored", "deflated"])
def test_a_dump_with_anything_in_it_is_read_or_refused(tmp_path, kind):
    """Nothing but ActualError, neither at once nor when the numbers are read."""
    path, counts = tmp_path / {"safetensors": "a.safetensors", "npy": "a/x.npy"}.get(kind, "a.npz"), {"read": 0, "refused": 0}
    (tmp_path / "a").mkdir()
    if kind == "safetensors":
        tensorfile.write(path, {"x": A, "y": A})
    elif kind == "npy":
        np.save(path, A)
    else:
        zipped(path, {"x.npy": npy(A), "y.npy": npy(A[0])}, zipfile.ZIP_DEFLATED if kind == "deflated" else 0)
    raw = path.read_bytes()
    edit = st.tuples(st.integers(0, len(raw)), st.integers(0, 20), st.one_of(st.binary(max_size=12), st.sampled_from(
        [b"\xff" * 4, b"\0" * 4, b"PK\x03\x04", b"(-1,)", b"'|O'", b"[2,", b"999999999999", raw[:20]])))

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(st.lists(edit, min_size=1, max_size=3), st.booleans())
    def tried(edits, shifted):
        new = bytearray(raw)
        for at, n, put in edits:
            new[at:at + (n if shifted else len(put))] = put
        if path.exists():
            path.unlink()
        path.write_bytes(new)
        try:
            arrays(path.parent if kind == "npy" else path)
            counts["read"] += 1
        except ActualError as error:
            assert str(error)
            counts["refused"] += 1
    tried()
    print(kind, counts)
    assert sum(counts.values()) >= EXAMPLES and counts["refused"] > EXAMPLES // 3
