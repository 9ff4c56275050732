"""Reads of files that may take for ever, in a few threads of their own."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flying_serving.server.own_thread import in_own_thread

T = TypeVar("T")


class SlowReads:
    """At most `threads` reads at a time. Others wait.

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
