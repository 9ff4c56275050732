"""LaneScheduler: it is laid over the class that vLLM would take, plans as that class does, and
tells what happens.
"""

import logging
from logging.handlers import QueueHandler
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from flying_serving.errors import ConfigError
from flying_serving.vllm_adapter.scheduler.scheduler import (
    LaneScheduler,
    lane_class,
    use_lane_class,
)
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.kv_lanes import KVLane, make

PROMPT = 10


class UsersScheduler(AsyncScheduler):
    """A scheduler that a user has written."""

    def get_num_unfinished_requests(self) -> int:
        return 77


def scheduler_config(**fields: Any) -> SchedulerConfig:
    """Return a configuration as vLLM's engine has it."""
    return SchedulerConfig(max_model_len=64, is_encoder_decoder=False, **fields)


def whole(scheduler: SchedulerConfig) -> Any:
    """Return the configuration of a server that serves no kind of requests."""
    return SimpleNamespace(scheduler_config=scheduler, speculative_config=None, lora_config=None)


# ---- which class


@pytest.mark.parametrize("stock", [Scheduler, AsyncScheduler, UsersScheduler])
def test_the_class_of_a_lane_is_laid_over_vllms_choice(stock: type[Any]) -> None:
    laid = lane_class(stock)
    assert issubclass(laid, LaneScheduler)
    assert issubclass(laid, stock)
    assert lane_class(stock) is laid
    assert lane_class(laid) is laid
    assert laid.__module__ == LaneScheduler.__module__


def test_a_synchronous_lane_is_not_asynchronous() -> None:
    """The asynchronous scheduler counts tokens that a synchronous engine never makes ahead."""
    assert not issubclass(lane_class(Scheduler), AsyncScheduler)


def test_a_class_that_is_no_scheduler_is_refused() -> None:
    message = r"^--scheduler-cls=dict: must be a subclass of Scheduler$"
    with pytest.raises(ConfigError, match=message):
        lane_class(dict)


@pytest.mark.parametrize(
    ("is_async", "of_user", "stock"),
    [
        (False, None, Scheduler),
        (True, None, AsyncScheduler),
        (True, UsersScheduler, UsersScheduler),
        (True, f"{__name__}.UsersScheduler", UsersScheduler),
    ],
)
def test_vllm_makes_a_lane_of_the_class_that_it_would_make(
    is_async: bool, of_user: type[Any] | str | None, stock: type[Any]
) -> None:
    config = scheduler_config(async_scheduling=is_async, scheduler_cls=of_user)
    assert config.get_scheduler_cls().__name__ == stock.__name__
    use_lane_class(whole(config))
    assert issubclass(config.get_scheduler_cls(), LaneScheduler)
    assert (
        config.get_scheduler_cls().__mro__[1 if stock is Scheduler else 2].__name__
        == stock.__name__
    )


def warnings_of(config: SchedulerConfig) -> list[str]:
    """Return what is logged when vLLM's engine makes a scheduler of a lane's class."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger, handler = logging.getLogger("vllm.config.scheduler"), QueueHandler(records)
    logger.addHandler(handler)
    try:
        use_lane_class(whole(config))
        config.get_scheduler_cls()
    finally:
        logger.removeHandler(handler)
    return [records.get().getMessage() for _ in range(records.qsize())]


def test_no_warning_names_a_class_that_the_user_has_not_chosen() -> None:
    assert warnings_of(scheduler_config(async_scheduling=True)) == []


def test_the_user_is_warned_of_a_class_of_his() -> None:
    """As by vLLM alone: once, by the name of that class."""

    class Another(AsyncScheduler):
        pass

    (logged,) = warnings_of(scheduler_config(scheduler_cls=Another))
    assert logged.startswith(f"Using custom scheduler class {Another}.")


# ---- what it does


def test_a_lane_plans_as_vllm_does(overlaps: bool) -> None:
    """With as many requests as may run at once, and one more; blocks run out on the way."""
    lanes = [KVLane(overlaps=overlaps, blocks=14, is_stock=is_stock) for is_stock in (True, False)]
    for lane in lanes:
        for family in range(1, 6):
            lane.scheduler.add_request(make(f"r{family}", family, PROMPT, 6))
    for _ in range(60):
        for lane in lanes:
            lane.step()
    stock, laid = ([plan.num_scheduled_tokens for plan in lane.plans] for lane in lanes)
    assert not isinstance(lanes[0].scheduler, LaneScheduler)
    assert sum(map(len, stock)) > 30
    assert laid == stock


def test_methods_of_a_users_class_are_called() -> None:
    lane = KVLane(overlaps=True, kind=UsersScheduler)
    assert lane.scheduler.get_num_unfinished_requests() == 77


def test_hooks_are_told_in_the_order_of_events() -> None:
    """The output is heard of before the scheduler takes it: its request still has all blocks
    then.
    """
    lane, told = KVLane(overlaps=False), list[tuple[str, Any]]()
    lane.scheduler.hooks = Hooks(
        step_planned=lambda plan: told.append(("planned", plan)),
        output_received=lambda plan: told.append(("received", lane.pool.blocks_of("a"))),
        blocks_freed=lambda request: told.append(
            ("freed", lane.pool.blocks_of(request.request_id))
        ),
    )
    lane.scheduler.add_request(make("a", 3, 3, 1))
    lane.step()
    assert told == [("planned", lane.plans[0]), ("received", [1]), ("freed", [1])]
    assert lane.pool.blocks_of("a") == []


@pytest.mark.parametrize("log_stats", [True, False])
def test_statistics_are_told_of_where_vllm_makes_any(log_stats: bool) -> None:
    lane, told = KVLane(overlaps=False, log_stats=log_stats), list[Any]()
    lane.scheduler.hooks = Hooks(stats_made=told.append)
    stats = lane.scheduler.make_stats()
    assert told == ([stats] if log_stats else [])


def test_cached_prefix_is_known_until_its_blocks_are_freed() -> None:
    lane = KVLane(overlaps=False)
    for name in ("a", "b"):
        lane.scheduler.add_request(make(name, 3, PROMPT, 2))
        lane.step()
        assert lane.scheduler.cached_tokens == {name: 0 if name == "a" else 8}
        while lane.scheduler.requests:
            lane.step()
        assert lane.scheduler.cached_tokens == {}
