"""Structured output in lane 1, in a group, and across a switch."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from harness.live import Server
from harness.streams import stream, streamed_body
from tests.deep.server.behaviour.comparisons import (
    ALONE,
    LANES,
    TOGETHER,
    post,
    prompt,
    same,
    sampling,
)

pytestmark = pytest.mark.server


# ---- structured output

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": ["Berlin", "Paris", "Rome"]}},
    "regex": {"structured_outputs": {"regex": "[abc]{20}-[0-9]{20}"}},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
}


def valid(name: str, text: str) -> None:
    if name == "choice":
        assert text in FORMATS["choice"]["structured_outputs"]["choice"]
    elif name == "regex":
        assert re.fullmatch(FORMATS["regex"]["structured_outputs"]["regex"], text)
    else:
        found = json.loads(text)
        assert found.keys() == {"colour", "sure"}
        assert found["colour"] in ("red", "green", "blue")


async def test_structured_output_in_both_lanes_and_across_a_switch(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Grammars of several requests advance in step with their tokens, beside requests without
    one.
    """

    def body(name: str, degree: int | None) -> dict[str, Any]:
        fields = sampling(70, 150, degree, **FORMATS[name]) | {"ignore_eos": False}
        return streamed_body(server.model, prompt(71, 25), **fields)

    reference = {name: await stream(http, body(name, 1)) for name in FORMATS}
    for name, answer in reference.items():
        assert answer.finish_reason == "stop"
        valid(name, answer.text)
    free = streamed_body(server.model, prompt(72, 60), **sampling(72, 80))
    free_alone = await stream(http, free)
    for mode in ("weave", "hard"):
        server.layout(ALONE)
        jobs = [(name, degree) for name in FORMATS for degree in (None, *LANES)]
        tasks = [asyncio.create_task(stream(http, body(name, degree))) for name, degree in jobs]
        beside = asyncio.create_task(stream(http, free))
        await asyncio.sleep(0.15)
        await asyncio.to_thread(server.layout, TOGETHER, mode)
        after_switch = {
            name: asyncio.create_task(stream(http, body(name, None))) for name in FORMATS
        }
        for (name, _), task in zip(jobs, tasks, strict=True):
            same(await task, reference[name])
        for name, task in after_switch.items():
            same(await task, reference[name])
        same(await beside, free_alone)


def test_structured_output_in_a_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "Which colour?"}]
    texts = []
    for degree in LANES:
        fields = sampling(73, 150, degree, **FORMATS["response_format"]) | {"ignore_eos": False}
        answer = post(server, "/v1/chat/completions", messages=messages, **fields)
        texts.append(answer["choices"][0]["message"]["content"])
        valid("json", texts[-1])
    assert texts[0] == texts[1]
