"""Communication: read base.py (the interface), threads.py, mpi.py, ending.py, then mesh.py, ledger.py,
launch.py and paper.py (a mesh that is not running)."""
from refimpl.comm.base import Comm, CommError, SerialComm, shares
from refimpl.comm.launch import launch, local_rank, world
from refimpl.comm.ledger import Ledger, Total
from refimpl.comm.mesh import AXES, Mesh
from refimpl.comm.threads import ThreadComm, run_threads

__all__ = ["AXES", "Comm", "CommError", "Ledger", "Mesh", "SerialComm", "ThreadComm", "Total", "launch", "local_rank",
           "run_threads", "shares", "world"]
