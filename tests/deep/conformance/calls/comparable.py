"""Answers of a server, in a form in which two servers can be compared: without ids and times."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

from flying_lab.sse import EventStream
from harness.streams import WORST_LOGPROB
from tests.deep.conformance.calls.bodies import Call

OF_THE_MOMENT = frozenset(
    {
        "call_id",
        "completed_at",
        "created",
        "created_at",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "cache_write_tokens",
        "cached_tokens",
        "id",
        "item_id",
        "request_id",
        "sequence_number",
        "signature",
        "system_fingerprint",
    }
)
"""Fields that differ between two answers of one server: ids, times, and tokens that were cached."""
OF_A_STREAM = OF_THE_MOMENT | {"reasoning_tokens"}
"""vLLM counts these in a stream by its events, and an event has as many tokens as have come."""
ID = re.compile(r"\b(call|chatcmpl|chatcmpl-tool|cmpl|msg|resp|rs|fc)[-_][0-9a-f]{8,}\b")
CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\] ")
"""The time of day, which is part of xgrammar's messages."""
JOINED = ("content", "reasoning", "text", "arguments", "name")
"""Fields of a stream's events whose parts belong together."""


def ask(http: httpx.Client, call: Call) -> dict[str, Any]:
    """Make a call. Returns its status and body, the events of a stream joined."""
    headers = {"Content-Type": "application/json"}
    answer = http.post(call.path, content=call.content, headers=headers)
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    body = _stream(answer.content) if is_stream else answer.json()
    return {"status": answer.status_code, "body": lasting(body)}


def lasting(value: Any, without: frozenset[str] = OF_THE_MOMENT) -> Any:
    """The value without ids and times, and its numbers with as many places as are compared."""
    if isinstance(value, dict):
        return {key: lasting(part, without) for key, part in value.items() if key not in without}
    if isinstance(value, list):
        return [lasting(part, without) for part in value]
    if isinstance(value, float):
        return round(value, 6)
    return CLOCK.sub("", ID.sub(r"\1", value)) if isinstance(value, str) else value


def differences(ours: Any, stock: Any, at: str = "") -> Iterator[str]:
    """Each place where two answers differ, and both values there."""
    if isinstance(ours, dict) and isinstance(stock, dict):
        for key in sorted(ours.keys() | stock.keys()):
            if key in ours and key in stock:
                yield from differences(ours[key], stock[key], f"{at}.{key}")
            else:
                side = "ours" if key in ours else "stock"
                yield f"{at}.{key}: only in {side}: {ours.get(key, stock.get(key))}"
    elif isinstance(ours, list) and isinstance(stock, list) and len(ours) == len(stock):
        for place, pair in enumerate(zip(ours, stock, strict=True)):
            yield from differences(*pair, f"{at}[{place}]")
    elif isinstance(ours, float) and isinstance(stock, float):
        if abs(ours - stock) > WORST_LOGPROB:
            yield f"{at}: {ours} and {stock}"
    elif ours != stock:
        yield f"{at}: {ours!r} and {stock!r}"


def _stream(data: bytes) -> dict[str, Any]:
    """The events of a stream. How many tokens an event has depends on time, so parts are joined."""
    stream = EventStream(_event)
    events = list(stream.feed(data))
    choices: dict[str, dict[str, Any]] = {}
    others: list[Any] = []
    for event in events:
        for choice in event.pop("choices", []):
            _join(choices.setdefault(str(choice["index"]), {}), choice)
        others.append(lasting(event, OF_A_STREAM))
    events = _without_repeats(others)
    return {"choices": lasting(choices), "events": events, "done": stream.done}


def _event(text: str | bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(text)
    return event


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a choice: texts and lists grow, tool calls do so by their index."""
    for key, value in part.items():
        if isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value or []:
                _join(whole.setdefault(f"tool {call['index']}", {}), call)
        elif isinstance(value, list):
            whole.setdefault(key, []).extend(value)
        elif isinstance(value, str) and key in JOINED:
            whole[key] = whole.get(key, "") + value
        elif value is not None:
            whole[key] = value


def _without_repeats(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with deltas of the same kind joined, and equal ones that follow each other once."""
    joined: list[dict[str, Any]] = []
    for event in events:
        last = joined[-1] if joined else {}
        if event == last:
            continue
        if _is_text(event) and _is_text(last) and event.get("type") == last.get("type"):
            last["delta"] = _added(last["delta"], event["delta"])
            last["logprobs"] = (last.get("logprobs") or []) + (event.get("logprobs") or [])
        else:
            joined.append(event)
    return joined


def _is_text(event: dict[str, Any]) -> bool:
    """Whether an event is a part of a text."""
    delta = event.get("delta")
    if isinstance(delta, dict):
        return "type" in delta and any(isinstance(delta.get(key), str) for key in _PARTS)
    return isinstance(delta, str)


_PARTS = ("text", "thinking", "partial_json")
"""Fields of deltas of /v1/messages."""


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return left | {key: left.get(key, "") + right[key] for key in _PARTS if key in right}
    return left + right
