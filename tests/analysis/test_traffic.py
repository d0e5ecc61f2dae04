"""Localises faults of the traffic formula, against numbers worked by hand."""
import math
from dataclasses import replace

import pytest

from refimpl.analysis import local_parameters, step_payload
from refimpl.comm import Mesh
from refimpl.comm.paper import paper_mesh
from refimpl.models import GPT2_SMALL, Config, parameters

CFG = Config(vocab_size=10, n_layers=2, n_heads=2, d_model=4, d_ff=6, max_seq_len=5)


def test_parameters_by_hand():
    # embed 40, positions 20, final norm 8; a layer: norms 16, q k v o 4·(16 + 4), up 24 + 6, down 24 + 4
    assert local_parameters(CFG, Mesh()) == 40 + 20 + 8 + 2 * (16 + 80 + 30 + 28)
    # tp = 2 halves the words, q, k, v (weights and biases), the rows of o, up, the rows of down; o.b and down.b stay whole
    assert local_parameters(CFG, paper_mesh("tp=2")) == 20 + 20 + 8 + 2 * (16 + 3 * 10 + 8 + 4 + 15 + 12 + 4)


def test_published_parameter_count_of_gpt2_small():
    assert local_parameters(GPT2_SMALL, Mesh()) == 124_439_808      # Radford et al. 2019's "117M"; the released arrays' total


def test_payload_by_hand():
    payload = step_payload(CFG, paper_mesh("dp=2,tp=2"), batch_size=6, seq_len=5)
    assert payload["tp"][0] == (4 * 2 + 2) * 3 * 5 * 4 + 3 * 3 * 5
    assert payload["dp"][0] == local_parameters(CFG, paper_mesh("tp=2")) + 2
    assert step_payload(CFG, Mesh(), 6, 5) == {}
    assert step_payload(CFG, paper_mesh("dp=3,tp=2"), 7, 5)["tp"][0] == 10 * 3 * 5 * 4 + 45     # rank 0 has 3 of 3, 2, 2


@pytest.mark.parametrize("cfg, tokens", [
    (Config(vocab_size=50, n_layers=2, n_heads=4, d_model=32, max_seq_len=4), 96),
    (GPT2_SMALL, 2304),                                                                     # Radford et al. 2019, table 2
    (Config(vocab_size=50257, n_layers=96, n_heads=96, d_model=12288, max_seq_len=2048), 36_864),   # Brown et al. 2020, 2.1
], ids=["small", "gpt2", "gpt3"])
def test_tensor_and_data_payload_of_the_layers_are_equal_at_three_widths_of_tokens(cfg, tokens):
    """4·L·T·D for T tokens against 12·L·D², the elements of the layers' matrices."""
    matrices = sum(math.prod(row.shape) for name, row in parameters(cfg, Mesh()).items()
                   if name.startswith("layers.") and name.endswith(".w"))
    assert matrices == 12 * cfg.n_layers * cfg.d_model ** 2 and tokens == 3 * cfg.d_model
    embedding_head_and_loss = 2 * tokens * cfg.d_model + 3 * tokens
    assert step_payload(cfg, paper_mesh("tp=2"), batch_size=1, seq_len=tokens)["tp"][0] - embedding_head_and_loss == matrices


def test_gradients_that_travel_over_tp_as_well_are_not_in_the_formula():
    for options in ({"n_kv_heads": 1}, {"qk_norm": True}):
        with pytest.raises(ValueError, match="travel over tp as well"):
            step_payload(replace(CFG, **options), paper_mesh("tp=2"), 6, 5)
