"""The manifest of a bundle: what it says of every value, written as one line each, and checked when it is read.

    "step1/grad/layers.0.attn.q.w": {"role": "grad", "phase": "backward", "step": 1, "dtype": "F64", "shape": [16, 16],
        "along": {"tp": "axis 1"}, "boxes": [[[0, 16], [0, 8]], [[0, 16], [8, 16]]], "kind": "canonical", "sha256": "...",
        "uncertainty": 1.1e-16, "noise": {"float32": 3.6e-08, ...}, "terms": 32}
"""
import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Mapping

from refimpl.comm import Mesh
from refimpl.comm.mesh import AXES
from refimpl.files import parse_json
from refimpl.golden.conventions import is_text, is_value
from refimpl.golden.emulate import FORMATS
from refimpl.golden.place import HOW, Placement, layout_of
from refimpl.golden.recipe import Recipe
from refimpl.models import Config, parameters
from refimpl.parallel import SequenceLayout
from refimpl.tensorfile import DTYPES

FORMAT, VERSION = "refimpl golden values", 2
MAX_BYTES = 64_000_000
MAX_RANKS = 256
MAX_CONVENTIONS = 100
MAX_SCORES = 2 ** 27                                    # batch_size · n_heads · seq_len²: 1 GiB
ROLES = ("input", "param", "act", "grad", "comm", "opt")
PHASES = ("forward", "backward", "update")
KINDS = ("canonical", "gauge", "partial")
HEX = set("0123456789abcdef")


class BundleError(ValueError):
    """A bundle that is damaged, or of a version that is not known, with the reason."""


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one value.

    kind         canonical: any stack must have it; partial: a part of a sum, which a stack may cut otherwise: only the sum is
                 canonical; gauge: the loss does not depend on it, it is rounding alone
    sha256       of the holders' parts, little-endian and in C order, one after another
    uncertainty  root mean square error of these values themselves
    noise        format -> the largest sigma; None where the format overflows
    terms        products or numbers that are added up in one element
    """
    role: str
    phase: str
    step: int
    dtype: str
    place: Placement
    kind: str
    sha256: str
    uncertainty: float
    noise: Mapping[str, float | None]
    terms: int

    def to_dict(self) -> dict[str, Any]:
        """The placement as its shape, how it lies along the mesh axes and, where a rank has less than all, what each has."""
        line = {f.name: getattr(self, f.name) for f in fields(self)}
        place = line.pop("place")
        line |= {"shape": list(place.shape), "along": place.along}
        if any(box != whole_box(place.shape) for box in place.boxes):
            line["boxes"] = [[list(ends) for ends in box] for box in place.boxes]
        return line


def whole_box(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, n) for n in shape)


def text_of(manifest: Mapping[str, Any], entries: Mapping[str, Entry]) -> str:
    """One line for each value."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(e.to_dict(), allow_nan=False)}" for key, e in entries.items())
    head = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1, allow_nan=False)
    return f'{head[:-2]},\n "values": {{\n{lines}\n }}\n}}\n'


def read_manifest(path: Path) -> tuple[dict[str, Any], Recipe | None, dict[str, Entry]]:
    """The manifest, what the values are made of (None: of op cases), and what is said of each.  Error: BundleError, OSError."""
    if path.is_symlink() or not path.is_file():
        raise BundleError(f"{path.parent} is no bundle: it has no manifest.json")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise BundleError(f"{path} has {size} bytes; a manifest has at most {MAX_BYTES}")
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise BundleError(f"{path} {error}") from None
    try:
        require(isinstance(found, dict) and found.get("format") == FORMAT, f"its format is not {FORMAT!r}")
        version = found.get("version")
        require(type(version) is int and version == VERSION, f"its version is {str(version)[:50]}, and {VERSION} is read here: "
                "make the bundle again, or take the refimpl that made it")
        require({"recipe", "files", "values", "conventions"} <= found.keys(), "it must have recipe, conventions, files, values")
        recipe = None if found["recipe"] is None else recipe_of(found["recipe"])
        mesh = recipe.mesh if recipe else dict.fromkeys(AXES, 1)
        require_conventions(found["conventions"])
        require(isinstance(found["files"], dict) and all(isinstance(v, str) for v in found["files"].values()),
                "files must be a table of texts")
        require(isinstance(found["values"], dict) and found["values"], "values must be a table with at least one value")
        entries = {key: entry_of(key, line, mesh) for key, line in found["values"].items()}
        if recipe:
            require_fitting(recipe, entries)
        return found, recipe, entries
    except ValueError as error:
        raise BundleError(f"{path} is damaged: {error}") from None


def require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def require_conventions(table: Any) -> None:
    require(isinstance(table, dict) and len(table) <= MAX_CONVENTIONS,
            f"conventions must be at most {MAX_CONVENTIONS}, in a table")
    for name, said in table.items():
        require(is_text(name) and isinstance(said, list) and len(said) == 2 and is_value(said[0]) and is_text(said[1]),
                f"convention {name[:100]!r} must be [value, sentence], not {str(said)[:200]}")


