"""Which of a stack's arrays belongs to which value of a bundle: by its own name, or by another stack's names (names.py)."""
import difflib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Iterator, Sequence

import numpy as np

from refimpl.golden.actual import Dumped, Set
from refimpl.golden.bundle import Bundle
from refimpl.golden.names import NAMES, Names, to_ours


class UsageError(ValueError):
    """What was asked for cannot be done, with the reason."""


@dataclass(frozen=True)
class Found:
    """A value of a stack's: the whole of it (rank None) or one rank's part, in float64 once it is read.

    problem  why it cannot be compared, "" where it can
    again    another array may hold it, too
    """
    key: str
    rank: int | None
    where: str
    dtype: str
    read: Callable[[], np.ndarray]
    problem: str = ""
    again: bool = False


def matched(sets: Sequence[Set], bundle: Bundle, names: Names | None = None, prefix: str = "") -> list[Found]:
    """Everything that can be compared, in the bundle's order.

    prefix  what is missing before each name: "step1/grad"
    Error:  UsageError for a name that stands for nothing in the bundle, and for another number of ranks
    """
    if len(sets) not in (1, bundle.ranks):
        lacks = f"those of rank {len(sets)} are missing, or " if len(sets) < bundle.ranks else ""
        raise UsageError(f"there are arrays of {len(sets)} ranks, and the bundle is of {bundle.ranks}: {lacks}make one for "
                         "your mesh")
    order = {key: k for k, key in enumerate(bundle.entries)}
    out = [found for r, arrays in enumerate(sets) for name, dumped in arrays.items()
           for found in values_in(dumped, whole_name(prefix, name), bundle, names, r if len(sets) > 1 else None)]
    return sorted(once(out), key=lambda f: (order[f.key], f.rank or 0))


def whole_name(prefix: str, name: str) -> str:
    return f"{prefix.rstrip('/')}/{name}" if prefix else name


def left_aside(sets: Sequence[Set], names: Names | None, prefix: str = "") -> list[str]:
    """Names of the arrays that are no value of the bundle, as `names` knows."""
    return list(dict.fromkeys(name for arrays in sets for name in arrays
                              if names and names.leaves_out(*split(whole_name(prefix, name))[1:])))


def once(found: Sequence[Found]) -> Iterator[Found]:
    """Every value once, and those that hold one again and differ.  Error: UsageError for two that stand for the same value."""
    first: dict[tuple[str, int | None], Found] = {}
    for f in sorted(found, key=lambda f: f.again):
        of = first.setdefault((f.key, f.rank), f)
        if f is of:
            yield f
        elif not f.again:
            raise UsageError(f"{of.where} and {f.where} stand for the same value")
        elif f.problem or of.problem or not np.array_equal(f.read(), of.read(), equal_nan=True):
            yield replace(f, problem=f.problem or f"{f.where} differs from {of.where}, and both are one matrix")


def values_in(dumped: Dumped, name: str, bundle: Bundle, names: Names | None, rank: int | None) -> Iterator[Found]:
    """The values of the bundle that one array holds."""
    start, kind, theirs = split(name)
    if names and names.leaves_out(kind, theirs):
        return
    tied = bundle.recipe is not None and bundle.recipe.config.tied
    found = names.find(kind, theirs, tied) if names and theirs else None
    again = names is not None and found is not None and found[0] in names.again
    if found is None:
        if name not in bundle.entries:
            raise UsageError(f"{dumped.where} stands for nothing in the bundle{near(name, bundle, names)}")
        keys = [name]
    else:
        rule, layer = found
        layers = range(bundle.recipe.config.n_layers if bundle.recipe else 0) if rule.stacked else [layer]
        keys = [start + ours.format(i=i) for i in layers for ours in rule.ours]
        if missing := [key for key in keys if key not in bundle.entries]:
            raise UsageError(f"{dumped.where} stands for {missing[0]}, which the bundle has not: its model has no such part")
    if rank is None and bundle.ranks > 1 and "per rank" in bundle.entries[keys[0]].place.along.values():
        raise UsageError(f"{dumped.where} is each rank's own: give one file for each rank")
    shapes = [bundle.shape(key, rank) for key in keys]
    sizes = [math.prod(shape) for shape in shapes]
    problem = ""
    if found is None and dumped.shape != shapes[0] and (dumped.shape, shapes[0]) != ((1,), ()):
        problem = f"has shape {list(dumped.shape)}, {keys[0]} has {list(shapes[0])}"
    elif math.prod(dumped.shape) != sum(sizes):
        problem = f"has shape {list(dumped.shape)}, {sum(sizes)} numbers belong in it ({', '.join(keys[:3])})"
    elif found is not None:
        try:
            to_ours(found[0], np.broadcast_to(np.zeros(()), dumped.shape), shapes)
        except (ValueError, IndexError, TypeError):
            problem = f"has shape {list(dumped.shape)}, which cannot be {keys[0]} of shape {list(shapes[0])}" + (
                f" and {len(keys) - 1} more" if len(keys) > 1 else "")

    def part(k: int) -> np.ndarray:
        array = dumped.read()
        if found is not None:
            array = to_ours(found[0], array, shapes)[k]
        return array.reshape(shapes[k]).astype(np.float64)
    for k, key in enumerate(keys):
        yield Found(key, rank, dumped.where, dumped.dtype, partial(part, k), problem, again)


def split(name: str) -> tuple[str, str, str]:
    """The beginning of a key, its kind, and the name.

    >>> split("step1/grad/layers.0.attn.q.w"), split("params/embed.w"), split("step1/loss")
    (('step1/grad/', 'grad', 'layers.0.attn.q.w'), ('params/', 'params', 'embed.w'), ('', '', ''))
    """
    parts = name.split("/")
    k = next((k for k, part in enumerate(parts[:-1]) if not part.startswith("step")), None)
    return ("", "", "") if k is None else ("/".join(parts[:k + 1]) + "/", parts[k], "/".join(parts[k + 1:]))


def near(name: str, bundle: Bundle, names: Names | None) -> str:
    """Advice on a name that is not known."""
    kind, theirs = split(name)[1:] if "/" in name else ("", name)
    whose = [other for other, known in NAMES.items() if names is None for k in ([kind] if kind else ("params", "act"))
             if known.find(k, theirs) or known.leaves_out(k, theirs)]
    say = f"; it is a name of {' and '.join(dict.fromkeys(whose))}: --names says whose it is" if whose else ""
    if "/" not in name:
        return f": it should begin with params/, step1/act/, step1/grad/ or the like, or --as says so once for all{say}"
    if say:
        return say
    if names:
        return f": those names have no rule for it among the {'activations' if kind in ('act', 'dact') else 'parameters'}"
    close = difflib.get_close_matches(name, bundle.entries, n=1)
    return f": is {close[0]} meant?" if close else ": `golden show` lists what there is"
