"""Localises faults of other stacks' names: a layout that is turned, cut or joined wrongly, a parameter that no rule knows."""
from dataclasses import replace

import numpy as np
import pytest

from refimpl.comm import Mesh
from refimpl.comm.base import SerialComm
from refimpl.golden.actual import Dumped
from refimpl.golden.bundle import Bundle
from refimpl.golden.manifest import Entry, whole_box
from refimpl.golden.match import UsageError, left_aside, matched
from refimpl.golden.names import NAMES, to_ours, to_theirs
from refimpl.golden.place import Placement
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.trace import trace

LAYERS = 2
MODEL_OF = {"hf-gpt2": "gpt-micro", "llm.c": "gpt-micro", "hf-llama": "llama-micro"}
KINDS = {"params": "params/", "act": "step1/act/", "dact": "step1/dact/", "grad": "step1/grad/", "m": "step1/m/"}
BIASED = replace(MODELS["llama-micro"], biases=("qkv", "o", "mlp"))     # as of Qwen: q, k and v; nobody has the others


@pytest.fixture(scope="module")
def traces():
    """Of every model: the recipe and its values."""
    recipes = {name: Recipe(config, steps=1) for name, config in (*MODELS.items(), ("biased", BIASED))}
    return {name: (recipe, {key: v.array for key, v in trace(recipe, SerialComm()).items()})
            for name, recipe in recipes.items()}


def bundle_of(recipe, values):
    """A bundle in memory: as much of one as names need."""
    entries = {key: Entry("act", "forward", 1, "F64", Placement(Mesh().dims, a.shape, {}, (whole_box(a.shape),)),
                          "canonical", "",
                          0.0, {}, 1) for key, a in values.items()}
    return Bundle(None, {}, recipe, entries, {"shared.safetensors": values})


def keys_of(rule, start):
    """What a rule is about, layer by layer: [(their name, our keys)]."""
    layers = range(LAYERS) if "{i}" in rule.ours[0] else [""]
    if rule.stacked:
        return [(rule.theirs, [start + ours.format(i=i) for i in layers for ours in rule.ours])]
    return [(rule.theirs.format(i=i), [start + ours.format(i=i) for ours in rule.ours]) for i in layers]


def theirs_of(names, values, kind="params"):
    """The values of a kind by their names, in their layouts."""
    out = {}
    for rule in names.acts if kind in ("act", "dact") else names.params:
        for theirs, keys in keys_of(rule, KINDS[kind]):
            if all(key in values for key in keys):
                out[KINDS[kind] + theirs] = to_theirs(rule, [values[key] for key in keys])
    return out


