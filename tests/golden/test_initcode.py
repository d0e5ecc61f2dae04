"""Localises programs that make other weights or inputs than the reference: in C, JavaScript or plain Python."""
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_rng import DRAWS, EMBED, INTEGERS, STREAMS

import refimpl
from refimpl.comm import Mesh
from refimpl.golden.initcode import LANGUAGES, init_code
from refimpl.golden.recipe import MODELS, Recipe, batch, spread, values, weights
from refimpl.models.placements import parameters
from refimpl.ops.losses import IGNORE
from refimpl.rng import flat_index

LIMIT = 60
COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
NODE = shutil.which("node")
RECIPE = Recipe(MODELS["gpt-micro"], seed=3)
PARAMETERS = ("embed.w", "layers.0.attn.q.w", "layers.1.mlp.down.b", "layers.0.norm1.g", "norm.g")


class Program:
    """What `init-code` prints, as a program in `folder`: run it, or have it show expressions in its language."""

    def __init__(self, language, folder):
        if language == "c" and COMPILER is None:
            pytest.skip("there is no C compiler")
        if language == "js" and NODE is None:
            pytest.skip("there is no node")
        self.language, self.folder = language, folder
        self.path = folder / LANGUAGES[language].removesuffix(".txt")
        self.path.write_text(init_code(language), encoding="utf-8")
        self.command = {"c": [folder / "a.out"], "js": [NODE, self.path], "python": [sys.executable, self.path]}[language]
        if language == "c":
            self.compile(self.path, folder / "a.out")

    def compile(self, source, out):
        """As C99, without a warning."""
        flags = ["-std=c99", "-O2", "-Wall", "-Wextra", "-pedantic", "-Werror"]
        done = subprocess.run([COMPILER, *flags, source, "-o", out, "-lm"], capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr

    def __call__(self, *arguments):
        """The lines that it prints."""
        done = subprocess.run([*self.command, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.splitlines()

    def show(self, function, calls):
        """The results of a function of the program, in it, for lists of arguments."""
        if self.language == "python":
            return [repr(runpy.run_path(str(self.path))[function](*call)) for call in calls]
        if self.language == "js":
            def text(a):
                return json.dumps(a, ensure_ascii=False) if isinstance(a, (str, float)) else f"{a}n" if a > 2 ** 53 else str(a)
            lines = [f"console.log(String({function}({', '.join(map(text, call))})));" for call in calls]
            source = self.folder / "shown.js"
            source.write_text(f"{self.path.read_text(encoding='utf-8')}\n{chr(10).join(lines)}\n", encoding="utf-8")
            return subprocess.run([NODE, source], capture_output=True, text=True, timeout=LIMIT, check=True).stdout.splitlines()

        def text(a):
            return json.dumps(a, ensure_ascii=False) if isinstance(a, (str, float)) else f"UINT64_C({a % 2 ** 64})"
        form = '"%.17g\\n", ' if function == "value" else '"%" PRIu64 "\\n", (uint64_t)'
        lines = [f"    printf({form}{function}({', '.join(map(text, call))}));" for call in calls]
        source = self.folder / "shown.c"
        source.write_text('#define main unused\n#include "init.c"\n#undef main\nint main(void) {\n' + "\n".join(lines) +
                          "\n    return 0;\n}\n", encoding="utf-8")
        self.compile(source, self.folder / "shown")
        return subprocess.run([self.folder / "shown"], capture_output=True, text=True, timeout=LIMIT, check=True
                              ).stdout.splitlines()

    def name(self, function):
        return {"stream_of_step": "streamOfStep"}.get(function, function) if self.language == "js" else function


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory):
    return Program(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("seed", (0, 3, 2 ** 63))
@pytest.mark.parametrize("name", PARAMETERS)
def test_values_are_the_references_bit_for_bit(program, name, seed):
    row = parameters(RECIPE.config, Mesh())[name]
    (offset, scale), n = spread(name, row), int(np.prod(row.shape))
    lines = program(seed, name, n, offset, scale)
    assert np.array([float(x) for x in lines]).tobytes() == values(seed, name, np.arange(n), offset, scale).tobytes()


def test_the_whole_of_a_parameter_is_the_models(program):
    for name in ("layers.0.attn.k.w", "norm.b", "layers.1.norm2.g"):
        whole = weights(RECIPE, Mesh())[name].array
        lines = program(RECIPE.seed, name, whole.size, *spread(name, parameters(RECIPE.config, Mesh())[name]))
        assert [float(x) for x in lines] == whole.ravel().tolist()


@pytest.mark.parametrize("offset, scale", [(0, 0.1), (1, 2.0 ** -9), (-0.5, 3.0)])
def test_any_offset_and_scale(program, offset, scale):
    wanted = values(1, "größe", np.arange(50), offset, scale)
    assert [float(x) for x in program(1, "größe", 50, offset, scale)] == wanted.tolist()


@pytest.mark.parametrize("step", (1, 2))
def test_tokens_and_ignored_targets_of_a_step(program, step):
    b, recipe = batch(RECIPE, Mesh(), step), RECIPE
    B, T = recipe.batch_size, recipe.seq_len
    tokens = np.array(program(recipe.seed, "tokens", step, B * (T + 1), recipe.config.vocab_size), dtype=int).reshape(B, T + 1)
    ignored = np.array(program(recipe.seed, "ignored", step, B * T), dtype=int).reshape(B, T)
    assert np.array_equal(tokens[:, :-1], b.tokens) and ignored.any()
    assert np.array_equal(np.where(ignored, IGNORE, tokens[:, 1:]), b.targets)


def test_tokens_of_a_large_vocabulary(program):
    recipe = Recipe(replace(MODELS["gpt-micro"], vocab_size=50257))
    tokens = batch(recipe, Mesh(), 1).tokens
    assert [int(x) for x in program(0, "tokens", 1, 8, 50257)] == tokens[0].tolist()


def test_streams_are_the_published_ones(program):
    plain = {key: value for key, value in STREAMS.items() if key[2] is None}
    stepped = {key: value for key, value in STREAMS.items() if key[2] is not None}
    assert [int(x) for x in program.show("stream", [key[:2] for key in plain])] == list(plain.values())
    assert [int(x) for x in program.show(program.name("stream_of_step"), stepped)] == list(stepped.values())


def test_draws_and_integers_are_the_published_ones(program):
    name = "draw24"
    assert [int(x) for x in program.show(name, [(EMBED, i) for i in DRAWS])] == list(DRAWS.values())
    pairs = [int(x) for x in program.show(name, [(EMBED, i) for i in range(2 * len(INTEGERS))])]
    assert [(high * 2 ** 24 + low) % 50257 for high, low in zip(pairs[::2], pairs[1::2])] == INTEGERS
    lines = program(0, "embed.w", 4, 0, 1)
    assert [float(x) * 2 ** 23 + 2 ** 23 for x in lines] == [DRAWS[i] for i in range(4)]


def test_a_shard_made_alone_is_the_slice(program):
    """Rows 3 to 5 and columns 12 to 23 of [16, 24], by their indices in the whole."""
    name = "layers.0.attn.q.w"
    row = parameters(RECIPE.config, Mesh())[name]
    offset, scale = spread(name, row)
    index = flat_index([np.arange(3, 6), np.arange(12, 24)], row.shape)
    assert index[1, 2] == 4 * 24 + 14                   # i = r · C + c, as the text says
    key = int(program.show("stream", [(RECIPE.seed, name)])[0])
    lines = program.show("value", [(key, int(i), float(offset), float(scale)) for i in index.ravel()])
    assert [float(x) for x in lines] == weights(RECIPE, Mesh())[name].array[3:6, 12:24].ravel().tolist()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_text_stands_alone(language):
    """No file of this machine or of the package is named, none is opened, nothing is imported but the standard library."""
    text = init_code(language)
    assert str(Path(refimpl.__file__).parent) not in text and str(Path.home()) not in text
    assert not re.search(r"(?<![\w.])/(tmp|home|root|usr|opt|Users|var|mnt)\b|[A-Z]:\\", text)
    assert not re.search(r"\b(f?open|require|readFile\w*|import refimpl|from refimpl)\b", text)
    imported = re.findall(r"^(?:import|from) (\w+)|^#include <(\w+)", text, re.MULTILINE)
    assert {a or b for a, b in imported} <= {"sys", "inttypes", "stdint", "stdio", "stdlib", "string"}
    assert text.isascii() and max(map(len, text.splitlines())) <= 140


def test_what_is_not_understood_is_answered_with_the_usage(program):
    done = subprocess.run([*program.command, "1", "embed.w"], capture_output=True, text=True, timeout=LIMIT,
                          stdin=subprocess.DEVNULL)
    assert not done.stdout and "give SEED NAME N OFFSET SCALE" in done.stderr
