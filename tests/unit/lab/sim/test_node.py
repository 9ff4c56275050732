"""The production controller over simulated engines: every request ends once, whatever the policy
does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_lab.sim.clock import Clock
from flying_lab.sim.node import SimNode, request_spec
from flying_lab.workload.model import Request
from flying_lab.workload.synth import Alternating, synthesise
from flying_serving.config import MODES
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost
from harness.examples import examples
from tests.unit.lab.sim.small_nodes import check_over, node_of, run, system_of

COST = MigrationCost(0.002, 1e-6)


def bursts(requests: int, seed: int = 0) -> list[Request]:
    """Quiet and busy times."""
    parameters = Alternating(
        requests=requests,
        prompt_tokens=(10, 400),
        output_tokens=(1, 60),
        low_rate_rps=1.0,
        burst_rate_rps=12.0,
        low_s=8.0,
        burst_s=5.0,
    )
    return list(synthesise(parameters, seed).requests)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_all_requests(policy: str) -> None:
    """Static and changing layouts, with urgent requests and some that only a group holds."""
    requests = [
        Request(
            r.index,
            r.arrival_s,
            r.prompt_tokens + (2500 if r.index % 41 == 40 else 0),
            r.output_tokens,
        )
        if r.index % 9
        else Request(r.index, r.arrival_s, r.prompt_tokens, r.output_tokens, priority=-1)
        for r in bursts(150)
    ]
    node = run(node_of(policy), requests)
    check_over(node, requests)
    too_long = {str(r.index) for r in requests if r.prompt_tokens + r.output_tokens > 127 * 16}
    assert len(too_long) == 2
    apart = "the widest group (degree 1) holds 2032"
    reason = {"static-dp": apart, "split": apart, "manual": "the policy never makes one"}.get(
        policy
    )
    # `load` and `priority` do not look for them, and have a group here when they come
    assert {request.request_id for request, _ in node.outcome.refused} == (
        too_long if reason else set()
    )
    assert all(reason is not None and reason in why for _, why in node.outcome.refused)


def test_auto_changes_the_layout_and_says_when() -> None:
    """Wide when quiet, narrow under load; the outcome has each layout with its time."""
    requests = bursts(200)
    node = run(node_of("auto"), requests)
    check_over(node, requests)
    assert len(node.outcome.layouts) == len(node.outcome.switches) + 1 > 2
    times = [at for at, _ in node.outcome.layouts]
    assert times == sorted(times)
    assert all(
        switch.cutover_ms is not None and switch.drain_ms is not None
        for switch in node.outcome.switches
    )


@pytest.mark.deep
@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 6),
            st.integers(1, 1500),
            st.integers(1, 50),
            st.sampled_from([0, 0, -1]),
            st.sampled_from([None, None, None, 1, 2, 4]),
        ),
        min_size=1,
        max_size=25,
    ),
    st.lists(st.tuples(st.floats(0, 8), st.integers(0, 4), st.sampled_from(MODES)), max_size=6),
    st.sampled_from(["manual", "auto", "priority", "context"]),
    st.integers(60, 128),
    st.dictionaries(
        st.sampled_from([2, 4]),
        st.builds(MigrationCost, st.floats(0, 1), st.floats(0, 0.001)),
        max_size=2,
    ),
)
def test_requests_end_once_with_switches_at_any_time(
    work: list[tuple[float, int, int, int, int | None]],
    changes: list[tuple[float, int, str]],
    policy: str,
    blocks: int,
    migrations: dict[int, MigrationCost],
) -> None:
    """Every mode, with KV that migrates or does not, with little memory: each request ends exactly
    once.
    """
    work.sort(key=lambda row: row[0])
    requests = [
        Request(index, at_s, prompt, output, priority=priority, tp_degree=degree)
        for index, (at_s, prompt, output, priority, degree) in enumerate(work)
    ]
    node = node_of(policy, blocks=blocks, migrations=migrations)
    layouts = Layout.all(4, (1, 2, 4))
    for at_s, layout, mode in changes:
        node.clock.at(at_s, _order, node, layouts[layout], mode)
    run(node, requests)
    check_over(node, requests)


def _order(node, layout: Layout, mode: str) -> None:  # type: ignore[no-untyped-def]
    """As an operator; refused while another switch is under way."""
    if not node.controller.changeover.is_under_way:
        node.order(layout, mode)


def test_the_same_run_gives_the_same_times() -> None:
    requests = bursts(150)
    runs = [
        run(node_of("auto", migrations=dict.fromkeys((2, 4), COST)), requests).outcome
        for _ in range(2)
    ]
    times = [[(r.request_id, list(r.token_s or ())) for r in outcome.ended] for outcome in runs]
    assert times[0] == times[1]
    assert runs[0].layouts == runs[1].layouts


def test_lone_request_takes_the_time_of_its_steps() -> None:
    """Front end, then the prompt's step, then a step for each further token."""
    node = run(node_of("static-dp", frontend_s=0.05), [Request(0, 1.0, 100, 3)])
    (one,) = node.outcome.ended
    assert one.first_token_s == pytest.approx(1.0 + 0.05 + 0.022 + 0.1)
    assert one.end_s - one.first_token_s == pytest.approx(2 * (0.022 + 0.0008))


