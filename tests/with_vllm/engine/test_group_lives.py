"""Whole lives of requests in lanes of all sizes, which lend each other blocks."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.output import SchedulerOutput

from flying_serving.engine.group import ASK_AGAIN_S, in_physical_blocks
from flying_serving.engine.messages import RunStep
from flying_serving.layout.groups import aligned_group
from flying_serving.memory.lent_blocks import NULL_BLOCK
from harness.examples import examples
from tests.with_vllm.engine.inboxes import Inboxes
from tests.with_vllm.engine.pairs import Part
from tests.with_vllm.engine.schedulers import BLOCK, FakeScheduler


class Lives(RuleBasedStateMachine):
    """Engines with requests of their own and of all their groups, in any order of events, over
    contents of blocks.

    Each block of each engine holds, slot by slot, whose token was written there last; before a
    request's next step all its earlier tokens must still be there, on each member. In the end
    everything is done and given back. Blocks are scarce: whoever misses some asks those back that
    other lanes hold, as an engine's loop does.
    """

    engines = 2

    @initialize(lend_blocks=st.integers(1, 6), blocks=st.integers(8, 16))
    def begin(self, lend_blocks: int, blocks: int) -> None:
        self.blocks = blocks
        self.now = 0.0
        self.count = 0
        self.inboxes = Inboxes(self.engines)
        around = self.inboxes, blocks, lend_blocks
        sizes = [size for size in (2, 4) if size <= self.engines]
        self.parts = [
            Part(engine, [aligned_group(engine, size) for size in sizes], *around)
            for engine in range(self.engines)
        ]
        self.own = [part.own for part in self.parts]
        self.pools = [part.pool for part in self.parts]
        lanes = [part.lanes() for part in self.parts]
        self.members = [each.members for each in lanes]
        self.leaders = [
            each.leaders[size] for size in sizes for each in lanes if size in each.leaders
        ]
        self.content: list[dict[tuple[int, int], tuple[str, int]]] = [{} for _ in self.own]
        self.tables: list[dict[str, list[int]]] = [{} for _ in self.own]
        self.inside: list[Any] = [None for _ in self.own]
        self.expected: set[str] = set()

    # ---- what happens

    @rule(pick=st.integers(0, 6), prompt=st.integers(1, 14), tokens=st.integers(1, 6))
    def request(self, pick: int, prompt: int, tokens: int) -> None:
        self.count += 1
        schedulers = self.schedulers()
        schedulers[pick % len(schedulers)].add(f"r{self.count}", prompt, tokens)
        self.expected.add(f"r{self.count}")

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        # as vLLM does, between steps: what is under way may still be written
        under_way = [leader.scheduler for leader in self.leaders if leader.outstanding]
        alive = [(s, name) for s in self.schedulers() if s not in under_way for name in s.requests]
        if alive:
            scheduler, name = alive[pick % len(alive)]
            scheduler.end(name)
            self.expected.discard(name)

    @rule()
    def time_passes(self) -> None:
        self.now += ASK_AGAIN_S

    @rule(engine=st.integers(0, 3))
    def step_alone(self, engine: int) -> None:
        engine %= self.engines
        scheduler, pool = self.own[engine], self.pools[engine]
        if self.inside[engine] is not None:
            return
        if scheduler.waiting or pool.free_count() < len(scheduler.running):
            self.parts[engine].lending_at(self.now).ask(1, pool.missing_for_next())
        plan = scheduler.schedule()
        self.write(engine, plan)
        scheduler.update_from_output(plan, None)

    @rule(pick=st.integers(0, 2))
    def order(self, pick: int) -> None:
        leader = self.leaders[pick % len(self.leaders)]
        if self.inside[leader.group[0]] is None and leader.ready(self.now):
            leader.plan_step(self.now)

    @precondition(lambda self: any(self.inboxes.of_engine))
    @rule(engine=st.integers(0, 3))
    def serve(self, engine: int) -> None:
        engine %= self.engines
        if not self.inbox_can_be_read(engine):
            return
        message: Any = self.inboxes.read(engine)
        if not isinstance(message, RunStep):
            self.parts[engine].lending_at(self.now).handle(message)
            return
        (leader,) = [leader for leader in self.leaders if leader.group == message.group]
        member = self.members[engine][len(message.group)]
        self.write(engine, in_physical_blocks(message.plan, member.lent))
        self.inside[engine] = message
        if all(self.inside[other] is message for other in message.group):
            for other in message.group:
                self.inside[other] = None
            leader.finish(message.plan, None)

    def write(self, engine: int, plan: SchedulerOutput) -> None:
        """Do what a model runner does with a plan: keep tables, check what was written before,
        write what is new.
        """
        tables, content = self.tables[engine], self.content[engine]
        done: dict[str, int] = {}
        for gone in plan.finished_req_ids:
            tables.pop(gone, None)  # it may never have been in a step
        for new in plan.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids[0])
            done[new.req_id] = 0
        cached = plan.scheduled_cached_reqs
        for name, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                tables[name] = []
            tables[name] += added[0] if added else []
            done[name] = computed
        for name, tokens in plan.num_scheduled_tokens.items():
            for place in range(done[name]):
                assert content[tables[name][place // BLOCK], place % BLOCK] == (name, place)
            for place in range(done[name], done[name] + tokens):
                block = tables[name][place // BLOCK]
                assert 0 < block < self.blocks
                content[block, place % BLOCK] = (name, place)

    def inbox_can_be_read(self, engine: int) -> bool:
        return self.inside[engine] is None and bool(self.inboxes.of_engine[engine])

    def schedulers(self) -> list[FakeScheduler]:
        return [*self.own, *(leader.scheduler for leader in self.leaders)]

    # ---- what always holds, and what holds in the end

    @invariant()
    def books_balance(self) -> None:
        for leader in self.leaders:
            leader.check()
        for members, pool in zip(self.members, self.pools, strict=True):
            pool.check(set().union(*(member.lent.physical() for member in members.values())))
        if not any(self.inboxes.of_engine):
            for leader in self.leaders:
                for engine in leader.group:
                    table = self.members[engine][leader.size].lent.table
                    assert set(table) == leader.borrowed.held | {NULL_BLOCK}

    def teardown(self) -> None:
        """Everything that was begun comes to an end, and all blocks come home."""
        if not hasattr(self, "own"):
            return
        for _ in range(500):
            self.now += ASK_AGAIN_S / 3
            for engine in range(self.engines):
                while self.inbox_can_be_read(engine):
                    self.serve(engine)
                self.step_alone(engine)
            for pick in range(len(self.leaders)):
                self.order(pick)
            if not any(s.has_requests() for s in self.schedulers()) and not any(
                self.inboxes.of_engine
            ):
                break
        self.books_balance()
        assert self.expected <= {name for s in self.schedulers() for name in s.done}, (
            "some requests never end"
        )
        assert self.tables == [{} for _ in self.own]
        for leader in self.leaders:
            leader.give_back(self.blocks)
        while any(self.inboxes.of_engine):
            for engine in range(self.engines):
                self.serve(engine)
        for pool in self.pools:
            pool.check(set())
            assert pool.free_count() == self.blocks - 1


@pytest.mark.parametrize("seed", [5, 7, 9, 17, 18, 47, 59, 73, 653, 687])
def test_lanes_that_are_all_short_of_blocks_do_not_starve_each_other(seed: int) -> None:
    """Four engines, seven lanes, prompts of many chunks that may need nearly all blocks.

    With the first eight, and 165 more of fifteen hundred, lanes took blocks from each other for
    ever, as long as a leader gave away what its running prompts had yet to fill and a request that
    waited came before one that ran; with the last two two groups did, as long as both asked again
    after the same time.
    """
    chance = random.Random(seed)
    machine = type("Machine", (Lives,), {"engines": 4})()
    blocks = chance.randint(8, 16)
    machine.begin(lend_blocks=chance.randint(1, 6), blocks=blocks)
    for _ in range(chance.choice([3, 5, 8, 12])):
        machine.request(
            chance.randint(0, 6), chance.randint(1, (blocks - 1) * BLOCK - 6), chance.randint(1, 6)
        )
    machine.teardown()


@pytest.mark.parametrize("engines", [2, 4])
def test_requests_of_all_lanes_keep_their_tokens_and_come_to_an_end(engines: int) -> None:
    """One group, and three that nest."""
    machine = type("Machine", (Lives,), {"engines": engines})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
    )
