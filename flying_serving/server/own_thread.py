"""Work that may take for ever, in threads of its own: the executor of the event loop has few, and
who else uses it is not ours to say.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(
    work: Callable[[], T], name: str, ended: Callable[[], None] | None = None
) -> asyncio.Future[T]:
    """Run `work` in a thread of its own. Return its result, or its exception.

    The thread goes on if nothing awaits the result any more. The end of the process does not wait
    for it.

    `name`: of the thread. `ended`: called on the event loop when the work has ended.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(set_result: Callable[[], None]) -> None:
        if ended is not None:
            ended()
        if not result.done():
            set_result()

    def run() -> None:
        try:
            set_result = partial(result.set_result, work())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            set_result = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(end, set_result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
