"""Chat in lane 1 and in a group, and OpenAI's own client."""

import json

import httpx
import pytest

from flying_lab.sse import EventStream
from harness.live import KEY, Server
from harness.streams import streamed
from tests.deep.server.behaviour.comparisons import LANES, post, sampling

pytestmark = pytest.mark.server


# ---- chat, and OpenAI's own client

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How do birds fly?"},
]


@pytest.mark.parametrize("degree", LANES)
async def test_streamed_chat_with_usage(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    fields = sampling(80, 30, degree, messages=MESSAGES)
    whole = post(server, "/v1/chat/completions", **fields)
    body = {
        "model": server.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    text, usage, reasons = "", None, []
    async with streamed(http, body, EventStream(json.loads), "/v1/chat/completions") as events:
        async for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reasons.append(choice["finish_reason"])
    assert text == whole["choices"][0]["message"]["content"]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert usage is not None
    assert usage["completion_tokens"] == 30
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("degree", LANES)
def test_openai_client(server: Server, degree: int) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        extra = {"ignore_eos": True, "vllm_xargs": {"tp_degree": degree}}
        fields = {
            "model": server.model,
            "max_tokens": 20,
            "seed": 5,
            "temperature": 1.0,
            "extra_body": extra,
        }
        whole = client.chat.completions.create(messages=MESSAGES, **fields)
        events = client.chat.completions.create(messages=MESSAGES, stream=True, **fields)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        assert text == whole.choices[0].message.content
        plain = client.completions.create(prompt="Once upon a time", stream=True, **fields)
        assert (
            "".join(event.choices[0].text for event in plain)
            == client.completions.create(prompt="Once upon a time", **fields).choices[0].text
        )
        assert [model.id for model in client.models.list()] == [server.model]
        with pytest.raises(openai.BadRequestError, match="tp_degree=3"):
            client.completions.create(
                prompt="x", **fields | {"extra_body": {"vllm_xargs": {"tp_degree": 3}}}
            )
