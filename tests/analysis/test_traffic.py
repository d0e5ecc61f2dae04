"""Localises faults of the traffic formula, against numbers worked by hand."""
from refimpl.analysis import local_parameters, step_payload
from refimpl.comm import Mesh
from refimpl.comm.paper import paper_mesh
from refimpl.models import GPT2_SMALL, Config

CFG = Config(vocab_size=10, n_layers=2, n_heads=2, d_model=4, d_ff=6, max_seq_len=5)


def test_parameters_by_hand():
    # embed 40, positions 20, final norm 8; a layer: norms 16, q k v o 4·(16 + 4), up 24 + 6, down 24 + 4
    assert local_parameters(CFG, Mesh()) == 40 + 20 + 8 + 2 * (16 + 80 + 30 + 28)
    # tp = 2 halves q, k, v (weights and biases), the rows of o, up, the rows of down; o.b and down.b stay whole
    assert local_parameters(CFG, paper_mesh("tp=2")) == 40 + 20 + 8 + 2 * (16 + 3 * 10 + 8 + 4 + 15 + 12 + 4)


def test_published_parameter_count_of_gpt2_small():
    assert local_parameters(GPT2_SMALL, Mesh()) == 124_439_808      # Radford et al. 2019's "117M"; the released arrays' total


def test_payload_by_hand():
    payload = step_payload(CFG, paper_mesh("dp=2,tp=2"), batch_size=6, seq_len=5)
    assert payload["tp"][0] == 4 * 2 * 3 * 5 * 4
    assert payload["dp"][0] == local_parameters(CFG, paper_mesh("tp=2")) + 2
    assert step_payload(CFG, Mesh(), 6, 5) == {}
    assert step_payload(CFG, paper_mesh("dp=3,tp=2"), 7, 5)["tp"][0] == 4 * 2 * 3 * 5 * 4       # rank 0 has 3 of 3, 2, 2
