"""FakeScheduler plans the steps that a lane's scheduler of vLLM plans."""

from collections.abc import Callable
from typing import Any

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
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.scheduler.scheduler import LaneScheduler
from harness.examples import examples
from tests.with_vllm.engine import schedulers
from tests.with_vllm.vllm_adapter.kv_lanes import KVLane, token


class Unlimited(LaneScheduler):
    """Without the limit on prompts, which the fake has not: `vllm_adapter/scheduler` tests it."""

    def _limit_prompts(self) -> None:
        pass


def contents(plan: SchedulerOutput) -> dict[str, Any]:
    """What a plan says of requests and blocks: all that groups and model runners of tests read."""
    cached = plan.scheduled_cached_reqs
    return {
        "tokens": list(plan.num_scheduled_tokens.items()),
        "total": plan.total_num_scheduled_tokens,
        "new": [
            (new.req_id, len(new.prompt_token_ids or ()), new.block_ids, new.num_computed_tokens)
            for new in plan.scheduled_new_reqs
        ],
        "cached": list(
            zip(
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                strict=True,
            )
        ),
        "resumed": cached.resumed_req_ids,
        "finished": plan.finished_req_ids,
        "zeroed": plan.new_block_ids_to_zero,
    }


def state(scheduler: Any) -> dict[str, Any]:
    """What groups read of a scheduler."""
    queues = scheduler.running, scheduler.kv_holding_waiting, scheduler.waiting
    return {
        "queues": [[request.request_id for request in queue] for queue in queues],
        "requests": {
            name: (
                request.status,
                request.num_tokens,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                scheduler.kv_cache_manager.get_block_ids(name),
            )
            for name, request in scheduler.requests.items()
        },
        "counts": (scheduler.get_request_counts(), scheduler.get_num_unfinished_requests()),
        "has requests": scheduler.has_requests(),
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


class Alike(RuleBasedStateMachine):
    """Both schedulers, to which the same happens in any order, with few blocks."""

    @initialize(blocks=st.integers(3, 14))
    def begin(self, blocks: int) -> None:
        self.lane = KVLane(overlaps=False, blocks=blocks, kind=Unlimited, has_prefix_cache=False)
        self.fake = schedulers.FakeScheduler(blocks)
        self.pools = [self.lane.pool, SchedulerPool(self.fake)]
        self.count = 0
        self.plan: SchedulerOutput | None = None

    # ---- what happens

    @rule(prompt=st.integers(1, 24), outputs=st.integers(1, 8))
    def arrive(self, prompt: int, outputs: int) -> None:
        for pool, request in zip(self.pools, self.requests(prompt, outputs), strict=True):
            pool.scheduler.add_request(request)

    @rule(
        prompt=st.integers(2, 24),
        outputs=st.integers(1, 8),
        ahead=st.integers(1, 23),
        next_token=st.booleans(),
    )
    def arrive_with_kv(self, prompt: int, outputs: int, ahead: int, next_token: bool) -> None:
        """In two parts, if there are blocks for both."""
        usable = prompt - 1
        requests = self.requests(prompt, outputs)
        arrivals = list(zip(self.pools, requests, strict=True))

        def in_both(take: Callable[[SchedulerPool, Any], Any]) -> Any:
            taken = [take(pool, request) for pool, request in arrivals]
            assert taken[0] == taken[1]
            return taken[0]

        if in_both(lambda pool, one: pool.prepare(one, min(ahead, usable))) is None:
            return
        if in_both(lambda pool, one: pool.extend(one, usable, next_token=next_token)) is None:
            in_both(lambda pool, one: pool.release(one))
            return
        in_both(lambda pool, one: pool.arrived(one, usable))
        in_both(lambda pool, one: pool.scheduler.add_request(one))

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        """Also while a step is under way."""
        names = sorted(self.fake.requests)
        for name in names[pick % len(names) :][:1] if names else ():
            for pool in self.pools:
                pool.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        self.lane.schedule()
        self.plan = self.fake.schedule()
        assert contents(self.plan) == contents(self.lane.plans[-1])

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step(self) -> None:
        assert self.plan is not None
        self.lane.finish()
        self.fake.update_from_output(self.plan, None)
        self.plan = None

    # ---- what always holds

    @invariant()
    def are_alike(self) -> None:
        if hasattr(self, "fake"):
            assert state(self.fake) == state(self.lane.scheduler)

    def requests(self, prompt: int, outputs: int) -> tuple[Request, schedulers.Request]:
        """The same request for both."""
        self.count += 1
        name, tokens = f"r{self.count}", [token(self.count, place) for place in range(prompt)]
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        return Request(name, tokens, params, None), schedulers.Request(name, prompt, outputs)


def test_the_fake_plans_as_vllms_scheduler() -> None:
    """Whatever arrives, with its KV or without, is aborted, or loses its blocks to another."""
    run_state_machine_as_test(
        Alike, settings=settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
    )
