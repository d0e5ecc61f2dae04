"""Localises swapped operands and axes in matmul and einsum, broadcast batches whose gradient is not summed, and bad specs."""
import itertools

import numpy as np
import pytest

from refimpl.autograd import Count
from refimpl.autograd.op import stack
from refimpl.check import check_vjp
from refimpl.ops import einsum, matmul
from refimpl.rng import draw

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 1}
SPECS = ["ab,bc->ac", "ab,bc->ca", "ba,bc->ac", "ab,ab->", "ab,ba->", "ab,ab->ab", "ab,ab->a", "ab,ba->b", "a,b->ab", "a,b->ba",
         "a,a->", "a,a->a", "abc,cd->abd", "abc,cd->dab", "abc,abd->abcd", "abcd,abde->abce", "abcd,bcde->ae", "abc,bcd->ad",
         "abc,acd->abd", "acb,abd->cd", "ab,cd->abcd", "ab,cd->dbca", "abcde,edcba->", "abd,cbd->acb", ",->",
         "a,->a", ",ab->ba"]


def test_matmul_values_by_hand():
    y, vjp = matmul.array(np.array([[1.0, 2], [3, 4]]), np.array([[10.0, 0], [0, 100]]))
    assert y.tolist() == [[10, 200], [30, 400]]
    da, db = vjp(np.array([[1.0, 0], [0, 1]]))
    assert da.tolist() == [[10, 0], [0, 100]] and db.tolist() == [[1, 3], [2, 4]]


def test_a_repeated_matrix_gets_the_sum_over_the_batch():
    a, b = draw("a", (4, 2, 3)), draw("b", (3, 5))
    _, vjp = matmul.array(a, b)
    dy = draw("dy", (4, 2, 5))
    np.testing.assert_allclose(vjp(dy)[1], a.reshape(8, 3).T @ dy.reshape(8, 5), rtol=0, atol=1e-14)
    a, b = draw("a", (1, 3, 2, 3)), draw("b", (4, 1, 3, 5))
    da, db = matmul.array(a, b)[1](draw("dy", (4, 3, 2, 5)))
    assert (da.shape, db.shape) == (a.shape, b.shape)


@pytest.mark.parametrize("spec", SPECS)
def test_einsum_equals_numpy(spec):
    """The value, and as gradients the einsums with the output's and one operand's words exchanged."""
    left, right, out = spec.replace("->", ",").split(",")
    a, b, dy = (draw(w + spec, tuple(SIZES[c] for c in w)) for w in (left, right, out))
    y, vjp = einsum.array(a, b, spec=spec)
    np.testing.assert_allclose(y, np.einsum(spec, a, b), rtol=0, atol=1e-13)
    da, db = vjp(dy)
    np.testing.assert_allclose(da, np.einsum(f"{out},{right}->{left}", dy, b), rtol=0, atol=1e-13)
    np.testing.assert_allclose(db, np.einsum(f"{out},{left}->{right}", dy, a), rtol=0, atol=1e-13)


def test_einsum_equals_numpy_for_every_two_matrices():
    """All words of two letters out of three, every order of the output."""
    words = ["".join(w) for w in itertools.permutations("abc", 2)]
    count = 0
    for left, right in itertools.product(words, words):
        alone, shared = set(left) ^ set(right), set(left) & set(right)
        for n in range(len(shared) + 1):
            for kept in itertools.combinations(sorted(shared), n):
                for out in itertools.permutations([*sorted(alone), *kept]):
                    spec = f"{left},{right}->{''.join(out)}"
                    a, b = (draw(w, tuple(SIZES[c] for c in w)) for w in (left, right))
                    np.testing.assert_allclose(einsum.array(a, b, spec=spec)[0], np.einsum(spec, a, b), rtol=0, atol=1e-13)
                    count += 1
    assert count > 150


@pytest.mark.parametrize("a, b, spec, words", [
    ((2, 3), (3, 4), "ab,bc", "it must read \"ab,bc->ac\""), ((2, 3), (3, 4), "ab->ba", "it must read"),
    ((2, 3), (3, 4), "ab,b*->a", "it must read"), ((2, 3), (3, 4), "ab,bc,cd->ad", "it must read"),
    ((2, 2), (2, 4), "aa,ab->b", "a letter stands twice in one word"), ((2, 3), (3, 4), "ab,bc->aa", "a letter stands twice"),
    ((2, 3), (3, 4), "ab,bc->ad", "an output letter is in no operand"),
    ((2, 3), (3, 4), "ab,bc->a", "a letter is in one operand alone: sum over it first"),
    ((2, 3), (3, 4, 5), "ab,bc->ac", "the number of letters and axes differ"),
    ((2, 3), (4, 5), "ab,bc->ac", "a letter has two sizes"), ((2, 3), (1, 5), "ab,bc->ac", "a letter has two sizes"),
    ((2, 3), (3, 4), "", "it must read")])
def test_a_wrong_spec_is_named(a, b, spec, words):
    with pytest.raises(ValueError) as error:
        einsum.array(np.zeros(a), np.zeros(b), spec=spec)
    assert str(error.value).startswith(f"einsum {spec!r} of a{list(a)} and b{list(b)}: {words}")


def test_products_are_counted():
    with Count() as count:
        einsum.array(np.ones((2, 3, 5)), np.ones((2, 7, 5)), spec="htk,hsk->hts")
    assert count.flops["forward"] == 2 * 2 * 3 * 7 * 5


def test_check_catches_an_operand_that_is_not_transposed():
    def wrong(a, b):
        return a @ b, lambda dy: (dy @ b, a.T @ dy)

    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, draw("a", (3, 3)), draw("b", (3, 3)))


@pytest.mark.parametrize("a, b", [((64, 4, 8), (8, 16)), ((4, 8), (64, 8, 16)), ((2, 32, 4, 8), (8, 16)),
                                  ((4, 8), (9, 1, 8, 3))])
def test_a_matrix_against_a_batch_has_its_gradient_from_one_product(a, b):
    """Not from one a batch entry, [batch, D, M], and a sum."""
    a, b = draw("a", a), draw("b", b)
    y, vjp = matmul.array(a, b)
    products = []

    def seen(op, run, *arrays, **static):
        out = run(*arrays, **static)
        products.append(out[0].shape)
        return out
    stack.frames.append(type("Frame", (), {"call": staticmethod(seen)})())
    try:
        da, db = vjp(y)
    finally:
        stack.frames.pop()
    matrix = a if a.ndim == 2 else b
    assert sorted(matrix.shape) in map(sorted, products)
    assert da.shape == a.shape and db.shape == b.shape
    check_vjp(matmul, a, b)
