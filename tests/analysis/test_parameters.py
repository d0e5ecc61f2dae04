"""Localises faults of the closed forms, against the numbers of parameters that released checkpoints have."""
import pytest

from refimpl.analysis import PUBLISHED
from refimpl.analysis.parameters import mixtral
from refimpl.models import PRESETS, count

RELEASED = {                                            # elements of the arrays in the published checkpoints
    "mixtral-8x7b": 46_702_792_704, "bert-base": 109_482_240, "bert-large": 335_141_888, "t5-small": 60_506_624,
    "t5-base": 222_903_552, "t5-large": 737_668_096,
}


@pytest.mark.parametrize("name", RELEASED)
def test_closed_forms_are_the_released_numbers(name):
    assert PUBLISHED[name] == RELEASED[name]


def test_printed_numbers_of_gopher_and_chinchilla():
    """280B and 70B in the papers, of which 0.1% are norms and biases."""
    assert round(PUBLISHED["gopher"] / 1e9, 1) == 279.7 and round(PUBLISHED["chinchilla"] / 1e9, 2) == 70.06


def test_one_expert_is_mistral_with_a_router():
    assert mixtral(1) == count(PRESETS["mistral-7b"]) + 32 * 4096


def test_every_model_of_the_list_is_here_or_a_preset():
    assert set(PUBLISHED) == {*RELEASED, "gopher", "chinchilla"} and not set(PUBLISHED) & set(PRESETS)
