"""Localises faults of judging a stack: a mistake that passes, a right value that fails, a wrong cause, rank, op or number."""
import json
from dataclasses import replace

import numpy as np
import pytest

from refimpl.comm import Mesh, run_threads
from refimpl.comm.base import SerialComm
from refimpl.golden.actual import Dumped
from refimpl.golden.bundle import read
from refimpl.golden.check import every_rank
from refimpl.golden.emulate import FORMATS, Rounding, rounded
from refimpl.golden.factor import factors, rounded_runs
from refimpl.golden.limits import LIMITS
from refimpl.golden.make import make
from refimpl.golden.match import UsageError
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.report import INCOMPLETE, MISMATCH, NO_POWER, PASS, json_text
from refimpl.golden.session import How, compared
from refimpl.golden.suspects import SUSPECTS, Instead, scaled, with_static
from refimpl.golden.trace import trace

RUNS = 16
UP = "step1/act/layers.1.mlp.up"
Q = "step1/act/layers.0.attn.q"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    for name, config in MODELS.items():
        make(Recipe(config, steps=1), SerialComm(), folder / name, RUNS)
    two = Recipe(replace(MODELS["gpt-micro"], n_layers=1), Mesh().dims | {"tp": 2}, steps=1)
    run_threads(2, lambda comm: make(two, comm, folder / "two", 4))
    return {name: read(folder / name) for name in (*MODELS, "two")}


@pytest.fixture
def gpt(bundles):
    return bundles["gpt-micro"]


@pytest.fixture
def two(bundles):
    """Of two tp ranks."""
    return bundles["two"]


def ran(bundle, frames=(), dtype="float32", recipe=None):
    """What a stack in a format gives that errs as the frames, or another recipe, say."""
    run = trace(recipe or bundle.recipe, SerialComm(), None, [*frames, Rounding(dtype)])
    return {key: np.array(v.array) for key, v in run.items()}


def ranks_of(bundle):
    """Each rank's own values, as they are in the bundle."""
    return [{key: np.array(bundle.value(key, r)) for key in bundle.entries} for r in range(bundle.ranks)]


def report_of(bundle, *sets, dtype="float32", **options):
    """The report, of which every line fits a terminal, and which is JSON."""
    dumped = [{key: Dumped(key, a.shape, a.dtype.name, lambda a=a: a) for key, a in arrays.items()} for arrays in sets]
    report = compared(dumped, bundle, How(dtype, command="python -m refimpl golden check a --against b", **options))
    assert max(map(len, report.text().splitlines())) <= 80
    json.loads(json_text(report), parse_constant=pytest.fail)
    return report


def first_of(report):
    return next(line for line in report.lines if line.failed)


def failed(report):
    return [line.key for line in report.lines if line.failed]


# -- right, in every format --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_right_stack_passes(bundles, model, dtype):
    report = report_of(bundles[model], ran(bundles[model], dtype=dtype), dtype=dtype)
    assert report.status == PASS and not report.missing and not report.hidden and not report.cause
    assert {line.verdict for line in report.lines} <= {"pass", "gauge", "no power"}
    assert max(line.rho.norm for line in report.lines if line.verdict == "pass" and line.rung != "inputs") < LIMITS.norm / 2
    assert "refimpl golden check: PASS" in report.text() and "nothing: what was compared is right\n" in report.text()


def test_a_stack_in_float64_is_right_and_one_in_float32_is_not_in_float64(gpt):
    exact = ranks_of(gpt)[0]
    assert report_of(gpt, exact, dtype="float64").status == PASS
    assert report_of(gpt, ran(gpt), dtype="float64").status == MISMATCH


