"""Localises timelines that do not open, rows that do not line up, and traffic that a timeline shows twice, or not at all."""
import json
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from refimpl.autograd import Layout, Span, Tensor, recompute, stack, value_and_grad
from refimpl.comm import Comm, Ledger, Mesh, SerialComm, run_threads
from refimpl.comm.trace import Trace, TraceError
from refimpl.ops import sum as total
from refimpl.parallel import as_partial, copy_to, reduce_from

from .timeline import line_up, read


@pytest.mark.parametrize("a, b, fault", (
    ((0, 5), (3, 3), "overlap in part"), ((0, 2), (-1, 1), "before 0"), ((1, 2), (1, 3), "overlap in part"),
    ((2, 1), (1, 3), "not in order"), ((0, 2), (0, 1.0001), "is rounded")))
def test_the_reader_sees_what_would_not_be_shown(a, b, fault):
    events = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "rank 0"}},
              {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
              *({"name": "x", "cat": "op", "ph": "X", "pid": 1, "tid": 1, "args": {}, "ts": ts, "dur": d} for ts, d in (a, b))]
    with pytest.raises(AssertionError, match=fault):
        read(json.dumps({"otherData": {}, "traceEvents": events}))


# -- what is in it -------------------------------------------------------------------------------------------------


def timeline(comm, tmp_path, body, **options):
    """(rows, otherData) of the trace of `body()`, on every rank."""
    with Trace(comm, tmp_path / "out" / "trace.json", **options):
        body()
    assert stack.frames == []
    return read(comm.gather_texts((tmp_path / "out" / "trace.json").read_text() if comm.rank == 0 else "")[0])


def of_rank(rows, r):
    """All spans of rank r, those in flight included."""
    return [span for name, row in rows.items() if name == f"rank {r}" or name.startswith(f"rank {r} in flight") for span in row]


def everything(mesh):
    """Collectives forward, backward and recomputed, over two axes; transfers, of which two are under way together."""
    w, mine = Tensor(np.ones((2, 3))), Tensor(np.ones((2, 3)), Layout(frozenset({"tp"})))

    def part(w, mine):
        return reduce_from(as_partial(copy_to(w, comm=mesh.tp) * mine, comm=mesh.tp), comm=mesh.tp)
    value_and_grad(lambda p: total(recompute(part, p["w"], mine)), {"w": w})
    mesh.dp.all_gather(np.ones((2, 2), np.float32), axis=1)
    world = mesh.world
    first, second = world.start_ring(np.ones(5)), world.start_all_reduce(np.ones(7))
    first.wait()
    second.wait()
    first.wait()
    world.permute(np.ones(2, np.float32), ((world.size - 1, 0),))
    world.fixed_order().all_reduce(np.ones(4))
    world.barrier()


def check_everything(mesh, tmp_path):
    comm, ledger = mesh.world, Ledger()

    def body():
        comm.ledger.clear()
        everything(mesh)
        ledger.totals.update(comm.ledger.totals)
        comm.ledger.clear()                             # nothing but what a call adds is looked at
    rows, other = timeline(comm, tmp_path, body)
    assert [name for name in rows if "flight" not in name] == [f"rank {r}" for r in range(comm.size)]
    assert other["clock_error_us"] == 0 and not other["full"]
    assert [{**row, "seconds": 0} for row in other["ledger"][comm.rank]] == [
        {**row, "seconds": 0} for row in ledger.to_dicts()]
    seconds = sum(row["seconds"] for row in other["ledger"][comm.rank])
    assert seconds == pytest.approx(ledger.total().seconds, rel=0.2, abs=1e-3)

    spans = of_rank(rows, comm.rank)
    shown = [s for s in spans if "elements" in s["args"]]
    assert {s["cat"] for s in shown} <= {"collective", "transfer"}
    assert all(("wire" in s["args"]) == ("permute" in s["name"]) for s in shown)
    assert len(shown) == ledger.total().calls == 3 * (mesh.tp.size > 1) + (mesh.dp.size > 1) + 4 * (comm.size > 1)
    for axes in ("dp", "tp", "world"):
        found = [s["args"] for s in shown if s["args"]["axes"] == axes]
        t = ledger.total(axes=axes)
        assert [len(found), *(sum(a.get(k, 0) for a in found) for k in ("elements", "bytes", "wire"))] == [
            t.calls, t.elements, t.bytes, t.wire]

    phases = Counter((s["args"]["op"], s["args"]["phase"], s["args"].get("elements")) for s in spans
                     if s["args"].get("axes") == "tp" and s["cat"] == "collective")
    n = 6 if mesh.tp.size > 1 else None                 # g twice, f once
    assert phases == {("all_reduce", "forward", n): 1, ("all_reduce", "recompute", n): 1, ("all_reduce", "backward", n): 1}
    return rows


