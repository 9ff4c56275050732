"""What a forked engine drops of its parent, and what a worker leaves to it."""

import multiprocessing
import os
import signal
import socket

from flying_serving.worker.parent import forget_port, leave_signals_to_parent


def _forget(listening: socket.socket, pair: socket.socket) -> None:
    forget_port()
    pair.sendall(b"done")
    pair.recv(1)
    os._exit(0)


def test_a_forked_engine_does_not_keep_the_servers_port() -> None:
    """Its other sockets stay, and so do the server's own."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    child = multiprocessing.get_context("fork").Process(target=_forget, args=(listening, theirs))
    child.start()
    assert ours.recv(4) == b"done"
    with socket.create_connection(("127.0.0.1", port), timeout=30):
        listening.accept()[0].close()
    listening.close()
    socket.create_server(("127.0.0.1", port)).close()
    ours.sendall(b"x")
    child.join(30)
    assert child.exitcode == 0
    ours.close()
    theirs.close()


def _heeds_nothing() -> None:
    leave_signals_to_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    os._exit(3)


def test_a_worker_heeds_no_signal_that_its_engine_hears_too() -> None:
    child = multiprocessing.get_context("fork").Process(target=_heeds_nothing)
    child.start()
    child.join(30)
    assert child.exitcode == 3