def test_a_part_of_the_values_passes_and_the_others_are_counted(gpt):
    values = ran(gpt)
    report = report_of(gpt, {key: values[key] for key in (UP, "step1/loss", "step1/tokens")})
    assert report.status == PASS and len(report.missing) == len(gpt.entries) - 3
    assert f"not given     {len(gpt.entries) - 3} of the {len(gpt.entries)} values" in report.text()
    assert "nothing: what was compared is right, up to what was not given" in report.text()
    assert report_of(gpt, {UP: values[UP]}, demand_all=True).status == INCOMPLETE
    assert report_of(gpt, values, demand_all=True).status == PASS


def test_nothing_but_inputs_is_incomplete(gpt):
    values = {key: a for key, a in ran(gpt).items() if key.startswith("params/") or key == "step1/tokens"}
    report = report_of(gpt, values)
    assert report.status == INCOMPLETE and "dump more" in report.text()
    assert report_of(gpt, values | {"step1/tokens": values["step1/tokens"] + 1}).status == MISMATCH


def test_a_dump_of_nothing_is_refused(gpt):
    with pytest.raises(UsageError, match="there is nothing to compare"):
        report_of(gpt, {})
    with pytest.raises(UsageError, match="there are arrays of 2 ranks, and the bundle is of 1: make one"):
        report_of(gpt, {}, {})


# -- wrong values fail -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["zeros", "in other places", "of another seed", "with a sign", "half more"])
def test_what_is_wrong_everywhere_passes_nowhere(gpt, how, dtype):
    right = ran(gpt, dtype=dtype)
    powerful = {line.key for line in report_of(gpt, right, dtype=dtype).lines if line.verdict == "pass"}
    outputs = {key: a for key, a in right.items()
               if key in powerful and not key.startswith("params/") and gpt.entries[key].kind != "gauge"
               and key not in ("step1/tokens", "step1/targets")}
    other = ran(gpt, dtype=dtype, recipe=replace(gpt.recipe, seed=5))
    wrong = {key: {"zeros": np.zeros_like(a), "in other places": np.roll(a, 1), "of another seed": other[key],
                   "with a sign": -a,
                   "half more": a * 1.5}[how] for key, a in outputs.items()
             if how != "in other places" or not np.array_equal(np.roll(a, 1), a)}
    report = report_of(gpt, wrong, dtype=dtype)
    assert len(wrong) > 200 and {line.key for line in report.lines} == wrong.keys()
    assert not [line.key for line in report.lines if line.verdict != "fail"]


def test_an_input_is_the_same_or_wrong(gpt):
    """One weight in its last bit of float32; a target that is ignored and should not be."""
    values = ran(gpt)
    w = values["params/layers.1.attn.o.w"] = values["params/layers.1.attn.o.w"].astype("float32")
    w[3, 4] = np.nextafter(w[3, 4], np.float32(9))
    report = report_of(gpt, values)
    assert report.status == MISMATCH and failed(report) == ["params/layers.1.attn.o.w"]
    assert first_of(report).rho.worst == (3, 4) and "mend the inputs" in report.text()


@pytest.mark.parametrize("value, said", [(np.nan, "nan where a number belongs"), (np.inf, "inf where a number belongs"),
                                         (-np.inf, "-inf where a number belongs")])
def test_what_is_not_a_number_is_said_to_be_so(gpt, value, said):
    values = ran(gpt)
    values[UP][0, 0, 0] += 100.0
    values[UP][1, 2, 3] = value
    report = report_of(gpt, values)
    line = first_of(report)
    assert report.status == MISMATCH and line.key == UP and line.rho.worst == (1, 2, 3) and line.rho.what == said
    assert f"there is      {said}, at [1, 2, 3]" in report.text()
    assert str(value) in report.text()


