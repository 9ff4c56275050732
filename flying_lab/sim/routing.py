"""The node to which a router in front of several nodes sends a request, by common rules. No clock,
no chance.

- `round-robin`: one node after the other.
- `least-load`: the node with the fewest requests in flight, the first of equal ones.
- `cache-aware`: as the policy of this name in vllm-router 0.1.17, with its defaults. If requests in
  flight differ much, it takes the least loaded node. Otherwise it looks for the longest part of the
  prompt's beginning that the router has seen. If that is more than a certain share of the prompt,
  it takes the node that got this part first. If not, it takes the least loaded node.

A request in flight is one that the router has sent and whose answer is not over. The original
compares text; here a prompt is its hash ids. So a prompt without any is like no other, and blocks
that differ have no beginning in common.

Every two minutes vllm-router forgets beginnings beyond 2^25 characters for a node, the oldest
first. Here nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from flying_lab.workload.model import MOONCAKE_BLOCK_TOKENS, Request

RouterName = Literal["cache-aware", "least-load", "round-robin"]


class Router(Protocol):
    """Chooses nodes for requests, in the order in which they arrive."""

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """Return the number of a node; `in_flight` has the requests of each."""


def make_router(name: RouterName, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Router:
    """Return a router that has seen no request; `block_tokens` is the number of tokens of one hash
    id.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-load":
            return LeastLoad()
        case "cache-aware":
            return CacheAware(CacheAwareRules(), block_tokens)


class RoundRobin:
    """A router that takes one node after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """Return the next node in turn."""
        self._next += 1
        return (self._next - 1) % len(in_flight)


class LeastLoad:
    """A router that takes the node with the fewest requests in flight."""

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """Return the first node of all with the fewest requests in flight."""
        return in_flight.index(min(in_flight))


@dataclass(frozen=True)
class CacheAwareRules:
    """The conditions under which a cache-aware router goes by load, or by prefixes.

    Args:
        balance_abs_requests, balance_rel: it goes by load if the most requests in flight on a node,
            less the fewest, exceed the first. They must also exceed the second times the fewest.
        cache_threshold: it goes by prefixes if more than this share of a prompt was seen before.
    """

    balance_abs_requests: int = 64
    balance_rel: float = 1.5
    cache_threshold: float = 0.3

    def imbalanced(self, in_flight: Sequence[int]) -> bool:
        """Return whether only the load counts."""
        most, fewest = max(in_flight), min(in_flight)
        return most - fewest > self.balance_abs_requests and most > self.balance_rel * fewest


class CacheAware:
    """Sends prompts that begin alike to one node, while the load is balanced."""

    def __init__(self, rules: CacheAwareRules, block_tokens: int) -> None:
        self._rules = rules
        self._block_tokens = block_tokens
        self._tree = PrefixTree()

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """Choose a node by load or by prefix. It counts as having the prompt from now on."""
        node = in_flight.index(min(in_flight))
        if not self._rules.imbalanced(in_flight):
            blocks, owner = self._tree.match(request.hash_ids)
            seen_tokens = min(blocks * self._block_tokens, request.prompt_tokens)
            if (
                owner is not None
                and seen_tokens > self._rules.cache_threshold * request.prompt_tokens
            ):
                node = owner
        self._tree.insert(request.hash_ids, node)
        return node


class PrefixTree:
    """Beginnings of prompts, each with the node that got it first."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._owners: list[int] = []

    def match(self, hash_ids: Sequence[int]) -> tuple[int, int | None]:
        """Return the blocks of the longest beginning that is here, and its node; None if there is
        none.
        """
        place = blocks = 0
        for hash_id in hash_ids:
            child = self._children.get((place, hash_id))
            if child is None:
                break
            place, blocks = child, blocks + 1
        return blocks, self._owners[place - 1] if place else None

    def insert(self, hash_ids: Sequence[int], node: int) -> None:
        """Note a prompt that a node gets. Beginnings that are here keep their node."""
        place = 0
        for hash_id in hash_ids:
            child = self._children.get((place, hash_id))
            if child is None:
                self._owners.append(node)
                child = self._children[place, hash_id] = len(self._owners)
            place = child
