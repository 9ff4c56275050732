"""The steps of requests with drafts, by vLLM's scheduler and without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.vllm_adapter.keys import FULL_AT_KEY
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.scheduler.scheduler import lane_class
from flying_serving.vllm_adapter.speculation.drafts import Drafter, drafts_checked
from flying_serving.vllm_adapter.speculation.scheduler import DraftingScheduler
from harness.live import tiny
from tests.stock.drafted import CONFIG
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer

pytestmark = pytest.mark.usefixtures("classes_imported_here")

BLOCK = 16
PROMPT = [1, 2, 3, 4, 5] * 4
TEXT = PROMPT + [1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 1, 2, 9, 9, 9, 9, 1, 2, 3, 4, 8] * 3
"""The tokens that a request has in the end: some of its drafts are accepted, some are not."""


class DraftingLane:
    """The scheduler of a lane with drafts, where all requests get the tokens of TEXT."""

    def __init__(self, *, blocks: int = 100, step_tokens: int = 64, longest: int = 512) -> None:
        init_none_hash(sha256)  # as an engine does before there are requests
        config = EngineArgs(
            str(tiny("llama")),
            max_model_len=longest,
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            speculative_config=dict(CONFIG),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        self.drafter = Drafter(config)
        self.scheduler: Any = lane_class(Scheduler, (DraftingScheduler,))(
            config, of_one_layer(blocks, BLOCK), StructuredOutputManager(config), BLOCK
        )
        self.pool = SchedulerPool(self.scheduler)

    def request(
        self, name: str, outputs: int = 0, *, most: int = 400, full_at: int | None = None
    ) -> Request:
        """Return a request with so many outputs."""
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        params.extra_args = None if full_at is None else {FULL_AT_KEY: full_at}
        hasher = get_request_block_hasher(BLOCK, sha256)
        made = Request(name, PROMPT, params, None, block_hasher=hasher)
        made.append_output_token_ids(TEXT[len(PROMPT) :][:outputs])
        if outputs:
            made.prefill_stats = None  # as `history.resume` does
        return made

    def add(self, *args: Any, **options: Any) -> Request:
        request = self.request(*args, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, tuple[int, int]]:
        """Make a step. Returns the tokens of each request, and its drafts among them."""
        plan = self.scheduler.schedule()
        drafts = plan.scheduled_spec_decode_tokens
        planned = {
            name: (tokens, len(drafts.get(name, ())))
            for name, tokens in plan.num_scheduled_tokens.items()
        }
        assert plan.total_num_scheduled_tokens == sum(tokens for tokens, _ in planned.values())
        self.check_blocks(plan)
        requests = [self.scheduler.requests[name] for name in planned]
        ends = [one.num_computed_tokens for one in requests]
        sampled = [sampled_of(one, drafts.get(one.request_id, ())) for one in requests]
        ids = list(planned)
        output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        self.scheduler.update_from_output(plan, output)
        proposed = [
            self.drafter.propose(one.all_token_ids) if tokens else []
            for one, tokens in zip(requests, sampled, strict=True)
        ]
        most = self.scheduler.max_model_len - self.scheduler.num_spec_tokens
        if any(computed > most for computed in ends):  # as vLLM's runner
            proposed = [[0] * self.scheduler.num_spec_tokens] * len(ids)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, proposed))
        return planned

    def check_blocks(self, plan: Any) -> None:
        """A request that begins has blocks for all tokens of the step, and the runner knows
        them.
        """
        for new in plan.scheduled_new_reqs:
            tokens = new.num_computed_tokens + plan.num_scheduled_tokens[new.req_id]
            assert len(new.block_ids[0]) * BLOCK >= tokens
            assert list(new.block_ids[0]) == self.pool.blocks_of(new.req_id)

    def clear(self) -> None:
        """End all requests, and forget their prefixes."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert self.scheduler.reset_prefix_cache()

    def drafts_until(self, request: Request, outputs: int) -> list[int]:
        """Step until a request has so many outputs. Returns the number of drafts of each step that
        computed its last token.
        """
        counts = []
        while request.num_output_tokens < outputs:
            before = request.num_output_tokens
            drafts = self.step().get(request.request_id, (0, 0))[1]
            if request.num_output_tokens > before:
                counts.append(drafts)
        return counts