def test_a_trace_has_everything_once_and_adds_up_to_the_ledger(ranks, tmp_path):
    ranks.run_meshes(lambda mesh: check_everything(mesh, tmp_path) and None)


def test_spans_are_named_as_in_frames_and_nest_as_calls_do(ranks, tmp_path):
    def check(comm: Comm):
        rows, _ = timeline(comm, tmp_path, lambda: everything(Mesh(tp=comm.size, comm=comm)))
        for r in range(comm.size):
            row = rows[f"rank {r}"]
            parents = {(s["name"], s["cat"]): s["parent"] for s in row if s["args"]["phase"] != "recompute"}
            assert parents["reduce_from.all_reduce", "collective"] == "reduce_from"
            assert parents["copy_to.all_reduce", "collective"] == "copy_to"
            assert parents["reduce_from", "op"] is None and parents["copy_to", "backward"] is None
            assert parents["sum", "op"] is parents["sum", "backward"] is None
            assert {s["args"]["phase"] for s in row if s["cat"] == "backward"} == {"backward"}
            assert {s["name"] for s in row if s["cat"] == "op" and s["args"]["phase"] == "recompute"} == {
                "copy_to", "mul", "as_partial", "reduce_from"}
    ranks.run(check)


def test_of_calls_that_begin_together_the_outer_one_comes_first(tmp_path):
    """As a coarse clock shows them; calls are kept in the order of their ends."""
    with Trace(SerialComm(), tmp_path / "t.json") as trace:
        trace.spans += [Span(name, "op", "forward", "op", trace.zero + start, trace.zero + stop) for name, start, stop in (
            ("inmost", 1, 2), ("inner", 1, 3), ("outer", 1, 3), ("next", 3, 4))]
    row = read((tmp_path / "t.json").read_text())[0]["rank 0"]
    assert [(s["name"], s["parent"]) for s in row] == [("outer", None), ("inner", "outer"), ("inmost", "inner"), ("next", None)]


def test_transfers_under_way_have_rows_of_their_own(ranks, tmp_path):
    def check(comm: Comm):
        rows, other = timeline(comm, tmp_path, lambda: everything(Mesh(tp=comm.size, comm=comm)))
        for r in range(comm.size):
            lanes = [rows.get(f"rank {r} in flight{k}") for k in ("", " 2", " 3")]
            if comm.size == 1:
                assert lanes == [None] * 3              # nothing travels
                continue
            assert [[s["name"] for s in lane or ()] for lane in lanes] == [["start_permute"], ["start_all_reduce"], []]
            begins, waits = ([s for s in rows[f"rank {r}"] if s["name"].startswith(name)] for name in ("start_", "wait"))
            for lane, begin, wait in zip(lanes, begins, waits):
                assert (lane[0]["start"], lane[0]["stop"]) == (begin["start"], wait["stop"])
                assert lane[0]["args"]["exposed_us"] == pytest.approx(wait["dur"], abs=2e-3)
                assert wait["cat"] == "collective" and wait["args"]["for"] == begin["name"] and "elements" not in wait["args"]
            assert lanes[0][0]["args"] | {"exposed_us": 0} == {"axes": "world", "elements": 5, "bytes": 40, "wire": 5,
                                                               "exposed_us": 0}
            assert waits[2]["cat"] == "seam"            # to wait again is nothing
    ranks.run(check)


def test_a_transfer_that_nobody_waits_for_lasts_to_the_end(tmp_path):
    def body(comm):
        kept = []

        def start():
            kept.append(comm.start_ring(np.ones(3)))
            comm.barrier()
        rows, _ = timeline(comm, tmp_path, start)
        kept[0].wait()
        return rows
    rows = run_threads(2, body)[0]
    bar = rows["rank 1 in flight"][0]
    assert bar["stop"] == max(s["stop"] for s in rows["rank 1"]) and "exposed_us" not in bar["args"]
    assert bar["args"]["elements"] == 3


