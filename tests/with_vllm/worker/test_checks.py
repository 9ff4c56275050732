"""How many made-up requests a check has, by the memory that there is, and what follows from it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flying_serving.errors import ConfigError, GroupBroken
from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group
from flying_serving.parallelism import Parallelism
from flying_serving.worker.checks import LaneChecks, most_requests
from flying_serving.worker.selfcheck import record
from tests.with_vllm.worker.small_decoder import STEPS, Model
from tests.with_vllm.worker.token_division import MEMBERS, divided

HYBRID = KVGroups((KVGroup(96), KVGroup(1024, has_state=True), KVGroup(1024, has_state=True)))


def lane(groups: KVGroups) -> Any:
    limits = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048)
    config, kv = SimpleNamespace(scheduler_config=limits), SimpleNamespace(groups=groups)
    return SimpleNamespace(config=config, kv=kv)


@pytest.mark.parametrize(("groups", "blocks", "requests"), [(one_group(32), 5, 4), (HYBRID, 7, 2)])
def test_each_request_has_a_block_of_each_group(
    groups: KVGroups, blocks: int, requests: int
) -> None:
    assert most_requests(lane(groups), blocks) == requests


def test_memory_for_no_request_is_refused() -> None:
    says = "--kv-cache-memory-bytes: memory for 3 KV blocks, and this model needs at least 4"
    with pytest.raises(ConfigError, match=says):
        most_requests(lane(HYBRID), blocks=3)


# ---- token parallel steps that are refused


class Agreeing:
    """The communicators of an engine, of which no other refuses anything."""

    def same_device(self, _size: int) -> Any:
        return SimpleNamespace(rank_in_group=0, world_size=MEMBERS)

    def any_of(self, _size: int, value: bool) -> bool:
        return value


class Refusing(Agreeing):
    """Those of an engine of four, of which one in the other pair refuses all."""

    def any_of(self, size: int, value: bool) -> bool:
        return value or size == 4


class Divided:
    """A lane that has token parallel steps, which are lane 1's own."""

    def __init__(self, size: int, communicators: Any, step: Callable[[Any], None]) -> None:
        self.size, self.model = size, Model()
        self.communicators = communicators
        self.any_of = partial(communicators.any_of, size)
        self.divides_tokens: Any = nullcontext
        self.requests = 1
        self._step = step

    def step(self, plan: Any, parallelism: Parallelism) -> None:
        assert parallelism is Parallelism.TOKEN
        self._step(plan)

    def drop_requests(self) -> None:
        self.requests = 0


def checked(communicators: Any, step: Callable[[Any], None] | None = None) -> Divided:
    """Return the lane for two of four engines, whose token parallel steps were compared."""
    lane1 = Model()
    lane = Divided(2, communicators, step or divided(lane1, Model(), 0))
    widest = Divided(4, communicators, lambda _: None)
    lanes: Any = [SimpleNamespace(model=lane1), lane, widest]
    checks = LaneChecks(lanes, lambda _: None, 0.0)
    with torch.no_grad():
        expected = record(lane1, lane1.step, STEPS)
        checks._compare_token_parallel(lane, STEPS, expected, 0.01)  # type: ignore[arg-type]
    return lane


def test_steps_that_no_engine_refuses_stay() -> None:
    assert checked(Agreeing()).divides_tokens is nullcontext


def test_no_group_has_steps_that_another_group_of_the_widest_refuses() -> None:
    """They would measure other steps than these, in which all of the widest group vote."""

    assert checked(Refusing()).divides_tokens == "another engine refuses them"


def test_steps_that_fail_are_not_made_and_the_server_starts() -> None:
    def fails(_plan: Any) -> None:
        raise IndexError("index 20 is out of bounds")

    lane = checked(Agreeing(), fails)
    assert lane.divides_tokens == "they fail: IndexError: index 20 is out of bounds"
    assert not lane.requests


def test_a_lost_engine_ends_the_check() -> None:
    def lost(_plan: Any) -> None:
        raise GroupBroken("engine 1")

    with pytest.raises(GroupBroken):
        checked(Agreeing(), lost)
