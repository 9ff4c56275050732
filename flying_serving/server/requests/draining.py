"""A node's drain: it takes no new request, finishes its requests, and says when it is ready to
stop.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flying_serving.log import logger


class Draining:
    """The drain of a node, if it drains, and since when (as `time`).

    `answering`: the number of HTTP requests whose answers are not complete, whether or not an
    engine has them.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.answering = 0

    def __bool__(self) -> bool:
        return self.since is not None

    def begin(self) -> None:
        """Take no new request from now on."""
        if self.since is None:
            self.since = time.time()
            logger.info("the server drains: it takes no new requests")

    def end(self) -> None:
        """End the drain: the node takes requests again."""
        if self.since is not None:
            self.since = None
            logger.info("the server takes new requests again")

    @contextmanager
    def count_answer(self) -> Iterator[None]:
        """Count one HTTP request more in `answering` while the block runs."""
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1

    def to_json(self, requests: int) -> dict[str, Any]:
        """Return the part of `/load` about draining. `requests`: the number of requests of the
        controller.
        """
        return {
            "draining": bool(self),
            "ready_to_stop": bool(self) and max(requests, self.answering) == 0,
        }
