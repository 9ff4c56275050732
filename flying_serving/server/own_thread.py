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


class SlowReads:
    """Reads of files that may take for ever, at most `threads` at a time. Others wait.

    A file system that hangs holds a thread until it answers, whatever the deadline is.
    """

    def __init__(self, threads: int) -> None:
        self._free = asyncio.Semaphore(threads)

    async def run(self, read: Callable[[Callable[[], bool]], T], deadline_s: float) -> T:
        """Run `read` in a thread. Return its result, or raise its exception.

        `read` gets a function that says whether to stop: nothing waits for it any more then.

        Raises:
            TimeoutError: if there is no result within `deadline_s`, from the call on.
        """
        stopped = threading.Event()
        try:
            async with asyncio.timeout(deadline_s):
                await self._free.acquire()
                work = partial(read, stopped.is_set)
                return await in_own_thread(work, "flying-read", self._free.release)
        finally:
            stopped.set()
