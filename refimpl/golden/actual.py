"""What a stack has dumped: named arrays from safetensors, npz or a folder of npy files, global ones or those of each rank.

    dump.safetensors  dump.npz                      global values
    dump/step1/act/layers.0.attn.q.npy              the same: a file's path in the folder is the name
    dump/rank0.safetensors  dump/rank1.npz          each rank's parts (rank0, rank_1, rank-00002 ...)
    dump/rank0/step1/...npy                         the same

Nothing is executed (arrays of objects are refused), no link is followed, and no array is read before its shape has been looked
at: a file may claim what it likes.
"""
import re
import stat
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Mapping

import numpy as np

from refimpl import tensorfile

RANK = re.compile(r"rank[-_]?0*([0-9]+)(\.safetensors|\.npz)?")
UNREADABLE = (ValueError, OSError, EOFError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError,
              zipfile.BadZipFile, zlib.error)


class ActualError(ValueError):
    """A dump that cannot be read, with the reason."""


@dataclass(frozen=True)
class Dumped:
    """An array that has not been read yet.  bfloat16 comes as float32."""
    where: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


Set = Mapping[str, Dumped]


def read(path: Path) -> list[Set]:
    """One set of arrays, or one for each rank.  Error: ActualError."""
    try:
        return sets_of(path)
    except OSError as error:
        raise ActualError(f"{path} cannot be read: {error.strerror or error}") from None


def sets_of(path: Path) -> list[Set]:
    if path.is_file():
        return [of_file(path)]
    if not path.is_dir():
        raise ActualError(f"{path} is not there: it must be a .safetensors or .npz file, or a folder")
    ranks: dict[int, Path] = {}
    for p in sorted(path.iterdir()):
        if found := RANK.fullmatch(p.name):
            if p.is_symlink() or not (p.is_file() or p.is_dir()):
                raise ActualError(f"{p} is neither a file nor a folder (links are not followed)")
            if (other := ranks.setdefault(int(found[1]), p)) != p:
                raise ActualError(f"{other} and {p} are of the same rank")
    if (path / "manifest.json").exists():
        raise ActualError(f"{path} is a bundle of golden values, not a stack's dump: give it by --against")
    if not ranks:
        if files := sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".npz")):
            raise ActualError(f"{path} holds {files[0]}: name that file, or call it rank0{Path(files[0]).suffix}")
        return [of_folder(path)]
    arrays = (".safetensors", ".npz", ".npy")
    if others := sorted(p.name for p in path.iterdir() if p not in ranks.values() and p.suffix in arrays):
        raise ActualError(f"{path} holds {others[0]} beside the ranks' files: whose is it?")
    if sorted(ranks) != list(range(len(ranks))):
        missing = min(set(range(len(ranks))) - set(ranks))
        raise ActualError(f"{path} has the ranks {', '.join(map(str, sorted(ranks)))}: rank {missing} is missing, they must be "
                          "numbered from 0 on")
    return [of_folder(ranks[r]) if ranks[r].is_dir() else of_file(ranks[r]) for r in range(len(ranks))]


def of_file(path: Path) -> Set:
    if path.suffix == ".safetensors":
        return of_safetensors(path)
    if path.suffix == ".npz":
        return of_npz(path)
    raise ActualError(f"{path} is neither .safetensors nor .npz")


def of_safetensors(path: Path) -> Set:
    try:
        header, _, _ = tensorfile.read_header(path)
        views = tensorfile.views(path)
    except (tensorfile.TensorFileError, OSError) as error:
        raise ActualError(str(error)) from None

    def widened(name: str) -> np.ndarray:
        raw = views[name]
        return (raw.astype("<u4") << 16).view("<f4") if header[name]["dtype"] == "BF16" else raw
    return {name: Dumped(f"{path}: {name}", tuple(entry["shape"]), entry["dtype"], partial(widened, name))
            for name, entry in header.items()}


def of_npz(path: Path) -> Set:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if len({m.filename for m in members}) < len(members):
                raise ActualError(f"{path} has a name twice")
            return {m.filename[:-4]: of_npy(f"{path}: {m.filename[:-4]}", m.file_size, partial(member, path, m))
                    for m in members}
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise ActualError(f"{path} is not a readable npz file: {error}") from None


def member(path: Path, info: zipfile.ZipInfo) -> Any:
    with zipfile.ZipFile(path) as archive:
        return archive.open(info)                       # which keeps the file open


def of_folder(folder: Path) -> Set:
    return {str(p.relative_to(folder))[:-4]: of_npy(str(p), p.stat().st_size, partial(open, p, "rb"))
            for p in files_below(folder) if p.suffix == ".npy"}


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files, in the order of their names."""
    for p in sorted(folder.iterdir()):
        mode = p.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from files_below(p)
        elif stat.S_ISREG(mode):
            yield p


def of_npy(where: str, size: int, start: Callable[[], Any]) -> Dumped:
    """One npy file of `size` bytes.  Its header must account for all of them."""
    try:
        with start() as file:
            shape, fortran, dtype = npy_header(file)
            begin = file.tell()
    except UNREADABLE as error:
        raise ActualError(f"{where} is not a readable npy file: {error}") from None
    if dtype.hasobject or dtype.kind not in "fiub":
        raise ActualError(f"{where} holds {dtype}: it must hold numbers (bfloat16: as float32, or in safetensors)")
    n = 1
    for length in shape:
        n *= length
    if begin + n * dtype.itemsize != size:
        raise ActualError(f"{where} claims {dtype} of shape {list(shape)}, {n * dtype.itemsize} bytes, but has {size - begin}")

    def read() -> np.ndarray:
        try:
            with start() as file:
                file.read(begin)
                raw = np.frombuffer(file.read(n * dtype.itemsize), dtype)
            return raw.reshape(shape, order="F" if fortran else "C")
        except UNREADABLE as error:                     # damaged behind its header
            raise ActualError(f"{where} is damaged: {error}") from None
    return Dumped(where, shape, dtype.name, read)


def npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of version {version}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # numpy's, of headers that it reads only at the second attempt
        return read_header(file)
