"""Programs on two hosts, "left" and "right", that are both this machine.

names      two names of hosts: the launcher believes in two machines, the ranks share everything.  Open MPI's daemons ask
           the system for its name, so each gets a UTS namespace; MPICH's need nothing
networks   each host has a network, a name, an IPC and a /dev/shm of its own, and a cable (veth) joins them: what one host
           tells the other goes over TCP

No ssh server is needed: a script in the place of ssh drops the host's name and runs the command here.  The namespaces have
no names outside and go with the first of their processes, also when it is killed: there is nothing to tidy up.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.comm.launch import mpirun_command

from .programs import execute

KINDS = ("names", "networks")
IMPOSSIBLE = 77                                         # CABLE's status where the system does not allow it
OWN = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")      # root's rights inside, no others
AGENT = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")     # what MPICH, Open MPI 5 and 4 call ssh

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done              # flags for ssh
host=$1; shift
cd "$(dirname "$0")"
case $host in
    left) exec LEFT sh -c "$*";;
    right) exec RIGHT sh -c "$*";;
    *) echo "there is no host $host" >&2; exit 255;;
esac
"""

SETTLE = "mount -t tmpfs shm /dev/shm; mount -t sysfs sys /sys; ip link set lo up"

# This shell is on the left host, the first process of its namespaces.
CABLE = """
trap '[ $? = 0 ] || { echo "two networks cannot be made here" >&2; exit 77; }' EXIT
set -e
cd "$(dirname "$0")"
printf '127.0.0.1 localhost\\n10.0.0.1 left\\n10.0.0.2 right\\n' >names
mount --bind names /etc/hosts
touch net uts ipc
unshare --net=net --uts=uts --ipc=ipc hostname right
hostname left
SETTLE
./ssh right ip link add eth0 index 8 type veth peer name eth0 index 9 netns 1   # unequal numbers: the cable is up at once
ip addr add 10.0.0.1/24 dev eth0
ip link set eth0 up
./ssh right 'ip addr add 10.0.0.2/24 dev eth0; ip link set eth0 up'
for host in left right; do
    until ./ssh $host grep -q up /sys/class/net/eth0/operstate; do sleep 0.02; done
done
set +e
trap - EXIT
"$@"
status=$?
cat /sys/class/net/eth0/statistics/rx_bytes >received
exit $status
"""


class Hosts:
    """Two hosts with two ranks each, whose files lie in `folder`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder

    def run(self, program: str, plain: bool = False) -> tuple[int, str, str, float]:
        """(status, stdout, stderr, seconds) of a Python text on ranks 0, 1 (left) and 2, 3 (right), which gets the folder as
        its argument.  Skips where two hosts cannot be had.

        plain  as a user would start it.  (Told to leave ranks alone, Hydra 5.0 tells a host of the other's ranks that they have
               ended, also where all is well, and where that host was quicker, ends by SIGPIPE.)
        """
        mpirun, *rest = mpirun_command(4)
        flags, shell = rest[:rest.index("-n")], rest[rest.index("-n") + 2:]
        if plain:
            flags, shell = [flag for flag in flags if flag != "-disable-auto-cleanup"], []
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        hydra, open_mpi = "HYDRA" in version, "Open MPI" in version
        if not (hydra or open_mpi):
            pytest.skip(f"{mpirun} is neither Hydra's (MPICH) nor Open MPI's: how it reaches other hosts is not known here")
        left, right = self.doors(open_mpi)
        ssh = self.write("ssh", SSH.replace("LEFT", left).replace("RIGHT", right))
        ssh.chmod(0o755)
        names = self.write("hosts", "left:2\nright:2\n" if hydra else "left slots=2\nright slots=2\n")
        flags = [flag for flag in flags if flag != "--oversubscribe"]       # Open MPI would put all ranks on the first host
        command = [mpirun, *flags, "-f" if hydra else "--hostfile", str(names), "-n", "4", *shell,
                   sys.executable, str(self.write("program.py", program)), str(self.folder)]
        if self.kind == "networks":
            command = ["unshare", *OWN, "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                       "sh", str(self.write("cable", CABLE.replace("SETTLE", SETTLE))), *command]
        status, out, err, seconds = execute(command, **dict.fromkeys(AGENT, str(ssh)), HYDRA_LAUNCHER="ssh",
                                            TMPDIR=str(self.folder))        # where mpirun keeps files under its number
        if status == IMPOSSIBLE or self.kind == "networks" and err.startswith("unshare:"):
            pytest.skip(f"two networks cannot be made here: {err.strip()}")
        return status, out, err, seconds

    def doors(self, open_mpi: bool) -> tuple[str, str]:
        """What leads into the left and into the right host, in front of a command."""
        if self.kind == "networks":
            require("unshare", "nsenter", "mount", "hostname", "ip")
            return "", f"nsenter --net=net --uts=uts --ipc=ipc unshare --mount sh -ec '{SETTLE}; exec \"$@\"' -"
        if not open_mpi:
            return "", ""
        require("unshare", "hostname")
        uts = ["unshare", *OWN, "--uts"]
        trial = subprocess.run([*uts, "hostname", "left"], capture_output=True, text=True)
        if trial.returncode:
            pytest.skip(f"Open MPI asks the system for the host's name, and no second one can be had: {trial.stderr.strip()}")
        left, right = (f"{' '.join(uts)} sh -c 'hostname {host}; exec \"$@\"' -" for host in ("left", "right"))
        return left, right

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    @property
    def received(self) -> int:
        """Bytes that came over the cable to the left host."""
        return int((self.folder / "received").read_text())


def require(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"two hosts on one machine need {', '.join(missing)}")
