"""Requests that an engine ends with an error say why, and no other output does."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from flying_serving.vllm_adapter.scheduler.failures import failures, why_failed


def request(name: str, client: int) -> Any:
    return SimpleNamespace(request_id=name, client_index=client)


def test_each_client_hears_of_its_requests() -> None:
    found = failures([request("a", 0), request("b", 1), request("c", 0)], "why")
    assert {client: outputs.finished_requests for client, outputs in found.items()} == {
        0: {"a", "c"},
        1: {"b"},
    }
    ends = [end for outputs in found.values() for end in outputs.outputs]
    assert [(end.request_id, end.new_token_ids) for end in ends] == [
        ("a", []),
        ("c", []),
        ("b", []),
    ]


def test_the_reason_arrives_as_it_was_said() -> None:
    """Encoded as vLLM does."""
    (outputs,) = failures([request("a", 0)], "in words").values()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=EngineCoreOutputs)
    assert [why_failed(output) for output in sent.outputs] == ["in words"]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        (None, None),
        (FinishReason.STOP, "a stop string"),
        (FinishReason.STOP, 7),
        (FinishReason.LENGTH, None),
        (FinishReason.ABORT, None),
        (FinishReason.ERROR, None),
    ],
)
def test_an_output_of_vllm_says_no_error(reason: FinishReason | None, stop: int | str) -> None:
    output = EngineCoreOutput("a", [1], finish_reason=reason, stop_reason=stop)
    assert why_failed(output) is None
