"""The cases of the collectives: what each rank holds, cut in every way, the layouts before and after, and the other arguments.

SPLITS are the ways to share a few rows among any number of ranks: more ranks than rows, ranks without any, no rows at all.
"""
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np

from refimpl.comm import Comm, shares
from refimpl.rng import draw

Shape = tuple[int, ...]
Split = Callable[[int], Shape]                          # number of ranks -> what each of them holds
Held = Callable[[int, int], tuple[Shape, dict[str, Any]]]   # number of ranks, rank -> its x's shape, the static arguments


@dataclass(frozen=True)
class Collective:
    """A collective's input.

    before, after  the layouts, as check_adjoint takes them
    ids            a second argument, integers that all ranks have in common
    """
    name: str
    before: Any
    after: Any
    held: Held
    ids: np.ndarray | None = None

    def arguments(self, comm: Comm, dtype: str) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        """This rank's arrays and the static arguments besides comm."""
        shape, static = self.held(comm.size, comm.rank)
        name = self.name if self.before == "replicated" else f"{self.name}/{comm.rank}"
        return (draw(name, shape).astype(dtype), *([] if self.ids is None else [self.ids])), static


def uneven(size: int) -> Shape:
    """Shares 3, 0, 2, 1, 3, 0, 2, 1, ...: one rank in four holds nothing."""
    return tuple((3, 0, 2, 1)[r % 4] for r in range(size))


