"""Requests that wait in the queues of a live server's engines, whose every slot others have."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from harness.live import WAIT_S, Server, wait_until

SEQS = 2
FLAGS = (f"--max-num-seqs={SEQS}", "--max-waiting-requests=20")
DEADLINE_S = 0.3
ATTEMPTS = 5
HURRIED = 12
"""Requests with this deadline, half of them streamed, beside two that may wait for a minute."""
MODEL_LENGTH = 2048


class Busy:
    """Streams that take every slot of `groups` groups as long as this context is open."""

    def __init__(self, server: Server, groups: int) -> None:
        self._server = server
        self._count = SEQS * groups
        self._stack = ExitStack()
        self._lines: list[Iterator[str]] = []
        """Kept: a stream is closed when nothing reads it any more."""

    def __enter__(self) -> None:
        body = {
            "model": self._server.model,
            "prompt": [1] * 8,
            "max_tokens": MODEL_LENGTH - 8,
            "ignore_eos": True,
        }
        for _ in range(self._count):
            stream = self._server.http.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            )
            answer = self._stack.enter_context(stream)
            self._lines.append(answer.iter_lines())
            assert next(self._lines[-1]).startswith("data: "), answer.status_code

    def __exit__(self, *_: object) -> None:
        assert all(next(lines, None) is not None for lines in self._lines), "a stream has ended"
        self._stack.close()


def complete(
    server: Server, *, deadline_s: float | None = None, max_tokens: int = 4, **fields: Any
) -> httpx.Response:
    """The answer to a short completion."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": [1, 2, 3],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    if deadline_s is not None:
        body["vllm_xargs"] = {"queue_deadline_s": deadline_s}
    return server.http.post("/v1/completions", json=body | fields)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def is_expired(answer: httpx.Response, *, stream: bool) -> bool:
    """Whether an answer says that the request waited beyond its deadline, before it had any
    token.
    """
    if not stream:
        return answer.status_code == 504 and "longer than its queue_deadline_s" in answer.text
    errors = [event.get("error", {}) for event in events(answer)]
    says = [
        (error.get("code"), "longer than its queue_deadline_s" in error.get("message", ""))
        for error in errors
    ]
    return says == [(504, True)]


def queued(server: Server) -> int:
    """Requests that wait in engines."""
    lanes = [lane for engine in server.status()["engines"] for lane in engine["lanes"].values()]
    return sum(lane["waiting"] for lane in lanes)


def check_deadlines(server: Server, groups: int) -> None:
    """All that wait for longer than they may are refused, leave the engines, and the others are
    served.
    """
    with ThreadPoolExecutor(HURRIED + 2) as threads:
        with Busy(server, groups):
            patient = [threads.submit(complete, server, deadline_s=WAIT_S) for _ in range(2)]
            hurried = [
                (
                    stream,
                    threads.submit(
                        complete,
                        server,
                        deadline_s=DEADLINE_S,
                        stream=stream,
                        n=1 + number % 3 // 2,
                    ),
                )
                for number in range(HURRIED)
                for stream in [number % 2 == 0]
            ]
            for stream, one in hurried:
                answer = one.result(WAIT_S)
                assert is_expired(answer, stream=stream), (answer.status_code, answer.text)
            wait_until(lambda: queued(server) == len(patient), server.status)
            assert not any(one.done() for one in patient)
        assert [one.result(WAIT_S).status_code for one in patient] == [200, 200]
    server.until_idle()
    server.check()


def check_begun(server: Server) -> None:
    """A request that has begun may take longer than its deadline: its prompt, its output, both
    outputs of `n`.

    The deadline is half of the time that the same took before, on a machine of any speed.
    """
    deadline_s = ask_for_long(server, 0) / 2
    for attempt in range(1, ATTEMPTS + 1):
        if ask_for_long(server, attempt, deadline_s=deadline_s) > deadline_s:
            return
        deadline_s /= 2  # it was much faster this time
    pytest.fail(f"{ATTEMPTS} times it was over before its deadline")


def ask_for_long(server: Server, number: int, **deadline: float) -> float:
    """Return the seconds that a long request took, whose prompt no other request has."""
    prompt = [1 + (number + place) % 200 for place in range(MODEL_LENGTH - 400)]
    fields = {"prompt": prompt, "max_tokens": 300, "n": SEQS, "temperature": 1.0}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(complete, server, **deadline, **fields).result(WAIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == SEQS * 300
    server.until_idle()
    return float(answer.elapsed.total_seconds())


def starts(server: Server, count: int) -> Iterator[tuple[int, str]]:
    """Send so many streamed requests at once; yield status and body of each answer."""
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(complete, server, stream=True, max_tokens=40) for _ in range(count)]
        for one in asked:
            answer = one.result(2 * WAIT_S)
            yield answer.status_code, answer.text