def recipe_of(said: Any) -> Recipe:
    """Error: ValueError."""
    names = {f.name for f in fields(Recipe)}
    require(isinstance(said, dict) and said.keys() == names, f"recipe must have {', '.join(sorted(names))}")
    mesh = said["mesh"]
    require(isinstance(mesh, dict) and tuple(mesh) == AXES and all(is_count(n) and n for n in mesh.values())
            and math.prod(mesh.values()) <= MAX_RANKS, f"mesh must have {', '.join(AXES)}, at most {MAX_RANKS} ranks in all")
    for f in fields(Recipe):
        value = said[f.name]
        require(f.type is not int or is_count(value), f"{f.name} must be a count, not {str(value)[:50]}")
        require(f.type is not float or is_finite(value), f"{f.name} must be a number, not {str(value)[:50]}")
        require(f.type is not str or isinstance(value, str) and len(value) < 50, f"{f.name} is no name: {str(value)[:50]}")
    require(isinstance(said["config"], dict) and said["config"].keys() == {f.name for f in fields(Config)},
            "config does not have the settings of a model")
    return Recipe(**said | {"config": Config(**said["config"])})


def require_fitting(recipe: Recipe, entries: Mapping[str, Entry]) -> None:
    """Error: ValueError unless the values are of this recipe's model, samples and steps, so that it can be run again."""
    cfg, shapes = recipe.config, {key: entry.place.shape for key, entry in entries.items()}
    require(cfg.n_layers <= len(entries) and recipe.steps <= len(entries), "there are fewer values than layers or steps")
    params = {f"params/{name}": row.shape for name, row in parameters(cfg, Mesh()).items()}
    require({key: shape for key, shape in shapes.items() if key.startswith("params/")} == params,
            "its parameters are not those of its config")
    for step in range(1, recipe.steps + 1):
        for name in ("tokens", "targets"):
            require(shapes.get(f"step{step}/{name}") == (recipe.batch_size, recipe.seq_len),
                    f"step{step}/{name} is not of batch_size x seq_len numbers")
        require(shapes.get(f"step{step}/loss") == (), f"it has no step{step}/loss")
    scores = recipe.batch_size * cfg.n_heads * recipe.seq_len ** 2
    require(scores <= MAX_SCORES, f"its attention has {scores} scores, more than the {MAX_SCORES} that are run again here")


def entry_of(key: str, line: Any, mesh: dict[str, int]) -> Entry:
    """One value's line, checked.  Error: ValueError."""
    def check(holds: Any, what: str) -> None:
        require(holds, f"value {key[:100]!r}: {what}, not {str(line)[:200]}")
    names = {f.name for f in fields(Entry)} - {"place"} | {"shape", "along"}
    check(isinstance(line, dict) and names <= line.keys() <= names | {"boxes"}, f"it must have {', '.join(sorted(names))}")
    for name, allowed in (("role", ROLES), ("phase", PHASES), ("kind", KINDS), ("dtype", DTYPES)):
        check(isinstance(line[name], str) and line[name] in allowed, f"{name} must be one of {', '.join(allowed)}")
    check(isinstance(line["sha256"], str) and len(line["sha256"]) == 64 and set(line["sha256"]) <= HEX, "sha256 has 64 digits")
    check(is_count(line["step"]) and is_count(line["terms"]), "step and terms are counts")
    noise, shape, along = line["noise"], line["shape"], line["along"]
    formats = set() if line["role"] == "input" else set(FORMATS)
    check(is_finite(line["uncertainty"]) and isinstance(noise, dict) and noise.keys() == formats
          and all(v is None or is_finite(v) for v in noise.values()), "uncertainty and noise must be numbers of at least 0")
    check(isinstance(shape, list) and len(shape) <= 32 and all(map(is_count, shape)), "shape must be a list of counts")
    check(isinstance(along, dict) and along.keys() <= {axis for axis in AXES if mesh[axis] > 1}
          and all(isinstance(how, str) and HOW.fullmatch(how) for how in along.values()), "along says how it lies on the mesh")
    ranks = math.prod(mesh.values())
    boxes = line.get("boxes", [[[0, n] for n in shape]] * ranks)
    check(isinstance(boxes, list) and len(boxes) == ranks and all(is_box(box, shape) for box in boxes),
          "boxes are (start, stop) of every axis, for every rank, within shape")
    check(all(fits_layout(axis, how, shape, boxes, mesh) for axis, how in along.items()),
          "what is cut zigzag or striped is cut over cp, and its boxes say how many positions each rank has")
    place = Placement(mesh, tuple(shape), along, tuple(tuple((a, b) for a, b in box) for box in boxes))
    return Entry(place=place, **{name: line[name] for name in names - {"shape", "along"}})


def is_box(box: Any, shape: list[int]) -> bool:
    return isinstance(box, list) and len(box) == len(shape) and all(
        isinstance(ends, list) and len(ends) == 2 and all(map(is_count, ends)) and ends[0] <= ends[1] <= n
        for ends, n in zip(box, shape))


def fits_layout(mesh_axis: str, how: str, shape: list[int], boxes: list[Any], mesh: dict[str, int]) -> bool:
    """Whether an axis that is cut by a layout of positions is cut over cp, and of each rank's box says how many it has."""
    kind, axis = layout_of(how)
    if kind == "contiguous":
        return True
    if mesh_axis != "cp" or axis >= len(shape):
        return False
    sizes = SequenceLayout(kind, shape[axis]).sizes(mesh["cp"])
    return all(box[axis] == [0, sizes[rank // mesh["tp"] % mesh["cp"]]] for rank, box in enumerate(boxes))


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2 ** 63


def is_finite(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max     # (JSON has integers of a thousand digits)