SPLITS: dict[str, Split] = {
    "uneven": uneven,
    "one row on the first rank": lambda size: shares(1, size),
    "all on the last rank": lambda size: (0,) * (size - 1) + (3,),
    "fewer rows than ranks": lambda size: shares(size - 1, size),
    "one each, the rest on one": lambda size: tuple(1 + 3 * (r == size // 2) for r in range(size)),
    "every other rank": lambda size: tuple(2 * (r % 2 == 0) for r in range(size)),
    "nothing": lambda size: (0,) * size,
}


def every_split(n: int, size: int) -> Iterator[Shape]:
    """Every way to share `n` rows among `size` ranks.

    >>> list(every_split(2, 2))
    [(0, 2), (1, 1), (2, 0)]
    """
    if size == 1:
        yield (n,)
        return
    for first in range(n + 1):
        for rest in every_split(n - first, size - 1):
            yield first, *rest


def resized(shape: Shape, axis: int, n: int) -> Shape:
    """`shape` with `n` along `axis`."""
    out = list(shape)
    out[axis] = n
    return tuple(out)


def all_of(before: str, after: str, cases: list[tuple[str, Held]]) -> list[Collective]:
    return [Collective(name, before, after, held) for name, held in cases]


def even(n: int) -> Split:
    return lambda size: (n,) * size


# -- values that are whole on every rank --------------------------------------------------------------------------------

def uncut(before: str, after: str) -> list[Collective]:
    def whole(*shape: int) -> Held:
        return lambda size, rank: (shape, {})
    return all_of(before, after, [("matrix", whole(3, 5)), ("scalar", whole()), ("one element", whole(1)),
                                  ("empty", whole(0, 3)), ("batch", whole(2, 3, 7))])


def from_root(after: str) -> list[Collective]:
    def whole(root: Callable[[int], int], *shape: int) -> Held:
        return lambda size, rank: (shape, {"root": root(size)})
    return all_of("per_rank", after, [
        ("matrix, the last rank's", whole(lambda size: size - 1, 3, 5)), ("scalar, the first's", whole(lambda size: 0)),
        ("batch, the middle one's", whole(lambda size: size // 2, 2, 3, 7)), ("empty", whole(lambda size: 0, 0, 3))])


# -- values that are cut along an axis (whose size in a shape below is written 0) -----------------------------------------

def both_ways(before: str, after: str) -> list[Collective]:
    """A whole that is cut, or parts that are joined, along every axis and in every way."""
    def along(shape: Shape, axis: int, split: Split, given: bool = True) -> Held:
        def held(size: int, rank: int) -> tuple[Shape, dict[str, Any]]:
            sizes = split(size)
            static = {"axis": axis, "sizes": sizes} if given else {"axis": axis}
            return resized(shape, axis, sizes[rank] if before == "shard" else sum(sizes)), static
        return held
    places: list[tuple[Shape, int]] = [((2, 0, 5), 1), ((3, 0), -1), ((0, 5), 0), ((0,), 0), ((3, 0), -1), ((2, 0, 2), 1),
                                       ((2, 0), 1)]
    cases = [("last axis", along((3, 0), -1, even(2), False)), ("first axis", along((0, 3, 5), 0, even(2), False)),
             ("other axis empty", along((0, 0), 1, even(2), False)),
             *((f"{name}, axis {axis} of {len(shape)}", along(shape, axis, split))
               for (name, split), (shape, axis) in zip(SPLITS.items(), places, strict=True))]
    if before != "shard":
        cases.append(("default shares of seven", along((0, 2), 0, lambda size: shares(7, size), False)))
    return all_of(before, after, cases)


def exchanges() -> list[Collective]:
    """One axis is cut before, another after, each in a way of its own."""
    def both(shape: Shape, split: int, join: int, to: Split, of: Split, given: bool = True) -> Held:
        def held(size: int, rank: int) -> tuple[Shape, dict[str, Any]]:
            sizes = {"split_sizes": to(size), "join_sizes": of(size)} if given else {}
            return (resized(resized(shape, split, sum(to(size))), join, of(size)[rank]),
                    {"split": split, "join": join, **sizes})
        return held
    ways = list(SPLITS.values())
    places: list[tuple[Shape, int, int]] = [((0, 0), 0, 1), ((0, 0), 1, 0), ((0, 2, 0), -1, 0), ((2, 0, 3, 0), 1, 3),
                                            ((0, 0, 3), 1, 0), ((2, 0, 0), 1, 2), ((0, 0), 0, -1)]
    return all_of("shard", "shard", [
        ("rows to columns", both((0, 0), 1, 0, even(2), even(3), False)),
        ("tokens to heads", both((2, 0, 0, 3), 2, 1, lambda size: shares(3, size), even(2), False)),
        ("other axis empty", both((0, 0, 0), 1, 2, even(2), even(1), False)),
        *((f"{name}, axis {join} to {split}", both(shape, split, join, to, of)) for (name, to), of, (shape, split, join) in zip(
            SPLITS.items(), ways[3:] + ways[:3], places, strict=True))])


# -- values of every rank's own -----------------------------------------------------------------------------------------

def rows_by_counts() -> list[Collective]:
    def table(count: Callable[[int, int, int], int], *tail: int) -> Held:
        """count: source, target, number of ranks -> rows"""
        def held(size: int, rank: int) -> tuple[Shape, dict[str, Any]]:
            counts = tuple(tuple(count(source, target, size) for target in range(size)) for source in range(size))
            return (sum(counts[rank]), *tail), {"counts": counts}
        return held
    return all_of("per_rank", "per_rank", [
        ("one row each", table(lambda s, t, size: 1, 2)),
        ("uneven", table(lambda s, t, size: (3, 0, 2, 1)[(s + 2 * t) % 4], 2, 3)),
        ("all to the last rank", table(lambda s, t, size: s % 3 * (t == size - 1), 2)),
        ("all from the last rank", table(lambda s, t, size: (t % 3 + 1) * (s == size - 1))),
        ("one row of all ranks", table(lambda s, t, size: int(s == 0 and t == size // 2), 1)),
        ("every row stays", table(lambda s, t, size: 2 * (s == t), 2)), ("no rows", table(lambda s, t, size: 0, 2)),
        ("rows of nothing", table(lambda s, t, size: 2, 0)), ("equal shares", lambda size, rank: ((2 * size, 3), {}))])


def round_the_ring() -> list[Collective]:
    def ring(shift: int, split: Split, *tail: int, given: bool = True) -> Held:
        return lambda size, rank: ((split(size)[rank], *tail), {"shift": shift, **({"sizes": split(size)} if given else {})})
    return all_of("per_rank", "per_rank", [
        ("matrix", ring(1, even(3), 5, given=False)), ("back", ring(-1, even(1), 2, 3, given=False)),
        ("nowhere", ring(0, even(4), given=False)), ("empty", ring(1, even(2), 0, given=False)),
        *((f"{name}, by {shift}", ring(shift, split, 2))
          for (name, split), shift in zip(SPLITS.items(), (1, -1, 2, 1, -3, 1, 1), strict=True))])


# -- the vocabulary -----------------------------------------------------------------------------------------------------

def vocabulary(after: Any, ids: np.ndarray, shape: Callable[[int], Shape], names: dict[str, dict[str, Any]]
               ) -> list[Collective]:
    """Rows or columns of 11 words (of which some ranks have more than others, or, padded to 32, none), for each of `names`."""
    def held(n_rows: int, static: dict[str, Any]) -> Held:
        return lambda size, rank: (shape(shares(n_rows, size)[rank]), {"n_words": 11, "n_rows": n_rows, **static})
    return [Collective(f"{name}, {n_rows} rows", ("shard", None), after, held(n_rows, static), ids)
            for name, static in names.items() for n_rows in (11, 32)]


IDS = np.array([[0, 10, 5, 5], [7, 3, 10, 0]])
IGNORED = np.array([[0, -100, 5, 5], [-100, 3, 10, 0]])

VOCABULARY = {
    "vocab_parallel_embedding": vocabulary("partial", IDS, lambda n: (n, 3), {"ids": {}}),
    "vocab_parallel_cross_entropy": vocabulary(("replicated", None), IDS, lambda n: (2, 4, n), {"all count": {}}) + vocabulary(
        ("replicated", None), IGNORED, lambda n: (2, 4, n), {
            "some ignored": {}, "smoothing": {"smoothing": 0.1}, "z-loss": {"z_loss": 0.1},
            "smoothing over others": {"smoothing": 0.1, "smoothing_over": "others", "z_loss": 0.01}}),
}
COLLECTIVES = {                                         # of these, every one only moves and adds up what it is given
    "copy_to": uncut("replicated", "per_rank"),
    "reduce_from": uncut("partial", "replicated"),
    "as_partial": uncut("per_rank", "partial"),
    "gather_from": both_ways("shard", "replicated"),
    "scatter_to": both_ways("replicated", "shard"),
    "all_gather": both_ways("shard", "per_rank"),
    "reduce_scatter": both_ways("partial", "shard"),
    "all_to_all": exchanges(),
    "all_to_all_rows": rows_by_counts(),
    "ring_shift": round_the_ring(),
    "broadcast_from": from_root("replicated"),
    "broadcast": from_root("per_rank"),
}
