"""A bundle of golden values: a folder that says what is right, and how far from it a stack in a narrower format must be.

    manifest.json              what the values are made of, the conventions, and what is to be said of each (manifest.py)
    shared.safetensors         the values that all ranks have alike, and all values of a mesh of one rank
    rank-00000.safetensors     rank 0's parts of the others; a part that several ranks have is in the lowest one's file

A value called KEY is there as KEY, and its sigma in a format (noise.py), one byte for each element, as bfloat16/KEY.
A bundle is hostile until checked: `read` checks the manifest, then every file's sha256, then that the files hold what the
manifest says and nothing else.  Only files of the names above are opened, nothing is allocated that a file does not hold.
"""
import hashlib
import math
import re
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from refimpl import tensorfile
from refimpl.golden.conventions import Value
from refimpl.golden.manifest import BundleError, Entry, read_manifest, text_of
from refimpl.golden.noise import decoded
from refimpl.golden.place import Placement
from refimpl.golden.recipe import Recipe

FILE = re.compile(r"(shared|rank-[0-9]{5})\.safetensors")
SHARED = "shared.safetensors"


class Bundle:
    """A bundle on disk.  Values are read when they are asked for.  entries[key] says what there is to say of a value.

    conventions  name -> (value, sentence)
    recipe       what a trace is made of; None for op cases
    """

    def __init__(self, folder: Path, conventions: Mapping[str, tuple[Value, str]], recipe: Recipe | None,
                 entries: dict[str, Entry], files: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self.folder, self.conventions, self.recipe, self.entries, self.files = folder, conventions, recipe, entries, files

    @property
    def ranks(self) -> int:
        return math.prod(self.recipe.mesh.values()) if self.recipe else 1

    def shape(self, key: str, rank: int | None = None) -> tuple[int, ...]:
        """Of the whole value (rank None), or of a rank's part."""
        place = self.entries[key].place
        return place.shape if rank is None else tuple(stop - start for start, stop in place.boxes[rank])

    def value(self, key: str, rank: int | None = None) -> np.ndarray:
        """The whole value, or a rank's part."""
        place = self.entries[key].place
        if rank is None:
            return place.whole({r: self.value(key, r) for r in place.holders()})
        return self.files[file_of(place, rank)][key]

    def sigma(self, key: str, dtype: str, rank: int | None = None) -> np.ndarray | None:
        """How far each element must be off in a format; None where the format overflows.  (Of a sum, squares add up.)"""
        entry = self.entries[key]
        if (largest := entry.noise[dtype]) is None:
            return None
        if rank is None:
            squares = {r: np.square(self.sigma(key, dtype, r)) for r in entry.place.holders()}     # type: ignore[arg-type]
            return np.sqrt(entry.place.whole(squares))
        return decoded(self.files[file_of(entry.place, rank)][f"{dtype}/{key}"], largest)


def file_of(place: Placement, rank: int) -> str:
    """The file with a rank's part of a value."""
    alike = all(how == "replicated" for how in place.along.values())
    return SHARED if alike else f"rank-{place.holder(rank):05d}.safetensors"


def names_of(key: str, entry: Entry) -> list[str]:
    """What belongs to a value in a file: itself, and its sigma in each format."""
    return [key, *(f"{dtype}/{key}" for dtype, largest in entry.noise.items() if largest is not None)]


def write(folder: Path, about: Mapping[str, Any], entries: Mapping[str, Entry], parts: Mapping[str, Mapping[int, np.ndarray]]
          ) -> None:
    """Write a bundle into a folder: parts[name][holder], for all of `names_of`.  The same content gives the same bytes."""
    files: dict[str, dict[str, np.ndarray]] = {}
    for key, entry in entries.items():
        for name in names_of(key, entry):
            for holder in entry.place.holders():
                files.setdefault(file_of(entry.place, holder), {})[name] = parts[name][holder]
    for file in sorted(files):
        tensorfile.write(folder / file, files[file])
    sums = {file: sha256(folder / file) for file in sorted(files)}
    (folder / "manifest.json").write_text(text_of({**about, "files": sums}, entries), encoding="utf-8")


def read(folder: Path) -> Bundle:
    """Open a bundle.  Error: BundleError where it is damaged, incomplete or of a version that is not known."""
    manifest, recipe, entries = read_manifest(folder / "manifest.json")
    files = {}
    for file, wanted in manifest["files"].items():
        if not FILE.fullmatch(file) or not (folder / file).is_file() or (folder / file).is_symlink():
            raise BundleError(f"{folder}: {file[:100]!r} is missing, or no file of a bundle")
        if sha256(folder / file) != wanted:
            raise BundleError(f"{folder / file} is damaged: its sha256 is not that in the manifest")
        try:
            files[file] = tensorfile.views(folder / file)
        except tensorfile.TensorFileError as error:
            raise BundleError(str(error)) from None
    require_as_said(folder, entries, files)
    conventions = {name: (value, sentence) for name, (value, sentence) in manifest["conventions"].items()}
    return Bundle(folder, conventions, recipe, entries, files)


def require_as_said(folder: Path, entries: Mapping[str, Entry], files: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Error: BundleError unless the files hold the values of the manifest, in their shapes, and nothing else."""
    left = {(file, name) for file, arrays in files.items() for name in arrays}
    for key, entry in entries.items():
        digest = hashlib.sha256()
        for holder in entry.place.holders():
            shape = tuple(stop - start for start, stop in entry.place.boxes[holder])
            file = file_of(entry.place, holder)
            for name in names_of(key, entry):
                array, dtype = files.get(file, {}).get(name), tensorfile.DTYPES[entry.dtype] if name == key else "|u1"
                if array is None or array.shape != shape or array.dtype != dtype:
                    raise BundleError(f"{folder}: {file} lacks {name[:100]!r}, {dtype} of shape {list(shape)}")
                left.discard((file, name))
            digest.update(files[file][key].tobytes())
        if digest.hexdigest() != entry.sha256:
            raise BundleError(f"{folder}: {key[:100]!r} is damaged: its sha256 is not that in the manifest")
    if left:
        raise BundleError(f"{folder}: {min(left)[0]} has a tensor {min(left)[1][:100]!r} of which the manifest says nothing")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