def dumped(arrays):
    return [{name: Dumped(name, a.shape, a.dtype.name, lambda a=a: a) for name, a in arrays.items()}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose, model", [*MODEL_OF.items(), ("hf-llama", "biased")])
def test_there_and_back_is_the_same_bit_for_bit(traces, whose, model, kind):
    recipe, values = traces[model]
    bundle, theirs = bundle_of(recipe, values), theirs_of(NAMES[whose], values, kind)
    found = matched(dumped(theirs), bundle, NAMES[whose])
    assert len(found) >= len(theirs) > 5 and not any(f.problem for f in found)
    for f in found:
        assert f.read().shape == values[f.key].shape and f.read().tobytes() == values[f.key].tobytes(), f.key


@pytest.mark.parametrize("whose, model", [*MODEL_OF.items(), ("hf-llama", "biased")])
def test_every_parameter_has_exactly_one_rule(traces, whose, model):
    recipe, values = traces[model]
    names = NAMES[whose]
    ours = [key for rule in names.params for _, keys in keys_of(rule, "params/") for key in keys]
    there = [key for key in values if key.startswith("params/")]
    assert sorted(key for key in ours if key in there) == sorted(there)         # each once
    for theirs in theirs_of(names, values):
        assert sum(rule.theirs == names.find("params", theirs[7:])[0].theirs for rule in names.params) == 1


@pytest.mark.parametrize("whose", MODEL_OF)
def test_every_activation_of_theirs_is_one_of_ours(traces, whose):
    """A rule for what no model has would never be used."""
    recipe, values = traces[MODEL_OF[whose]]
    ours = [key for rule in NAMES[whose].acts for _, keys in keys_of(rule, "step1/act/") for key in keys]
    assert len(set(ours)) == len(ours) and not [key for key in ours if key not in values]


@pytest.mark.parametrize("whose, prefix", [("hf-gpt2", "transformer."), ("hf-llama", "model.")])
@pytest.mark.parametrize("kind", ["params", "act"])
def test_a_prefix_may_be_there_or_not(traces, whose, prefix, kind):
    recipe, values = traces[MODEL_OF[whose]]
    bundle, theirs, start = bundle_of(recipe, values), theirs_of(NAMES[whose], values, kind), KINDS[kind]
    plain = {f.key: f.read().tobytes() for f in matched(dumped(theirs), bundle, NAMES[whose])}
    longer = {start + prefix + name.removeprefix(start): a for name, a in theirs.items()}
    assert {f.key: f.read().tobytes() for f in matched(dumped(longer), bundle, NAMES[whose])} == plain


def test_modules_that_give_again_what_their_last_part_does_are_left_aside_and_named(traces):
    recipe, values = traces["gpt-micro"]
    again = {"step1/act/transformer.h.1.attn": np.zeros(1), "step1/dact/h.0.mlp": np.zeros(1)}
    given = dumped(again | {"params/transformer.wte.weight": values["params/embed.w"]})
    assert [f.key for f in matched(given, bundle_of(recipe, values), NAMES["hf-gpt2"])] == ["params/embed.w"]
    assert left_aside(given, NAMES["hf-gpt2"]) == list(again) and left_aside(given, None) == []
    under = [{name.removeprefix("step1/"): d for name, d in given[0].items()}]
    assert len(left_aside(under, NAMES["hf-gpt2"], "step1/")) == 2


@pytest.mark.parametrize("name", ["step1/grad/h.0.attn", "params/h.0.mlp", "step1/m/h.0.attn.attn_dropout"])
def test_a_modules_name_among_parameters_is_an_error(traces, name):
    with pytest.raises(UsageError, match="those names have no rule for it among the parameters"):
        matched(dumped({name: np.zeros(3)}), bundle_of(*traces["gpt-micro"]), NAMES["hf-gpt2"])


TIED_LLAMA = replace(MODELS["llama-micro"], tied=True)


@pytest.mark.parametrize("whose, name, config", [("hf-gpt2", "wte.weight", MODELS["gpt-micro"]),
                                                 ("hf-llama", "model.embed_tokens.weight", TIED_LLAMA)])
def test_the_matrix_of_a_tied_head_is_compared(traces, whose, name, config):
    """Alone it stands for the embedding's, beside it it must be the same."""
    bundle = bundle_of(Recipe(config, steps=1), traces["gpt-micro"][1])
    key, g = "step1/grad/embed.w", traces["gpt-micro"][1]["step1/grad/embed.w"]

    def found(**arrays):
        return matched(dumped({f"step1/grad/{theirs}": a for theirs, a in arrays.items()}), bundle, NAMES[whose])
    alone, = found(**{"lm_head.weight": 5 * g})
    assert (alone.key, alone.problem) == (key, "") and np.array_equal(alone.read(), 5 * g)
    both, = found(**{"lm_head.weight": g, name: g})
    assert both.where == f"step1/grad/{name}" and not both.problem
    one, other = found(**{"lm_head.weight": 5 * g, name: g})
    assert (one.key, one.problem, other.key) == (key, "", key) and np.array_equal(one.read(), g)
    assert other.problem == f"step1/grad/lm_head.weight differs from step1/grad/{name}, and both are one matrix"
    wrong = [f.problem for f in found(**{"lm_head.weight": g[:3], name: g})]
    assert wrong[0] == "" and wrong[1].startswith("has shape [3, 16], ")


def test_a_head_of_its_own_beside_gpt2s_names_is_compared_with_its_own_matrix(traces):
    recipe = Recipe(replace(MODELS["gpt-micro"], tied=False), steps=1)
    values = {"params/head.w": np.arange(640.0).reshape(16, 40)}
    found, = matched(dumped({"params/lm_head.weight": values["params/head.w"].T}), bundle_of(recipe, values), NAMES["hf-gpt2"])
    assert np.array_equal(found.read(), values["params/head.w"])


@pytest.mark.parametrize("name, words", [
    ("step1/act/transformer.h.0.attn.c_attn", "; it is a name of hf-gpt2: "),
    ("step1/grad/qkvw", "llm.c"), ("params/model.layers.0.mlp.up_proj.weight", "hf-llama"),
    ("transformer.h.0.ln_1.weight", "--as says so once for all; it is a name of hf-gpt2"), ("step1/act/h.0.mlp", "hf-gpt2")])
def test_a_name_that_a_map_knows_suggests_the_map(traces, name, words):
    with pytest.raises(UsageError) as caught:
        matched(dumped({name: np.zeros(3)}), bundle_of(*traces["gpt-micro"]))
    assert words in str(caught.value) and "--names says whose it is" in str(caught.value)


def test_one_number_in_a_list_is_a_scalar(traces):
    recipe, values = traces["gpt-micro"]
    found, = matched(dumped({"step1/loss": values["step1/loss"].reshape(1)}), bundle_of(recipe, values))
    assert not found.problem and found.read().shape == () and found.read() == values["step1/loss"]


# -- facts that are known ----------------------------------------------------------------------------------------------

def rule_of(whose, theirs, kind="params"):
    return NAMES[whose].find(kind, theirs)


def test_conv1d_of_gpt2_keeps_q_k_and_v_side_by_side(traces):
    """transformers: Conv1D(3 * D, D).weight has shape (D, 3D), y = x @ weight + bias, split along the last axis."""
    _, values = traces["gpt-micro"]
    q, k, v = (values[f"params/layers.1.attn.{p}.w"] for p in "qkv")
    theirs = theirs_of(NAMES["hf-gpt2"], values)
    joined = theirs["params/h.1.attn.c_attn.weight"]
    assert joined.shape == (16, 72) and np.array_equal(joined, np.hstack([q, k, v]))
    biases = np.hstack([values[f"params/layers.1.attn.{p}.b"] for p in "qkv"])
    assert np.array_equal(theirs["params/h.1.attn.c_attn.bias"], biases)
    assert theirs["params/h.1.mlp.c_fc.weight"].shape == (16, 32) and theirs["params/wte.weight"].shape == (40, 16)
    rule, layer = rule_of("hf-gpt2", "transformer.h.1.attn.c_attn.weight")
    a, b, c = to_ours(rule, joined, [(16, 24)] * 3)
    assert layer == "1" and np.array_equal(a, q) and np.array_equal(b, k) and np.array_equal(c, v)


def test_linear_of_torch_is_transposed(traces):
    """torch.nn.Linear(d_in, d_out).weight has shape (d_out, d_in), y = x @ weight.T + bias."""
    _, values = traces["llama-micro"]
    theirs = theirs_of(NAMES["hf-llama"], values)
    shapes = {"self_attn.q_proj": (24, 16), "self_attn.k_proj": (12, 16), "self_attn.v_proj": (12, 16),
              "mlp.gate_proj": (24, 16),
              "self_attn.o_proj": (16, 24), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
    assert {name: theirs[f"params/layers.0.{name}.weight"].shape for name in shapes} == shapes
    assert np.array_equal(theirs["params/layers.0.mlp.up_proj.weight"], values["params/layers.0.mlp.up.w"].T)
    assert np.array_equal(theirs["params/lm_head.weight"], values["params/head.w"].T)
    assert np.array_equal(theirs["params/embed_tokens.weight"], values["params/embed.w"])        # nn.Embedding is not


def test_llm_c_keeps_all_layers_in_one_array(traces):
    """train_gpt2.c: qkvw (L, 3C, C), qkvb (L, 3C), fcw (L, 4C, C), and atty (L, B, T, C), head by head in its channels."""
    _, values = traces["gpt-micro"]
    theirs, acts = theirs_of(NAMES["llm.c"], values), theirs_of(NAMES["llm.c"], values, "act")
    qkvw = theirs["params/qkvw"]
    assert qkvw.shape == (2, 72, 16) and theirs["params/qkvb"].shape == (2, 72)
    for layer in range(2):
        for k, part in enumerate("qkv"):
            w, b = (values[f"params/layers.{layer}.attn.{part}.{x}"] for x in "wb")
            assert np.array_equal(qkvw[layer, 24 * k:24 * k + 24], w.T)
            assert np.array_equal(theirs["params/qkvb"][layer, 24 * k:24 * k + 24], b)
    assert theirs["params/fcw"].shape == (2, 32, 16) and theirs["params/fcprojw"].shape == (2, 16, 32)
    assert theirs["params/ln1w"].shape == (2, 16) and theirs["params/wte"].shape == (40, 16)
    atty, attention = acts["step1/act/atty"], values["step1/act/layers.1.attn.attention"]
    assert atty.shape == (2, 4, 8, 24) and acts["step1/act/qkv"].shape == (2, 4, 8, 72)
    for head in range(4):
        assert np.array_equal(atty[1, :, :, 6 * head:6 * head + 6], attention[:, head])


# -- what does not fit -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, words", [
    ("params/h.0.attn.c_atn.weight", ["those names have no rule for it among the parameters"]),
    ("step1/act/h.0.attn.softmax", ["those names have no rule for it among the activations"]),
    ("h.0.attn.c_attn.weight", ["it should begin with params/, step1/act/, step1/grad/", "--as"]),
    ("params/h.2.ln_1.weight", ["stands for params/layers.2.norm1.g, which the bundle has not"]),
    ("params/h.-1.ln_1.weight", ["those names have no rule for it"]),
    ("params/h.0x.ln_1.weight", ["those names have no rule for it"])])
