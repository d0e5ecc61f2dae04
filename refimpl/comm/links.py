"""Connections between the ranks, beside MPI: they work while a rank computes, is blocked inside MPI, or is gone.

Rank r is connected to ranks r ± 1, r ± 2, r ± 4, ...; a message goes to all of them, and each passes on what it has not
seen.  So every rank hears every message, also when some are gone, and 2·log2(size) connections a rank are enough.  The
kernel closes the connections of a process that dies, however it dies: its neighbours see it at once.

Messages are JSON objects.  Both ends of a connection prove that they know the secret of this run, without sending it; whoever
else calls or answers is left alone.  Where all ranks are on one machine, nothing listens on the network.
"""
import fcntl
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, Callable, Iterator

SECRET = 16                                             # bytes, of the secret and of a challenge
CONNECTING = 10.0                                       # seconds for the ranks to connect
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
        self.alarm, self.woken = socket.socketpair()    # another thread of this process wakes the one that listens
        self.woken.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ)
        hosts = [h.decode() for h in gather(host().encode())]
        server, mine = None, ""
        with suppress(OSError):
            server = socket.create_server(("127.0.0.1" if len(set(hosts)) == 1 else "", 0), backlog=128)
            mine = json.dumps([secrets.token_hex(SECRET), server.getsockname()[1], own_addresses()])
        told = [t.decode() for t in gather(mine.encode())]
        if server is None or "" in told:
            raise OSError(f"rank {told.index('')} cannot listen for connections")
        endpoints = [json.loads(t) for t in told]
        try:
            self.connect(server, bytes.fromhex(endpoints[0][0]), [
                (port, ["127.0.0.1"] if where == hosts[rank] else addresses)
                for where, (_, port, addresses) in zip(hosts, endpoints)])
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)       # wakes the thread that accepts
            server.close()
        os.register_at_fork(after_in_child=self.close)  # else a child would keep the connections of a dead rank open

    def connect(self, server: socket.socket, secret: bytes, endpoints: list[tuple[int, list[str]]]) -> None:
        """Call the ranks above, while a thread answers those below."""
        steps = [1 << k for k in range(self.size.bit_length()) if 1 << k < self.size]
        awaited, called = {(self.rank - step) % self.size for step in steps}, queue.SimpleQueue[tuple[int, socket.socket]]()
        threading.Thread(target=answer_calls, args=(server, secret, self.rank, called), daemon=True).start()
        for step in steps:
            target = (self.rank + step) % self.size
            self.add(call(*endpoints[target], secret, self.rank, target), target)
        deadline = time.monotonic() + CONNECTING
        while awaited:
            try:
                rank, connection = called.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise OSError(f"rank {min(awaited)} did not connect within {CONNECTING:g} s") from None
            awaited.discard(rank)
            self.add(connection, rank)

    def add(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peers[connection], self.received[connection] = rank, bytearray()
        self.selector.register(connection, selectors.EVENT_READ)

    def close(self) -> None:
        for s in (*self.peers, self.woken, self.alarm):
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
                try:
                    connection.sendall(struct.pack("!I", len(text)) + text)
                except OSError:                         # it is gone, or does not read: listen() will tell
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def listen(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What has come within `seconds`, or until somebody wakes us; {"from": r, "gone": True} for a lost connection."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.woken:
                with suppress(OSError):
                    self.woken.recv(4096)
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


def answer_calls(server: socket.socket, secret: bytes, rank: int, called: Any) -> None:
    """Put (rank, connection) into the queue `called` for each that knows the secret, until the server is closed."""
    def answer(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.settimeout(CONNECTING)
            challenge, caller = receive(connection, SECRET), receive(connection, 4)
            mine = secrets.token_bytes(SECRET)
            connection.sendall(mine + proof(secret, b"answer", challenge, rank))
            number = struct.unpack("!I", caller)[0]
            if hmac.compare_digest(receive(connection, PROOF), proof(secret, b"call", mine, number)):
                called.put((number, connection))
                return
        connection.close()

    with suppress(OSError):
        while True:                                     # each in a thread of its own: a stranger may call and say nothing
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()


def call(port: int, addresses: list[str], secret: bytes, rank: int, target: int) -> socket.socket:
    """A connection to the first of `addresses` where rank `target` answers."""
    error = OSError("no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), CONNECTING / len(addresses))
            challenge = secrets.token_bytes(SECRET)
            connection.sendall(challenge + struct.pack("!I", rank))
            theirs = receive(connection, SECRET)
            if not hmac.compare_digest(receive(connection, PROOF), proof(secret, b"answer", challenge, target)):
                connection.close()
                raise OSError(f"that is not rank {target}")
            connection.sendall(proof(secret, b"call", theirs, rank))
            connection.settimeout(CONNECTING)
            return connection
        except OSError as e:
            error = OSError(f"no connection to {address}: {e}")
    raise error


PROOF = 32                                              # bytes


def proof(secret: bytes, direction: bytes, challenge: bytes, rank: int) -> bytes:
    """What only a rank of this run can say to a challenge; in the other direction it proves nothing."""
    return hmac.digest(secret, direction + challenge + struct.pack("!I", rank), "sha256")


def receive(connection: socket.socket, n: int) -> bytes:
    """n bytes.  Error: OSError where the connection ends before."""
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise OSError("it hangs up")
        data += part
    return data


def host() -> str:
    """Of two processes that reach each other on 127.0.0.1: the name of this machine, its network namespace and its boot."""
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
