"""Streams: a request as a group's leader gets it, each time that it is sent to one."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from flying_serving.controller.commands import Dispatch, DispatchPrefix, PullAhead
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Group, KVSource
from flying_serving.server.requests.streams import Streams
from flying_serving.vllm_adapter.keys import (
    AHEAD_KEY,
    FULL_AT_KEY,
    HISTORY_KEY,
    LANE_KEY,
    MIGRATED_FROM_KEY,
    OFFER_KEY,
)
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs


def opened(extra: dict[str, Any] | None = None) -> tuple[Streams, EngineCoreRequest]:
    """A request of three tokens that has come."""
    streams = Streams(settings("manual").capacity, 400)
    params = SamplingParams(max_tokens=20, extra_args=extra)
    request = EngineCoreRequest("r", [1, 2, 3], None, params, None, 0.0, None, None, None)
    streams.open(request)
    return streams, request


def sent(
    streams: Streams, group: Group, migrated_from: KVSource | None = None
) -> tuple[str, dict[str, Any] | None]:
    """The id that a request has in a group, and what engines are told beside vLLM's parameters."""
    request = streams.dispatch(Dispatch("r", group, 0, 400, migrated_from))
    assert request is not None
    return request.request_id, request.sampling_params.extra_args


def test_the_group_that_offers_the_kv_is_named_with_the_number() -> None:
    """Each time anew; and engines know a request by another id each time."""
    streams, request = opened({"mine": 1})
    assert sent(streams, (0,)) == ("r", {"mine": 1})
    assert streams.note_tokens(EngineCoreOutput("r", [7]))
    streams.detach("r")
    assert sent(streams, (2, 3), KVSource((0,), 5)) == (
        "r+1",
        {"mine": 1, LANE_KEY: 2, HISTORY_KEY: [7], MIGRATED_FROM_KEY: (0, 1, 5)},
    )
    streams.detach("r")
    assert sent(streams, (1,), KVSource((2, 3), 7)) == (
        "r+2",
        {"mine": 1, HISTORY_KEY: [7], MIGRATED_FROM_KEY: (2, 2, 7)},
    )
    streams.detach("r")
    assert sent(streams, (0, 1, 2, 3)) == ("r+3", {"mine": 1, LANE_KEY: 4, HISTORY_KEY: [7]})
    assert request.sampling_params.extra_args == {"mine": 1}


def test_a_group_is_filled_by_a_whole_step() -> None:
    """A request may have as many tokens more than its limit. It goes on elsewhere if it
    has not got all of its tokens.
    """
    streams, request = opened()
    streams._capacity = replace(streams._capacity, step_tokens=5)
    for limit, at_most, full_at in ((10, 14, 10), (18, 20, 18), (20, 20, None)):
        message = streams.dispatch(Dispatch("r", (0,), 0, limit, None))
        assert message is not None
        assert message.sampling_params.max_tokens == at_most
        assert (message.sampling_params.extra_args or {}).get(FULL_AT_KEY) == full_at
    assert request.sampling_params.max_tokens == 20

    message = streams.dispatch(Dispatch("r", (0,), 0, 18, None))
    assert message is not None
    for tokens, is_full in ((19, True), (1, False)):
        output = EngineCoreOutput(message.request_id, [7] * tokens)
        output.finish_reason = FinishReason.LENGTH
        assert streams.note_tokens(output)
        assert streams.is_full(output) is is_full


def test_a_request_migrates_before_its_first_token() -> None:
    """What was prefilled comes along; there is no history."""
    streams, request = opened()
    assert sent(streams, (0, 1)) == ("r", {LANE_KEY: 2})
    streams.detach("r")
    assert sent(streams, (3,), KVSource((0, 1), 1)) == ("r+1", {MIGRATED_FROM_KEY: (0, 2, 1)})
    assert request.sampling_params.extra_args is None


