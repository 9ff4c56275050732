"""No request may hurt another: what one client sends or leaves undone costs the others nothing.

Two engines of policy `auto`, each with four slots, and vLLM's limit of 24 requests that it knows of
at a time.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from harness.live import WAIT_S, Server, wait_until

pytestmark = pytest.mark.server

MODEL_LENGTH = 4000
PROMPT = 3900
MAX_NUM_SEQS = 4
QUEUED = 24
MOST_URGENT = -5
SETTINGS = (
    "--policy=auto",
    f"--max-model-len={MODEL_LENGTH}",
    f"--max-num-seqs={MAX_NUM_SEQS}",
    f"--max-num-queued-reqs={QUEUED}",
    "--enable-scale-out",
    f"--most-urgent-priority={MOST_URGENT}",
    "--priority-aging-s=1",
)
SURROGATE = "\ud800"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, *SETTINGS) as live:
        yield live


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a body as JSON in ASCII: a lone surrogate is an escape there."""
    content = json.dumps({"model": server.model, **body})
    return server.http.post(path, content=content, headers={"Content-Type": "application/json"})


def completion(server: Server, **fields: Any) -> httpx.Response:
    return post(server, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, **fields})


UNSENDABLE: dict[str, tuple[dict[str, Any], str]] = {
    "stop": ({"prompt": "x", "stop": [SURROGATE]}, "stop"),
    "vllm_xargs": ({"prompt": "x", "vllm_xargs": {"a": SURROGATE}}, "vllm_xargs.a"),
    "key": ({"prompt": "x", "vllm_xargs": {SURROGATE: 1}}, "vllm_xargs.\\ud800"),
    "kv_transfer_params": (
        {"prompt": "x", "kv_transfer_params": {"a": [SURROGATE]}},
        "kv_transfer_params",
    ),
    "request_id": ({"prompt": "x", "request_id": SURROGATE}, "request_id"),
    "chat": ({"messages": [{"role": "user", "content": "x"}], "stop": SURROGATE}, "stop"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_unsendable_field_is_refused_by_name(server: Server, name: str, stream: bool) -> None:
    """More often than there are slots: afterwards nothing is booked, and others are served."""
    body, parameter = UNSENDABLE[name]
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    for _ in range(2 * MAX_NUM_SEQS + 1):
        answer = post(server, path, {**body, "max_tokens": 2, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == parameter
        assert error["message"].startswith(f"{parameter}=")
    assert completion(server).status_code == 200
    server.until_idle()


@pytest.mark.parametrize(
    ("path", "status"), [("/nothing", 404), ("/v1/models", 405), ("/flying/status", 405)]
)
def test_a_body_that_no_route_wants_is_not_waited_for(
    server: Server, path: str, status: int
) -> None:
    """The server answers when it has the head of the request; of a body of eight megabytes it has
    not seen a byte.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: "
        f"application/json\r\nContent-Length: {2**23}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port.number), timeout=WAIT_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1024).split()[1] == str(status).encode()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("min_tokens", [0, 10_000])
def test_max_tokens_beyond_the_models_length_end_there(
    server: Server, degree: int, min_tokens: int
) -> None:
    """As in vLLM: this route takes them, and the request ends with `length` when the model's length
    is reached.
    """
    params = {"max_tokens": 100_000, "min_tokens": min_tokens, "extra_args": {"tp_degree": degree}}
    body = {"token_ids": [5] * PROMPT, "sampling_params": {**params, "ignore_eos": True}}
    for _ in range(2):
        answer = post(server, "/inference/v1/generate", body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == MODEL_LENGTH - PROMPT
    del params["extra_args"]
    answer = post(
        server,
        "/inference/v1/generate",
        {**body, "sampling_params": {**params, "ignore_eos": True}},
    )
    assert len(answer.json()["choices"][0]["token_ids"]) == MODEL_LENGTH - PROMPT
    server.until_idle()


class Busy:
    """Streams that take every slot of both engines as long as this context is open."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = ExitStack()
        self._streams: list[Iterator[str]] = []

    def __enter__(self) -> None:
        body = {
            "model": self._server.model,
            "prompt": [1] * 20,
            "max_tokens": 3900,
            "ignore_eos": True,
        }
        body |= {"stream": True, "vllm_xargs": {"tp_degree": 1}}
        for _ in range(2 * MAX_NUM_SEQS):
            stream = self._server.http.stream("POST", "/v1/completions", json=body)
            answer = self._stack.enter_context(stream)
            self._streams.append(answer.iter_lines())
            assert next(self._streams[-1]).startswith("data: "), answer.status_code

    def __exit__(self, *_: object) -> None:
        assert all(next(stream, None) is not None for stream in self._streams), "a stream has ended"
        self._stack.close()


@pytest.mark.parametrize("count", [1, 2], ids=["one", "n=2"])
def test_passed_deadlines_leave_no_requests(server: Server, count: int) -> None:
    """More requests get a 504 than vLLM may know of at a time: it has forgotten those that are
    over.
    """
    with Busy(server), ThreadPoolExecutor(8) as pool:
        fields = {
            "vllm_xargs": {"tp_degree": 1, "queue_deadline_s": 0.05},
            "n": count,
            "temperature": 1.0,
        }
        sent = [pool.submit(completion, server, **fields) for _ in range(QUEUED + 8)]
        codes = [one.result(WAIT_S).status_code for one in sent]
        assert set(codes) <= {504, 503}
        assert codes[-8:] == [504] * 8
    assert completion(server).status_code == 200
    server.until_idle()


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: Server) -> None:
    """Its request leaves the pool at once, not when a group has served it to nobody."""
    with Busy(server):
        for stream in (False, True):
            fields = {"vllm_xargs": {"tp_degree": 1, "queue_deadline_s": 1000}, "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{server.url}/v1/completions",
                    json={"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, **fields},
                    timeout=httpx.Timeout(WAIT_S, read=0.5),
                )
            wait_until(lambda: not server.requests("waiting"))
        assert server.requests("running") == 2 * MAX_NUM_SEQS
    server.until_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_priority_beyond_the_limit_is_refused(server: Server, stream: bool) -> None:
    """The answer names the field, its value and the flag."""
    answer = completion(server, priority=MOST_URGENT - 1, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
    assert answer.json()["error"]["message"].startswith(
        f"priority={MOST_URGENT - 1}: must be {MOST_URGENT} or more on this server "
        "(--most-urgent-priority)"
    )
    assert completion(server, priority=MOST_URGENT, stream=stream).status_code == 200


def test_urgent_requests_without_end_do_not_starve_another(server: Server) -> None:
    """More of them than there are slots want one all the time; one that is not urgent ages, and is
    served.
    """
    over = threading.Event()

    def ask_again() -> int:
        count = 0
        while not over.is_set():
            assert (
                completion(server, priority=-1, max_tokens=32, ignore_eos=True).status_code == 200
            )
            count += 1
        return count

    with ThreadPoolExecutor(3 * MAX_NUM_SEQS) as pool:
        asking = [pool.submit(ask_again) for _ in range(3 * MAX_NUM_SEQS)]
        try:
            time.sleep(0.5)
            for priority in (0, 1000):
                answer = completion(server, priority=priority, max_tokens=64, ignore_eos=True)
                assert answer.status_code == 200, answer.text
        finally:
            over.set()
        assert sum(one.result(WAIT_S) for one in asking) > 3 * MAX_NUM_SEQS
    server.until_idle()
