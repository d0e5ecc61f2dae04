"""Localises a configuration that is not what was meant: a bad value taken, a default changed, a published model with the wrong
number of parameters or with ranks that do not hold all of them.
"""
import json
import math
import tracemalloc
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from refimpl.comm.paper import paper_mesh
from refimpl.models import PRESETS, Config, count, parameters
from refimpl.models.placements import heads
from refimpl.parallel import Cut, box
from refimpl.parallel.cuts import even_bounds

SMALL = {"vocab_size": 11, "n_layers": 3, "n_heads": 4, "d_model": 16, "max_seq_len": 8}
INF, NAN = float("inf"), float("nan")


# -- bad values ------------------------------------------------------------------------------------------------------

BAD = [
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ({"n_layers": -1}, "n_layers must be at least 1, got -1"),
    ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
    ({"n_heads": 0}, "n_heads must be at least 1, got 0"),
    ({"n_heads": -4}, "n_heads must be at least 1, got -4"),
    ({"d_model": 0}, "d_model must be at least 1, got 0"),
    ({"d_model": 18}, "d_model must be a multiple of n_heads.* got d_model 18, n_heads 4.*"),
    ({"max_seq_len": 0}, "max_seq_len must be at least 1, got 0"),
    ({"d_ff": -1}, "d_ff must be at least 1, got -1"),
    ({"n_kv_heads": -1}, "n_kv_heads must be at least 1, got -1"),
    ({"n_kv_heads": 3}, "n_heads must be a multiple of n_kv_heads, got 4 and 3"),
    ({"n_kv_heads": 8}, "n_heads must be a multiple of n_kv_heads, got 4 and 8"),
    ({"head_dim": -2}, "head_dim must be at least 1, got -2"),
    ({"head_dim": 3, "positions": "rope"}, "rope turns pairs of channels: head_dim must be even, got 3"),
    ({"norm": "batch_norm"}, "norm must be one of layer_norm, rms_norm, rms_norm_1.w, got 'batch_norm'"),
    ({"norm_place": "both"}, "norm_place must be one of pre, post, got 'both'"),
    ({"positions": "alibi"}, "positions must be one of learned, rope, none, got 'alibi'"),
    ({"positions": None}, "positions must be a text, got None"),
    ({"rope_pairing": "odd"}, "rope_pairing must be one of .*half.*, got 'odd'"),
    ({"ffn": "silu"}, "ffn must be one of gelu_tanh, gelu_erf, relu, swiglu, geglu_tanh, geglu_erf, got 'silu'"),
    ({"biases": ("qkv", "k")}, "biases must be among norm, qkv, o, mlp, head, got 'k'"),
    ({"windows": (3, -1)}, r"windows must be at most n_layers = 3 numbers of keys \(0: all\), got \(3, -1\)"),
    ({"windows": (1, 2, 3, 4)}, r"windows must be at most n_layers = 3 numbers of keys \(0: all\), got \(1, 2, 3, 4\)"),
    ({"vocab_multiple": 0}, "vocab_multiple must be at least 1, got 0"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ({"dropout": NAN}, r"dropout must be in \[0, 1\), got nan"),
    *(({name: value}, f"{name} must be a positive number, got {value}")
      for name in ("eps", "rope_theta", "embed_scale") for value in (0.0, -1.0, INF, NAN)),
    *(({"soft_cap": value}, f"soft_cap must be finite and at least 0, got {value}") for value in (-1.0, INF, NAN)),
]


@pytest.mark.parametrize("change, words", BAD, ids=[str(change) for change, _ in BAD])
def test_a_bad_value_is_an_error_that_names_the_field_and_what_would_be_right(change, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        Config(**SMALL | change)


WRONG_KIND = [{"biases": "norm"}, {"norm": ["layer_norm"]}, {"windows": 3}, {"windows": (2.5,)}, {"n_layers": 2.5},
              {"n_heads": 4.0}, {"vocab_size": "11"}, {"d_ff": None}, {"eps": "1e-5"}, {"dropout": None}, {"tied": "no"},
              {"qk_norm": 1}]


@pytest.mark.parametrize("change", WRONG_KIND, ids=str)
def test_a_value_of_the_wrong_kind_is_an_error_that_names_the_field(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Config(**SMALL | change)


def test_every_field_that_can_be_wrong_is_tried():
    assert {f.name for f in fields(Config)} - {name for change, _ in BAD for name in change} == {"tied", "qk_norm"}


def test_a_configuration_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Config(**SMALL).d_model = 32
    assert len({Config(**SMALL), Config(**SMALL), Config(**SMALL | {"d_ff": 7})}) == 2      # it is a key of caches


# -- what is left out, and what follows ------------------------------------------------------------------------------

def test_what_is_left_out_is_gpt2s():
    assert Config(**SMALL).to_dict() == SMALL | {
        "d_ff": 64, "n_kv_heads": 4, "head_dim": 4, "norm": "layer_norm", "norm_place": "pre", "eps": 1e-5,
        "positions": "learned", "rope_theta": 10000.0, "rope_pairing": "half", "ffn": "gelu_tanh",
        "biases": ["norm", "qkv", "o", "mlp"], "qk_norm": False, "windows": [], "embed_scale": 1.0, "tied": True,
        "soft_cap": 0.0, "vocab_multiple": 1, "dropout": 0.0}
    given = Config(**SMALL | {"d_model": 18}, d_ff=5, n_kv_heads=2, head_dim=6)             # 4 heads, whatever d_model is
    assert (given.d_ff, given.n_kv_heads, given.head_dim) == (5, 2, 6)


def test_lists_become_tuples():
    cfg = Config(**SMALL, biases=["norm"], windows=[2, 0])
    assert cfg.biases == ("norm",) and cfg.windows == (2, 0)
    assert cfg == Config(**SMALL, biases=("norm",), windows=(2, 0))


@pytest.mark.parametrize("cfg", [*PRESETS.values(), Config(**SMALL, windows=(3, 0), soft_cap=30.0, biases=("head",))],
                         ids=[*PRESETS, "small"])
def test_a_configuration_comes_back_from_json(cfg):
    assert Config(**json.loads(json.dumps(cfg.to_dict()))) == cfg


@pytest.mark.parametrize("windows, seen", [((), [None] * 3), ((5,), [5] * 3), ((5, 0), [5, None, 5]), ((1, 0, 2), [1, None, 2]),
                                           ((0,), [None] * 3)])
def test_windows_come_in_turn(windows, seen):
    assert [Config(**SMALL, windows=windows).window(i) for i in range(3)] == seen


@pytest.mark.parametrize("words, multiple, rows", [(11, 1, 11), (11, 8, 16), (16, 8, 16), (1, 128, 128), (50257, 128, 50304)])
def test_the_vocabulary_is_padded_to_a_multiple(words, multiple, rows):
    cfg = Config(**SMALL | {"vocab_size": words}, vocab_multiple=multiple)
    assert cfg.padded_vocab == rows == parameters(cfg, paper_mesh("tp=1"))["embed.w"].shape[0]


def test_three_of_the_feed_forward_layers_have_a_gate():
    gated = {ffn for ffn in ("gelu_tanh", "gelu_erf", "relu", "swiglu", "geglu_tanh", "geglu_erf")
             if Config(**SMALL, ffn=ffn).gated}
    assert gated == {"swiglu", "geglu_tanh", "geglu_erf"}
    for ffn in ("relu", "swiglu"):
        rows = parameters(Config(**SMALL, ffn=ffn), paper_mesh("tp=1"))
        assert ("layers.0.mlp.gate.w" in rows) == (ffn in gated)


# -- published models ------------------------------------------------------------------------------------------------

EMBEDDING = {"gemma-2b": 524_550_144, "gemma-7b": 786_825_216}             # Gemma Team 2024, table 2, counts it apart
PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3": 174_604_259_328,
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-33b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192, "mistral-7b": 7_241_732_096, "smollm2-135m": 134_515_008,
    "megatron-1.2b": 1_213_479_936, "megatron-2.5b": 2_490_408_960, "megatron-4.2b": 4_199_109_120,
    "megatron-8.3b": 8_317_040_640,                                        # with the padded vocabulary of 51,200
    "gemma-2b": 1_981_884_416 + EMBEDDING["gemma-2b"], "gemma-7b": 7_751_248_896 + EMBEDDING["gemma-7b"],
}


def test_the_published_models_have_their_numbers_of_parameters_and_nothing_is_allocated():
    tracemalloc.start()
    try:
        assert {name: count(cfg) for name, cfg in PRESETS.items()} == PUBLISHED
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    for name, size in EMBEDDING.items():
        assert math.prod(parameters(PRESETS[name], paper_mesh("tp=1"))["embed.w"].shape) == size


def test_the_feed_forward_width_of_llama_is_two_thirds_of_four_rounded_up():
    widths = {cfg.d_model: cfg.d_ff for name, cfg in PRESETS.items() if name.startswith("llama-")}
    assert widths == {4096: 11008, 5120: 13824, 6656: 17920, 8192: 22016}


@pytest.mark.parametrize("tp", (2, 4, 8))
@pytest.mark.parametrize("name", PRESETS)
def test_what_the_ranks_hold_is_the_whole_and_the_replicas(name, tp):
    """Cut once, replicated on every rank, and kv heads once more for each rank after the first that shares them."""
    cfg, mesh = PRESETS[name], paper_mesh(f"tp={tp}")
    held, replicas = 0, 0
    shared = sum(stop - start for start, stop in heads(cfg, tp)[1]) - cfg.n_kv_heads
    for key, row in parameters(cfg, mesh).items():
        size = math.prod(row.shape)
        if isinstance(row.placement, Cut):
            held += sum(stop - start for start, stop in row.placement.bounds) * size // row.shape[row.placement.axis]
            if ".attn.k." in key or ".attn.v." in key:
                replicas += shared * cfg.head_dim * size // row.shape[row.placement.axis]
        else:
            held, replicas = held + tp * size, replicas + (tp - 1) * size
        first = math.prod(s.stop - s.start for s in box(row.placement, row.shape, mesh))    # a mesh on paper is rank 0
        assert first == (size if not isinstance(row.placement, Cut) else
                         size // row.shape[row.placement.axis] * row.placement.bounds[0][1])
    assert held == PUBLISHED[name] + replicas
    assert shared == {"gemma-2b": tp - 1, "smollm2-135m": {2: 1, 4: 2, 8: 5}[tp]}.get(name, 0)


def test_a_rank_of_gpt2_small_on_two_holds_its_words_heads_and_units():
    """Half of the matrices by hand: 50257 words are 25129 and 25128."""
    D, F, V = 768, 3072, 50257
    whole = 1024 * D + 12 * (4 * D + 2 * D) + 2 * D                        # positions; norms, two biases; the last norm
    cut = even_bounds(V, 2)[0][1] * D + 12 * (4 * D * D // 2 + 3 * D // 2 + 2 * D * F // 2 + F // 2)
    mesh = paper_mesh("tp=2")
    mine = sum(math.prod(s.stop - s.start for s in box(row.placement, row.shape, mesh))
               for row in parameters(PRESETS["gpt2-small"], mesh).values())
    assert mine == whole + cut == 62_641_920


def test_presets_are_changed_by_replace():
    longer = replace(PRESETS["llama-7b"], max_seq_len=4096)
    assert count(longer) == count(PRESETS["llama-7b"]) and longer != PRESETS["llama-7b"]
