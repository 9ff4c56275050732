"""Streams: a request as a group's leader gets it, each time that it is sent to one."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from flying_serving.controller.commands import Dispatch
from flying_serving.layout.groups import Group
from flying_serving.server.streams import Streams
from flying_serving.vllm_adapter.keys import HISTORY_KEY, LANE_KEY, MIGRATED_FROM_KEY
from tests.controller.shell import settings


def opened(extra: dict[str, Any] | None = None) -> tuple[Streams, EngineCoreRequest]:
    """A request of three tokens that has come."""
    streams = Streams(settings("manual").capacity, 400)
    params = SamplingParams(max_tokens=20, extra_args=extra)
    request = EngineCoreRequest("r", [1, 2, 3], None, params, None, 0.0, None, None, None)
    streams.open(request)
    return streams, request


def sent(streams: Streams, group: Group, migrated_from: Group | None = None) -> tuple[str, dict[str, Any] | None]:
    """The id that a request has in a group, and what engines are told beside vLLM's parameters."""
    request = streams.to_engine(Dispatch("r", group, 0, 400, migrated_from))
    assert request is not None
    return request.request_id, request.sampling_params.extra_args


def test_the_group_that_has_the_kv_is_named_with_the_id_there() -> None:
    """Each time anew: engines know a request by the id that it has with them."""
    streams, request = opened({"mine": 1})
    assert sent(streams, (0,)) == ("r", {"mine": 1})
    assert streams.take(EngineCoreOutput("r", [7]))
    streams.recall("r")
    assert sent(streams, (2, 3), (0,)) == (
        "r+1",
        {"mine": 1, LANE_KEY: 2, HISTORY_KEY: [7], MIGRATED_FROM_KEY: (0, 1, "r")},
    )
    streams.recall("r")
    assert sent(streams, (1,), (2, 3)) == ("r+2", {"mine": 1, HISTORY_KEY: [7], MIGRATED_FROM_KEY: (2, 2, "r+1")})
    streams.recall("r")
    assert sent(streams, (0, 1, 2, 3)) == ("r+3", {"mine": 1, LANE_KEY: 4, HISTORY_KEY: [7]})
    assert request.sampling_params.extra_args == {"mine": 1}


def test_a_request_migrates_before_its_first_token() -> None:
    """What was prefilled comes along; there is no history."""
    streams, request = opened()
    assert sent(streams, (0, 1)) == ("r", {LANE_KEY: 2})
    streams.recall("r")
    assert sent(streams, (3,), (0, 1)) == ("r+1", {MIGRATED_FROM_KEY: (0, 2, "r")})
    assert request.sampling_params.extra_args is None


def test_what_the_old_group_says_is_stale() -> None:
    """From the recall on, also while the request waits for another group."""
    streams, _ = opened()
    sent(streams, (0,))
    assert streams.recall("r") == "r"
    assert not streams.take(EngineCoreOutput("r", [7]))
    sent(streams, (1,), (0,))
    assert not streams.take(EngineCoreOutput("r", [7]))
    output = EngineCoreOutput("r+1", [8])
    assert streams.take(output)
    assert output.request_id == "r"


def test_a_request_that_is_over_goes_nowhere() -> None:
    """A request whose client has left is not sent on."""
    streams, _ = opened()
    sent(streams, (0,))
    streams.close("r")
    assert streams.to_engine(Dispatch("r", (1,), 0, 400, (0,))) is None


@pytest.mark.parametrize("key", [LANE_KEY, HISTORY_KEY, MIGRATED_FROM_KEY])
@pytest.mark.parametrize("value", [None, 2, [0, 1, "r"]])
def test_clients_may_not_say_what_the_server_tells_engines(key: str, value: Any) -> None:
    """Whatever they say; the error, HTTP 400, names the field."""
    streams, request = opened({key: value})
    with pytest.raises(VLLMValidationError, match=rf"^vllm_xargs\.{key} is not for clients") as raised:
        streams.spec(3, request.sampling_params, request.priority)
    assert raised.value.parameter == f"vllm_xargs.{key}"


def test_the_models_length_ends_a_request_for_good() -> None:
    """What goes beyond it is as long as it: that is no full group, and `min_tokens` is cut with it."""
    streams = Streams(settings("manual").capacity, 90)
    params = SamplingParams(max_tokens=100_000, min_tokens=50_000)
    request = EngineCoreRequest("r", list(range(60)), None, params, None, 0.0, None, None, None)
    streams.open(request)
    spec = streams.spec(60, params, 0)
    assert (spec.tokens, spec.max_output_tokens) == (61, 30)
    for limit, full in ((29, True), (30, False), (40, False)):
        sent = streams.to_engine(Dispatch("r", (0,), 0, limit))
        assert sent is not None
        assert sent.sampling_params.max_tokens == sent.sampling_params.min_tokens == min(limit, 30)
        output = EngineCoreOutput(sent.request_id, [7], finish_reason=FinishReason.LENGTH)
        assert streams.take(output)
        assert streams.is_full(output) == full
