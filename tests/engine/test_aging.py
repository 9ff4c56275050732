"""Aging in vLLM's own scheduler under its priority policy: who is scheduled first, and who is preempted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from flying_serving.demo.tiny import make_model
from flying_serving.engine.aging import Aging
from tests.live import ROOT

AGING_S = 10.0
BLOCK = 16


class Lane:
    """One of vLLM's schedulers without a model: every request gets the same token again and again."""

    def __init__(self, policy: str, *, blocks: int = 100, slots: int = 1) -> None:
        model = make_model(ROOT / ".models" / "llama", "llama")
        args = EngineArgs(
            str(model), max_model_len=512, max_num_seqs=slots, scheduling_policy=policy, enable_prefix_caching=False
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = AsyncScheduler(config, kv, StructuredOutputManager(config), BLOCK)
        self.aging = Aging(AGING_S)
        self.count = 0

    def come(self, request_id: str, priority: int, now_s: float, *, tokens: int = 4, outputs: int = 400) -> Request:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        made = Request(request_id, [1] * tokens, params, None, arrival_time=now_s, priority=priority)
        self.aging.came(self.scheduler, request_id, now_s)
        self.scheduler.add_request(made)
        return made

    def step(self) -> set[str]:
        """Schedule and compute. Returns what was scheduled."""
        plan: SchedulerOutput = self.scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, [[7] for _ in ids])
        self.scheduler.update_from_output(plan, output)
        return set(ids)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield


def until_begun(lane: Lane, name: str, *, every_s: float) -> float:
    """One urgent request after another comes, each when one has ended. Returns when `name` is scheduled."""
    now_s = 0.0
    lane.come(name, 0, now_s)
    for number in range(60):
        lane.come(f"urgent {number}", -5, now_s, outputs=1)
        now_s += every_s
        if name in lane.step():
            return now_s
    raise AssertionError("it has never begun")


def test_urgent_requests_pass_one_until_it_has_aged() -> None:
    """One step and one slot each second, and an urgent request that wants it."""
    assert AGING_S <= until_begun(Lane("priority"), "old", every_s=1.0) <= AGING_S + 2


def test_another_policy_is_left_alone() -> None:
    """First come, first served does not starve anyone."""
    lane = Lane("fcfs")
    old = lane.come("old", 3, 0.0)
    lane.come("new", 0, 2 * AGING_S)
    assert old.priority == 3


def test_what_has_aged_is_not_preempted_for_what_came_later() -> None:
    """Two that run share blocks for one of them only: the one that goes is the later one, however urgent."""
    lane = Lane("priority", blocks=1 + 8, slots=2)
    lane.come("old", 0, 0.0, tokens=60)
    lane.step()
    lane.come("urgent", -5, AGING_S, tokens=60)
    assert lane.step() == {"old", "urgent"}
    for _ in range(12):
        scheduled = lane.step()
    assert scheduled == {"old"}


def test_what_is_over_is_passed_by() -> None:
    """Nothing is left of requests that came long ago."""
    lane = Lane("priority")
    for number in range(5):
        lane.come(f"r{number}", 0, float(number), outputs=1)
        lane.step()
    lane.come("last", 0, 100.0)
    assert len(lane.aging._came) == 1