def test_the_report_has_the_numbers_of_the_first_wrong_value(gpt):
    values, expected = ran(gpt), gpt.value(UP)
    values[UP][1, 2, 3] += 0.25
    values["step1/act/head"] += 1.0
    report = report_of(gpt, values)
    line, sigma = first_of(report), gpt.sigma(UP, "float32")
    assert line.key == UP and line.rho.worst == (1, 2, 3)
    assert line.rho.actual == values[UP][1, 2, 3] and line.rho.expected == expected[1, 2, 3]
    assert line.rho.norm == pytest.approx(np.sqrt(np.mean((values[UP] - expected) ** 2) / np.mean(sigma ** 2)), rel=1e-6)
    assert line.rho.element >= 0.9 * 0.25 / sigma.max()
    text = report.text()
    assert f"first wrong   {UP}\n                trace, forward, step 1\n" in text
    assert f"there is      {line.rho.actual:.9g} where {line.rho.expected:.9g} belongs" in text
    assert "at [1, 2, 3] of [4, 8, 32]" in text and "    python -m refimpl golden check a --against b --local\n" in text


def test_the_first_wrong_value_is_that_of_the_lowest_rung(gpt):
    values = {key: a * 2 for key, a in ran(gpt).items() if key in ("step1/loss", "step1/grad/embed.w", "step1/m/embed.w")}
    assert failed(report_of(gpt, values)) == ["step1/loss", "step1/grad/embed.w", "step1/m/embed.w"]
    assert failed(report_of(gpt, dict(reversed(values.items())))) == ["step1/loss", "step1/grad/embed.w", "step1/m/embed.w"]


def test_the_relation_to_the_right_value_is_said(gpt):
    values = ran(gpt)
    for change, said in ((lambda a: a * 4, "the right value times 4"), (np.zeros_like, "all zeros"),
                         (lambda a: np.roll(a, 1, 1), "the right value, moved by 1 along axis 1")):
        report = report_of(gpt, {UP: change(values[UP])})
        assert report.relation == said and f"it is         {said}" in report.text()


def test_a_shape_that_is_not_right_is_a_mismatch(gpt):
    report = report_of(gpt, {UP: ran(gpt)[UP][:3]})
    assert report.status == MISMATCH and first_of(report).note == f"has shape [3, 8, 32], {UP} has [4, 8, 32]"
    assert f"has shape [3, 8, 32], {UP}" in " ".join(report.text().split())


def test_a_value_whose_controls_would_pass_is_said_to_have_no_power(gpt):
    """The gradient by k's bias is rounding alone: zeros are as right."""
    key = "step1/grad/layers.0.attn.k.b"
    values = ran(gpt)
    report = report_of(gpt, {key: values[key]})
    assert report.status == NO_POWER and report.lines[0].verdict == "no power"
    assert report.lines[0].note == "zeros would pass, too" and f"no power      {key}" in report.text()
    assert "these are rounding alone in every stack" in report.text()
    assert report_of(gpt, {key: values[key], UP: values[UP]}).status == PASS


def test_the_json_says_what_the_report_says(gpt):
    values = ran(gpt)
    values[UP][1, 2, 3] = np.nan
    report = report_of(gpt, values)
    said = json.loads(json_text(report))
    assert said.keys() == {"verdict", "status", "dtype", "limits", "conventions", "counts", "not_given", "parts_missing",
                           "left_aside", "formats", "relation", "cause", "right_in", "hidden", "factor", "lines", "locally"}
    assert (said["verdict"], said["status"], said["dtype"], said["not_given"]) == ("MISMATCH", 1, "float32", [])
    assert len(said["lines"]) == len(gpt.entries) == sum(said["counts"].values()) and said["counts"]["fail"] == 1
    line, = (line for line in said["lines"] if line["verdict"] == "fail")
    assert line == {"key": UP, "rank": None, "rung": "trace", "verdict": "fail", "note": "", "norm": "inf", "element": "inf",
                    "worst": [1, 2, 3], "actual": "nan", "expected": gpt.value(UP)[1, 2, 3],
                    "what": "nan where a number belongs"}


# -- usual mistakes ----------------------------------------------------------------------------------------------------

SOMEWHERE = [(model, k) for k, suspect in enumerate(SUSPECTS)
             for model in list(MODELS) if suspect.changed(Recipe(MODELS[model], steps=1))]
