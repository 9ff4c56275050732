"""The limit on prompts: what the scheduler of a lane puts into a step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from flying_serving.scheduling.batches import Running
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.scheduler.limits import running_of
from harness.examples import examples
from tests.with_vllm.vllm_adapter.one_token import OneTokenLane

MAX_NUM_SEQS = 8


def planned(lane: OneTokenLane) -> dict[str, int]:
    """Make a step. Returns its tokens by request; one whose prompt is not done yet gets no
    token.
    """
    plan = lane.scheduler.schedule()
    requests = lane.scheduler.requests
    ids = list(plan.num_scheduled_tokens)
    done = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in ids]
    sampled = [[7] if each else [] for each in done]
    lane.scheduler.update_from_output(
        plan, ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
    )
    tokens: dict[str, int] = plan.num_scheduled_tokens
    return tokens


@settings(max_examples=examples(25), deadline=None)
@given(limit=st.integers(1, 80), prompts=st.lists(st.integers(2, 400), min_size=1, max_size=4))
def test_a_step_takes_no_more_prompt_tokens_and_every_decode(
    limit: int, prompts: list[int]
) -> None:
    lane = OneTokenLane("fcfs", blocks=400, max_num_seqs=MAX_NUM_SEQS)
    asked: list[Running] = []
    # the first prompts come before the request that decodes, so that they are before it in vLLM's
    # order
    for number, tokens in enumerate(prompts):
        lane.arrive(f"p{number}", 0, 0.0, tokens=tokens, outputs=8)

    def prompt_tokens(running: Running) -> int | None:
        asked.append(running)
        return limit if running.decoding or len(asked) > 1 else 1 + len(prompts)

    lane.scheduler.prompt_limit = prompt_tokens
    lane.arrive("decodes", 0, 0.0, tokens=1, outputs=100)
    done: dict[str, int] = dict.fromkeys(
        [*(f"p{number}" for number in range(len(prompts))), "decodes"], 0
    )
    lengths = {**{f"p{number}": tokens for number, tokens in enumerate(prompts)}, "decodes": 1}
    for _ in range(60):
        decoding = {
            name
            for name, count in done.items()
            if count >= lengths[name] and name in lane.scheduler.requests
        }
        step = planned(lane)
        if len(asked) > 1:
            # a prompt with one token left counts as well
            assert asked[-1].decoding >= len(decoding)
            assert decoding <= step.keys()
            assert sum(step.values()) <= asked[-1].decoding + limit
        for name, tokens in step.items():
            done[name] += tokens


def test_without_a_limit_a_step_is_as_before() -> None:
    lane = OneTokenLane("fcfs", max_num_seqs=MAX_NUM_SEQS)
    limits = iter([16, None])
    lane.scheduler.prompt_limit = lambda running: next(limits)
    lane.arrive("a", 0, 0.0, tokens=100)
    lane.arrive("b", 0, 0.0, tokens=100)
    assert planned(lane) == {"a": 16}
    assert planned(lane) == {"a": 84, "b": 100}


@pytest.mark.parametrize("limit", [None, 16])
def test_a_request_that_comes_with_its_kv_does_not_wait_for_prompts(limit: int | None) -> None:
    """It has a token in the first step, also where a prompt that runs could take all of it."""
    most = 64
    lane = OneTokenLane("fcfs", blocks=400, max_num_seqs=MAX_NUM_SEQS, step_tokens=most)
    lane.scheduler.prompt_limit = None if limit is None else lambda running: limit
    lane.arrive("prompt", 0, 0.0, tokens=400)
    lane.arrive("waits", 0, 0.0, tokens=400)
    assert planned(lane) == {"prompt": limit or most}
    arrives = Request("arrives", [1] * 40, SamplingParams(max_tokens=8, ignore_eos=True), None)
    pool = SchedulerPool(lane.scheduler)
    assert pool.prepare(arrives, 39) is not None
    pool.arrived(arrives, 39)
    lane.scheduler.add_request(arrives)
    assert planned(lane) == {"prompt": limit or most - 1, "arrives": 1}
    assert planned(lane)["arrives"] == 1
    assert arrives.num_output_tokens == 2


def test_more_prompts_than_the_limit_has_tokens_leave_one_to_each_decode() -> None:
    """Each of them takes one token, and they are before the request that decodes."""
    lane = OneTokenLane(
        "fcfs", blocks=400, max_num_seqs=MAX_NUM_SEQS, step_tokens=80, chunk_tokens=16
    )
    for number in range(4):
        lane.arrive(f"p{number}", 0, 0.0, tokens=100)
    lane.arrive("decodes", 0, 0.0, tokens=1)
    assert planned(lane)["p3"] == 16
    lane.scheduler.prompt_limit = lambda running: 2
    assert planned(lane) == {**{f"p{number}": 1 for number in range(4)}, "decodes": 1}


def test_drafts_are_no_prompt() -> None:
    """A request that decodes has some; they are counted with its token."""
    lane = OneTokenLane("fcfs", max_num_seqs=MAX_NUM_SEQS)
    request = lane.arrive("a", 0, 0.0, tokens=5)
    planned(lane)
    request.spec_token_ids = [3, 4]
    assert running_of(lane.scheduler) == (Running(decoding=1, context_tokens=5), 3)


def test_running_requests_are_reported_with_their_context() -> None:
    """Decoding requests with what they read, and what the first of the prompts under way has."""
    lane = OneTokenLane("fcfs", max_num_seqs=MAX_NUM_SEQS)
    lane.arrive("a", 0, 0.0, tokens=5)
    planned(lane)
    lane.scheduler.prompt_limit = lambda running: 16
    lane.arrive("b", 0, 0.0, tokens=100)
    planned(lane)
    running = Running(decoding=1, context_tokens=6, prefilling=1, computed_tokens=16)
    assert running_of(lane.scheduler) == (running, 1)