def sampled_of(request: Request, drafts: Sequence[int]) -> list[int]:
    """Return what a model samples that knows TEXT."""
    if request.num_computed_tokens < request.num_tokens:
        return []
    following = TEXT[request.num_tokens :]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == following[accepted]:
        accepted += 1
    return following[: accepted + 1]


OUTPUTS = 50


@pytest.fixture
def lane() -> DraftingLane:
    return DraftingLane()


def boundaries(lane: DraftingLane) -> tuple[list[int], list[int]]:
    """Return the numbers of outputs after each step of an undisturbed request, and of drafts in
    it.
    """
    request, ends, counts = lane.add("undisturbed"), list[int](), list[int]()
    while request.num_output_tokens < OUTPUTS:
        counts += lane.drafts_until(request, request.num_output_tokens + 1)
        ends.append(request.num_output_tokens)
    lane.clear()
    return ends, counts


def test_steps_of_the_scheduler_are_told_from_tokens(lane: DraftingLane) -> None:
    ends, counts = boundaries(lane)
    tokens = TEXT[: len(PROMPT) + ends[-1]]
    assert set(counts) > {0, 4}
    assert counts == drafts_checked(
        tokens, len(PROMPT), lambda end: lane.drafter.propose(tokens[:end])
    )


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_a_request_with_outputs_makes_the_steps_of_an_undisturbed_one(beside: bool) -> None:
    """It computes its outputs again; then each step has the drafts that it would have had."""
    lane = DraftingLane(step_tokens=40)
    ends, counts = boundaries(lane)
    for step, outputs in enumerate(ends[:-1], start=1):
        lane.clear()
        if beside:
            lane.add(f"other-{step}")
        request = lane.add(f"again-{step}", outputs)
        assert lane.drafts_until(request, OUTPUTS) == counts[step:], outputs


def test_a_step_is_never_longer_than_the_runner_takes() -> None:
    """Where prompts fill a step, requests that go on have room for their drafts all the same."""
    lane, most = DraftingLane(step_tokens=32), 32
    ends, _ = boundaries(lane)
    for number, outputs in enumerate(ends[3:7]):
        lane.add(f"again-{number}", outputs)
        lane.add(f"other-{number}")
    while lane.scheduler.requests:
        planned = lane.step()
        assert sum(tokens for tokens, _ in planned.values()) <= most
        ended = [one for one in lane.scheduler.running if one.num_output_tokens >= OUTPUTS]
        names = [one.request_id for one in ended]
        lane.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


def test_a_step_has_room_however_many_requests_go_on() -> None:
    """vLLM waits with a request that has come with its KV until its padded step has room."""
    lane = DraftingLane(step_tokens=12)
    ends, counts = boundaries(lane)
    arrived = lane.request("arrived", ends[3])
    assert lane.pool.prepare(arrived, arrived.num_tokens - 1) is not None
    lane.pool.arrived(arrived, arrived.num_tokens - 1)
    lane.scheduler.add_request(arrived)
    for number in range(8):
        lane.add(f"again-{number}", ends[3])
    assert lane.drafts_until(arrived, OUTPUTS) == counts[4:]


