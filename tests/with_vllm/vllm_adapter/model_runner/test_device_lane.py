"""A lane's steps: when an output is waited for, and what comes of a lost member."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import CollectiveTimeout, GroupBroken
from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane, OutputUse, VoidStep
from tests.with_vllm.worker.configurations import LLAMA, configuration


class Asynchronous:
    """A model runner whose output is waited for later, as vLLM's is with async scheduling."""

    def __init__(self) -> None:
        self.waited_for: list[str] = []

    def execute_model(self, plan: str) -> None:
        """Launch a step; its output comes from `sample_tokens`."""
        self._plan = plan

    def sample_tokens(self, grammar: Any) -> Any:
        """Return the output of the step, not yet waited for."""
        plan = self._plan

        def get_output() -> str:
            self.waited_for.append(plan)
            return f"output of {plan}"

        return SimpleNamespace(get_output=get_output)


class Failing:
    """A model runner whose steps fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def execute_model(self, plan: str) -> None:
        raise self._error


MakeLane = Callable[[Any], tuple[DeviceLane, list[tuple[int, bool]]]]


@pytest.fixture
def lane_of(tmp_path: Path) -> MakeLane:
    """Make a lane of two over a runner. With it comes what was confirmed of its group: outputs that
    had come, and whether a step goes on.
    """
    config = configuration(tmp_path, LLAMA)

    def make(runner: Any) -> tuple[DeviceLane, list[tuple[int, bool]]]:
        confirmed: list[tuple[int, bool]] = []

        def require_whole(size: int, *, goes_on: bool) -> None:
            confirmed.append((len(runner.waited_for), goes_on))

        communicators: Any = SimpleNamespace(
            activate=lambda size: nullcontext(), require_whole=require_whole
        )
        return DeviceLane(runner, config, (0, 1), communicators), confirmed

    return make


def test_returned_output_is_waited_for_at_once(lane_of: MakeLane) -> None:
    runner = Asynchronous()
    lane, confirmed = lane_of(runner)
    assert lane.execute("1", None, OutputUse.RETURNED) == "output of 1"
    assert runner.waited_for == ["1"]
    assert confirmed == [(1, False)]


def test_kept_outputs_are_waited_for_when_they_are_taken_in_order(lane_of: MakeLane) -> None:
    runner = Asynchronous()
    lane, _ = lane_of(runner)
    assert [lane.execute(plan, None, OutputUse.KEPT) for plan in "12"] == [None, None]
    assert runner.waited_for == []
    assert lane.take_output() == "output of 1"
    assert runner.waited_for == ["1"]
    assert lane.take_output() == "output of 2"


def test_output_of_a_step_that_was_not_launched_is_that_of_a_lost_member(
    lane_of: MakeLane,
) -> None:
    """The engine's first device may have launched it, and waits for none then."""
    lane, _ = lane_of(Asynchronous())
    why = "group of 2 engines: the step was not launched here"
    assert lane.take_output() == VoidStep(why)


def test_group_is_to_be_whole_when_an_output_is_there(lane_of: MakeLane) -> None:
    lane, confirmed = lane_of(Asynchronous())
    for plan in "12":
        lane.execute(plan, None, OutputUse.KEPT)
    assert confirmed == []
    lane.take_output()
    lane.take_output()
    assert confirmed == [(1, True), (2, False)]


@pytest.mark.parametrize("use", OutputUse)
def test_step_of_a_lost_member_is_an_output_for_the_engine(
    lane_of: MakeLane, use: OutputUse
) -> None:
    lane, _ = lane_of(Failing(GroupBroken("engine 1 exited")))
    assert lane.execute("1", None, use) == VoidStep("engine 1 exited")
    assert not lane.kept


def test_step_of_a_lost_member_ends_a_check(lane_of: MakeLane) -> None:
    lane, _ = lane_of(Failing(GroupBroken("engine 1 exited")))
    with pytest.raises(GroupBroken, match=r"^engine 1 exited$"):
        lane.step("1")


def test_step_in_which_a_living_member_takes_no_part_raises(lane_of: MakeLane) -> None:
    lane, _ = lane_of(Failing(CollectiveTimeout("engine 1 is late")))
    with pytest.raises(CollectiveTimeout):
        lane.execute("1", None, OutputUse.RETURNED)


def test_lane_divides_tokens_only_with_a_way_to(lane_of: MakeLane) -> None:
    lane, _ = lane_of(Asynchronous())
    assert lane.ways == (Parallelism.TENSOR,)
    with pytest.raises(AssertionError, match="it has one member"):
        lane.step("1", Parallelism.TOKEN)
    lane.divides_tokens = nullcontext
    assert lane.ways == (Parallelism.TENSOR, Parallelism.TOKEN)
    assert lane.step("1", Parallelism.TOKEN) == "output of 1"


@pytest.mark.parametrize(
    "function", [DeviceLane.execute, DeviceLane.take_output, DeviceLane.leave, DeviceLane.rejoin]
)
def test_functions_that_engines_call_are_sent_by_their_names(function: Any) -> None:
    """An engine of several devices pickles them."""
    assert pickle.loads(pickle.dumps(function)) is function
