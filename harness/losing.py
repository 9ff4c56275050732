"""How tests have a live server lose an engine."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from harness.live import Server, wait_until


def process(server: Server, engine: int) -> psutil.Process:
    """The process of an engine that is there."""
    (pid,) = [one["pid"] for one in server.status()["engines"] if one["engine"] == engine]
    return psutil.Process(pid)


def kill(server: Server, engine: int) -> None:
    """End an engine's process as the kernel does that is out of memory; return when the server has
    lost it.
    """
    before = server.status()["losses"][str(engine)]
    os.kill(process(server, engine).pid, signal.SIGKILL)
    wait_until(lambda: server.status()["losses"][str(engine)] > before, server.log)


def is_whole(server: Server) -> bool:
    """Whether all engines are there."""
    return not server.status()["degraded"]


@contextmanager
def lost(server: Server, engine: int) -> Iterator[None]:
    """Within this block, of some seconds, the server is without an engine: what starts it again is
    stopped.
    """
    engines = {one["pid"] for one in server.status()["engines"]}
    children = psutil.Process(server.process.pid).children()
    (parent,) = [
        one
        for one in children
        if one.pid not in engines and "resource_tracker" not in str(one.cmdline())
    ]
    parent.suspend()
    try:
        kill(server, engine)
        yield
    finally:
        parent.resume()
    wait_until(lambda: is_whole(server), server.log)