def test_an_unknown_name_is_a_sentence_that_helps(traces, name, words):
    with pytest.raises(UsageError) as caught:
        matched(dumped({name: np.zeros(3)}), bundle_of(*traces["gpt-micro"]), NAMES["hf-gpt2"])
    assert str(caught.value).startswith(f"{name} stands for ") and all(word in str(caught.value) for word in words)


def test_an_unknown_name_of_ours_is_answered_with_the_nearest(traces):
    with pytest.raises(UsageError, match="nothing in the bundle: is step1/act/layers.0.attn.q meant?"):
        matched(dumped({"step1/act/layer.0.attn.q": np.zeros(3)}), bundle_of(*traces["gpt-micro"]))
    with pytest.raises(UsageError, match="golden show. lists what there is"):
        matched(dumped({"xyz/xyz/9": np.zeros(3)}), bundle_of(*traces["gpt-micro"]))


def test_a_part_that_the_model_has_not_is_an_error(traces):
    """A LLaMA of no biases, of which a stack dumps a bias."""
    with pytest.raises(UsageError, match="layers.0.attn.q.b, which the bundle has not: its model has no such part"):
        matched(dumped({"params/layers.0.self_attn.q_proj.bias": np.zeros(24)}), bundle_of(*traces["llama-micro"]),
                NAMES["hf-llama"])


