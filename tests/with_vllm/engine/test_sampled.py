"""SampledTokens: a member that has sampled other tokens than its leader is named, with the step."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from flying_serving.comm.board import STEPS, StepBoard
from flying_serving.engine.sampled import SampledTokens, answer_of, why_logprobs_differ

GROUP = (4, 5, 6, 7)
SIZE = len(GROUP)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[StepBoard]:
    made = StepBoard(f"{tmp_path}/board", 8)
    yield made
    made.close()


@pytest.fixture
def members(board: StepBoard) -> dict[int, SampledTokens]:
    return {engine: SampledTokens(engine, board) for engine in GROUP}


def sampled(*rows: Sequence[int]) -> Any:
    """What a step's output has of tokens: one row for each request."""
    return SimpleNamespace(sampled_token_ids=[list(row) for row in rows])


def step(members: dict[int, SampledTokens], other: int | None = None, token: int = 7) -> None:
    """All make a step, which ends with one token for each of two requests; `other` draws another
    one.
    """
    for engine, samples in members.items():
        samples.note(SIZE, sampled([token], [token + 1 if engine == other else token]))


def test_no_member_is_apart_before_the_first_step(members: dict[int, SampledTokens]) -> None:
    assert members[4].why_apart(GROUP) is None


def test_members_with_equal_tokens_are_not_apart(members: dict[int, SampledTokens]) -> None:
    for token in range(20):
        step(members, token=token)
        assert members[4].why_apart(GROUP) is None


@pytest.mark.parametrize("other", GROUP[1:])
def test_a_member_with_another_token_is_named_with_the_step(
    members: dict[int, SampledTokens], other: int
) -> None:
    step(members)
    step(members)
    step(members, other)
    assert members[4].why_apart(GROUP) == (
        f"engine {other} has sampled other tokens than engine 4, which leads group [4, 5, 6, 7], "
        "by step 3 of the group"
    )


def test_a_member_stays_apart_after_equal_tokens(members: dict[int, SampledTokens]) -> None:
    """Logits are gathered, so greedy tokens are equal however wrong the KV of one member is."""
    step(members, 6)
    step(members)
    why = members[4].why_apart(GROUP)
    assert why is not None
    assert why.startswith("engine 6 ")


@pytest.mark.parametrize("ahead", [4, 6])
def test_a_member_that_is_ahead_is_compared_by_the_same_step(
    members: dict[int, SampledTokens], ahead: int
) -> None:
    step(members)
    members[ahead].note(SIZE, sampled([9]))
    assert members[4].why_apart(GROUP) is None


def test_a_member_that_is_two_steps_ahead_does_not_hide_that_it_is_apart(
    members: dict[int, SampledTokens],
) -> None:
    """It may have noted a step that its leader has launched, and not looked at yet."""
    step(members, 6)
    members[6].note(SIZE, sampled([9]))
    why = members[4].why_apart(GROUP)
    assert why is not None
    assert why.endswith("by step 1 of the group")


@pytest.mark.parametrize("behind", GROUP[1:])
def test_a_member_that_has_not_noted_the_step_before_is_awaited(
    members: dict[int, SampledTokens], behind: int
) -> None:
    assert members[4].awaited(GROUP) is None
    for _ in range(4):
        for _ in range(2):
            assert members[4].awaited(GROUP) is None
            for engine, samples in members.items():
                if engine != behind:
                    samples.note(SIZE, sampled([7]))
        assert members[4].awaited(GROUP) == behind
        members[behind].note(SIZE, sampled([7]))
        assert members[4].awaited(GROUP) is None
        members[behind].note(SIZE, sampled([7]))


def test_a_member_is_awaited_where_steps_are_counted_round(
    members: dict[int, SampledTokens], board: StepBoard
) -> None:
    for samples in members.values():
        samples._of(SIZE).append((STEPS - 2, 5))
    for _ in range(4):
        step(members)
        assert members[4].awaited(GROUP) is None
    for _ in range(2):
        for engine in (4, 5, 7):
            members[engine].note(SIZE, sampled([1]))
    assert members[4].awaited(GROUP) == 6


def test_a_token_of_another_request_is_another_token(members: dict[int, SampledTokens]) -> None:
    for engine, samples in members.items():
        samples.note(SIZE, sampled([1], [2]) if engine != 7 else sampled([2], [1]))
    assert members[4].why_apart(GROUP) is not None


def test_a_draft_that_another_request_has_accepted_is_another_token(
    members: dict[int, SampledTokens],
) -> None:
    for engine, samples in members.items():
        samples.note(SIZE, sampled([1, 2], [3]) if engine != 7 else sampled([1], [2, 3]))
    assert members[4].why_apart(GROUP) is not None


def test_members_that_begin_anew_are_compared_from_then_on(
    members: dict[int, SampledTokens],
) -> None:
    step(members, 5)
    for samples in members.values():
        samples.begin_anew(SIZE)
    step(members)
    assert members[4].why_apart(GROUP) is None
    step(members, 5)
    why = members[4].why_apart(GROUP)
    assert why is not None
    assert why.endswith("by step 3 of the group")


