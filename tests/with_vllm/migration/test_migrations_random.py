"""Requests that migrate between real schedulers: whatever happens meanwhile, they end with the KV
of their tokens.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from vllm.v1.request import Request

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.source import RETAIN_S, RunningOffer
from harness.examples import examples
from tests.with_vllm.migration.migrating_node import GROUPS, MigratingNode
from tests.with_vllm.vllm_adapter.kv_lanes import make


@dataclass
class Running:
    """A request as the API server sees it: where it is, under which name, and where it is pulled
    ahead to.
    """

    family: int
    prompt: int
    outputs: int
    group: Group
    name: str
    request: Request
    ahead: tuple[Group, str, int] | None = None


class RandomMigrations(RuleBasedStateMachine):
    """Whatever a client, the API server and two engines do, in any order."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.serial = 0

    @initialize(
        overlaps=st.booleans(),
        blocks=st.fixed_dictionaries({g: st.integers(9, 16) for g in GROUPS}),
        chunk_blocks=st.sampled_from([1, 2, 64]),
    )
    def start(self, overlaps: bool, blocks: dict[Group, int], chunk_blocks: int) -> None:
        """Few blocks or more, in small chunks or at once."""
        self.node = MigratingNode(blocks, overlaps=overlaps, chunk_blocks=chunk_blocks)
        self.all: list[Running] = []

    def _make(self, family: int, prompt: int, outputs: int, had: int = 0) -> Request:
        self.serial += 1
        return make(f"{family}.{self.serial}", family, prompt, outputs, had=had)

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _is_over(self, one: Running) -> bool:
        return one.name in self.node.ended

    @rule(
        target=running,
        family=st.integers(1, 3),
        prompt=st.integers(1, 18),
        outputs=st.integers(1, 8),
        group=st.sampled_from(GROUPS),
    )
    def begin(self, family: int, prompt: int, outputs: int, group: Group) -> Running:
        """A request that begins here."""
        request = self._make(family, prompt, outputs)
        self.node.lanes[group].scheduler.add_request(request)
        self.all.append(Running(family, prompt, outputs, group, request.request_id, request))
        return self.all[-1]

    @rule(
        target=running,
        prompt=st.integers(2, 18),
        part=st.integers(1, 17),
        groups=st.permutations(GROUPS),
    )
    def split_prompt(self, prompt: int, part: int, groups: list[Group]) -> Running:
        """One group computes the first tokens of a prompt, another all the rest."""
        part, number = min(part, prompt - 1), self._next()
        first, request = self._make(4, part, 1), self._make(4, prompt, 5)
        offer = RunningOffer(number, len(groups[0]), early=True)
        self.node.at(groups[0]).source.offer(first.request_id, offer)
        self.node.lanes[groups[0]].scheduler.add_request(first)
        self.node.expect(request, groups[1], KVSource(groups[0], number))
        self.all.append(Running(4, part, 1, groups[0], first.request_id, first))
        self.all.append(Running(4, prompt, 5, groups[1], request.request_id, request))
        return self.all[-1]

    @rule(
        target=running,
        prompt=st.integers(1, 12),
        here=st.integers(1, 6),
        groups=st.permutations(GROUPS),
    )
    def split_outputs(self, prompt: int, here: int, groups: list[Group]) -> Running:
        """One group gives the first outputs, and its KV is pulled ahead by another, which gives the
        rest.
        """
        number = self._next()
        request, ahead = self._make(5, prompt, here), self._make(5, prompt, here + 4)
        offer = RunningOffer(number, len(groups[0]), early=True)
        self.node.at(groups[0]).source.offer(request.request_id, offer)
        self.node.lanes[groups[0]].scheduler.add_request(request)
        self.node.expect(ahead, groups[1], KVSource(groups[0], number), prompt + here - 1)
        one = Running(5, prompt, here, groups[0], request.request_id, request)
        one.ahead = groups[1], ahead.request_id, number
        self.all.append(one)
        return one

    @rule()
    def go_on_ahead(self) -> None:
        """Requests whose first group has given its outputs go on where they are pulled ahead to."""
        for one in self.all:
            if one.ahead is not None and self._is_over(one):
                group, name, number = one.ahead
                one.ahead = None
                request = make(name, one.family, one.prompt, one.outputs + 4, had=one.outputs)
                self.node.expect(request, group, KVSource(one.group, number))
                self.all.append(
                    Running(one.family, one.prompt, one.outputs + 4, group, name, request)
                )
                return

    @rule(
        target=running,
        one=consumes(running),
        group=st.sampled_from(GROUPS),
        told_first=st.booleans(),
        steps=st.integers(0, 2),
    )
    def migrate(self, one: Running, group: Group, told_first: bool, steps: int) -> Any:
        """A request goes on in another group; whoever pulls it ahead does not any more."""
        if self._is_over(one) or group == one.group:
            return one
        if one.ahead is not None:
            self.node.abort(one.ahead[1], one.ahead[0])
            one.ahead = None
        number = self._next()
        if told_first:
            self.node.at(one.group).retain(one.name, number)
        request = self._make(one.family, one.prompt, one.outputs, had=one.request.num_output_tokens)
        self.node.expect(request, group, KVSource(one.group, number))
        if not told_first:
            for _ in range(steps):
                self.node.at(group).advance(self.node.now_s, None)
            self.node.at(one.group).retain(one.name, number)
        self.all.remove(one)
        self.all.append(
            Running(one.family, one.prompt, one.outputs, group, request.request_id, request)
        )
        return self.all[-1]

    @rule(one=consumes(running))
    def abort(self, one: Running) -> None:
        """A client goes, wherever its request is."""
        if not self._is_over(one):
            self.node.abort(one.name, one.group)
            if one.ahead is not None:
                self.node.abort(one.ahead[1], one.ahead[0])
            self.all.remove(one)

    @rule(group=st.sampled_from(GROUPS), count=st.integers(1, 3))
    def step(self, group: Group, count: int) -> None:
        """Steps of a lane."""
        for _ in range(count):
            self.node.step(group)

    @rule(
        engine=st.integers(0, 1),
        limit_s=st.sampled_from([None, 0.0, 2.0, 5.0]),
        token_s=st.sampled_from([0.0, 1.0]),
    )
    def advance(self, engine: int, limit_s: float | None, token_s: float) -> None:
        """An engine pulls for a while."""
        self.node.migrations[engine].target.chunks.token_s = {1: token_s, 2: token_s}
        self.node.migrations[engine].advance(self.node.now_s, limit_s)

    @rule(engine=st.integers(0, 1), count=st.integers(1, 4))
    def serve(self, engine: int, count: int) -> None:
        """An engine handles messages."""
        for _ in range(count):
            self.node.serve(engine)

    @rule(seconds=st.sampled_from([0.01, 1.1, 5.1, 31.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.node.now_s += seconds

    @rule()
    def reset(self) -> None:
        """All KV is to go, in both engines at once."""
        for lane in self.node.lanes.values():
            lane.settle()
        while any(migrations.is_pulling() for migrations in self.node.migrations):
            for engine in range(2):
                self.node.serve(engine)
        for migrations in self.node.migrations:
            migrations.forget_kv()
        for lane in self.node.lanes.values():
            holding = list(lane.scheduler.kv_holding_waiting)
            if not holding:
                assert lane.scheduler.reset_prefix_cache(reset_running_requests=True)

    @invariant()
    def books_balance(self) -> None:
        """In every lane."""
        if hasattr(self, "node"):
            for lane in self.node.lanes.values():
                lane.pool.check(set())

    def teardown(self) -> None:
        """All that has not ended does, and leaves nothing behind."""
        if not hasattr(self, "node"):
            return
        node = self.node
        for _ in range(400):
            self.go_on_ahead()
            for group in GROUPS:
                node.step(group)
            for engine in range(2):
                node.migrations[engine].advance(node.now_s, None)
                while node.inboxes[engine]:
                    node.serve(engine)
            node.now_s += 0.3
        for lane in node.lanes.values():
            lane.settle()
        assert [one.name for one in self.all if not self._is_over(one)] == []
        node.now_s += RETAIN_S + 1
        for migrations in node.migrations:
            migrations.advance(node.now_s, None)
            assert migrations.incoming.by_id == {}
            assert migrations.source.running == {}
            assert migrations.source.retained == {}
        for lane in node.lanes.values():
            assert lane.scheduler.requests == {}
            assert lane.free() == lane.pool.total


RandomMigrations.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=30, deadline=None
)
TestRandomMigrations = RandomMigrations.TestCase
