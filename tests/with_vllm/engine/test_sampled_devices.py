"""answer_of: the first device answers for its engine; outputs of devices that differ are marked."""

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from flying_serving.engine.sampled import OutputOfDevicesApart, answer_of
from flying_serving.vllm_adapter.model_runner.device_lane import VoidStep


def output_of(*tokens: list[int]) -> ModelRunnerOutput:
    """The output of a step: the tokens of each request."""
    names = [f"r{number}" for number in range(len(tokens))]
    return ModelRunnerOutput(
        names, {name: number for number, name in enumerate(names)}, list(tokens)
    )


@pytest.mark.parametrize("answers", [[7, 8], [None, None], ["only one"]])
def test_answers_that_are_no_outputs_are_not_compared(answers: list[object]) -> None:
    assert answer_of(answers) == answers[0]


def test_equal_outputs_of_all_devices_are_the_first_ones() -> None:
    outputs = [output_of([5], []) for _ in range(4)]
    assert answer_of(outputs) is outputs[0]


def test_the_output_of_a_single_device_is_its_own() -> None:
    output = output_of([5])
    assert answer_of([output]) is output


@pytest.mark.parametrize("device", [1, 2, 3])
def test_the_first_device_with_other_tokens_is_named(device: int) -> None:
    outputs = [output_of([5], [6]) for _ in range(device)]
    outputs += [output_of([5], [7]) for _ in range(4 - device)]
    answer = answer_of(outputs)
    assert isinstance(answer, OutputOfDevicesApart)
    assert answer.apart == device
    assert vars(outputs[0]).items() <= vars(answer).items()


def test_a_device_that_has_sampled_a_token_less_is_apart() -> None:
    answer = answer_of([output_of([5], [6]), output_of([5], [])])
    assert isinstance(answer, OutputOfDevicesApart)


def test_empty_outputs_are_equal() -> None:
    assert answer_of([EMPTY_MODEL_RUNNER_OUTPUT] * 2) is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_device_that_has_lost_a_member_has_sampled_no_other_tokens() -> None:
    output = output_of([5])
    assert answer_of([output, VoidStep("engine 1 is lost")]) is output


def test_the_loss_that_the_first_device_reports_is_the_answer() -> None:
    lost = VoidStep("engine 1 is lost")
    assert answer_of([lost, output_of([5])]) is lost
