"""SIGTERM and interrupts while engines start: vLLM's handlers raise, and pyzmq, in which it waits, swallows that."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import psutil

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_END_S = 5.0


@contextmanager
def ended_by_signals(run_dir: str) -> Iterator[None]:
    """While the body runs, SIGTERM and SIGINT end this process, its engines and their workers, and remove `run_dir`.

    At once: nothing has been served yet that would have to be put in order.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    server = os.getpid()

    def end(number: int, _frame: object) -> NoReturn:
        if os.getpid() == server:  # else an engine that has not dropped the handler yet
            sys.stderr.write("flying-serving: ended while engines were starting\n")
            _kill_engines()
            shutil.rmtree(run_dir, ignore_errors=True)
            sys.stderr.flush()
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_engines() -> None:
    engines = multiprocessing.active_children()
    for engine in engines:
        with suppress(psutil.NoSuchProcess):
            for worker in psutil.Process(engine.pid).children(recursive=True):
                worker.kill()
        engine.kill()
    for engine in engines:
        engine.join(_END_S)