ONCE = list({k: model for model, k in reversed(SOMEWHERE)}.items())        # gpt-micro where both would do


def test_every_suspect_applies_to_a_micro_model_but_two():
    left = [suspect.what for k, suspect in enumerate(SUSPECTS) if k not in dict(ONCE)]
    assert left == ["GELU in its tanh form where the erf form belongs",
                    "the bias of a row-parallel layer is added by every tp rank"]


@pytest.mark.parametrize("k, model", sorted(ONCE), ids=lambda x: str(x))
def test_a_usual_mistake_is_found_and_named(bundles, model, k):
    bundle, suspect = bundles[model], SUSPECTS[k]
    recipe, frames = suspect.changed(bundle.recipe)
    report = report_of(bundle, ran(bundle, frames, recipe=recipe))
    assert report.status == MISMATCH and report.cause and report.cause.what == suspect.what and report.cause.explained > 0.9
    assert "  probably      " + suspect.what[:20] in report.text()


def test_a_bias_that_every_tp_rank_adds_is_found_and_named(two):
    suspect = next(s for s in SUSPECTS if "by every tp rank" in s.what)
    report = report_of(two, *every_rank(*suspect.changed(two.recipe)))
    assert report.status == MISMATCH and report.cause.what == suspect.what
    assert first_of(report).key == "step1/act/layers.0.attn.add"


def test_a_mistake_that_no_suspect_makes_is_not_blamed_on_one(gpt):
    report = report_of(gpt, ran(gpt, [Instead("attention", scaled(1.1, 2), "layers.1.*")]))
    assert report.status == MISMATCH and report.cause is None and not report.hidden


def test_gelu_of_the_other_form_is_seen_in_bfloat16_though_no_element_fails(gpt):
    recipe, frames = SUSPECTS[0].changed(gpt.recipe)
    report = report_of(gpt, ran(gpt, frames, "bfloat16", recipe), dtype="bfloat16")
    assert report.status == MISMATCH and not failed(report)
    found, = report.hidden
    assert found.what == SUSPECTS[0].what and found.key == "step1/act/layers.0.mlp.gelu_tanh"
    assert 0.7 < found.amount < 1.3 and found.z > LIMITS.along
    assert "hidden        GELU in its erf form where the tanh form belongs" in report.text()


# -- a factor that rounding hides --------------------------------------------------------------------------------------

def times(values, factor, kind):
    """The values, those of a kind times a factor and rounded again."""
    return {key: rounded(a * factor, FORMATS["bfloat16"]) if key.startswith(kind) else a for key, a in values.items()}


@pytest.mark.parametrize("model", MODELS)
def test_gradients_times_1_03_are_found_in_bfloat16(bundles, model):
    right = ran(bundles[model], dtype="bfloat16")
    right = {key: a for key, a in right.items() if not key.startswith(("step1/m", "step1/v", "step1/params"))}
    report = report_of(bundles[model], times(right, 1.03, "step1/grad/"), dtype="bfloat16")
    assert report.status == MISMATCH and not failed(report) and report.factor.key.startswith("step1/grad/")
    assert 1.02 < report.factor.times < 1.04 and report.factor.z > LIMITS.factor
    text = " ".join(report.text().split())
    assert f"hidden {report.factor.key} is the right value times 1.0" in text and "mend what is hidden" in text
    assert report_of(bundles[model], times(right, 1.001, "step1/grad/"), dtype="bfloat16").status == PASS


def test_an_activation_times_1_03_is_found_in_bfloat16(gpt):
    key = "step1/act/layers.1.attn.attention"
    report = report_of(gpt, times({key: ran(gpt, dtype="bfloat16")[key]}, 1.03, key), dtype="bfloat16")
    assert report.status == MISMATCH and (failed(report) == [key] or report.factor.key == key)
    report = report_of(gpt, times({key: ran(gpt, dtype="bfloat16")[key]}, 0.985, key), dtype="bfloat16")
    assert not failed(report) and report.factor.key == key and 0.98 < report.factor.times < 0.99


