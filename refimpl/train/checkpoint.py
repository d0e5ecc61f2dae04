"""Checkpoints: a folder of safetensors files and a manifest, written by all ranks, read on any mesh.  Nothing is executed.

    FOLDER/step-00000200/manifest.json            {"format": 1, "step": 200, "about": {...},
                                                   "files": [{"name": "rank-00000.safetensors", "bytes": n, "crc32": c}, ...]}
    FOLDER/step-00000200/rank-00000.safetensors   rank 0's pieces; the file's metadata says of each where in the global array
                                                  it lies: {"start": [0, 4], "shape": [8, 8]}

A checkpoint grows as step-00000200.part, is on the disk (fsync) before it gets its name, and loses that name before it is
deleted: whenever a process is killed, a folder without .part is whole.  One run at a time saves into FOLDER.
A checkpoint is hostile until checked: nothing is allocated but what the caller wants.  Read `save`, then `load`.
"""
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Callable, Mapping, TypeVar

import numpy as np

from refimpl import tensorfile
from refimpl.comm import Comm
from refimpl.files import parse_json

MAX_MANIFEST = 10_000_000                               # bytes
NAME = "step-" + "[0-9]" * 8
Box = tuple[slice, ...]                                 # a part of a global array: one slice for each axis
T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or loaded, with the reason: the same sentence on every rank."""


@dataclass(frozen=True)
class Piece:
    """`array` lies at `start` in a global array of `shape`."""
    array: np.ndarray
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple(slice(i, i + n) for i, n in zip(self.start, self.array.shape))


@dataclass(frozen=True)
class Wanted:
    """The part `box` of a global array of `shape`."""
    shape: tuple[int, ...]
    box: Box
    dtype: np.dtype


def save(folder: Path, step: int, pieces: Mapping[str, Piece], about: dict[str, Any], comm: Comm, keep: int = 2) -> Path:
    """All ranks save their `pieces`, together, as FOLDER/step-...; rank 0's `about` (JSON) goes into the manifest.

    Every element of a global array is given by exactly one rank.  Of the complete checkpoints the last `keep` stay, or all
    where it is 0.  Errors: CheckpointError, the same on every rank, where one of them cannot write; what was complete stays.
    """
    if not 0 <= step < 10 ** 8 or keep < 0:
        raise CheckpointError(f"step must be 0 to 99999999 and keep at least 0, got {step} and {keep}")
    comm.agree(f"the saving of step {step}")
    path = folder / f"step-{step:08d}"
    part = path.with_suffix(".part")
    file = part / f"rank-{comm.rank:05d}.safetensors"
    first = comm.rank == 0
    try:
        together(comm, part, lambda: begin(path, part) if first else None)
        entry = together(comm, file, lambda: write_pieces(file, pieces) if pieces else None)
        entries = map(json.loads, comm.gather_texts(json.dumps(entry)))
        manifest = {"format": 1, "step": step, "about": about, "files": [e for e in entries if e]}
        together(comm, part, lambda: complete(path, part, manifest) if first else None)
        together(comm, folder, lambda: remove_old(path, keep) if first and keep else None)
    except CheckpointError as error:
        if first:
            shutil.rmtree(part, ignore_errors=True)     # free the space
        last = comm.gather_texts(str(latest(folder) or "") if first else "")[0]
        left = f"the latest complete checkpoint is {last}" if last else "there is no complete checkpoint yet"
        raise CheckpointError(f"saving {path.name}: {error}; {left}") from None
    return path


def together(comm: Comm, at: Path, act: Callable[[], T]) -> T:
    """What `act` gives on this rank.  Its OSError or ValueError is a CheckpointError of all ranks: the lowest rank's sentence,
    which names `at` where the error itself names no file."""
    failure = ""
    try:
        result = act()
    except OSError as error:
        failure = f"rank {comm.rank} failed at {error.filename or at}: {error.strerror or error}"
    except ValueError as error:
        failure = str(error) or repr(error)
    failures = [f for f in comm.gather_texts(failure) if f]
    if failures:
        raise CheckpointError(failures[0])
    return result


def begin(path: Path, part: Path) -> None:
    """An empty folder `part`; those that killed runs have left are removed."""
    os.makedirs(path.parent, exist_ok=True)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is there already: remove it, or save to another folder")
    for stale in path.parent.glob(NAME + ".part"):
        shutil.rmtree(stale)
    os.mkdir(part)


def write_pieces(file: Path, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Write a rank's file -> its entry in the manifest."""
    for name, piece in pieces.items():
        check_inside(piece.start, piece.array.shape, piece.shape, f"tensor {name!r}")
    tensorfile.write(file, {name: piece.array for name, piece in pieces.items()},
                     {name: json.dumps({"start": p.start, "shape": p.shape}) for name, p in pieces.items()})
    sync(file)
    return entry_of(file)