@pytest.mark.parametrize("whose, name, shape, said", [
    ("hf-gpt2", "params/h.0.attn.c_attn.weight", (16, 71),
     "has shape [16, 71], 1152 numbers belong in it (params/layers.0.attn.q"),
    ("llm.c", "params/qkvw", (3, 72, 16), "has shape [3, 72, 16], 2304 numbers belong in it (params/layers.0.attn.q.w, "),
    (None, "params/embed.w", (16, 40), "has shape [16, 40], params/embed.w has [40, 16]"),
    (None, "step1/loss", (2,), "has shape [2], step1/loss has []"),
    (None, "step1/loss", (1, 1), "has shape [1, 1], step1/loss has []")])
def test_another_size_is_a_mismatch_with_a_sentence(traces, whose, name, shape, said):
    found = matched(dumped({name: np.zeros(shape)}), bundle_of(*traces["gpt-micro"]), NAMES.get(whose))
    assert found and all(f.problem.startswith(said) for f in found)


@pytest.mark.parametrize("whose, name, shape", [
    ("hf-gpt2", "params/h.0.attn.c_attn.weight", (72, 16)), ("hf-gpt2", "params/wte.weight", (640,)),
    ("hf-llama", "params/layers.0.mlp.down_proj.weight", (24, 16)), ("hf-llama", "params/lm_head.weight", (16, 40)),
    ("llm.c", "params/qkvw", (1, 144, 16)), ("llm.c", "params/qkvw", (2, 16, 72)), ("llm.c", "params/qkvw", (4, 36, 16)),
    ("llm.c", "params/lnfw", (4, 4)), ("llm.c", "step1/act/atty", (2, 8, 4, 24)), ("llm.c", "step1/act/qkv", (4, 2, 8, 72))])
def test_the_right_size_in_another_shape_is_a_mismatch_with_a_sentence_too(traces, whose, name, shape):
    """As that of a stack which keeps the transpose."""
    bundle = bundle_of(*traces[MODEL_OF[whose]])
    found = matched(dumped({name: np.zeros(shape)}), bundle, NAMES[whose])
    assert found and all(f.problem.startswith(f"has shape {list(shape)}, which cannot be {found[0].key} of") for f in found)


def test_two_names_for_one_value_are_an_error(traces):
    recipe, values = traces["gpt-micro"]
    twice = dumped({"params/wte.weight": values["params/embed.w"], "params/transformer.wte.weight": values["params/embed.w"]})
    with pytest.raises(UsageError, match="params/wte.weight and params/transformer.wte.weight stand for the same value"):
        matched(twice, bundle_of(recipe, values), NAMES["hf-gpt2"])


def test_a_beginning_is_put_before_each_name(traces):
    recipe, values = traces["gpt-micro"]
    found = matched(dumped({"transformer.wte.weight": values["step1/grad/embed.w"]}), bundle_of(recipe, values),
                    NAMES["hf-gpt2"],
                    "step1/grad")
    assert [f.key for f in found] == ["step1/grad/embed.w"]


def test_our_own_names_may_stand_among_theirs(traces):
    """The loss has none of theirs."""
    recipe, values = traces["gpt-micro"]
    given = {"step1/loss": values["step1/loss"], "step1/tokens": values["step1/tokens"],
             "step1/act/wte": values["step1/act/embed"]}
    found = matched(dumped(given), bundle_of(recipe, values), NAMES["hf-gpt2"])
    assert [f.key for f in found] == ["step1/tokens", "step1/act/embed", "step1/loss"]