def test_parts_of_a_sum_are_not_held_against_a_factor(two):
    """A stack may cut them otherwise."""
    runs = rounded_runs(two, "bfloat16")
    values = {(key, r): 1.5 * two.value(key, r) for key in two.entries for r in (0, 1)}
    found = {f.key for f in factors(values, runs, two, "bfloat16")}
    assert Q in found and not [key for key in found if two.entries[key].kind != "canonical"]


# -- the format --------------------------------------------------------------------------------------------------------

def test_the_narrowest_format_of_what_is_no_input_decides(gpt):
    """Under autocast most are float32: gradients, norms, inputs."""
    values = {key: a.astype("float32") for key, a in ran(gpt, dtype="float16").items()}
    values[Q] = values[Q].astype("float16")
    report = report_of(gpt, values, dtype=None)
    assert report.dtype == "float16" and report.status == PASS
    assert "formats       float16 and float32: compared as float16, the narrowest" in report.text()
    values[Q] = values[Q].astype("float32")
    values["params/embed.w"] = values["params/embed.w"].astype("float16")
    report = report_of(gpt, values, dtype=None)
    assert report.dtype == "float32" and "formats " not in report.text()


def test_what_is_right_in_a_narrower_format_is_said_to_be_so(gpt):
    values = {key: a for key, a in ran(gpt, dtype="bfloat16").items() if key.startswith("step1/act/")}
    report = report_of(gpt, values, dtype="float32")
    assert report.status == MISMATCH and report.right_in == "bfloat16"
    assert "right in bfloat16: if the stack computes in it, say --dtype bfloat16" in " ".join(report.text().split())
    recipe, frames = SUSPECTS[0].changed(gpt.recipe)
    assert report_of(gpt, ran(gpt, frames, recipe=recipe)).right_in == ""       # whose cause is known, and bfloat16 hides
    assert report_of(gpt, {UP: values[UP] + 3.0}).right_in == ""


# -- the op that errs --------------------------------------------------------------------------------------------------

def louder(run, *arrays, **static):
    y, vjp = run(*arrays, **static)
    return y * 1.001, vjp


def lame(run, *arrays, **static):
    """The vjp errs."""
    y, vjp = run(*arrays, **static)
    return y, lambda dy: vjp(dy * 1.001)


PLANTED = [("gelu_tanh", louder, "layers.1.*", "step1/act/layers.1.mlp.gelu_tanh"),
           ("gelu_tanh", lame, "layers.0.*", "step1/dact/layers.0.mlp.up"),
           ("attention", with_static(scale=0.40), "layers.1.*", "step1/act/layers.1.attn.attention"),
           ("layer_norm", louder, "layers.0.norm2*", "step1/act/layers.0.norm2.layer_norm")]


@pytest.mark.parametrize("op, fn, where, key", PLANTED, ids=[key for *_, key in PLANTED])
def test_local_replay_names_the_op_that_errs(gpt, op, fn, where, key):
    report = report_of(gpt, ran(gpt, [Instead(op, fn, where)]), locally=True)
    wrong = [line.key for line in report.locally if line.failed]
    assert report.status == MISMATCH and wrong[0] == key and len(wrong) < 5
    assert f"op that errs  {key}\n" in report.text()


def test_local_replay_of_a_right_stack_finds_nothing(gpt):
    report = report_of(gpt, ran(gpt), locally=True)
    assert report.status == PASS and len(report.locally) > 100 and "op that errs" not in report.text()
    assert f"with --local up to {LIMITS.local_norm:g} of the whole, {LIMITS.local_element:g} of any element" in report.text()


def test_local_replay_of_several_ranks_needs_every_ranks_own(two):
    whole = {key: two.value(key) for key in (Q, "step1/loss")}
    with pytest.raises(UsageError, match="--local needs every rank's own values"):
        report_of(two, whole, locally=True)


