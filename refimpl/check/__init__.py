"""Checks of ops and collectives, for our tests and for your own ops.  A failure is an AssertionError of one sentence.

    check_vjp(gelu_tanh, x)                          the numbers: the vjp is the transpose of the Jacobian, and linear
    check_op(gelu_tanh, x)                           the same, and purity, dtypes, views, docstring and residuals
    check_adjoint(copy_to, comm, "replicated", "per_rank", x)       a collective, on all ranks

The first also takes a plain function of arrays that returns (y, vjp).  Cotangents and directions come from rng.py, so a
failure repeats.  Left out: whether y itself is right (tests/ops works that out by hand).  Read pure.py, collectives.py,
then tools.py.
"""
from refimpl.check.collectives import check_adjoint
from refimpl.check.pure import check_docstring, check_dtypes, check_op, check_purity, check_residuals, check_views, check_vjp

__all__ = ["check_adjoint", "check_docstring", "check_dtypes", "check_op", "check_purity", "check_residuals", "check_views",
           "check_vjp"]
