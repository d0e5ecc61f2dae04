"""Communication: read base.py (the interface; arguments.py checks what it is given, transfer.py is a collective under way),
threads.py and mpi.py, then mesh.py, ledger.py and launch.py (with mpi_world.py, library.py, switches.py).

algorithms.py: what a library does inside a collective.  What ends all ranks together: verdict.py (the sentence), watch.py,
links.py, ending.py.  Arrays of a GPU: device.py, direct.py.  trace.py: the timeline.  paper.py: a mesh that is not running.
"""
from refimpl.comm.arguments import CommError, shares
from refimpl.comm.base import Comm, SerialComm
from refimpl.comm.launch import launch, local_rank, world
from refimpl.comm.ledger import Ledger, Total
from refimpl.comm.mesh import AXES, Mesh
from refimpl.comm.threads import ThreadComm, run_threads
from refimpl.comm.trace import Trace
from refimpl.comm.transfer import Transfer

__all__ = ["AXES", "Comm", "CommError", "Ledger", "Mesh", "SerialComm", "ThreadComm", "Total", "Trace", "Transfer", "launch",
           "local_rank", "run_threads", "shares", "world"]