def test_a_group_that_was_forgotten_begins_with_its_first_step(
    members: dict[int, SampledTokens], board: StepBoard
) -> None:
    """A member that was started again has made none."""
    step(members, 6)
    members[6] = SampledTokens(6, board)
    for samples in members.values():
        samples.forget(SIZE)
    step(members)
    assert members[4].why_apart(GROUP) is None
    assert board.sampled(6, SIZE)[1][0] == 1


def test_groups_of_other_sizes_are_compared_apart(members: dict[int, SampledTokens]) -> None:
    step(members)
    for engine in (4, 5):
        members[engine].note(2, sampled([engine]))
    assert members[4].why_apart(GROUP) is None
    assert members[4].why_apart((4, 5)) is not None


def test_steps_are_counted_round(members: dict[int, SampledTokens], board: StepBoard) -> None:
    for samples in members.values():
        samples._of(SIZE).append((STEPS - 1, 5))
    step(members, 7)
    assert board.sampled(4, SIZE)[0][0] == 0
    assert members[4].why_apart(GROUP) is not None


# ---- devices of one engine


def step_with_devices_apart(members: dict[int, SampledTokens], other: int) -> None:
    """All make a step with the same tokens, but the second device of `other` draws another one."""
    for engine, samples in members.items():
        devices = [ModelRunnerOutput([], {}, [[7]]), ModelRunnerOutput([], {}, [[7]])]
        if engine == other:
            devices[1].sampled_token_ids = [[8]]
        samples.note(SIZE, answer_of(devices))


def test_a_leader_whose_devices_are_apart_knows_it_in_the_same_step(
    members: dict[int, SampledTokens],
) -> None:
    step(members)
    step_with_devices_apart(members, 4)
    assert members[4].why_apart(GROUP) == (
        "device 1 of engine 4 has sampled other tokens than its device 0, in group [4, 5, 6, 7], "
        "by step 2 of the group"
    )


@pytest.mark.parametrize("other", GROUP[1:])
def test_a_member_whose_devices_are_apart_is_apart_and_stays_so(
    members: dict[int, SampledTokens], other: int
) -> None:
    step_with_devices_apart(members, other)
    for _ in range(3):
        why = members[4].why_apart(GROUP)
        assert why is not None
        assert why.startswith(f"engine {other} ")
        step_with_devices_apart(members, other)


def test_devices_that_are_apart_in_the_same_way_on_all_members_are_noticed(
    members: dict[int, SampledTokens],
) -> None:
    devices = [ModelRunnerOutput([], {}, [[7]]), ModelRunnerOutput([], {}, [[8]])]
    for samples in members.values():
        samples.note(SIZE, answer_of(devices))
    assert members[4].why_apart(GROUP) is not None


@pytest.mark.parametrize("engine", GROUP)
@pytest.mark.parametrize("begin", [SampledTokens.begin_anew, SampledTokens.forget])
def test_a_group_that_begins_again_forgets_that_devices_were_apart(
    members: dict[int, SampledTokens], engine: int, begin: Callable[[SampledTokens, int], None]
) -> None:
    step_with_devices_apart(members, engine)
    for samples in members.values():
        begin(samples, SIZE)
    step(members)
    assert members[4].why_apart(GROUP) is None
    step_with_devices_apart(members, engine)
    assert members[4].why_apart(GROUP) is not None


# ---- tokens and their logprobs


def output_of(tokens: list[list[int]], of_logprobs: list[list[int]], **more: Any) -> Any:
    """What vLLM's runner returns: a row for each request, with the sampled token first."""
    ids = np.array(of_logprobs, dtype=np.int32)
    logprobs = LogprobsLists(ids, np.zeros(ids.shape), np.zeros(len(ids)), **more)
    names = [f"r{n}" for n in range(len(tokens))]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=logprobs,
    )


@pytest.mark.parametrize(
    ("tokens", "of_logprobs"),
    [([[5], [6]], [[5], [6]]), ([[5], []], [[5, 9], [6, 9]]), ([[5]], [[5, 7, 6]])],
    ids=["sampled only", "a prompt goes on", "most likely ones too"],
)
def test_tokens_with_their_own_logprobs_are_no_error(
    tokens: list[list[int]], of_logprobs: list[list[int]]
) -> None:
    assert why_logprobs_differ(output_of(tokens, of_logprobs)) is None


def test_a_token_with_other_logprobs_names_the_request_and_both_tokens() -> None:
    assert why_logprobs_differ(output_of([[5], [6]], [[5, 6], [7, 6]])) == (
        "request r1 has sampled token 6, and its logprobs are of token 7"
    )


def test_logprobs_of_the_whole_vocabulary_are_not_compared() -> None:
    """They have no column of tokens."""
    output = output_of([[5]], [[5]])
    whole = output.logprobs._replace(logprob_token_ids=np.zeros(0))
    output.logprobs = whole
    assert why_logprobs_differ(output) is None


def test_output_without_logprobs_is_not_compared() -> None:
    output = output_of([[5]], [[5]])
    output.logprobs = None
    assert why_logprobs_differ(output) is None