def test_a_step_does_not_look_at_all_waiting_requests(
    lane: DraftingLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands. That a preempted one goes on is known."""
    ends, _ = boundaries(lane)
    request = lane.add("preempted")
    lane.drafts_until(request, ends[4])
    for number in range(30):
        lane.add(f"waits-{number}")
    looked: list[int] = []
    queue = type(lane.scheduler.waiting)
    monkeypatch.setattr(queue, "__iter__", lambda _: looked.append(1) or iter(()))
    lane.step()
    lane.scheduler.running.remove(request)
    lane.scheduler._preempt_request(request, 0.0)
    lane.step()
    assert looked == []


def test_a_request_near_the_models_length_takes_no_drafts_from_others() -> None:
    longest = len(PROMPT) + OUTPUTS + 5
    lane = DraftingLane(step_tokens=200, longest=longest)
    ends, counts = boundaries(lane)
    for step, outputs in enumerate(ends[:-1], start=1):
        lane.clear()
        lane.add(f"long-{step}", longest - len(PROMPT) - 3)
        request = lane.add(f"again-{step}", outputs)
        assert lane.drafts_until(request, OUTPUTS) == counts[step:], outputs


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_so_does_a_request_that_comes_with_its_kv(beside: bool) -> None:
    """vLLM would pad its first step, unless a prompt is computed beside it."""
    lane = DraftingLane(step_tokens=12)
    ends, counts = boundaries(lane)
    for step, outputs in enumerate(ends[:-1], start=1):
        lane.clear()
        if beside:
            lane.add(f"other-{step}")
            lane.step()
        request = lane.request(f"again-{step}", outputs)
        assert lane.pool.prepare(request, request.num_tokens - 1) is not None
        lane.pool.arrived(request, request.num_tokens - 1)
        lane.scheduler.add_request(request)
        assert lane.drafts_until(request, OUTPUTS) == counts[step:], outputs


def test_a_preempted_request_makes_the_steps_of_an_undisturbed_one(lane: DraftingLane) -> None:
    ends, counts = boundaries(lane)
    request = lane.add("preempted")
    lane.drafts_until(request, ends[4])
    lane.scheduler.running.remove(request)
    lane.scheduler._preempt_request(request, 0.0)
    assert lane.drafts_until(request, OUTPUTS) == counts[5:]


def test_no_first_step_is_padded(lane: DraftingLane) -> None:
    """vLLM pads that of a prompt of which the prefix cache has all but a token."""
    lane.drafts_until(lane.add("first"), 1)
    request = lane.request("second")
    assert lane.pool.prepare(request, len(PROMPT) - 1) is not None
    lane.pool.arrived(request, len(PROMPT) - 1)
    lane.scheduler.add_request(request)
    assert lane.step()["second"] == (1, 0)


def test_drafts_without_room_are_left_out(lane: DraftingLane) -> None:
    """The blocks hold all tokens of the request, and none of its drafts."""
    ends, _ = boundaries(lane)
    lengths = [len(PROMPT) + end for end in ends]
    tokens = next(
        tokens
        for tokens in lengths
        if tokens % BLOCK in (14, 15, 0) and len(lane.drafter.propose(TEXT[:tokens])) > 2
    )
    lane = DraftingLane(blocks=1 + -(-tokens // BLOCK))
    lane.add("again", tokens - len(PROMPT))
    assert lane.step()["again"] == (tokens, 0)
    lane.pool.check(set())


def test_a_request_that_fills_its_group_ends_after_a_whole_step(lane: DraftingLane) -> None:
    ends, _ = boundaries(lane)
    for full_at in range(3, 12):
        request = lane.add(f"full-{full_at}", full_at=full_at)
        while not request.is_finished():
            lane.step()
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert request.num_output_tokens == min(end for end in ends if end >= full_at)


def test_blocks_for_drafts_are_missed(lane: DraftingLane) -> None:
    """They count as the next tokens of a request."""
    request = lane.add("one")
    lane.drafts_until(request, 12)
    owned = len(lane.pool.blocks_of("one"))
    request.spec_token_ids = [0] * (owned * BLOCK + 1 - request.num_tokens)
    lane.pool.take(lane.pool.free_count())
    assert lane.pool.missing_for_running() == 1
    request.spec_token_ids = []
    assert lane.pool.missing_for_running() == 0
