"""Split requests in the simulator, by the production splitter: all tokens once, KV handed over."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import pytest

from flying_lab.results.metrics import token_gaps
from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.lanes import SimLane
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import SimRequest, SimStep
from flying_lab.sim.run import results, simulate
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.config import MODES
from flying_serving.controller.commands import Fail
from flying_serving.controller.requests import ALONE, RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost
from tests.unit.lab.sim.small_nodes import check_over, node_of, run, system_of

MACHINE = Modelled(models.load("qwen2.5-14b"), hardware.parse_devices("a100x2"))
OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
TARGET = replace(OPTIONS, tbt_slo_s=0.1)
MIXED = synthesise(
    Poisson(requests=150, rate_rps=4.0, prompt_tokens=(10, 6000), output_tokens=(1, 400)), 5
)
QUICK = MigrationCost(1e-3, 1e-6)
PROMPT, OUTPUTS = 600, 40
ASKED = Request(0, 0.0, PROMPT, OUTPUTS)


def splitting(options: Options = TARGET) -> System:
    """Return system `split` of two engines of one A100 each."""
    return build("split", MACHINE, 1, options)


def served(system: System, workload: Workload) -> SimNode:
    """Return a node that has served a workload, with nothing left behind."""
    node = SimNode(system, Clock())
    node.start()
    run(node, workload.requests)
    check_over(node, workload.requests)
    return node


@dataclass
class Computed:
    """Tokens that each engine has computed: of prompts, and one of each decoding request."""

    prefilled: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    decoded: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self.prefilled.values()) + sum(self.decoded.values())


def watch(node: SimNode) -> Computed:
    """Count the tokens that a node's engines compute from now on."""
    computed, before = Computed(), node.cluster._on_step

    def count(lane: SimLane, took_s: float, step: SimStep) -> None:
        computed.prefilled[lane.group[0]] += step.prefill_tokens
        computed.decoded[lane.group[0]] += step.sequences
        before(lane, took_s, step)

    node.cluster._on_step = count
    return computed


def small(policy: str = "manual") -> SimNode:
    """Return two small engines, between which KV can be pulled."""
    sizes = (1,) if policy == "split" else (1, 2)
    return node_of(policy, 2, migrations=dict.fromkeys(sizes, QUICK))


def ask(node: SimNode, at: int, asks: Request = ASKED, **asked: object) -> SimRequest:
    """Let a request arrive that asks to be split at a token."""
    prompt, outputs = asks.prompt_tokens, asks.output_tokens
    request = SimRequest(str(asks.index), prompt, outputs, node.clock.now_s, token_s=array("d"))
    spec = RequestSpec(prompt, prompt + outputs, outputs, split_at=at)
    node.open[request.request_id] = request
    node.start()
    node._admit(request, replace(spec, **asked), ALONE)  # type: ignore[arg-type]
    return request


def run_until(node: SimNode, holds: Callable[[], bool]) -> None:
    """Let time pass until something holds."""
    while not holds():
        assert node.clock.step(), "it never holds"


def prefix_of(node: SimNode) -> SimRequest:
    """Return the only prefix that runs."""
    (prefix,) = node.parts._of_prefix
    return prefix


# ---- splits that the policy plans


def test_a_planned_split_computes_each_token_once() -> None:
    node = SimNode(splitting(), Clock())
    computed = watch(node)
    node.start()
    run(node, MIXED.requests)
    check_over(node, MIXED.requests)
    counts = node.controller.state.splits.counts
    assert counts.prompt > 5
    assert counts.undone == 0
    assert len(node.parts.handoffs) == counts.prompt + counts.output
    assert sum(request.preemptions for request in node.outcome.ended) == 0
    assert computed.tokens == sum(r.prompt_tokens + r.output_tokens - 1 for r in MIXED.requests)


def test_a_handoff_waits_for_the_last_chunk_only() -> None:
    one = splitting()
    node = served(replace(one, shape=replace(one.shape, migrations={1: QUICK})), MIXED)
    chunk_s = QUICK.seconds(OPTIONS.max_num_batched_tokens)
    assert max(handoff.tokens for handoff in node.parts.handoffs) > 2048
    assert max(handoff.waited_s for handoff in node.parts.handoffs) <= chunk_s + 1e-12


@pytest.mark.parametrize("times", [20.0, 0.001])
def test_a_wrong_hint_loses_no_token(times: float) -> None:
    """Clients ask for more tokens than they get, so the server knows no length."""
    one = replace(splitting(), max_tokens=lambda _: 8000)
    hinted = replace(one, hint=lambda request: math.ceil(times * request.output_tokens))
    counts = served(hinted, MIXED).controller.state.splits.counts
    assert (counts.replanned > 100) == (times < 1.0)


