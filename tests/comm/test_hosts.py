"""Localises what holds on one machine only: a rank's place on it, the cores it gets, results and common ends across hosts."""
import json
import time

import pytest

from .hosts import KINDS, Hosts
from .programs import QUICK, unlocked

LARGE = 1 << 17                                         # elements: 1 MiB, no longer one packet

MESHED = """
import json, sys
import numpy as np
from refimpl.comm import Mesh, local_rank, world
launch = sys.modules["refimpl.comm.launch"]
shares = []
launch.affinity = lambda: np.arange(4096) < 8           # eight cores, whatever this machine has
launch.cgroup_cores = lambda: None
launch.set_blas_threads = shares.append
comm = world()
mesh = Mesh(dp=2, tp=2, comm=comm)

for n in (4, {large}):
    data = [np.arange(n, dtype=float).reshape(2, -1) * (r + 1) - r for r in range(4)]          # exact in any order
    for axis, group in (("dp", (comm.rank % 2, comm.rank % 2 + 2)), ("tp", (comm.rank // 2 * 2, comm.rank // 2 * 2 + 1))):
        along, x, (a, b) = getattr(mesh, axis), data[comm.rank], (data[r] for r in group)
        assert np.array_equal(along.all_reduce(x), a + b)
        assert np.array_equal(along.all_reduce(x, "max"), np.maximum(a, b))
        assert np.array_equal(along.all_gather(x, axis=1), np.concatenate([a, b], 1))
        assert np.array_equal(along.reduce_scatter(x, axis=0), (a + b)[along.rank:along.rank + 1])
    assert np.array_equal(comm.all_reduce(x), sum(data))
    assert np.array_equal(comm.broadcast(x, root=3), data[3])

node = comm.raw.Split_type(comm.MPI.COMM_TYPE_SHARED)
found = comm.gather_texts(json.dumps({{
    "rank": comm.rank, "node": node.allgather(comm.rank), "local rank": local_rank(comm), "threads": shares,
    "watched": comm.watch is not None, "host": comm.MPI.Get_processor_name()}}))
if comm.rank == 0:
    print(json.dumps([json.loads(text) for text in found]))
"""

# One rank fails, the others wait for it; a rank holds its lock for as long as it lives.
FAILING = """
import fcntl, sys
import numpy as np
from refimpl.comm import Mesh, world
comm = world()
lock = open(sys.argv[1] + f"/lock{comm.rank}", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
comm.barrier()
if comm.rank == 3:
    raise ValueError("the " + "cause")
Mesh(dp=2, tp=2, comm=comm).dp.all_reduce(np.ones(3))
"""


@pytest.fixture(params=KINDS)
def hosts(request, mpirun, tmp_path):
    return Hosts(request.param, tmp_path)


def test_a_mesh_over_two_hosts_is_right_and_each_host_is_shared_by_its_own_ranks(hosts):
    code, out, err, _ = hosts.run(MESHED.format(large=LARGE), plain=True)
    assert code == 0, err
    found = json.loads(out)
    assert [row["rank"] for row in found] == [0, 1, 2, 3]
    assert [row["node"] for row in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [row["local rank"] for row in found] == [0, 1, 0, 1]
    assert [row["threads"] for row in found] == [[4]] * 4
    assert all(row["watched"] for row in found), err    # the ranks are connected beside MPI, too
    if hosts.kind == "networks":
        assert [row["host"] for row in found] == ["left", "left", "right", "right"]
        assert hosts.received > 8 * LARGE


def test_a_failure_on_the_second_host_ends_the_ranks_of_both(hosts):
    code, _, err, seconds = hosts.run(FAILING)
    assert code != 0 and seconds < QUICK and "ValueError: the cause" in err, err
    deadline = time.monotonic() + 5                     # mpirun ends a little before its ranks
    for rank in range(4):
        while not (free := unlocked(hosts.folder / f"lock{rank}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert free, f"rank {rank} goes on"
