"""What engines tell each other about KV that is pulled."""

from dataclasses import dataclass

from flying_serving.layout.groups import Group
from flying_serving.migration.offers import KVSource


@dataclass(frozen=True)
class PullKV:
    """A leader to its `group`: copy the KV of some tokens of a request, each member the heads that it works with.

    `source_blocks`, `blocks`: the request's, from its first token on, of the group that has the KV and of this one.
    """

    group: Group
    request_id: str
    source: KVSource
    source_blocks: list[int]
    blocks: list[int]
    tokens: range


@dataclass(frozen=True)
class KVPulled:
    """A member to the leader of `group`: its part of a PullKV is done."""

    group: Group
    engine: int
    request_id: str


@dataclass(frozen=True)
class ReleaseKV:
    """To the owner of an offer, the only member of `group`: nobody wants it any more, or only what is behind `tokens`.

    Those are pulled, and the request has left the owner, so that nobody reads them there.
    """

    group: Group
    number: int
    tokens: int | None = None