def test_longer_requests_move_to_the_engine_with_less_to_do() -> None:
    """Some of many, each at most once; none loses a token."""
    one = replace(system_of("split", 2, migrations={1: QUICK}), max_tokens=lambda _: 300)
    draw = Random(1)
    requests = [Request(index, 0.2 * index, 60, draw.choice((4, 250))) for index in range(60)]
    node = SimNode(replace(one, hint=lambda _: 4), Clock())
    node.start()
    run(node, requests)
    check_over(node, requests)
    counts = node.controller.state.splits.counts
    assert 0 < counts.moved < counts.replanned <= len(requests)


@pytest.mark.parametrize("name", ["split", "stock-dp"])
def test_steps_keep_to_the_target_for_the_time_between_tokens(name: str) -> None:
    """In 98 % of gaps at a load at which they would not without it."""
    within = {}
    for options in (OPTIONS, TARGET):
        one = build(name, MACHINE, 1, options)
        begin, end = token_gaps(results(one, MIXED, simulate(one, MIXED.requests), "a test"))
        within[options.tbt_slo_s] = float((end - begin <= 0.1).mean())
    assert within[math.inf] < 0.95
    assert within[0.1] > 0.98


def test_an_idle_server_splits_nothing() -> None:
    far = Workload(
        "far apart", 1, tuple(Request(index, 30.0 * index, 3000, 100) for index in range(5))
    )
    assert served(splitting(), far).parts.handoffs == []


def test_a_prompt_longer_than_an_engine_holds_is_refused() -> None:
    """Two engines that share a request hold no more of it than one."""
    node = small("split")
    requests = [Request(0, 0.0, 2100, 10), Request(1, 0.0, 1900, 10), Request(2, 0.0, 1900, 10)]
    node.start()
    run(node, requests)
    check_over(node, requests)
    ((refused, reason),) = node.outcome.refused
    assert refused.request_id == "0"
    assert "the widest group (degree 1) holds 2032" in reason


def test_the_simulated_controller_has_the_settings_of_policy_split() -> None:
    settings = splitting().settings
    assert settings.policy is POLICIES["split"]
    assert settings.limits.capped
    assert settings.tbt_slo_s == 0.1
    assert settings.capacity.block_tokens == {1: 16}


# ---- splits that a request asks for


@pytest.mark.parametrize("at", [1, 16, 300, 599])
def test_a_split_prompt_is_computed_by_two_engines(at: int) -> None:
    node = small()
    computed = watch(node)
    ask(node, at)
    run(node, [])
    check_over(node, [ASKED])
    assert computed.prefilled == {0: at, 1: PROMPT - at}
    assert computed.decoded == {0: 0, 1: OUTPUTS - 1}
    assert [handoff.tokens for handoff in node.parts.handoffs] == [at]


@pytest.mark.parametrize("at", [600, 601, 638])
def test_a_split_answer_goes_on_in_the_second_engine(at: int) -> None:
    """The second engine computes the last token that the first one has given."""
    node = small()
    computed = watch(node)
    ask(node, at)
    run(node, [])
    check_over(node, [ASKED])
    assert computed.prefilled == {0: PROMPT, 1: 1}
    assert computed.decoded == {0: at - PROMPT, 1: PROMPT + OUTPUTS - at - 2}
    assert [handoff.tokens for handoff in node.parts.handoffs] == [at]


def test_the_second_engine_begins_when_the_prefix_has_ended() -> None:
    node = small()
    request = ask(node, 300)
    prefix = prefix_of(node)
    run_until(node, lambda: request.group is not None)
    assert (request.group, request.computed_tokens, prefix.group) == ((1,), 300, None)
    assert node.clock.now_s == pytest.approx(prefix.end_s + QUICK.seconds(128))
    assert len(node.controller.state.splits) == 0


def test_an_answer_that_ends_before_its_split_leaves_no_part() -> None:
    node = small()
    computed = watch(node)
    ask(node, PROMPT + 60, max_output_tokens=100)
    assert len(node.parts) == 1
    run(node, [])
    check_over(node, [ASKED])
    assert computed.tokens == computed.prefilled[0] + computed.decoded[0]
    assert node.parts.handoffs == []


def test_a_prefix_that_fails_hands_over_what_it_has() -> None:
    node = small()
    computed = watch(node)
    request = ask(node, 500)
    prefix = prefix_of(node)
    run_until(node, lambda: prefix.computed_tokens >= 256)
    node.cluster.remove(prefix)
    node._carry_out(node.controller.prefix_ended("0", node.clock.now_s, failed=True))
    run_until(node, lambda: request.group is not None)
    assert 256 <= request.computed_tokens < 500
    run(node, [])
    check_over(node, [ASKED])
    assert node.controller.state.splits.counts.undone == 1
    assert sum(computed.prefilled.values()) == PROMPT


