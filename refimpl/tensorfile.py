"""The safetensors file format, read and written by hand: names, dtypes, shapes and raw bytes.  Nothing is executed.

    8 bytes   header length n, little endian
    n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, space padded
    the rest  the arrays, C order, little endian, one after another

A file is hostile until checked: the header is bounded, every entry must have exactly the size that its shape says, entries
must follow one another from the first byte to the last, and nothing is allocated that the file does not hold.
Reference: the safetensors format description (Hugging Face).
"""
import json
import math
import os
from pathlib import Path
from typing import Any, Mapping

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
          "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "BF16": "<u2"}
CODES = {np.dtype(v): k for k, v in DTYPES.items() if k != "BF16"}
MAX_HEADER = 100_000_000


class TensorFileError(ValueError):
    """A file that is not a well-formed tensor file, with the reason."""


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` in sorted order of their names; the same content gives the same bytes.

    Non-contiguous arrays are written in logical (C) order.  Errors: TensorFileError for a dtype the format lacks, and for the
    name "__metadata__", which the format keeps for itself.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in sorted(tensors):
        a = np.asarray(tensors[name])
        if name == "__metadata__":
            raise TensorFileError("no tensor can be called __metadata__")
        if a.dtype.newbyteorder("<") not in CODES:
            raise TensorFileError(f"tensor {name!r} has dtype {a.dtype}: the format knows {', '.join(map(str, CODES))}")
        header[name] = {"dtype": CODES[a.dtype.newbyteorder("<")], "shape": list(a.shape),
                        "data_offsets": [begin, begin + a.nbytes]}
        begin += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            a = np.asarray(tensors[name])
            file.write(a.astype(a.dtype.newbyteorder("<"), copy=False).tobytes(order="C"))


def read_header(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, str], int]:
    """The checked entries, the metadata and the offset of the data.  Errors: TensorFileError, FileNotFoundError."""
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if size < 8 or n > min(MAX_HEADER, size - 8):
            raise TensorFileError(f"{path}: the header claims {n} bytes, the file has {size}")
        try:
            header = json.loads(file.read(n).decode("utf-8"), object_pairs_hook=_unique)
        except TensorFileError as error:
            raise TensorFileError(f"{path}: {error}") from None
        except (ValueError, RecursionError) as error:           # not utf-8, not JSON, a number of 5000 digits
            raise TensorFileError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError(f"{path}: __metadata__ must map names to strings")
    spans = sorted(_check_entry(path, name, entry, size - 8 - n) for name, entry in header.items())
    for (_, end), (begin, _) in zip([(0, 0), *spans], [*spans, (size - 8 - n, 0)]):
        if end != begin:
            raise TensorFileError(f"{path}: " + (f"two tensors share bytes {begin}..{end}" if end > begin else
                                                 f"bytes {end}..{begin} belong to no tensor"))
    return header, metadata, 8 + n


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [k for k, _ in pairs]
    if len(set(names)) != len(names):
        raise TensorFileError(f"the header names {max(names, key=names.count)!r} twice")
    return dict(pairs)


def _check_entry(path: str | os.PathLike, name: str, entry: Any, available: int) -> tuple[int, int]:
    whole = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"} and all(
        isinstance(entry[k], list) and all(type(v) is int and 0 <= v < 2 ** 63 for v in entry[k])
        for k in ("shape", "data_offsets")) and isinstance(entry["dtype"], str)
    if not whole or entry["dtype"] not in DTYPES or len(entry["data_offsets"]) != 2 or len(entry["shape"]) > 32 \
            or math.prod(max(n, 1) for n in entry["shape"]) >= 2 ** 59:         # numpy refuses [0, 2**62, 2**62]
        raise TensorFileError(f"{path}: the entry of {name!r} is malformed: {str(entry)[:200]}")
    begin, end = entry["data_offsets"]
    need = math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize
    if not begin <= end <= available or end - begin != need:
        raise TensorFileError(f"{path}: {name!r} claims bytes {begin}..{end} of {available}; its shape "
                              f"{entry['shape']} as {entry['dtype']} needs {need}")
    return begin, end


def read(path: str | os.PathLike, names: list[str] | None = None) -> dict[str, np.ndarray]:
    """The tensors called `names` (all by default).  bfloat16 is widened, exactly, to float32.

    Errors: TensorFileError for a malformed file, KeyError for a name that is not in it.
    """
    header, _, start = read_header(path)
    out = {}
    with open(path, "rb") as file:
        for name in sorted(header) if names is None else names:
            if name not in header:
                raise KeyError(f"{path} has no tensor {name!r}; it has {', '.join(sorted(header)[:10])} ...")
            entry = header[name]
            file.seek(start + entry["data_offsets"][0])
            raw = np.fromfile(file, DTYPES[entry["dtype"]], math.prod(entry["shape"])).reshape(entry["shape"])
            out[name] = (raw.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else raw
    return out


def views(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors as read-only arrays that the operating system reads when they are looked at: nothing is loaded before.

    bfloat16, which numpy lacks, is seen as its bits, uint16.  Errors: TensorFileError for a malformed file.
    """
    header, _, start = read_header(path)
    raw = np.memmap(path, np.uint8, "r") if header else np.zeros(0, np.uint8)
    return {name: raw[start + a:start + b].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items() for a, b in [entry["data_offsets"]]}
