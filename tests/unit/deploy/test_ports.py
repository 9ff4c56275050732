"""A port is held from when it is chosen: no other process gets it until its server listens."""

import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context

import pytest

from flying_deploy.ports import HOST, ReservedPort

BINDS = "import socket, sys; socket.socket().bind((sys.argv[1], int(sys.argv[2])))"
MANY = 200
EVERYWHERE = "0.0.0.0"


def another_process_binds(port: int, host: str = HOST) -> bool:
    """Whether another process gets the port that asks for it."""
    done = subprocess.run(
        [sys.executable, "-c", BINDS, host, str(port)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "Address already in use" in done.stderr, done.stderr
    return done.returncode == 0


def listens(port: ReservedPort) -> socket.socket:
    """A server that is told the port."""
    return socket.create_server((HOST, port.number))


def chosen(count: int) -> set[int]:
    """Ports that a process holds at the same time."""
    with ExitStack() as stack:
        return {stack.enter_context(ReservedPort()).number for _ in range(count)}


@pytest.mark.parametrize("host", [HOST, EVERYWHERE])
def test_a_held_port_is_refused_to_another_process(host: str) -> None:
    with ReservedPort() as port:
        assert not another_process_binds(port.number, host)


def test_a_port_that_is_held_no_more_is_free() -> None:
    with ReservedPort() as port:
        number = port.number
    assert another_process_binds(number)


def test_ports_that_are_held_at_once_are_all_different() -> None:
    assert len(chosen(MANY)) == MANY


def test_starters_in_several_processes_get_no_port_that_is_held_here() -> None:
    with ExitStack() as stack, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as others:
        held = {stack.enter_context(ReservedPort()).number for _ in range(MANY)}
        for found in others.map(chosen, [MANY] * 4):
            assert not held & found


def test_connections_are_refused_until_a_server_listens() -> None:
    with ReservedPort() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port.number))
        with listens(port), socket.create_connection((HOST, port.number)):
            pass


def test_a_port_on_which_a_server_listens_cannot_be_held() -> None:
    with ReservedPort() as port, listens(port), pytest.raises(OSError, match="in use"):
        ReservedPort(port.number)


def test_a_port_is_held_until_each_of_its_holders_is_closed() -> None:
    port = ReservedPort()
    other = port.again()
    port.close()
    port.close()
    assert not another_process_binds(other.number)
    other.close()
    assert another_process_binds(other.number)
