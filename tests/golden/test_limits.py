"""Localises faults of the limits: others than the study gives, a study that holds no longer, a mistake that they let pass."""
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from refimpl.golden import diagnose, factor
from refimpl.golden.limits import LIMITS, RATE, exceeded, limits_of
from refimpl.golden.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("false_alarms", ROOT / "benchmarks/false_alarms.py")
STUDY = json.loads((ROOT / "docs/false_alarms.json").read_text(encoding="utf-8"))
assert SPEC and SPEC.loader
false_alarms = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(false_alarms)

WAYS = [way for way in false_alarms.WAYS if way.name in ("last digits", "numpy", "more", "fused")]
SUSPECTS = ("a norm's eps of 1e-6 where 1e-5 belongs, or the other way round", "there is no causal mask",
            "AdamW without weight decay")


def test_a_gumbel_variable_exceeds_it_as_often_as_said():
    x, beta = exceeded(2.0, 3.0), 3.0 * math.sqrt(6) / math.pi
    mode = 2.0 - 0.5772156649015329 * beta
    assert 1 - math.exp(-math.exp(-(x - mode) / beta)) == pytest.approx(RATE)


def test_a_limit_is_the_largest_number_over_the_cells_or_what_was_seen():
    def cell(mean, deviation, largest):
        return {"mean": mean, "deviation": deviation, "max": largest}
    study = {"comparisons": {"a": {"norm": cell(2, 0, 2.2), "element": cell(5, 0, 5.5), "along": cell(1, 1, 3),
                                   "factor": cell(0, 0, 1)},
                             "a local b": {"norm": cell(1, 1, 1), "element": cell(5.6, 0, 5.6)}}}
    limits = limits_of(study)                           # 2.2, 5.5, 1 + 4.94, 5.6, 1 + 4.94, all times 1.25
    assert vars(limits) == {"norm": 3.0, "element": 7.0, "local_norm": 7.5, "local_element": 7.0, "along": 7.5, "factor": 1.5}


def test_the_limits_are_those_that_the_rule_makes_of_the_study():
    assert LIMITS == limits_of(STUDY) and vars(LIMITS) == STUDY["limits"]


def test_no_right_stack_of_the_study_was_a_false_alarm():
    for name, cell in STUDY["comparisons"].items():
        for of, numbers in cell.items():
            assert of == "n" or numbers["max"] <= getattr(LIMITS, "local_" + of if "local" in name else of), (name, of)


def test_the_study_tells_nothing_of_the_machine_that_made_it():
    assert not re.search(r"/tmp|/home|/root|bash", json.dumps(STUDY))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    recipe = Recipe(false_alarms.CONFIGS["llama-micro"], seed=100, steps=1)     # a seed that the study has not
    return false_alarms.made(recipe, tmp_path_factory.mktemp("limits") / "bundle")


@pytest.fixture(scope="module")
def suspects(bundle):
    return diagnose.runs(bundle)


@pytest.fixture(scope="module")
def rounded_runs(bundle):
    return {dtype: factor.rounded_runs(bundle, dtype) for dtype in diagnose.NARROW}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.dtype} {way.name}")
def test_a_right_stack_with_another_seed_stays_below_the_limits_and_is_as_the_study_says(way, bundle, suspects, rounded_runs):
    values = false_alarms.run_of(way, bundle.recipe)
    found = list(false_alarms.rhos(values, bundle, way.dtype))
    assert max(f[1] for f in found) <= LIMITS.norm and max(f[2] for f in found) <= LIMITS.element
    assert max(false_alarms.projections(values, bundle, way.dtype, suspects), default=0.0) <= LIMITS.along
    if way.dtype in rounded_runs:
        assert false_alarms.factor_of(values, rounded_runs[way.dtype], bundle, way.dtype) <= LIMITS.factor
    for size in ("small", "large"):
        said = STUDY["values"][f"{way.dtype} {way.name}, {size}"]
        for k, of in ((1, "norm"), (2, "element")):
            median = sorted(f[k] for f in found if f[0] == size)[sum(f[0] == size for f in found) // 2]
            assert said[of][0] / 2 < median < 2 * said[of][0], (size, of)


def test_what_becomes_of_suspects_is_as_the_study_says():
    config = false_alarms.CONFIGS["llama-micro"]
    found = false_alarms.power(Recipe(config, steps=1), ("bfloat16",), LIMITS, SUSPECTS)
    assert set(found) == set(SUSPECTS)
    for what, fates in found.items():
        assert fates["bfloat16"]["verdict"] == STUDY["power"]["llama-micro"][what]["bfloat16"]["verdict"], what