# -- differences that heal ---------------------------------------------------------------------------------------------

K = "step1/act/layers.0.attn.k"


def test_keys_to_which_the_same_is_added_heal(gpt):
    """Softmax takes it away again."""
    values = ran(gpt)
    values[K] = values[K] + np.linspace(0.1, 0.6, 24)
    report = report_of(gpt, values)
    line, = (line for line in report.lines if line.key == K)
    assert report.status == PASS and line.verdict == "gauge" and line.note == "heals: all that is made of it is right"
    assert f"may differ    {K}" in report.text()


def test_queries_alone_in_another_order_do_not_heal(gpt):
    values = ran(gpt)
    values[Q] = np.roll(values[Q], 6, -1)
    assert failed(report_of(gpt, values)) == [Q]


def test_shifted_keys_alone_do_not_heal(gpt):
    """Of nothing behind them it is known whether it is right."""
    assert failed(report_of(gpt, {K: ran(gpt)[K] + 0.5})) == [K]


# -- ranks -------------------------------------------------------------------------------------------------------------

def test_every_ranks_own_values_pass(two):
    report = report_of(two, *ranks_of(two))
    assert report.status == PASS and not report.missing and not report.lacking
    assert {line.rank for line in report.lines} == {0, 1, None}         # None: sums of the ranks' parts


def test_global_values_pass_on_a_bundle_of_two_ranks(two):
    keys = [key for key, e in two.entries.items() if "per rank" not in e.place.along.values()]
    report = report_of(two, {key: two.value(key) for key in keys})
    assert report.status == PASS and len(report.lines) == len(keys) > 100
    wrong = report_of(two, {key: np.roll(two.value(key), 1) for key in (Q, "step1/act/layers.0.attn.o")})
    assert failed(wrong) == [Q, "step1/act/layers.0.attn.o"]


@pytest.mark.parametrize("key, where", [(Q, "trace"), ("step1/grad/layers.0.attn.q.w", "gradients"),
                                        ("params/layers.0.mlp.up.w", "inputs"),
                                        ("step1/act/layers.0.norm1.layer_norm", "trace")])
def test_a_mistake_of_rank_1_alone_is_reported_with_its_rank(two, key, where):
    sets = ranks_of(two)
    sets[1][key].flat[-3] += 0.01            # (the first query may be anything)
    report = report_of(two, *sets)
    assert [(line.key, line.rank, line.rung) for line in report.lines if line.failed] == [(key, 1, where)]
    assert f"{where}, " in report.text() and "step" in report.text() and ", rank 1\n" in report.text()


def test_the_part_of_a_rank_that_is_missing_is_incomplete(two):
    sets = ranks_of(two)
    del sets[1][Q]
    report = report_of(two, *sets)
    assert report.status == INCOMPLETE and report.lacking == {Q: [1]} and f"parts missing {Q} of rank 1\n" in report.text()


def test_parts_of_a_sum_may_be_cut_otherwise_but_their_sum_may_not_differ(two):
    key = "step1/act/layers.0.attn.o"
    sets, shift = ranks_of(two), np.random.default_rng(0).standard_normal((4, 8, 16))
    sets[0][key] += shift
    sets[1][key] -= shift
    report = report_of(two, *sets)
    assert report.status == PASS
    assert {line.rank: line.verdict for line in report.lines if line.key == key} == {0: "partial", 1: "partial", None: "pass"}
    sets[1][key] += 0.01
    report = report_of(two, *sets)
    assert [(line.key, line.rank) for line in report.lines if line.failed] == [(key, None)]


def test_exchanged_ranks_are_wrong(two):
    report = report_of(two, *reversed(ranks_of(two)))
    assert report.status == MISMATCH and {line.rank for line in report.lines if line.failed and line.rung == "trace"} == {0, 1}
