"""Messages between engines about pulled KV."""

from dataclasses import dataclass

from flying_serving.layout.groups import Group, KVSource


@dataclass(frozen=True)
class PullKV:
    """A leader to its `group`: copy the KV of `tokens` of a request.

    Each member copies the heads that it works with. `source_blocks` and `blocks` hold the request's
    tokens from the first on: blocks of the group that has the KV, and of this one. `completes`: the
    tokens are the last of the offer, so what the request has beside its KV is copied, too.
    """

    group: Group
    request_id: str
    source: KVSource
    source_blocks: list[int]
    blocks: list[int]
    tokens: range
    completes: bool = False


@dataclass(frozen=True)
class KVPulled:
    """A member to the leader of `group`: its part of a PullKV is copied."""

    group: Group
    engine: int
    request_id: str


@dataclass(frozen=True)
class ReleaseKV:
    """A target to the owner of an offer, the only member of `group`: the KV may be freed.

    `tokens`: free the KV of the first tokens only, which are pulled. The request has left the
    owner, so no other engine reads them there. None: free all of it, and the offer ends.
    """

    group: Group
    number: int
    tokens: int | None = None
