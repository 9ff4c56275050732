"""Requests, and parts of split ones, as a shell without engines knows them."""

from dataclasses import dataclass

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Group, KVSource


@dataclass(frozen=True)
class Part:
    """What a group has of a split request beside the request itself: a prefix, or with `is_ahead`
    what it pulls.
    """

    request_id: str
    group: Group
    tokens: int
    is_ahead: bool


@dataclass
class ModelStream:
    """A request as the shell knows it: where it is, and what it has got, in all and from its
    present group.

    `ahead`: tokens without KV that its group computes first. `kv`: while it waits, the offer of its
    KV. `offer`: the number under which its group will offer that at its end there.
    """

    spec: RequestSpec
    arrived_s: float
    group: Group | None = None
    begun: bool = False
    tokens: int = 0
    tokens_here: int = 0
    limit: int = 0
    ahead: int = 0
    kv: KVSource | None = None
    offer: int | None = None
    arrived_with_kv: bool = False

    @property
    def needed_tokens(self) -> int:
        """Tokens that the request needs room for."""
        return max(self.spec.needed_tokens, self.spec.prompt_tokens + self.tokens + 1)
