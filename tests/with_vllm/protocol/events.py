"""What may happen at an engine, with all that comes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.client import ClientMessage, Order

Label = tuple[Any, ...]
Sent = tuple[Group, int]
"""A message, by number, and to whom it goes."""


class Event(NamedTuple):
    """Something that may happen at an endpoint.

    Args:
        label: what it is.
        after: number of the endpoint after that.
        sent: the message that is sent with it.
        done: jobs that it completes.
        failed: jobs that it ends with an error.
        given: jobs of a group of which it gives out tokens.
        heard: the client_message that is heard.
        wrong: what went wrong.
    """

    label: Label
    after: int
    sent: Sent | None = None
    done: tuple[str, ...] = ()
    heard: ClientMessage | None = None
    wrong: str | None = None
    failed: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether nobody else can notice it."""
        return self.sent is None and not self.done and not self.failed and self.wrong is None

    @property
    def local(self) -> bool:
        """Whether nothing changes but the endpoint: nobody else and nothing that the client
        knows.
        """
        return self.silent and not isinstance(self.heard, Order)
