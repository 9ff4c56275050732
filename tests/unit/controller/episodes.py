"""Requests as clients ask for them, and episodes of events around a server that draw them."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flying_serving.config import MODES
from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import PoolFull, RequestError
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import Step
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs

MOST_WAITING = 6
WIDE_WINS, NARROW_WINS, MIXED = (0.5, 0.5), (1.5, 1.2), (0.6, 0.75)


@st.composite
def shareable(draw: st.DrawFn, most_tokens: int) -> RequestSpec:
    """Return what a client asks for whose request two groups may share; it may say where, and how
    long its output will be, or be wrong.
    """
    prompt = draw(st.integers(1, most_tokens - 1) | st.integers(1, 60))
    outputs = draw(st.integers(1, most_tokens - prompt))
    at = draw(
        st.none() | st.integers(0, prompt + outputs) | st.just(prompt) | st.integers(1, prompt)
    )
    expected = draw(st.none() | st.integers(1, outputs))
    sure = draw(st.just(outputs) | st.just(1))
    return RequestSpec(
        prompt,
        prompt + sure,
        outputs,
        expected_tokens=expected,
        split_at=at,
        most_tokens=prompt + outputs,
    )


@st.composite
def underestimated(draw: st.DrawFn, most_tokens: int) -> RequestSpec:
    """Return what a client asks for that expects a much shorter output than it gets."""
    prompt, expected = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    outputs = most_tokens - prompt
    return RequestSpec(
        prompt, prompt + 1, outputs, expected_tokens=expected, most_tokens=most_tokens
    )


@st.composite
def wishes(draw: st.DrawFn, most_tokens: int) -> RequestSpec:
    """Return what a client asks for: open-ended, or some tokens, of which some are sure, a few more
    than so many.
    """
    prompt = draw(st.integers(1, most_tokens - 1) | st.integers(1, 60))
    open_ended = draw(st.integers(0, 3)) == 0
    outputs = draw(st.integers(1, most_tokens - prompt))
    sure = draw(st.just(outputs) | st.integers(1, outputs))
    split_at = st.integers(0, prompt + outputs) | st.integers(0, prompt) | st.just(prompt)
    return RequestSpec(
        prompt,
        prompt + 1 if open_ended else prompt + sure,
        1000 - prompt if open_ended else outputs,
        draw(st.sampled_from([None, None, None, 1, 2, 4])),
        draw(st.sampled_from([0, 0, 0, 1, -1])),
        draw(st.sampled_from([None, None, 0.2, 2.0])),
        draw(st.integers(0, 4)) > 0,
        draw(st.none() | st.integers(1, 100)),
        draw(st.none() | split_at),
        draw(st.integers(0, 4)) > 0,
        None if open_ended else prompt + outputs,
    )


@st.composite
def long_or_narrow(draw: st.DrawFn, most_tokens: int) -> RequestSpec:
    """Return what a client asks for that needs lent weights or a low degree, at times neither."""
    tokens = draw(st.integers(most_tokens // 2, most_tokens - 3) | st.integers(2, 40))
    degree = draw(st.sampled_from([None, 1, 2])) if tokens <= 40 else None
    priority = draw(st.sampled_from([0, 0, 0, 1, -1]))
    return RequestSpec(
        tokens - 1, tokens, draw(st.sampled_from([1, 1, 1000 - tokens])), degree, priority
    )


class Episode(RuleBasedStateMachine):
    """One server from its start to quiescence; the shell checks each command and each state.

    `limited`: whether groups have limits under `manual` too, as in the simulator. `wishes`: what
    clients ask for. `migrates`: group sizes of which a migration was measured; None if any may be.
    """

    names = tuple(sorted(POLICIES))
    limited = False
    wishes = staticmethod(wishes)
    migrates: frozenset[int] | None = None
    always_lends = False
    made: Callable[..., ModelShell] = staticmethod(ModelShell)
    survives = False

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @initialize(
        data=st.data(),
        engines=st.sampled_from([2, 4]),
        factors=st.sampled_from([WIDE_WINS, NARROW_WINS, MIXED]),
        max_num_seqs=st.integers(1, 4),
        migration_sizes=st.sets(st.sampled_from([2, 4])),
        dry_run=st.integers(0, 9).map(lambda n: n == 0),
        lends=st.booleans(),
    )
    def start(
        self,
        data: st.DataObject,
        engines: int,
        factors: tuple[float, float],
        max_num_seqs: int,
        migration_sizes: set[int],
        dry_run: bool,
        lends: bool,
    ) -> None:
        self.policy = POLICIES[data.draw(st.sampled_from(self.names))]
        chosen = settings(
            self.policy.name,
            engines,
            max_num_seqs=max_num_seqs,
            most_waiting=MOST_WAITING,
            dry_run=dry_run,
            capped=self.limited or self.policy.name != "manual",
            spare=self.survives,
            lends=self.always_lends
            or (lends and self.policy.pinned_size is None and not self.survives),
        )
        tokens = chosen.capacity.kv_tokens
        self.shell = self.made(chosen, costs(tuple(tokens), *factors))
        measured = migration_sizes if self.migrates is None else self.migrates
        self.shell.controller.state.migrates = dict.fromkeys(measured, MigrationCost(0.0005, 1e-6))
        self.layouts = Layout.all(engines, sorted(tokens))
        # where no group is formed for them, longer ones would wait for what may never come
        forms = chosen.forms_groups or self.policy.name == "manual"
        self.most_tokens = (
            max(chosen.capacity.most_tokens.values()) + 3 if forms else min(tokens.values())
        )

    def _waiting(self, *, urgent: bool) -> int:
        """How many wait that a request like this one counts, in engines too where nothing is held
        back.
        """
        count = [self.shell.open[name].spec.urgent for name in self.shell.waiting()].count(urgent)
        limits, loads = self.shell.controller.settings.limits, self.shell.controller.state.loads
        for group in () if limits.capped else loads.groups:
            running = [
                one for one in loads[group].requests.values() if one.spec.urgent or not urgent
            ]
            count += max(0, len(running) - limits.max_num_seqs)
        return count

    @rule(data=st.data(), passed_s=st.floats(0.0, 0.5))
    def arrive(self, data: st.DataObject, passed_s: float) -> None:
        self.shell.now_s += passed_s
        self.count += 1
        spec = data.draw(self.wishes(self.most_tokens))
        capacity = self.shell.controller.settings.capacity
        holding = [
            size for size, tokens in capacity.most_tokens.items() if tokens >= spec.longest_tokens
        ]
        fits = (
            holding
            if spec.degree is None
            else {spec.degree}.intersection(holding, capacity.degrees)
        )
        waiting = self._waiting(urgent=spec.urgent)
        if not fits:
            with pytest.raises(RequestError):
                self.shell.arrive(f"r{self.count}", spec)
        elif waiting >= MOST_WAITING:
            with pytest.raises(PoolFull):
                self.shell.arrive(f"r{self.count}", spec)
        else:
            self.shell.arrive(f"r{self.count}", spec)
        self.shell.check()

    @precondition(lambda self: self.shell.running())
    @rule(data=st.data(), count=st.integers(1, 40), passed_s=st.floats(0.0, 0.2))
    def token(self, data: st.DataObject, count: int, passed_s: float) -> None:
        self.shell.now_s += passed_s
        self.shell.token(data.draw(st.sampled_from(self.shell.running())), count)

    @precondition(lambda self: self.shell.running())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.shell.begin(data.draw(st.sampled_from(self.shell.running())))

    @precondition(lambda self: self.shell.prefixes())
    @rule(data=st.data(), failed=st.booleans())
    def end_prefix(self, data: st.DataObject, failed: bool) -> None:
        self.shell.end_prefix(data.draw(st.sampled_from(self.shell.prefixes())), failed=failed)

    @precondition(lambda self: self.shell.parts)
    @rule(data=st.data())
    def part_cannot_be_sent(self, data: st.DataObject) -> None:
        part = self.shell.parts[data.draw(st.sampled_from(sorted(self.shell.parts)))]
        self.shell.carry_out(self.shell.controller.part_failed(part.request_id))

    @precondition(lambda self: self.shell.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.shell.finish(
            *data.draw(st.sets(st.sampled_from(sorted(self.shell.open)), max_size=3)), aborted=True
        )

    @precondition(lambda self: self.shell.waiting())
    @rule()
    def abort_all_that_wait(self) -> None:
        self.shell.finish(*self.shell.waiting(), aborted=True)

    @rule()
    def finish_what_is_over(self) -> None:
        self.shell.finish("r0", aborted=True)
        assert self.shell.controller.state.group_of("r0") is None

    @precondition(lambda self: self.shell.ordered is not None and not self.shell.is_regrouped)
    @rule()
    def regroup(self) -> None:
        self.shell.regroup()

    @precondition(lambda self: self.shell.ordered is not None)
    @rule(fails=st.integers(0, 9))
    def answer(self, fails: int) -> None:
        if fails == 0:
            self.shell.fail()
        else:
            self.shell.acknowledge()

    @precondition(lambda self: self.shell.going())
    @rule(data=st.data(), fails=st.integers(0, 9))
    def answer_weights(self, data: st.DataObject, fails: int) -> None:
        group = data.draw(st.sampled_from(self.shell.going()))
        self.shell.answer_weights(group, complete=fails > 0)

    @rule(passed_s=st.floats(0.0, 1.0))
    def tick(self, passed_s: float) -> None:
        self.shell.tick(passed_s)

    @precondition(
        lambda self: (
            self.policy.name == "manual" and not self.shell.controller.changeover.is_under_way
        )
    )
    @precondition(lambda self: self.shell.layout.groups)
    @rule(data=st.data(), mode=st.sampled_from(MODES))
    def order(self, data: st.DataObject, mode: str) -> None:
        self.shell.order(data.draw(st.sampled_from(self.shell.controller.state.layouts)), mode)

    @precondition(lambda self: self.shell.controller.changeover.untold_switch is not None)
    @rule()
    def drop(self) -> None:
        switch = self.shell.controller.changeover.untold_switch
        self.shell.drop()
        assert not self.shell.controller.changeover.is_under_way
        assert not switch.open

    @rule(
        data=st.data(),
        duration_s=st.floats(0.001, 1.0),
        prefill=st.integers(0, 64),
        sequences=st.integers(0, 4),
    )
    def measure(self, data: st.DataObject, duration_s: float, prefill: int, sequences: int) -> None:
        size = data.draw(st.sampled_from(sorted(self.shell.controller.settings.capacity.kv_tokens)))
        self.shell.controller.stepped(
            [Step(size, duration_s, prefill, sequences, 10 * sequences)] * 25
        )

    @invariant()
    def at_most_one_switch_is_under_way(self) -> None:
        if hasattr(self, "shell") and self.shell.ordered is not None:
            assert self.shell.controller.changeover.is_under_way

    @invariant()
    def only_requests_that_have_not_begun_have_a_deadline(self) -> None:
        """Of those that are open; none is late after a tick."""
        if hasattr(self, "shell"):
            open_ = self.shell.open.values()
            expected = [one for one in open_ if one.spec.deadline_s is not None and not one.begun]
            assert len(self.shell.controller.state.deadlines) == len(expected)

    @invariant()
    def switches_forget_requests_that_are_over(self) -> None:
        """With nothing running and nothing in the pool, all that any switch was told of."""
        if not hasattr(self, "shell"):
            return
        controller = self.shell.controller
        if controller.state.running == len(controller.state.pool) == 0:
            assert not self.shell.streams_of_switches()
            assert controller.changeover.is_under_way or not controller.state.switches._open

    def teardown(self) -> None:
        """Everything ends if engines go on: nothing waits for what never comes."""
        if not hasattr(self, "shell"):
            return
        rounds = 10 + 4 * len(self.shell.open)
        if self.policy.name == "manual":
            self.shell.settle(rounds, until_changed=True)
            self.shell.order(self.layouts[-1])
        self.shell.settle(rounds)
