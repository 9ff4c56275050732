"""Beginnings: vLLM's own scheduler tells of requests with a deadline when they are in a step for
the first time.
"""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from flying_serving.vllm_adapter.keys import DEADLINE_KEY
from flying_serving.vllm_adapter.scheduler.beginnings import beginnings_in, is_beginning
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.one_token import OneTokenLane

pytestmark = pytest.mark.usefixtures("classes_imported_here")


def asked(name: str, outputs: int, *, deadline: bool) -> Request:
    """Return a request as an engine gets it."""
    extra = {DEADLINE_KEY: 1.0} if deadline else None
    return Request(
        name, [1] * 4, SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args=extra), None
    )


def test_a_request_is_told_of_in_its_first_step_and_not_before() -> None:
    """One runs at a time; of a request without a deadline nothing is told."""
    lane, told = OneTokenLane("fcfs"), list[str]()

    def emit(outputs: dict[int, EngineCoreOutputs] | None) -> None:
        if outputs is None:
            return
        assert list(outputs) == [0]
        assert all(is_beginning(output) for output in outputs[0].outputs)
        told.extend(output.request_id for output in outputs[0].outputs)

    lane.scheduler.hooks = Hooks(step_planned=lambda plan: emit(beginnings_in(plan)))
    for name, deadline in (("a", True), ("b", False), ("c", True)):
        lane.scheduler.add_request(asked(name, 3, deadline=deadline))
    seen = []
    for _ in range(9):
        lane.step()
        seen.append(list(told))
    assert seen == 6 * [["a"]] + 3 * [["a", "c"]]


@pytest.mark.parametrize(
    "output",
    [EngineCoreOutput("a", [7]), EngineCoreOutput("a", [], finish_reason=FinishReason.STOP)],
)
def test_tokens_and_ends_are_no_beginnings(output: EngineCoreOutput) -> None:
    assert not is_beginning(output)
