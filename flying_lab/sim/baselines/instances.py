"""Gyges' scheduler (arXiv 2509.19729, algorithms 1 and 2) in the simulator: instances that join,
and part again.

An instance is an engine, or an aligned group of `size` engines that steps together. It has the KV
memory of the weights that it has lent. All requests of engines that join go on in the group, with
their KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.engines import SimOrder
from flying_lab.sim.requests import BlockPool, SimRequest
from flying_lab.sim.transformation import Pause
from flying_serving.layout.groups import Group, Layout, aligned_group

THRESHOLD = 0.5
"""A group parts only if its requests need at most this share of the KV memory of its engines,
without lent weights.
"""
Route = Literal["gyges", "by-length", "round-robin", "least-load"]


@dataclass(frozen=True)
class Transforming:
    """The rules by which a simulated server changes the degree of its instances.

    Args:
        size: engines of a group.
        lent_blocks: KV blocks that each of them has while weights are lent.
        up, down: pauses of joining and parting, by the KV tokens of the engine that has most.
        route: how instances are chosen.

    `gyges` and `by-length` are the paper's algorithm 1, whose text leaves open when an instance is
    a candidate. With `gyges` it is one if it has room beside its other requests, *by length* if it
    could ever hold the request. The others are the routers that the paper compares with. There an
    engine that is chosen for a request that it cannot hold joins its neighbours.
    """

    size: int
    lent_blocks: int
    up: Callable[[float], Pause]
    down: Callable[[float], Pause]
    route: Route = "gyges"


@dataclass(eq=False)
class Instance:
    """Engines that serve requests together.

    Args:
        group: its engines.
        requests: with each, the KV tokens that it is expected to have at its end.
        long: how many of them an engine alone cannot hold.
        forms: its engines have not joined, or not parted, yet.
        lent: it has the KV memory of weights that are lent.
        parts: it frees that memory, to part.
    """

    group: Group
    requests: dict[SimRequest, float] = field(default_factory=dict)
    long: int = 0
    forms: bool = False
    lent: bool = False
    parts: bool = False

    @property
    def tokens(self) -> float:
        """Return the KV tokens of all its requests at their end."""
        return sum(self.requests.values())

    @property
    def load(self) -> float:
        """Return the KV tokens of all its requests at their end, per engine."""
        return self.tokens / len(self.group)


@dataclass
class TransformLog:
    """How often engines have joined and parted, and how long they did nothing beside it, in
    seconds.
    """

    joined: int = 0
    parted: int = 0
    stalled_s: float = 0.0


class Transforms:
    """Sends requests to instances, and changes these; `mean_outputs`: tokens that a request is
    expected to get.
    """

    def __init__(
        self, cluster: Cluster, transforming: Transforming, mean_outputs: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._how = transforming
        self._mean_outputs = mean_outputs
        engines, blocks = cluster.shape.engines, cluster.shape.blocks - 1
        tokens = cluster.shape.block_tokens
        self._narrow_tokens = blocks * tokens[1]
        self._wide_tokens = (blocks + transforming.lent_blocks) * tokens[transforming.size]
        self._unlent_tokens = blocks * tokens[transforming.size]
        self._groups = Layout.uniform(engines, transforming.size).groups
        self.instances = [Instance((engine,)) for engine in range(engines)]
        self._of: dict[SimRequest, Instance] = {}
        self._next = 0
        self._longest_tokens = 0
        self._reserve: Group = ()
        self.log = TransformLog()

    # ---- algorithm 1

    def send(self, request: SimRequest) -> None:
        """Choose an instance for a request that arrives, or make one."""
        tokens = request.prompt_tokens + request.output_tokens
        instance = self._schedule_request(tokens)
        expected = request.prompt_tokens + max(1.0, self._mean_outputs())
        self._add(instance, request, min(expected, float(tokens)))
        if tokens > self._narrow_tokens:
            self._longest_tokens = max(self._longest_tokens, tokens)
        self._cluster.clock.after(self._cluster.shape.options.message_s, self._deliver, request)

    def _schedule_request(self, tokens: int) -> Instance:
        if self._how.route in ("round-robin", "least-load"):
            return self._unaware(tokens)
        best, least = None, math.inf
        for instance in self.instances:
            if not instance.long and self._check_reserve(instance, tokens):
                continue
            others = 0.0 if self._how.route == "by-length" else instance.tokens
            if others + tokens <= self._holds(instance) and instance.load < least:
                best, least = instance, instance.load
        if best is not None:
            return best
        apart = [group for group in self._groups if self._is_apart(group)]
        if apart:
            return self._scale_up(min(apart, key=self._tokens_of))
        return min(
            (one for one in self.instances if tokens <= self._holds(one)), key=lambda one: one.load
        )

    def _unaware(self, tokens: int) -> Instance:
        """Choose round robin, or the least load. An instance that cannot hold the request is scaled
        up.
        """
        self._next += 1
        chosen = self.instances[(self._next - 1) % len(self.instances)]
        if self._how.route == "least-load":
            chosen = min(self.instances, key=lambda one: one.load)
        if tokens <= self._holds(chosen):
            return chosen
        return self._scale_up(aligned_group(chosen.group[0], self._how.size))

    def _check_reserve(self, instance: Instance, tokens: int) -> bool:
        """Return whether an instance without a long request must not get this one.

        A group is to part soon. Engines that would have to join for the next long request keep room
        for it.
        """
        if tokens > self._narrow_tokens:
            return False
        if len(instance.group) > 1:
            return True
        if instance.group[0] not in self._reserve:
            return False
        return self._wide_tokens - self._tokens_of(self._reserve) - tokens < self._longest_tokens

    def _update_reserve(self) -> None:
        """Note the engines that would join next: the group with the least load, unless some have
        joined already.
        """
        apart = [group for group in self._groups if self._is_apart(group)]
        joined = len(apart) < len(self._groups)
        self._reserve = () if joined else min(apart, key=self._tokens_of)

    # ---- algorithm 2

    def ended(self, run: SimRequest) -> bool:
        """Note the end of a request. Returns False: it continues on no other instance."""
        instance = self._of.pop(run)
        del instance.requests[run]
        instance.long -= run.prompt_tokens + run.output_tokens > self._narrow_tokens
        self._schedule_parallelism(instance)
        return False

    def _schedule_parallelism(self, instance: Instance) -> None:
        if self._may_part(instance) and not instance.parts and not instance.forms:
            instance.parts = True
            self._together(instance, 0.0, self._give_back)
        self._update_reserve()

    def _may_part(self, instance: Instance) -> bool:
        wide = len(instance.group) > 1
        return wide and not instance.long and instance.tokens < THRESHOLD * self._unlent_tokens

    # ---- changes of instances

    def _scale_up(self, group: Group) -> Instance:
        """Join engines that are apart. Their requests, also the ones on their way, go to the
        group.
        """
        old = [one for one in self.instances if one.group[0] in group]
        new = Instance(group, forms=True)
        pause = self._how.up(max(one.tokens for one in old))
        self._replace(old, [new])
        for one in old:
            for request, tokens in one.requests.items():
                self._add(new, request, tokens)
        self.log.joined += 1
        self._together(new, pause.stall_s, self._joined, pause.delay_s)
        self._update_reserve()
        return new

    def _joined(self, instance: Instance, delay_s: float) -> None:
        instance.forms = False
        self._migrate(instance.requests, lambda _: instance.group)
        self._order(instance.group, self._how.size)
        self._cluster.clock.after(delay_s, self._together, instance, 0.0, self._lend)

    def _lend(self, instance: Instance) -> None:
        _give_blocks(self._pools(instance), self._how.lent_blocks)
        instance.lent = True
        self._schedule_parallelism(instance)

    def _give_back(self, instance: Instance) -> None:
        """Remove the blocks of lent weights from the KV cache, if they are free."""
        free = min(self._cluster.pools[engine].free for engine in instance.group)
        if not instance.lent or free < self._how.lent_blocks:
            instance.parts = False
            return
        _give_blocks(self._pools(instance), -self._how.lent_blocks)
        instance.lent = False
        pause = self._how.down(instance.load)
        self._cluster.clock.after(
            pause.delay_s, self._together, instance, pause.stall_s, self._part
        )

    def _part(self, instance: Instance) -> None:
        """Part the engines, whose weights are back, unless new requests forbid it."""
        if not self._may_part(instance):
            instance.parts = False
            self._lend(instance)
            return
        new = [Instance((engine,)) for engine in instance.group]
        self._replace([instance], new)
        for request, tokens in sorted(instance.requests.items(), key=lambda item: -item[1]):
            self._add(min(new, key=lambda one: one.tokens), request, tokens)
        self.log.parted += 1
        self._migrate(instance.requests, lambda request: self._of[request].group)
        self._order(instance.group, 1)
        self._update_reserve()

    # ---- inside

    def _holds(self, instance: Instance) -> int:
        return self._wide_tokens if len(instance.group) > 1 else self._narrow_tokens

    def _is_apart(self, group: Group) -> bool:
        return all(len(one.group) == 1 for one in self.instances if one.group[0] in group)

    def _tokens_of(self, group: Group) -> float:
        return sum(one.tokens for one in self.instances if one.group[0] in group)

    def _replace(self, old: list[Instance], new: list[Instance]) -> None:
        self.instances = sorted(
            [one for one in self.instances if one not in old] + new, key=lambda one: one.group
        )

    def _add(self, instance: Instance, request: SimRequest, tokens: float) -> None:
        self._of[request] = instance
        instance.requests[request] = tokens
        instance.long += request.prompt_tokens + request.output_tokens > self._narrow_tokens

    def _deliver(self, request: SimRequest) -> None:
        """Give a request to its instance; if that forms just now, the request begins with the
        others.
        """
        instance = self._of[request]
        if request.group is None and not instance.forms:
            self._cluster.add(instance.group, request)

    def _together(
        self, instance: Instance, stall_s: float, done: Callable[..., None], *args: float
    ) -> None:
        self.log.stalled_s += stall_s
        self._cluster.together(instance.group, stall_s, done, instance, *args)

    def _migrate(
        self, requests: dict[SimRequest, float], group_of: Callable[[SimRequest], Group]
    ) -> None:
        """Take requests out of their lanes and add them to others: requests with KV before all that
        wait there.
        """
        for request in requests:
            self._cluster.remove(request)
        with_kv = [request for request in requests if request.computed_tokens]
        for request in (*reversed(with_kv), *(one for one in requests if not one.computed_tokens)):
            self._cluster.add(group_of(request), request)

    def _pools(self, instance: Instance) -> list[BlockPool]:
        return [self._cluster.pools[engine] for engine in instance.group]

    def _order(self, group: Group, size: int) -> None:
        steps = self._cluster.shape.options.weave_steps
        for engine in group:
            self._cluster.order(engine, SimOrder(size, "weave", steps, lambda _: None))


def _give_blocks(pools: Iterable[BlockPool], blocks: int) -> None:
    """Give each engine `blocks` blocks more, or fewer if negative."""
    for pool in pools:
        pool.blocks += blocks
        pool.free += blocks
