"""Aging in vLLM's own scheduler under its priority policy: who is scheduled first, and who is
preempted.
"""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.engine.aging import Aging
from flying_serving.vllm_adapter.scheduler.priorities import FOREMOST
from flying_serving.vllm_adapter.scheduler.scheduler import lane_class
from harness.live import tiny
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer

pytestmark = pytest.mark.usefixtures("classes_imported_here")

AGING_S = 10.0
BLOCK = 16


class Lane:
    """A scheduler of production without a model: every request gets the same token again and
    again.
    """

    def __init__(
        self,
        policy: str,
        *,
        blocks: int = 100,
        max_num_seqs: int = 1,
        step_tokens: int | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        args = EngineArgs(
            str(tiny("llama")),
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            long_prefill_token_threshold=chunk_tokens,
            scheduling_policy=policy,
            enable_prefix_caching=False,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = lane_class(AsyncScheduler)(
            config, of_one_layer(blocks, BLOCK), StructuredOutputManager(config), BLOCK
        )
        self.aging = Aging(AGING_S)
        self.count = 0

    def arrive(
        self, request_id: str, priority: int, now_s: float, *, tokens: int = 4, outputs: int = 400
    ) -> Request:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        made = Request(
            request_id, [1] * tokens, params, None, arrival_time=now_s, priority=priority
        )
        self.aging.arrived(self.scheduler, request_id, now_s)
        self.scheduler.add_request(made)
        return made

    def step(self) -> set[str]:
        """Schedule and compute. Returns what was scheduled."""
        plan: SchedulerOutput = self.scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, [[7] for _ in ids])
        self.scheduler.update_from_output(plan, output)
        return set(ids)


def until_begun(lane: Lane, name: str, *, every_s: float) -> float:
    """One urgent request after another comes, each when one has ended. Returns when `name` is
    scheduled.
    """
    now_s = 0.0
    lane.arrive(name, 0, now_s)
    for number in range(60):
        lane.arrive(f"urgent {number}", -5, now_s, outputs=1)
        now_s += every_s
        if name in lane.step():
            return now_s
    raise AssertionError("it has never begun")


def test_urgent_requests_pass_an_old_request_until_it_has_aged() -> None:
    """One step and one slot each second, and an urgent request that wants it."""
    assert AGING_S <= until_begun(Lane("priority"), "old", every_s=1.0) <= AGING_S + 2


def test_another_policy_is_left_alone() -> None:
    """First come, first served does not starve anyone."""
    lane = Lane("fcfs")
    old = lane.arrive("old", 3, 0.0)
    lane.arrive("new", 0, 2 * AGING_S)
    assert old.priority == 3
    assert noted(lane) == []


def test_an_aged_request_is_not_preempted_for_a_later_one() -> None:
    """Two that run share blocks for one of them only: the one that goes is the later one, however
    urgent.
    """
    lane = Lane("priority", blocks=1 + 8, max_num_seqs=2)
    lane.arrive("old", 0, 0.0, tokens=60)
    lane.step()
    lane.arrive("urgent", -5, AGING_S, tokens=60)
    assert lane.step() == {"old", "urgent"}
    for _ in range(12):
        scheduled = lane.step()
    assert scheduled == {"old"}


def noted(lane: Lane) -> list[str]:
    """Return of whom it is known when they arrived."""
    return [request_id for arrivals in lane.aging._arrivals.values() for _, request_id in arrivals]


def test_ended_requests_do_not_age() -> None:
    """Nothing is left of requests that arrived long ago."""
    lane = Lane("priority")
    for number in range(5):
        lane.arrive(f"r{number}", 0, float(number), outputs=1)
        lane.step()
    lane.arrive("last", 0, 100.0)
    assert noted(lane) == ["last"]


@pytest.mark.parametrize("aborted", [True, False])
def test_ended_request_is_forgotten_before_it_would_age(aborted: bool) -> None:
    """Whatever happens within that time: one entry for each that is there, and at most as many of
    others.
    """
    lane = Lane("priority")
    lane.arrive("old", 9, 0.0)
    for number in range(300):
        name = f"r{number}"
        lane.arrive(name, 0, AGING_S * number / 300, outputs=1)
        assert len(noted(lane)) <= 2 * len(lane.scheduler.requests)
        if aborted:
            lane.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        else:
            lane.step()
    assert noted(lane)[0] == "old"


def test_waiting_request_ages_after_others_were_forgotten() -> None:
    """With the time at which it arrived."""
    lane = Lane("priority")
    for number in range(20):
        lane.arrive(f"r{number}", 0, 0.1 * number)
    lane.scheduler.finish_requests(
        [f"r{number}" for number in range(20) if number != 5], RequestStatus.FINISHED_ABORTED
    )
    for number in range(20, 23):
        lane.arrive(f"r{number}", 0, 5.0)
    assert noted(lane) == ["r5", "r20", "r21", "r22"]
    kept = lane.scheduler.requests["r5"]
    lane.arrive("before", -5, 0.5 + AGING_S - 0.01)
    assert kept.priority == 0
    lane.arrive("after", -5, 0.5 + AGING_S)
    assert kept.priority == FOREMOST


def test_more_of_a_prompt_is_no_arrival() -> None:
    """A request ages from when it arrived, once."""
    lane = Lane("priority")
    lane.arrive("a", 0, 0.0)
    lane.aging.arrived(lane.scheduler, "a", 1.0)
    assert noted(lane) == ["a"]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that were compared with others."""
    found: list[str] = []
    less = Request.__lt__

    def counted(one: Request, other: Request) -> bool:
        found.append(one.request_id)
        return less(one, other)

    monkeypatch.setattr(Request, "__lt__", counted)
    return found


def one_arrival(compared: list[str], waiting: int, aged: int) -> int:
    """Return what it takes where so many wait, the later the more urgent, and so many have just
    aged.
    """
    lane = Lane("priority")
    for number in range(waiting):
        lane.arrive(f"{number:05}", -number, 0.0 if number < aged else 1.0)
    compared.clear()
    lane.aging.arrived(lane.scheduler, "next", AGING_S)
    assert sum(request.priority == FOREMOST for request in lane.scheduler.requests.values()) == aged
    return len(compared)


def test_arrival_in_a_long_queue_costs_logarithmic_comparisons(compared: list[str]) -> None:
    """Two comparisons more where four times as many wait, for each that has aged."""
    assert one_arrival(compared, 800, 1) <= one_arrival(compared, 200, 1) + 2 <= 12
    assert one_arrival(compared, 800, 800) <= 4 * (one_arrival(compared, 200, 200) + 2 * 200)
