"""The least pace of a body, so that a client which stalls does not hold memory for long."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import HTTPException
from starlette.types import Message, Receive

LEAST_BYTES_S = 32 * 1024
"""The least rate of a body; a slow telephone sends as fast."""
GRACE_S = 10.0
"""The time by which a body may fall behind that rate, and so the longest time in which a client may
send nothing.
"""
STALL_S = 1.0
"""A deadline that is noticed later than this was missed by this process, which did not run
meanwhile.
"""


class BodyPace:
    """The deadline for the next bytes of a body; times are the event loop's, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.deadline_s = now_s + GRACE_S

    def arrived(self, count: int, now_s: float) -> None:
        """Note bytes that have come. They extend the deadline, up to the whole of GRACE_S from
        now.
        """
        self.deadline_s = min(self.deadline_s + count / LEAST_BYTES_S, now_s + GRACE_S)

    def excuse_stall(self, now_s: float) -> bool:
        """Set a new deadline if this process did not run when the deadline passed. Returns whether
        it did so.
        """
        if now_s - self.deadline_s <= STALL_S:
            return False
        self.deadline_s = now_s + GRACE_S
        return True


async def chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the chunks of a body.

    Raises:
        HTTPException: 400 if the client leaves before its end; 408 if it comes too slowly.
    """
    loop = asyncio.get_running_loop()
    pace = BodyPace(loop.time())
    more = True
    while more:
        message = await _next(receive, pace)
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "body: the client has left before its end")
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        pace.arrived(len(chunk), loop.time())
        yield chunk


async def _next(receive: Receive, pace: BodyPace) -> Message:
    while True:
        try:
            async with asyncio.timeout_at(pace.deadline_s):
                return await receive()
        except TimeoutError:
            if not pace.excuse_stall(asyncio.get_running_loop().time()):
                problem = f"has fallen {GRACE_S:g} s behind the least rate, {LEAST_BYTES_S} bytes/s"
                raise HTTPException(408, f"body: {problem}") from None
