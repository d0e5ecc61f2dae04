"""What is in a bundle, as text."""
import fnmatch
import math
import textwrap
from collections import Counter

import numpy as np

from refimpl.golden.bundle import Bundle
from refimpl.golden.conventions import Value, text_of
from refimpl.golden.manifest import Entry

WIDTH = 80


def listing(bundle: Bundle, pattern: str | None = None) -> str:
    """The first line says how much there is.  With a pattern: the numbers of the values whose names match it."""
    if pattern is not None:
        return numbers(bundle, pattern)
    recipe, entries = bundle.recipe, bundle.entries
    total = sum(math.prod(e.place.shape) for e in entries.values())
    mesh = ",".join(f"{axis}={n}" for axis, n in recipe.mesh.items()) if recipe else ""
    lines = [f"{len(entries)} values, {total} numbers, " + (
        f"{plural(recipe.steps, 'step')} of {plural(recipe.config.n_layers, 'layer')} on {mesh}" if recipe else "cases of ops")]
    lines += ["", "conventions"] + [convention(name, *said) for name, said in bundle.conventions.items()]
    lines += ["", "values" + " " * 44 + "shape          kind       rounding in bfloat16"]
    lines += [f"  {key:<48} {str(list(e.place.shape)):<14} {e.kind:<10} {relative(bundle, key, e)}{place(e)}"
              for key, e in entries.items()]
    roles = Counter(e.role for e in entries.values())
    return "\n".join(lines + ["", ", ".join(f"{n} {role}" for role, n in roles.items())])


def convention(name: str, value: Value, sentence: str) -> str:
    return textwrap.fill(f"{text_of(value)}: {sentence}", WIDTH, initial_indent=f"  {name:<24} ", subsequent_indent=" " * 27,
                         break_on_hyphens=False)


def plural(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def place(entry: Entry) -> str:
    return "".join(f"  {axis}: {how}" for axis, how in entry.place.along.items() if how != "replicated")


def relative(bundle: Bundle, key: str, entry: Entry) -> str:
    """The largest sigma over the largest number."""
    noise = entry.noise.get("bfloat16")
    size = max((float(np.abs(bundle.value(key, r)).max(initial=0.0)) for r in entry.place.holders()), default=0.0)
    return f"{noise / size:8.1e}" if noise and size and math.isfinite(size) else "       -"


def numbers(bundle: Bundle, pattern: str) -> str:
    keys = fnmatch.filter(bundle.entries, pattern)
    if not keys:
        raise ValueError(f"no value is called {pattern!r}: `refimpl golden show` lists what there is")
    out = []
    for key in keys:
        whole = "per rank" not in bundle.entries[key].place.along.values()
        for rank in [None] if whole else bundle.entries[key].place.holders():
            of_rank = "" if rank is None else f", rank {rank}"
            out.append(f"{key}{of_rank}\n{np.array2string(bundle.value(key, rank), threshold=200, precision=9)}")
    return "\n".join(out)
