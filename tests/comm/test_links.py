"""Localises strangers that keep the ranks from connecting or are taken for one, and half a message that stays in the way."""
import socket
import threading

import pytest

from refimpl.comm import links as module
from refimpl.comm import run_threads
from refimpl.comm.links import Links, call

SECRET = b"of this run, all"


def made(comm):
    """The links of ranks that are threads, which meet as MPI's would."""
    return Links(comm.rank, comm.size, lambda mine: [t.encode("latin-1") for t in comm.gather_texts(mine.decode("latin-1"))])


def heard(links, n):
    """Who was heard, of n messages."""
    found = []
    while len(found) < n:
        found += [message["from"] for message in links.listen(5)]
    return sorted(found)


@pytest.mark.parametrize("size", (2, 3, 5, 8))
def test_every_rank_hears_every_other_once(size):
    def on_rank(comm):
        links = made(comm)
        comm.barrier()
        links.send({"kind": "hello"})
        assert heard(links, size - 1) == [r for r in range(size) if r != comm.rank]
        comm.barrier()
        links.close()
    run_threads(size, on_rank)


@pytest.mark.parametrize("greeting", (b"", b"x", b"x" * 1000), ids=("silent", "short", "long"))
def test_strangers_that_call_do_not_matter(monkeypatch, greeting):
    """They come before any rank does."""
    strangers, make = [], socket.create_server

    def create_server(*args, **kwargs):
        server = make(*args, **kwargs)
        for _ in range(3):
            strangers.append(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
            strangers[-1].sendall(greeting)
        return server

    def on_rank(comm):
        links = made(comm)
        assert set(links.peers.values()) == {r for r in range(3) if r != comm.rank}
        comm.barrier()
        links.close()
    monkeypatch.setattr(module.socket, "create_server", create_server)
    run_threads(3, on_rank)
    assert len(strangers) == 9
    for s in strangers:
        s.close()


def test_an_impostor_is_not_taken_for_the_rank_and_does_not_learn_the_secret():
    server, told = socket.create_server(("127.0.0.1", 0)), []

    def answer():
        connection, _ = server.accept()
        connection.settimeout(5)
        told.append(connection.recv(1000))
        connection.sendall(told[0][:16] + b"?" * 32)
        told.append(connection.recv(1000))
        connection.close()
    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(OSError, match="no connection to 127.0.0.1: that is not rank 1"):
        call(server.getsockname()[1], ["127.0.0.1"], SECRET, 0, 1)
    thread.join()
    server.close()
    assert len(told[0]) == 20 and told[1] == b"" and SECRET not in told[0]


def test_a_rank_that_does_not_read_is_given_up_and_not_sent_half_a_message(monkeypatch):
    monkeypatch.setattr(module, "CONNECTING", 0.2)
    sent = threading.Event()

    def on_rank(comm):
        links = made(comm)
        comm.barrier()
        if comm.rank == 0:
            for _ in range(20):                         # more than the kernel keeps for one that does not read
                links.send({"kind": "long", "text": "x" * 900_000})
            sent.set()
            assert any(message.get("gone") for _ in range(50) for message in links.listen(0.1))
        else:
            sent.wait(30)
            whole = [message for _ in range(200) for message in links.listen(0.01)]
            assert whole[-1] == {"from": 0, "gone": True} and len(whole) < 20
        comm.barrier()
        links.close()
    run_threads(2, on_rank)
