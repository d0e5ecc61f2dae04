"""Connections between the ranks, beside MPI: they work while a rank computes, is blocked inside MPI, or is gone.

Rank r is connected to ranks r ± 1, r ± 2, r ± 4, ...; a message goes to all of them, and each passes on what it has not
seen.  So every rank hears every message, also when some are gone, and 2·log2(size) connections a rank are enough.  The
kernel closes the connections of a process that dies, however it dies: its neighbours see it at once.

Messages are small JSON objects.  A connection is accepted only from a process that knows the secret of this run.  Where all
ranks are on one machine, nothing listens on the network.
"""
import fcntl
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from contextlib import suppress
from typing import Any, Callable, Iterator

SECRET = 16                                             # bytes
PATIENCE = 10.0                                         # seconds for the ranks to connect
LONGEST = 1 << 20                                       # bytes of one message
SIOCGIFADDR = 0x8915                                    # Linux: the address of an interface
Gather = Callable[[bytes], list[bytes]]                 # every rank's bytes, on every rank


class Links:
    """The connections of one rank.  Made by all ranks together; `gather` exchanges what they need for it.

    Error: OSError where a connection cannot be made.
    """

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self.rank, self.size = rank, size
        self.seen: set[tuple[int, int]] = set()
        self.serial, self.lock = 0, threading.Lock()    # two threads send
        self.peers: dict[socket.socket, int] = {}
        self.received: dict[socket.socket, bytearray] = {}
        self.selector = selectors.DefaultSelector()
        self.alarm, self.ear = socket.socketpair()      # another thread of this process wakes the one that listens
        self.ear.setblocking(False)
        self.selector.register(self.ear, selectors.EVENT_READ)
        hosts = [h.decode() for h in gather(host().encode())]
        server, mine = None, ""
        with suppress(OSError):
            server = socket.create_server(("127.0.0.1" if len(set(hosts)) == 1 else "", 0), backlog=128)
            mine = json.dumps([secrets.token_hex(SECRET), server.getsockname()[1], own_addresses()])
        told = [t.decode() for t in gather(mine.encode())]
        if server is None or "" in told:
            raise OSError(f"rank {told.index('')} cannot listen for connections")
        doors = [json.loads(t) for t in told]
        try:
            self.connect(server, bytes.fromhex(doors[0][0]), [
                (port, ["127.0.0.1"] if where == hosts[rank] else addresses)
                for where, (_, port, addresses) in zip(hosts, doors)])
        finally:
            server.close()
        os.register_at_fork(after_in_child=self.close)  # else a child would keep the connections of a dead rank open

    def connect(self, server: socket.socket, secret: bytes, doors: list[tuple[int, list[str]]]) -> None:
        steps = [1 << k for k in range(self.size.bit_length()) if 1 << k < self.size]
        for step in steps:
            self.add(called(*doors[(self.rank + step) % self.size], secret, self.rank), (self.rank + step) % self.size)
        server.settimeout(PATIENCE)
        awaited = {(self.rank - step) % self.size for step in steps}
        while awaited:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            greeting = exactly(connection, SECRET + 4)
            if secrets.compare_digest(greeting[:SECRET], secret):
                rank = struct.unpack("!I", greeting[SECRET:])[0]
                awaited.discard(rank)
                self.add(connection, rank)
            else:
                connection.close()

    def add(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peers[connection], self.received[connection] = rank, bytearray()
        self.selector.register(connection, selectors.EVENT_READ)

    def close(self) -> None:
        for s in (*self.peers, self.ear, self.alarm):
            s.close()
        self.peers.clear()

    def wake(self) -> None:
        with suppress(OSError):                         # it is closed, or already full of wake-up calls
            self.alarm.send(b"!", socket.MSG_DONTWAIT)

    def send(self, message: dict[str, Any]) -> None:
        """To all ranks."""
        with self.lock:
            self.serial += 1
            self.pass_on(json.dumps({**message, "from": self.rank, "serial": self.serial}).encode())

    def pass_on(self, text: bytes, but: socket.socket | None = None) -> None:
        for connection in list(self.peers):
            if connection is not but:
                with suppress(OSError):                 # it is gone: listen() will tell
                    connection.sendall(struct.pack("!I", len(text)) + text)

    def listen(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What has come within `seconds`, or until somebody wakes us; {"from": r, "gone": True} for a lost connection."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.ear:
                with suppress(OSError):
                    self.ear.recv(4096)
            elif isinstance(key.fileobj, socket.socket):
                yield from self.read(key.fileobj)

    def read(self, connection: socket.socket) -> Iterator[dict[str, Any]]:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        buffer = self.received[connection]
        buffer += data
        while len(buffer) >= 4:
            length = struct.unpack("!I", buffer[:4])[0]
            if length > LONGEST:
                data = b""
                break
            if len(buffer) < 4 + length:
                break
            text = bytes(buffer[4:4 + length])
            del buffer[:4 + length]
            message = json.loads(text)
            if message["from"] != self.rank and (message["from"], message["serial"]) not in self.seen:
                self.seen.add((message["from"], message["serial"]))
                with self.lock:
                    self.pass_on(text, connection)
                yield message
        if not data:
            self.selector.unregister(connection)
            connection.close()
            rank = self.peers.pop(connection)
            if rank not in self.peers.values():         # (two ranks may have two connections)
                yield {"from": rank, "gone": True}


def called(port: int, addresses: list[str], secret: bytes, rank: int) -> socket.socket:
    """A connection to the first of `addresses` that answers."""
    error = OSError("no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), PATIENCE / len(addresses))
            connection.sendall(secret + struct.pack("!I", rank))
            connection.settimeout(PATIENCE)
            return connection
        except OSError as e:
            error = OSError(f"no connection to {address}: {e}")
    raise error


def exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            break
        data += part
    return data.ljust(n, b"\0")


def host() -> str:
    """The same for two processes exactly if they reach each other on 127.0.0.1: this machine and its network namespace."""
    identity = socket.gethostname()
    with suppress(OSError):
        identity += f" {os.stat('/proc/self/ns/net').st_ino}"
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        identity += " " + file.read().strip()
    return identity


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces, the loopback's last."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with suppress(OSError):                     # an interface without an address; a system other than Linux
                reply = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    with suppress(OSError):
        found += [a for a in socket.gethostbyname_ex(socket.gethostname())[2] if a not in found]
    return sorted(found, key=lambda a: a.startswith("127."))
