"""Localises arrays written as raw memory, dtypes that change on the way, and files that make a reader allocate or execute."""
import json
import os
import tracemalloc

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.tensorfile import DTYPES, TensorFileError, read, read_header, write

A = np.arange(6.0).reshape(2, 3)


def raw(path, header, data=b"", length=None):
    """A file with any header (text, bytes or what json can write), and any claim about its length."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# -- round trips ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [code for code in DTYPES if code != "BF16"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, code):
    bits = np.frombuffer(bytes(range(1, 49)), "u1")
    a = (bits % 2).astype(bool) if code == "BOOL" else bits.view(DTYPES[code])
    write(tmp_path / "a", {"a": a.reshape(2, -1)})
    b = read(tmp_path / "a")["a"]
    assert b.dtype == a.dtype and b.shape == (2, a.size // 2) and b.tobytes() == a.tobytes()
    assert read_header(tmp_path / "a")[0]["a"]["dtype"] == code


@pytest.mark.parametrize("values", [[np.nan, np.inf, -np.inf, -0.0, 5e-324, 1.7976931348623157e308]])
def test_special_values_keep_their_bits(tmp_path, values):
    write(tmp_path / "a", {"a": np.array(values)})
    assert read(tmp_path / "a")["a"].tobytes() == np.array(values).tobytes()


@pytest.mark.parametrize("a", [np.zeros(()), np.zeros(0), np.zeros((2, 0, 3)), np.zeros((1,) * 8), np.array(7, "int64")])
def test_scalars_and_empty_arrays_keep_their_shape(tmp_path, a):
    write(tmp_path / "a", {"a": a, "b": A})
    back = read(tmp_path / "a")
    assert back["a"].shape == a.shape and back["a"].dtype == a.dtype and np.array_equal(back["a"], a)
    assert np.array_equal(back["b"], A)


@pytest.mark.parametrize("a", [A.T, A[:, ::2], A[::-1], np.broadcast_to(np.array([1.0, 2]), (3, 2)), np.asfortranarray(A),
                               np.broadcast_to(np.float32(1), (2, 2)), A[:, 1:2]])
def test_logical_rows_are_written_not_memory(tmp_path, a):
    write(tmp_path / "a", {"a": a})
    assert read(tmp_path / "a")["a"].tolist() == a.tolist()
    assert (tmp_path / "a").read_bytes().endswith(np.array(a.tolist(), a.dtype).tobytes())


def test_big_endian_arrays_are_written_little_endian(tmp_path):
    write(tmp_path / "a", {"a": A.astype(">f8")})
    assert read(tmp_path / "a")["a"].tolist() == A.tolist()
    assert (tmp_path / "a").read_bytes().endswith(A.astype("<f8").tobytes())


@pytest.mark.parametrize("bits, value", [(0x3FC0, 1.5), (0xC000, -2.0), (0x0000, 0.0), (0x7F80, np.inf), (0x4049, 3.140625)])
def test_bfloat16_is_widened_exactly(tmp_path, bits, value):
    path = raw(tmp_path / "a", {"a": entry("BF16", (1,), (0, 2))}, bits.to_bytes(2, "little"))
    a = read(path)["a"]
    assert a.dtype == np.float32 and a.tolist() == [value]


def test_the_same_content_gives_the_same_bytes(tmp_path):
    write(tmp_path / "a", {"x": A, "b": A[0]}, {"two": "2", "one": "1"})
    write(tmp_path / "b", {"b": A[0].copy(), "x": np.asfortranarray(A)}, {"one": "1", "two": "2"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_bytes_by_hand(tmp_path):
    write(tmp_path / "a", {"b": np.array([1], "int16"), "a": np.array([[2, 3]], "uint8")}, {"k": "v"})
    header = (b'{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[1,2],"data_offsets":[0,2]},'
              b'"b":{"dtype":"I16","shape":[1],"data_offsets":[2,4]}}')
    header += b" " * (-len(header) % 8)
    assert (tmp_path / "a").read_bytes() == len(header).to_bytes(8, "little") + header + b"\x02\x03\x01\x00"


def test_names_metadata_and_selection(tmp_path):
    write(tmp_path / "a", {"größe.w": A, "b": A[0]}, {"step": "3"})
    assert list(read(tmp_path / "a")) == ["b", "größe.w"]
    assert list(read(tmp_path / "a", ["größe.w"])) == ["größe.w"]
    assert read_header(tmp_path / "a")[1] == {"step": "3"}
    with pytest.raises(KeyError, match="has no tensor 'c'; it has b, größe.w"):
        read(tmp_path / "a", ["c"])


def test_the_public_library_reads_it_and_is_read(tmp_path):
    public = pytest.importorskip("safetensors.numpy")
    tensors = {"a": A, "b": np.arange(3), "c": np.zeros((0, 2), np.float32), "d": np.array([True])}
    write(tmp_path / "ours", tensors)
    public.save_file(tensors, tmp_path / "theirs")
    for back in (public.load_file(tmp_path / "ours"), read(tmp_path / "theirs")):
        assert all(back[n].dtype == a.dtype and np.array_equal(back[n], a) for n, a in tensors.items())


@pytest.mark.parametrize("a", [np.zeros(2, complex), np.array(["text"]), np.array([None]), np.zeros(2, "datetime64[s]"),
                               np.zeros(2, np.longdouble)])
def test_dtypes_that_the_format_lacks_are_refused(tmp_path, a):
    with pytest.raises(TensorFileError, match="tensor 'a' has dtype .*: the format knows float64, float32"):
        write(tmp_path / "a", {"a": a})
    assert not (tmp_path / "a").exists()


def test_a_tensor_cannot_take_the_place_of_the_metadata(tmp_path):
    with pytest.raises(TensorFileError, match="no tensor can be called __metadata__"):
        write(tmp_path / "a", {"__metadata__": A})


# -- hostile files ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "shape that needs more": ({"a": entry(shape=(3,))}, r"'a' claims bytes 0..8 of 8; its shape \[3\] as F32 needs 12"),
    "shape that needs less": ({"a": entry(shape=(1,))}, "'a' claims bytes 0..8 of 8"),
    "huge shape": ({"a": entry(shape=(2 ** 40, 2 ** 10))}, "'a' claims bytes 0..8 of 8"),
    "product that wraps to 0": ({"a": entry(shape=(2 ** 32, 2 ** 32), offsets=(0, 0))}, "malformed"),
    "empty but too large for numpy": ({"a": entry(shape=(0, 2 ** 62, 2 ** 62), offsets=(0, 0))}, "malformed"),
    "size beyond 64 bits": ({"a": entry(shape=(10 ** 4000, 0), offsets=(0, 0))}, "malformed"),
    "33 axes": ({"a": entry(shape=(1,) * 33)}, "malformed"),
    "end outside": ({"a": entry(offsets=(8, 16))}, "'a' claims bytes 8..16 of 8"),
    "far outside": ({"a": entry(offsets=(2 ** 60, 2 ** 60 + 8))}, "'a' claims bytes"),
    "end before begin": ({"a": entry(offsets=(8, 0))}, "'a' claims bytes 8..0 of 8"),
    "negative offset": ({"a": entry(offsets=(-8, 0))}, "malformed"),
    "negative size": ({"a": entry(shape=(-1, -2))}, "malformed"),
    "overlap": ({"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))}, "two tensors share bytes 4..8"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, "two tensors share bytes 0..8"),
    "bytes nobody owns": ({"a": entry(shape=(1,), offsets=(4, 8))}, "bytes 0..4 belong to no tensor"),
    "a tail": ({"a": entry(shape=(1,), offsets=(0, 4))}, "bytes 4..8 belong to no tensor"),
    "no tensors but data": ({}, "bytes 0..8 belong to no tensor"),
    "unknown dtype": ({"a": entry("F8_E5M2", (8,))}, "malformed"),
    "dtype that is no text": ({"a": entry(["F32"])}, "malformed"),
    "dtype that is null": ({"a": entry(None)}, "malformed"),
    "fractional size": ({"a": entry(shape=(2.0,))}, "malformed"),
    "size that is a bool": ({"a": entry(shape=(2, True))}, "malformed"),
    "one offset": ({"a": entry(offsets=(8,))}, "malformed"),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, "malformed"),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, "malformed"),
    "additional key": ({"a": {**entry(), "more": 1}}, "malformed"),
    "entry that is a list": ({"a": [1]}, "malformed"),
    "entry that is null": ({"a": None}, "malformed"),
    "shape that is text": ({"a": {**entry(), "shape": "2"}}, "malformed"),
    "metadata that is a list": ({"__metadata__": ["a"], "a": entry()}, "__metadata__ must map names to strings"),
    "metadata with numbers": ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__ must map names to strings"),
    "a list": ([1, 2], "the header is not a JSON object"),
    "a number": ("7", "the header is not a JSON object"),
    "no JSON": ("{'a': 1}", "the header is not JSON"),
    "no header": ("", "the header is not JSON"),
    "not utf-8": (b'{"\xff": 1}', "the header is not JSON"),
    "a name twice": ('{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2), "the header names 'a' twice"),
    "a key twice": ('{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "names 'dtype' twice"),
    "deep nesting": ("[" * 100_000, "the header is not JSON"),
    "deep objects": ('{"a":' * 100_000, "the header is not JSON"),
    "a number of 10000 digits": ('{"a": %s}' % ("9" * 10_000), "the header is not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_headers_are_refused(tmp_path, case):
    header, words = HOSTILE[case]
    path = raw(tmp_path / "bad", header, bytes(8))
    for refused in (read_header, read):
        with pytest.raises(TensorFileError, match=f"bad: .*{words}"):
            refused(path)


@pytest.mark.parametrize("length", [2 ** 64 - 1, 2 ** 63, 2 ** 40, tensorfile.MAX_HEADER + 1, 1000])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    with pytest.raises(TensorFileError, match=f"the header claims {length} bytes, the file has"):
        read(raw(tmp_path / "bad", {"a": entry()}, bytes(8), length))


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    write(tmp_path / "a", {"a": A, "b": A[0]})
    whole = (tmp_path / "a").read_bytes()
    for n in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:n])
        with pytest.raises(TensorFileError):
            read(tmp_path / "cut")


def test_no_flipped_byte_of_the_header_causes_another_error(tmp_path):
    write(tmp_path / "a", {"a": A, "b": A[0]}, {"k": "v"})
    whole = (tmp_path / "a").read_bytes()
    for at in range(len(whole) - A.nbytes - A[0].nbytes):
        for flip in (0x01, 0x10, 0x80):
            changed = bytearray(whole)
            changed[at] ^= flip
            (tmp_path / "b").write_bytes(changed)
            try:
                back = read(tmp_path / "b")
            except TensorFileError:
                continue
            assert sum(a.nbytes for a in back.values()) <= A.nbytes + A[0].nbytes


@pytest.mark.parametrize("header, length", [({"a": entry("F64", (2 ** 40,), (0, 2 ** 43))}, None), ({"a": entry()}, 2 ** 62),
                                            ({f"a{i}": entry("U8", (2 ** 30,), (0, 2 ** 30)) for i in range(100)}, None)])
def test_nothing_is_allocated_that_the_file_lacks(tmp_path, header, length):
    path = raw(tmp_path / "bad", header, bytes(8), length)
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 10 * os.path.getsize(path)
    finally:
        tracemalloc.stop()


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")


def test_views_are_the_tensors_without_loading_them(tmp_path):
    tensors = {"a": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 3), "float32"), "scalar": np.array(3, "int32")}
    tensorfile.write(tmp_path / "t", tensors)
    views = tensorfile.views(tmp_path / "t")
    assert views.keys() == tensors.keys() and not any(v.flags.writeable for v in views.values())
    for name, a in tensors.items():
        assert views[name].dtype == a.dtype and views[name].shape == a.shape and (views[name] == a).all()
    assert isinstance(views["a"], np.memmap)


def test_views_of_a_damaged_file_are_refused(tmp_path):
    tensorfile.write(tmp_path / "t", {"a": np.arange(6.0)})
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1])
    with pytest.raises(tensorfile.TensorFileError, match="claims bytes"):
        tensorfile.views(tmp_path / "t")
