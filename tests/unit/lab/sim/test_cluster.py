"""Engines on a virtual clock: weave, hard switch, groups of several sizes, lanes that lack
blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Cluster, ClusterShape, Options
from flying_lab.sim.engines import SimOrder
from flying_lab.sim.host import HostTime
from flying_lab.sim.lanes import Finished, SimLane
from flying_lab.sim.requests import SimRequest, SimStep
from flying_serving.config import MODES
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group, Layout
from harness.examples import examples
from tests.unit.lab.sim.small_nodes import OPTIONS, shape_of, step_time


@dataclass
class World:
    """A cluster, and its past: (time, group, seconds) of steps and of other things that engines did
    together.
    """

    shape: ClusterShape
    clock: Clock = field(default_factory=Clock)
    steps: list[tuple[float, Group, float]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    joined: int = 0
    announced_s: float = 0.001

    def __post_init__(self) -> None:
        self.cluster = Cluster(self.shape, step_time, self.clock, self._on_tokens, self._on_step)

    def _on_tokens(self, finished: Finished) -> None:
        self.ended += [request.request_id for request in finished.ended]

    def _on_step(self, lane: SimLane, seconds: float, step: SimStep) -> None:
        self.steps.append((self.clock.now_s, lane.group, seconds))

    def together(self, group: Group, seconds: float) -> None:
        """Let engines do something together."""
        self.cluster.together(group, seconds, self._joined, group, seconds)

    def _joined(self, group: Group, seconds: float) -> None:
        self.joined += 1
        self.steps.append((self.clock.now_s - seconds, group, seconds))

    def order(self, layout: Layout, mode: str) -> None:
        """Tell every engine."""
        for engine in range(self.shape.engines):
            size = len(layout.group_of(engine))
            self.cluster.order(engine, SimOrder(size, mode, 1, self._answered))

    def _answered(self, now_s: float) -> None:
        """When all have answered they hear, a moment later, that nothing migrates."""
        self.answers.append(now_s)
        if len(self.answers) % self.shape.engines == 0:
            self.clock.after(self.announced_s, self.cluster.announce_migrations)

    def run(self, until_s: float = float("inf")) -> None:
        """Let time pass."""
        events = 0
        self.clock.at(min(until_s, 1e9), lambda: None)
        while self.clock.now_s < until_s and self.clock.step():
            events += 1
            assert events < 500_000


def no_engine_in_two_steps(world: World) -> None:
    """Steps that share an engine do not overlap."""
    free_at = [0.0] * world.shape.engines
    for began, group, seconds in sorted(world.steps, key=lambda step: step[0] + step[2]):
        assert all(free_at[engine] <= began + 1e-9 for engine in group), (began, group)
        for engine in group:
            free_at[engine] = began + seconds


work = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 6), st.integers(1, 300), st.integers(1, 40)),
    min_size=1,
    max_size=14,
)
orders = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 4), st.sampled_from(MODES)), max_size=5)
joint = st.lists(st.tuples(st.floats(0, 3), st.integers(4, 6), st.floats(0, 0.5)), max_size=5)


@settings(max_examples=examples(80), deadline=None)
@given(work, orders, joint, st.booleans())
def test_all_requests_end_under_any_layout_orders(
    requests: list[tuple[float, int, int, int]],
    changes: list[tuple[float, int, str]],
    together: list[tuple[float, int, float]],
    recomputes: bool,
) -> None:
    """Requests in groups of mixed sizes and orders at any time: none is stuck, no engine is in two
    steps at once.
    """
    world = World(shape_of(4, (1, 2, 4), blocks=24, recomputes=recomputes))
    groups, layouts = list(world.cluster.lanes), Layout.all(4, (1, 2, 4))
    for number, (at_s, group, prompt, output) in enumerate(requests):
        mine = SimRequest(str(number), prompt, output, at_s)
        world.clock.at(at_s, world.cluster.add, groups[group], mine)
    for at_s, layout, mode in changes:
        world.clock.at(at_s, world.order, layouts[layout], mode)
    for at_s, group, seconds in together:
        world.clock.at(at_s, world.together, groups[group], seconds)
    world.run()
    assert sorted(world.ended) == sorted(str(n) for n in range(len(requests)))
    assert world.joined == len(together)
    assert len(world.answers) == 4 * len(changes)
    assert all(pool.free == pool.blocks == 23 for pool in world.cluster.pools)
    no_engine_in_two_steps(world)


def test_a_weave_gives_both_layouts_half_of_the_time() -> None:
    world = World(shape_of(2, (1, 2)))
    world.cluster.add((0,), SimRequest("old", 10, 100, 0.0))
    world.run(0.2)
    world.order(Layout.uniform(2, 2), "weave")
    world.cluster.add((0, 1), SimRequest("new", 10, 100, 0.0))
    world.run(1.5)
    spent = {
        size: sum(s for at, group, s in world.steps if len(group) == size and at > 0.3)
        for size in (1, 2)
    }
    assert spent[1] > 0.3 and spent[2] > 0.3
    assert 0.5 < spent[1] / spent[2] < 2.0


def test_devices_wait_for_the_host_where_an_engine_turns_to_another_lane() -> None:
    """Not while a lane's steps follow one another, as before and after a weave. Each request in the
    step adds its time.
    """
    world = World(shape_of(2, (1, 2), turns={1: HostTime(0.5, 0.25), 2: HostTime(0.125, 0.0)}))
    world.cluster.add((0,), SimRequest("old", 1, 100, 0.0))
    world.run(0.2)
    world.order(Layout.uniform(2, 2), "weave")
    world.cluster.add((0, 1), SimRequest("new", 1, 100, 0.0))
    world.run()
    took = {size: {s for _, group, s in world.steps if len(group) == size} for size in (1, 2)}
    plain = {size: step_time(size, SimStep([], 1)) for size in (1, 2)}
    assert {plain[1], plain[1] + 0.75} <= took[1]
    assert {plain[2], plain[2] + 0.125} <= took[2]


@pytest.mark.parametrize("mode", MODES)
def test_engines_wait_until_migrations_are_announced(mode: str) -> None:
    """They make no step for nothing; an engine that keeps its group goes on."""
    world = World(shape_of(4, (1, 2)), announced_s=1.0)
    for engine in (0, 3):
        world.cluster.add((engine,), SimRequest(str(engine), 10, 400, 0.0))
    world.run(0.2)
    world.order(Layout(((0, 1), (2,), (3,))), mode)
    world.run(4.0)
    waited = (max(world.answers), max(world.answers) + 1.0)
    began = {group for at, group, _ in world.steps if waited[0] <= at < waited[1]}
    assert began == ({(3,)} if mode in ("soft", "migrate") else {(0,), (3,)})
    assert any(at >= waited[1] for at, group, _ in world.steps if group == (0,))


def test_a_hard_switch_pauses_the_old_layout_up_to_a_limit() -> None:
    """The paused request gets a step about every max_pause_s, and ends after the others."""
    world = World(shape_of(2, (1, 2), options=replace(OPTIONS, max_pause_s=0.5)))
    world.cluster.add((0,), SimRequest("old", 10, 60, 0.0))
    world.run(0.2)
    world.order(Layout.uniform(2, 2), "hard")
    world.cluster.add((0, 1), SimRequest("new", 10, 200, 0.0))
    world.run(3.0)
    old = [at for at, group, _ in world.steps if group == (0,) and at > 0.3]
    assert 3 <= len(old) <= 7
    assert all(0.4 < later - earlier < 0.7 for earlier, later in itertools.pairwise(old))
    world.run()
    assert world.ended == ["new", "old"]


def test_a_hard_switch_that_frees_kv_computes_prompts_again() -> None:
    """The authors' fork frees the blocks of the requests that it preempts."""
    prefilled = {}
    for recomputes in (False, True):
        world = World(
            shape_of(2, (1, 2), options=replace(OPTIONS, max_pause_s=0.5), recomputes=recomputes)
        )
        old = SimRequest("old", 100, 60, 0.0)
        world.cluster.add((0,), old)
        world.run(0.5)
        world.order(Layout.uniform(2, 2), "hard")
        world.run()
        prefilled[recomputes] = old.preemptions
    assert prefilled == {False: 0, True: 1}


def test_a_group_waits_for_blocks_that_another_engine_holds() -> None:
    """The leader of a group is woken when a member that it does not step with gives blocks back."""
    world = World(shape_of(2, (1, 2), blocks=9))
    world.cluster.add((1,), SimRequest("narrow", 100, 12, 0.0))
    world.run(0.2)
    world.cluster.add((0, 1), SimRequest("wide", 200, 2, 0.0))
    world.run()
    assert world.ended == ["narrow", "wide"]


def test_a_budget_below_the_number_of_requests_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens=4: must be at least max_num_seqs=8"
    ):
        Options(max_num_seqs=8, max_num_batched_tokens=4)