def test_output_of_the_old_group_is_stale() -> None:
    """From the recall on, also while the request waits for another group."""
    streams, _ = opened()
    sent(streams, (0,))
    assert streams.detach("r") == "r"
    assert not streams.note_tokens(EngineCoreOutput("r", [7]))
    sent(streams, (1,), KVSource((0,), 1))
    assert not streams.note_tokens(EngineCoreOutput("r", [7]))
    output = EngineCoreOutput("r+1", [8])
    assert streams.note_tokens(output)
    assert output.request_id == "r"


def test_a_request_that_is_over_goes_nowhere() -> None:
    """A request whose client has left is not sent on."""
    streams, _ = opened()
    sent(streams, (0,))
    streams.close("r")
    assert streams.dispatch(Dispatch("r", (1,), 0, 400, KVSource((0,), 1))) is None


def test_a_group_is_told_under_which_number_it_offers_kv_at_the_end() -> None:
    streams, _ = opened()
    request = streams.dispatch(Dispatch("r", (0,), 0, 10, offer=4))
    assert request is not None
    assert request.sampling_params.extra_args == {OFFER_KEY: (4, False)}


def test_a_prefix_is_a_request_of_its_own() -> None:
    """One greedy token behind the first tokens of the prompt: nothing of what the client asked for
    the output.
    """
    streams, request = opened({"mine": 1})
    request.sampling_params.stop_token_ids = [7]
    prefix = streams.dispatch_prefix(DispatchPrefix("r", (2, 3), 2, 5))
    assert prefix is not None
    params = prefix.sampling_params
    assert prefix.request_id == "r~5"
    assert prefix.prompt_token_ids == [1, 2]
    assert prefix.lora_request is None
    assert params.max_tokens == 1
    assert params.temperature == 0.0
    assert params.stop_token_ids == []
    assert params.extra_args == {LANE_KEY: 2, OFFER_KEY: (5, True)}
    assert sent(streams, (0,), KVSource((2, 3), 5)) == (
        "r",
        {"mine": 1, MIGRATED_FROM_KEY: (2, 2, 5)},
    )
    assert not streams.note_tokens(EngineCoreOutput("r~5", [9]))
    assert streams.end_prefix(EngineCoreOutput("r~5", [9])) is None
    over = EngineCoreOutput("r~5", [9], finish_reason=FinishReason.LENGTH)
    assert not streams.note_tokens(over)
    assert [streams.end_prefix(over), streams.end_prefix(over)] == ["r", None]


def test_prefetched_request_goes_on_under_the_same_id() -> None:
    """With the tokens that the first group has given, and as a group's limit is no end of the
    request.
    """
    streams, _ = opened({"mine": 1})
    first = streams.dispatch(Dispatch("r", (0,), 0, 2, offer=5, publishes=True))
    assert first is not None
    assert first.sampling_params.max_tokens == 2
    assert first.sampling_params.extra_args == {"mine": 1, OFFER_KEY: (5, True)}
    kv = KVSource((0,), 5)
    ahead = streams.pull_ahead(PullAhead("r", (1,), kv, 4))
    assert ahead is not None
    source = {"mine": 1, MIGRATED_FROM_KEY: (0, 1, 5)}
    assert ahead.request_id == "r~5"
    assert ahead.sampling_params.extra_args == source | {AHEAD_KEY: 4}
    output = EngineCoreOutput("r", [7, 8], finish_reason=FinishReason.LENGTH)
    assert streams.note_tokens(output)
    assert streams.is_full(output)
    streams.detach("r")
    assert sent(streams, (1,), kv) == ("r~5", source | {HISTORY_KEY: [7, 8]})
    assert not streams.note_tokens(EngineCoreOutput("r", [9]))
    last = EngineCoreOutput("r~5", [9], finish_reason=FinishReason.LENGTH)
    assert streams.note_tokens(last)
    assert last.request_id == "r"
    assert streams.is_full(last) is False