# -- the clocks ----------------------------------------------------------------------------------------------------


def pauses(comm):
    for _ in range(3):
        time.sleep(2e-3 * comm.rank)
        comm.barrier()


def test_ranks_line_up(ranks, tmp_path):
    def check(comm: Comm):
        rows, _ = timeline(comm, tmp_path, lambda: pauses(comm))
        line_up(rows, comm.size)
        assert all(rows[f"rank {r}"][k]["ts"] >= 2000 * r * (k + 1) for r in range(comm.size) for k in range(3))
    ranks.run(check)


def test_clocks_of_different_machines_are_compared(tmp_path, monkeypatch):
    """Each rank's clock shows another time; the rows line up all the same, but for the error that the file states."""
    clock = time.perf_counter

    def skewed():
        return clock() + 1000.0 * int(threading.current_thread().name.removeprefix("rank ") or 0)
    monkeypatch.setattr(time, "perf_counter", skewed)
    rows, other = run_threads(3, lambda comm: timeline(comm, tmp_path, lambda: pauses(comm)))[0]
    assert 0 < other["clock_error_us"] < 1e5            # a barrier among threads on a busy machine
    line_up(rows, 3, slack=2 * other["clock_error_us"])


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_trace_itself_is_not_counted(ranks, tmp_path):
    def check(comm: Comm):
        comm.ledger.clear()
        rows, _ = timeline(comm, tmp_path, lambda: None)
        assert rows == {f"rank {r}": [] for r in range(comm.size)}
        comm.ledger.clear()                             # of the test's own gathering
        with Trace(comm, tmp_path / "t.json"):
            pass
        assert not comm.ledger.totals
    ranks.run(check)


def test_what_it_says_when_written(tmp_path, capsys):
    run_threads(2, lambda comm: timeline(comm, tmp_path, lambda: comm.all_reduce(np.ones(1500))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0, while traced:"
    assert lines[2].split()[:7] == ["world", "all_reduce", "forward", "1", "1,500", "12,000", "-"]
    assert lines[-1] == f"trace: {tmp_path}/out/trace.json, 2 spans of 2 ranks: open it at ui.perfetto.dev"


def test_an_old_trace_does_not_pass_for_a_new_one(tmp_path):
    (tmp_path / "t.json").write_text("old")
    Trace(SerialComm(), tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_gets_too_long_ends_where_it_still_nests(tmp_path, capsys):
    def body(comm):
        mesh = Mesh(tp=2, comm=comm)
        return timeline(comm, tmp_path, lambda: [everything(mesh) for _ in range(10)], limit=20)
    rows, other = run_threads(2, body)[0]
    assert other["full"] and all(20 <= len(rows[f"rank {r}"]) <= 40 for r in (0, 1))
    assert ", no more than about 20 of each: open it" in capsys.readouterr().out


def test_a_disk_that_is_full_for_a_moment_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    """The text of rank 1 does not fit, that of rank 2 would."""
    append = Trace.append

    def full(self, piece):
        return append(self, piece[:5]) or "No space left on device" * (b'"rank 1"' in piece)
    monkeypatch.setattr(Trace, "append", full)

    def body(comm):
        with pytest.raises(TraceError, match="the trace cannot be written to .*t.json: No space left on device"):
            with Trace(comm, tmp_path / "t.json"):
                comm.barrier()
        return True
    assert run_threads(3, body) == [True] * 3 and list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_file_and_its_own_error(tmp_path):
    def body(comm):
        with Trace(comm, tmp_path / "t.json"):
            comm.barrier()
            if comm.rank == 1:
                raise ZeroDivisionError("planted")
            comm.barrier()
    with pytest.raises(ZeroDivisionError, match="planted"):
        run_threads(2, body)
    assert list(tmp_path.iterdir()) == []


def test_leaving_with_status_0_is_an_end_like_others(tmp_path):
    with pytest.raises(SystemExit):
        with Trace(SerialComm(), tmp_path / "t.json"):
            sys.exit(0)
    assert read((tmp_path / "t.json").read_text())[0] == {"rank 0": []}
