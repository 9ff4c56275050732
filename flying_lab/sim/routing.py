"""Where a router in front of several nodes sends a request, by rules that people run. No clock, no
chance.

- `round-robin`: one node after the other.
- `least-load`: the node with the fewest requests in flight, the first of those that have as few.
- `cache-aware`: as the policy of this name in vllm-router 0.1.17, with its defaults. If requests in
  flight differ much, the least loaded node; else the node that was first sent the longest part of
  the prompt's beginning that the router has seen, if that is more than a certain share of the
  prompt; else the least loaded node.

A request in flight is one that the router has sent and whose answer is not over. vllm-router
compares text; here a prompt is its hash ids, so one without any is like no other, and blocks that
differ have no beginning in common. Every two minutes vllm-router forgets what is above 2^25
characters for a node, the oldest first; here nothing is forgotten.
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
        """The number of a node; `in_flight` has the requests of each."""


def make_router(name: RouterName, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Router:
    """A router that has seen no request; `block_tokens` is what one hash id stands for."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-load":
            return LeastLoad()
        case "cache-aware":
            return CacheAware(CacheAwareRules(), block_tokens)


class RoundRobin:
    """One node after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """The next one."""
        self._next += 1
        return (self._next - 1) % len(in_flight)


class LeastLoad:
    """The node with the fewest requests in flight."""

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """The first of those with the fewest."""
        return in_flight.index(min(in_flight))


@dataclass(frozen=True)
class CacheAwareRules:
    """When a cache-aware router goes by load, and when by prefixes.

    Args:
        balance_abs_requests, balance_rel: it goes by load if the most requests in flight on a node
            are more than so many above the fewest, and more than this many times the fewest.
        cache_threshold: it goes by prefixes if more than this share of a prompt was seen before.
    """

    balance_abs_requests: int = 64
    balance_rel: float = 1.5
    cache_threshold: float = 0.3

    def imbalanced(self, in_flight: Sequence[int]) -> bool:
        """Whether only the load counts."""
        most, fewest = max(in_flight), min(in_flight)
        return most - fewest > self.balance_abs_requests and most > self.balance_rel * fewest


class CacheAware:
    """Sends prompts that begin alike to one node, as long as the load is balanced."""

    def __init__(self, rules: CacheAwareRules, block_tokens: int) -> None:
        self._rules = rules
        self._block_tokens = block_tokens
        self._tree = PrefixTree()

    def choose(self, request: Request, in_flight: Sequence[int]) -> int:
        """By load or by prefix; the node has the prompt from now on."""
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
    """Beginnings of prompts, each with the node that was sent it first."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._owners: list[int] = []

    def match(self, hash_ids: Sequence[int]) -> tuple[int, int | None]:
        """Blocks of the longest beginning that is here, and its node; None if there is none."""
        place = blocks = 0
        for hash_id in hash_ids:
            child = self._children.get((place, hash_id))
            if child is None:
                break
            place, blocks = child, blocks + 1
        return blocks, self._owners[place - 1] if place else None

    def insert(self, hash_ids: Sequence[int], node: int) -> None:
        """A node is sent a prompt; beginnings that are here keep the node that they have."""
        place = 0
        for hash_id in hash_ids:
            child = self._children.get((place, hash_id))
            if child is None:
                self._owners.append(node)
                child = self._children[place, hash_id] = len(self._owners)
            place = child