def test_dropped_part_cannot_go_on() -> None:
    """The KV that its first group offers is pulled under another id, and the end of a prefix is
    stale.
    """
    streams, _ = opened()
    sent(streams, (0,))
    kv = KVSource((0,), 5)
    streams.pull_ahead(PullAhead("r", (1,), kv, 4))
    assert streams.drop_part("r", 5) == "r~5"
    assert sent(streams, (1,), kv) == ("r+1", {MIGRATED_FROM_KEY: (0, 1, 5)})
    streams.dispatch_prefix(DispatchPrefix("r", (2,), 2, 6))
    assert streams.drop_part("r", 6) == "r~6"
    assert (
        streams.end_prefix(EngineCoreOutput("r~6", [9], finish_reason=FinishReason.LENGTH)) is None
    )


def test_no_part_is_made_of_a_request_that_is_over() -> None:
    streams, _ = opened()
    streams.close("r")
    assert streams.dispatch_prefix(DispatchPrefix("r", (1,), 2, 5)) is None
    assert streams.pull_ahead(PullAhead("r", (1,), KVSource((0,), 5), 4)) is None


@pytest.mark.parametrize(
    ("fields", "needed", "longest"),
    [
        ({"max_tokens": 250}, 61, 310),
        ({"max_tokens": 250, "min_tokens": 20}, 80, 310),
        ({"max_tokens": 250, "ignore_eos": True}, 310, 310),
        ({"max_tokens": None}, 61, 61),
        ({"max_tokens": None, "min_tokens": 20}, 80, 80),
        ({"max_tokens": 340, "ignore_eos": True}, 61, 61),
        ({"max_tokens": None, "ignore_eos": True}, 61, 61),
    ],
)
def test_request_needs_only_its_certain_tokens(
    fields: dict[str, Any], needed: int, longest: int
) -> None:
    """Of a prompt of 60 tokens, where the model's length is 400; all that it may take decides
    whether it is refused.
    """
    spec = Streams(settings("manual").capacity, 400).spec_of(60, SamplingParams(**fields), 0)
    assert spec.least_tokens == needed
    assert spec.longest_tokens == longest


@pytest.mark.parametrize("max_tokens", [None, 20, 150, 330, 339, 340])
def test_no_group_is_formed_for_a_large_max_tokens(max_tokens: int | None) -> None:
    """Where outputs usually have 20 tokens, and groups are worse for everything but a need."""
    shell = ModelShell(settings("auto", max_num_seqs=64), costs((1, 2, 4), 1.5, 1.2))
    for number in range(40):
        shell.arrive(f"r{number}", RequestSpec(10, 30, 20))
        shell.tick()
        shell.token(f"r{number}", 20)
    spec = Streams(shell.controller.settings.capacity, 400).spec_of(
        60, SamplingParams(max_tokens=max_tokens), 0
    )
    shell.arrive("agent", spec)
    shell.tick()
    assert shell.switches == []
    assert len(shell.open["agent"].group or ()) == 1


def test_the_models_length_ends_a_request_for_good() -> None:
    """What goes beyond it is as long as it: that is no full group, and `min_tokens` is cut with
    it.
    """
    streams = Streams(settings("manual").capacity, 90)
    params = SamplingParams(max_tokens=100_000, min_tokens=50_000)
    request = EngineCoreRequest("r", list(range(60)), None, params, None, 0.0, None, None, None)
    streams.open(request)
    spec = streams.spec_of(60, params, 0)
    assert spec.least_tokens == 61
    assert spec.max_output_tokens == 30
    for limit, full in ((29, True), (30, False), (40, False)):
        sent = streams.dispatch(Dispatch("r", (0,), 0, limit))
        assert sent is not None
        assert sent.sampling_params.max_tokens == sent.sampling_params.min_tokens == min(limit, 30)
        output = EngineCoreOutput(sent.request_id, [7], finish_reason=FinishReason.LENGTH)
        assert streams.note_tokens(output)
        assert streams.is_full(output) == full
