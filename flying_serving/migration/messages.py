"""What engines tell each other about requests that migrate with their KV."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class MigratingRequest:
    """A request that migrates, by its id in the group that it leaves.

    `start_tokens`: tokens whose KV the target has already. `tokens`: those whose KV it can hold, in `blocks` of its
    own.
    """

    request_id: str
    start_tokens: int
    tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class MigrateKV:
    """Copy the KV of requests from `source` to `target`; `group`: the smallest that holds all engines of both."""

    group: Group
    source: Group
    target: Group
    requests: list[MigratingRequest]


@dataclass(frozen=True)
class KVOffer:
    """What the source has of a request: how many tokens' KV, in which of its blocks."""

    tokens: int
    blocks: list[int]


def encode_offers(offers: Sequence[KVOffer], sizes_blocks: Sequence[int]) -> list[int]:
    """Offers as numbers, for a collective of a length that all ranks know: each padded to its number of blocks."""
    numbers: list[int] = []
    for offer, size in zip(offers, sizes_blocks, strict=True):
        numbers += [offer.tokens, *offer.blocks, *[0] * (size - len(offer.blocks))]
    return numbers


def decode_offers(numbers: Iterable[int], sizes_blocks: Sequence[int]) -> list[KVOffer]:
    """The inverse of `encode_offers`; padding stays in the blocks."""
    following = iter(numbers)
    return [KVOffer(next(following), [next(following) for _ in range(size)]) for size in sizes_blocks]
