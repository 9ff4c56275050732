"""SIGTERM and interrupts while engines start: vLLM's handlers raise, and pyzmq, in which it waits,
swallows that.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from flying_serving.server.start.rundir import remove_run_dir

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_END_S = 5.0
_VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""The module of vLLM's own handler while a server starts. uvicorn replaces that handler, or ours,
when it serves.
"""


@contextmanager
def ended_by_signals(run_dir: str) -> Iterator[None]:
    """While the body runs, SIGTERM and SIGINT end this process, its engines and their workers, and
    remove `run_dir`.

    This happens at once: nothing has been served yet that would have to be put in order. In vLLM's
    API server the handlers stay until it serves. vLLM's own handlers raise in any code that runs,
    which may answer with an exception of its own.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    server = os.getpid()

    def end(number: int, _frame: object) -> NoReturn:
        if os.getpid() == server:  # an engine may not have dropped the handler yet
            sys.stderr.write("flying-serving: ended while it was starting\n")
            _kill_engines()
            remove_run_dir(Path(run_dir))
            sys.stderr.flush()
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    goes_on = False
    try:
        yield
        goes_on = getattr(before[signal.SIGTERM], "__module__", None) == _VLLM_SERVER
    finally:
        for number, handler in before.items():
            if not goes_on:
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