def test_a_request_begins_with_the_step_that_has_its_prompt() -> None:
    """The second prompt has to wait for the step of the first, which takes all tokens of a step."""
    requests = [Request(index, 1.0, 128, 3) for index in range(2)]
    node = run(node_of("static-dp", engines=1, frontend_s=0.05), requests)
    first, second = sorted(node.outcome.ended, key=lambda one: one.begun_s)
    assert first.begun_s == pytest.approx(1.0 + 0.05)
    assert second.begun_s == pytest.approx(first.first_token_s)


def test_a_cap_above_the_length_hides_the_length() -> None:
    request = Request(0, 0.0, 100, 10)
    assert request_spec(request, None, None) == RequestSpec(100, 110, 10)
    capped = request_spec(request, None, lambda _: 40)
    assert capped == RequestSpec(100, 101, 40, most_tokens=140)


def test_requests_with_a_larger_cap_get_the_tokens_that_they_have() -> None:
    requests = bursts(150)
    system = replace(system_of("auto"), max_tokens=lambda _: 240)
    check_over(run(SimNode(system, Clock()), requests), requests)


def test_the_controller_knows_every_token_at_the_end() -> None:
    """What policies learn of lengths is what requests got, however short the time since the last
    tick.
    """
    node, expected = node_of("auto", engines=2), Demand()
    run(node, [Request(0, 0.0, 10, 7)])
    expected.grew(0, 7)
    expected.finished(7)
    assert node.controller.state.demand.output_tokens == expected.output_tokens


@pytest.mark.parametrize("capped", [True, False], ids=["in the pool", "in the engine"])
def test_a_request_with_a_deadline_that_waits_too_long_is_refused(capped: bool) -> None:
    """Wherever it waits; one that has begun is served, though its first token comes later."""
    node = node_of("static-dp", engines=1)
    node.controller.choice.limits = type(node.controller.choice.limits)(8, 128, capped=capped)
    requests = [Request(i, 0.0, 1500, 50, deadline_s=0.5) for i in range(3)]
    run(node, requests)
    assert [reason for _, reason in node.outcome.refused] and "waited" in node.outcome.refused[0][1]
    assert [one.request_id for one in node.outcome.ended] == ["0"]
    assert node.outcome.ended[0].first_token_s > 0.5
    assert len(node.outcome.refused) == 2


@pytest.mark.deep
def test_requests_of_one_event_are_told_as_such() -> None:
    """Eight at a time, or eight that come at the same time by chance."""
    for event_size, events in ((8, True), (1, False)):
        node = node_of("auto", engines=2)
        requests = [
            Request(i, 8.0 * (i // 8), 10, 4, event=i // 8 if events else None) for i in range(400)
        ]
        run(node, requests)
        assert node.controller.state.demand._arrivals._events.mean_size == pytest.approx(
            event_size, rel=0.1
        )


def test_finished_requests_can_be_streamed_out() -> None:
    seen: list[str] = []
    node = node_of("auto")
    node._on_end = lambda request: seen.append(request.request_id)
    requests = bursts(60)
    run(node, requests)
    assert sorted(seen) == sorted(str(r.index) for r in requests)
    assert node.outcome.ended == []