def test_a_prefix_that_fails_before_it_arrives_hands_over_nothing() -> None:
    node = small()
    computed = watch(node)
    ask(node, 500)
    node._carry_out(node.controller.prefix_ended("0", node.clock.now_s, failed=True))
    run(node, [])
    check_over(node, [ASKED])
    assert computed.prefilled == {0: 0, 1: PROMPT}


def test_a_request_whose_pull_fails_goes_on_where_it_is() -> None:
    """At its split it is recalled from its group, and begins there again with its KV."""
    node = small()
    computed = watch(node)
    request = ask(node, PROMPT + 10)
    run_until(node, lambda: request.tokens > 0)
    node._carry_out(node.controller.part_failed("0"))
    run(node, [])
    check_over(node, [ASKED])
    assert node.controller.state.splits.counts.undone == 1
    assert node.parts.handoffs == []
    assert computed.tokens == PROMPT + OUTPUTS - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [300, PROMPT + 20])
@pytest.mark.parametrize("after_s", [0.0, 0.06, 0.1, 0.3, 0.6, 0.8])
def test_an_operators_switch_undoes_a_split(mode: str, at: int, after_s: float) -> None:
    """In every phase of its parts: all tokens once, whatever group it goes on in."""
    node = small()
    ask(node, at)
    node.clock.at(after_s, node.order, Layout.uniform(2, 2), mode)
    run(node, [])
    check_over(node, [ASKED])
    assert node.controller.state.layout == Layout.uniform(2, 2)


@pytest.mark.parametrize("seed", range(6))
def test_switches_and_failures_of_many_split_requests_lose_no_token(seed: int) -> None:
    draw = Random(seed)
    node = node_of("manual", 4, migrations=dict.fromkeys((1, 2, 4), QUICK))
    requests = [
        Request(index, draw.uniform(0.0, 24.0), draw.randint(20, 700), draw.randint(1, 40))
        for index in range(120)
    ]

    def switch() -> None:
        layout = Layout.uniform(4, draw.choice((1, 2)))
        if not node.controller.changeover.is_under_way and layout != node.controller.state.layout:
            node.order(layout, draw.choice(MODES))

    def fail_one() -> None:
        splits = node.controller.state.splits
        if splits.open:
            request_id = draw.choice(list(splits.open))
            now_s, in_prompt = node.clock.now_s, splits.in_prompt(request_id)
            hear = partial(node.controller.prefix_ended, now_s=now_s, failed=True)
            node._carry_out((hear if in_prompt else node.controller.part_failed)(request_id))

    for request in requests:
        at = draw.randint(1, request.prompt_tokens + request.output_tokens)
        node.clock.at(request.arrival_s, ask, node, at, request)
    for number in range(8):
        node.clock.at(3.0 * number + draw.uniform(0.0, 3.0), switch)
    for number in range(30):
        node.clock.at(0.8 * number + draw.uniform(0.0, 0.8), fail_one)
    run(node, [])
    check_over(node, requests)
    assert len(node.outcome.ended) == len(requests)
    assert node.controller.state.splits.counts.undone > 5
    assert len(node.parts.handoffs) > 20


def test_a_deadline_drops_the_part_of_a_request_that_has_not_begun() -> None:
    """Prompts of others are before it in both engines."""
    node = small()
    others = [Request(index, 0.0, 1000, 4) for index in (1, 2)]
    for request in others:
        node.arrive(request)
    run_until(node, lambda: node.controller.state.running == 2)
    ask(node, 300, priority=-1, deadline_s=0.2)
    assert len(node.parts) == 1
    run(node, [])
    check_over(node, [*others, ASKED])
    ((refused, reason),) = node.outcome.refused
    assert (refused.request_id, reason) == ("0", "waited 0.2 s")


def test_a_prefix_that_begins_meets_the_deadline_of_its_request() -> None:
    node = small()
    ask(node, 500, deadline_s=0.01)
    run(node, [])
    check_over(node, [ASKED])
    assert node.outcome.refused == []


def test_a_request_that_fails_is_refused_with_the_reason() -> None:
    node = small()
    request = ask(node, PROMPT + 10)
    run_until(node, lambda: request.group is not None)
    node._carry_out([Fail("0", "its engine was lost")])
    node._carry_out(node.controller.finished(["0"], node.clock.now_s, aborted=True))
    run(node, [])
    check_over(node, [ASKED])
    assert node.outcome.refused == [(request, "its engine was lost")]