def entry_of(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    crc = 0
    with open(file, "rb") as opened:
        while block := opened.read(2 ** 20):
            crc = zlib.crc32(block, crc)
    return {"name": file.name, "bytes": file.stat().st_size, "crc32": crc}


def complete(path: Path, part: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest; with all on the disk, `part` becomes `path`."""
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    with open(part / "manifest.json", "wb") as file:
        file.write(text)
    read_manifest(part)                                 # what could not be read would be no checkpoint
    sync(part / "manifest.json")
    sync(part)
    os.rename(part, path)
    sync(path.parent)


def remove_old(path: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last `keep` and `path`, the one just written."""
    for old in complete_ones(path.parent)[:-keep]:
        if old != path:
            part = old.with_suffix(".part")
            os.rename(old, part)
            sync(path.parent)
            shutil.rmtree(part)


def sync(path: Path) -> None:
    """Return when this file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return max(complete_ones(folder), default=None)


def complete_ones(folder: Path) -> list[Path]:
    return sorted(manifest.parent for manifest in folder.glob(NAME + "/manifest.json"))


def load(path: Path, wanted: Mapping[str, Wanted], comm: Comm) -> tuple[int, dict[str, np.ndarray]]:
    """All ranks load, together, the boxes that each wants -> the step, and out[name] of the shape of `wanted[name].box`.

    The ranks may be others, with other boxes, than those that saved.
    Errors: CheckpointError, the same on every rank, for a checkpoint that is incomplete or damaged, a wanted tensor that it
    lacks or has in another shape or dtype, and a tensor in it that no rank wants.
    """
    comm.agree(f"the loading of {path.name}")
    manifest = together(comm, path, lambda: read_manifest(path))
    entries = manifest["files"]
    together(comm, path, lambda: check_files(path, entries[comm.rank::comm.size]))
    pieces = together(comm, path, lambda: read_pieces([path / entry["name"] for entry in entries]))
    ignored = [set(json.loads(text)) for text in comm.gather_texts(json.dumps(sorted(pieces.keys() - wanted.keys())))]
    if unwanted := set.intersection(*ignored):
        raise CheckpointError(f"{path} has a tensor {min(unwanted)!r} that nobody wants: it is of another model or optimizer")
    arrays = together(comm, path, lambda: {name: assemble(f"{path}: tensor {name!r}", pieces.get(name, []), w)
                                           for name, w in wanted.items()})
    return manifest["step"], arrays


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked manifest of a checkpoint: "step", "about" and "files".  Errors: CheckpointError, OSError."""
    file = path / "manifest.json"
    if not file.is_file() or file.stat().st_size > MAX_MANIFEST:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no manifest.json of at most {MAX_MANIFEST} bytes")
    manifest = parse(file.read_bytes(), str(file))
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        raise CheckpointError(f"{file} is not of format 1, the one that this program reads")
    if manifest.keys() != {"format", "step", "about", "files"} or not is_count(manifest["step"], 10 ** 8) \
            or not isinstance(manifest["about"], dict) or not isinstance(manifest["files"], list):
        raise CheckpointError(f"{file} must have a step from 0 to 99999999, an object `about` and a list of files")
    for entry in manifest["files"]:
        if not isinstance(entry, dict) or entry.keys() != {"name", "bytes", "crc32"} or not isinstance(entry["name"], str) \
                or not re.fullmatch(r"rank-[0-9]{5,9}\.safetensors", entry["name"]) \
                or not is_count(entry["bytes"]) or not is_count(entry["crc32"], 2 ** 32):
            raise CheckpointError(f"{file}: a file has a name like rank-00000.safetensors, a number of bytes and a crc32, not "
                                  f"{str(entry)[:200]}")
    return manifest


def check_files(path: Path, entries: list[dict[str, Any]]) -> None:
    """Error: CheckpointError unless the files are those that were saved."""
    for entry in entries:
        file = path / entry["name"]
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete")
        if (found := entry_of(file)) != entry:
            raise CheckpointError(f"{file} has {found['bytes']} bytes of crc32 {found['crc32']}, but {entry['bytes']} bytes of "
                                  f"crc32 {entry['crc32']} were saved: it is damaged, or another file")


def read_pieces(files: list[Path]) -> dict[str, list[Piece]]:
    """Every tensor's pieces, which stay on the disk until they are looked at.  Errors: CheckpointError, TensorFileError."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        places = tensorfile.read_header(file)[1]
        for name, array in tensorfile.views(file).items():
            where = f"{file}: the place of tensor {name!r}"
            place = parse(places.get(name, "").encode("utf-8", "surrogatepass"), where)
            if not isinstance(place, dict) or place.keys() != {"start", "shape"} or not all(
                    isinstance(counts, list) and all(map(is_count, counts)) for counts in place.values()):
                raise CheckpointError(f"{where} must be two lists of counts, start and shape, not {str(place)[:200]}")
            start, shape = tuple(place["start"]), tuple(place["shape"])
            check_inside(start, array.shape, shape, where)
            pieces.setdefault(name, []).append(Piece(array, start, shape))
    return pieces


def assemble(what: str, pieces: list[Piece], wanted: Wanted) -> np.ndarray:
    """The wanted box, from the pieces that have a part of it.  Error: CheckpointError unless they make one whole array."""
    check_inside(tuple(i.start for i in wanted.box), shape_of(wanted.box), wanted.shape, what)
    if not pieces:
        raise CheckpointError(f"{what} is not in this checkpoint")
    for piece in pieces:
        if piece.shape != wanted.shape or piece.array.dtype != wanted.dtype:
            raise CheckpointError(f"{what} has shape {piece.shape} and dtype {piece.array.dtype} there, but {wanted.shape} and "
                                  f"{wanted.dtype} are wanted")
    if any(math.prod(shape_of(meet(a.box, b.box))) for a, b in combinations(pieces, 2)):
        raise CheckpointError(f"{what} has pieces that overlap")
    if (held := sum(piece.array.size for piece in pieces)) != (size := math.prod(wanted.shape)):
        raise CheckpointError(f"{what} has a hole: the pieces hold {held} of its {size} elements")
    out = np.empty(shape_of(wanted.box), wanted.dtype)
    for piece in pieces:
        common = meet(piece.box, wanted.box)
        out[within(common, wanted.box)] = piece.array[within(common, piece.box)]
    return out


def parse(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where} {error}") from None


def is_count(value: Any, limit: int = 2 ** 63) -> bool:
    return type(value) is int and 0 <= value < limit


def check_inside(start: tuple[int, ...], n: tuple[int, ...], shape: tuple[int, ...], what: str) -> None:
    """Error: CheckpointError unless a part of shape `n` from `start` on lies in an array of `shape`."""
    if not len(start) == len(n) == len(shape) or not all(0 <= i <= i + k <= size for i, k, size in zip(start, n, shape)):
        raise CheckpointError(f"{what}: a part of shape {n} from {start} on does not lie in an array of shape {shape}")


def meet(a: Box, b: Box) -> Box:
    """What two boxes have in common."""
    ends = [(max(i.start, j.start), min(i.stop, j.stop)) for i, j in zip(a, b)]
    return tuple(slice(start, max(start, stop)) for start, stop in ends)


def within(box: Box, outer: Box) -> Box:
    """Where `box` lies in the array that holds `outer`."""
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(box, outer))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(i.stop - i.start for i in box)
