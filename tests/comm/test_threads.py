"""Localises hangs and lost errors of ranks as threads: a rank that fails, leaves early, or waits for the wrong partner."""
import sys
import threading
import time

import numpy as np
import pytest

from refimpl.comm import CommError, Mesh, run_threads


def waits(comm):
    comm.all_reduce(np.ones(3))


def run_and_catch(size, body, **kwargs):
    """Every rank's error (None without one), and what run_threads raises."""
    errors = [None] * size

    def main(comm):
        try:
            body(comm)
        except BaseException as error:
            errors[comm.rank] = error
            raise
    start = time.monotonic()
    with pytest.raises(BaseException) as caught:
        run_threads(size, main, **kwargs)
    assert time.monotonic() - start < 5, "the failure was not noticed at once"
    return errors, caught.value


@pytest.mark.parametrize("size", (2, 4))
def test_a_rank_that_raises_ends_all_with_its_error(size):
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        waits(comm)
    errors, raised = run_and_catch(size, body)
    assert raised is errors[1]
    others = {str(e) for r, e in enumerate(errors) if r != 1}
    assert len(others) == 1, "not the same sentence on all ranks"
    assert all(type(e) is CommError for r, e in enumerate(errors) if r != 1)
    assert "rank 1 failed (KeyError: 'the cause'); rank 0 waits in all_reduce over world: sum of float64[3]" in others.pop()
    if sys.version_info >= (3, 11):
        assert f"rank 1 of {size}" in raised.__notes__[0]


def test_the_first_of_several_failures_is_raised():
    def body(comm):
        if comm.rank == 2:
            raise ValueError("first")
        time.sleep(0.2)
        raise ValueError(f"later {comm.rank}")
    assert str(run_and_catch(4, body)[1]) == "first"


def test_a_rank_that_returns_early_is_an_error_of_those_who_wait():
    def body(comm):
        if comm.rank != 1:
            waits(comm)
    errors, raised = run_and_catch(3, body)
    assert errors[1] is None and str(errors[0]) == str(errors[2]) == str(raised)
    assert str(raised).startswith("rank 1 has ended; rank")


@pytest.mark.parametrize("status, kept", ((3, True), ("some text", True), (0, False), (None, False)))
def test_sys_exit_with_a_failure_ends_all_and_without_is_a_return(status, kept):
    def body(comm):
        if comm.rank == 0:
            raise SystemExit(status)
        waits(comm)
    errors, raised = run_and_catch(3, body)
    assert type(errors[1]) is CommError and str(errors[1]) == str(errors[2])
    assert raised is errors[0] if kept else "rank 0 has ended" in str(raised)


def test_sys_exit_zero_everywhere_is_a_success():
    assert run_threads(2, lambda comm: sys.exit(0)) == [None, None]


def test_ranks_that_wait_for_one_another_are_found_at_once():
    """Rank 0 reduces over its tp group, rank 1 over its dp group: no group is ever complete."""
    def body(comm):
        mesh = Mesh(dp=2, tp=2, comm=comm)
        (mesh.tp if comm.rank in (0, 3) else mesh.dp).all_reduce(np.ones(2))
    errors, raised = run_and_catch(4, body, timeout=20)
    assert len({str(e) for e in errors}) == 1
    assert str(raised).startswith("the ranks wait for one another; rank 0 waits in all_reduce over tp")
    assert "rank 1 waits in all_reduce over dp: sum of float64[2]" in str(raised)


def test_a_rank_that_never_comes_is_an_error_after_the_time_limit():
    free = threading.Event()

    def body(comm):
        if comm.rank == 1:
            free.wait(20)
            return
        try:
            waits(comm)
        finally:
            free.set()
    errors, raised = run_and_catch(3, body, timeout=0.2)
    assert str(raised) == str(errors[0]) == str(errors[2])
    assert str(raised).startswith("rank 1 did not come within 0.2 s; rank")


def test_a_group_that_does_not_need_the_failed_rank_is_ended_too():
    def body(comm):
        mesh = Mesh(dp=2, tp=2, comm=comm)
        if comm.rank == 0:
            raise ValueError("alone")
        for _ in range(10 ** 6):
            (mesh.tp if comm.rank > 1 else mesh.dp).barrier()
    errors, raised = run_and_catch(4, body)
    assert str(raised) == "alone" and all(errors)


def test_the_sender_may_change_its_buffer_right_after_the_call():
    def body(comm):
        for k in range(50):
            x = np.full(1000, float(comm.rank + k))
            y = comm.all_reduce(x)
            g = comm.all_gather(x[:3], axis=0)
            b = comm.broadcast(x, root=1)
            x[:] = np.nan
            assert (y == sum(r + k for r in range(comm.size))).all() and (b == 1 + k).all()
            assert g.tolist() == [float(r + k) for r in range(comm.size) for _ in range(3)]
            y[:] = g[:] = b[:] = np.nan                  # nor do the results belong to anybody else
    run_threads(4, body)


def test_results_do_not_depend_on_who_comes_first():
    def bits(late):
        def body(comm):
            time.sleep(0.02 if comm.rank == late else 0)
            return comm.all_reduce(np.array([1e16, 1.0, -1e16, 0.1])[comm.rank:comm.rank + 1]).tobytes()
        return run_threads(4, body)
    assert len({b for late in range(4) for b in bits(late)}) == 1


def test_results_come_in_the_order_of_the_ranks():
    assert run_threads(5, lambda comm: comm.rank ** 2) == [0, 1, 4, 9, 16]


def test_groups_with_the_same_members_do_not_mix_their_messages():
    def body(comm):
        mesh = Mesh(tp=2, comm=comm)
        (mesh.tp if comm.rank else mesh.world).all_reduce(np.ones(1))
    errors, _ = run_and_catch(2, body)
    assert str(errors[0]) == str(errors[1]) and "all_reduce over tp" in str(errors[0])
