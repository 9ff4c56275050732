"""Signals that end programs with servers, so that the servers end too."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the body runs, SIGTERM and SIGHUP end it as Ctrl-C does, so that its `finally` clauses
    run.

    They become SIGINT: an event loop hands that to its handler, where an exception would end in
    some callback. A shell ignores SIGINT for the programs that it runs in the background; here they
    obey it too.
    """

    def interrupt(_number: int, _frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: interrupt,
        signal.SIGHUP: interrupt,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
