"""Wrong requests to a server of four engines, and what it answers."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from vllm.exceptions import VLLMValidationError

from flying_serving.config import FlyingConfig
from flying_serving.server.requests.rights import ClientRights
from harness.live import KEY, Server, wait_until
from tests.deep.server.errors.case import Case
from tests.deep.server.errors.http_cases import (
    ALONE,
    CANCELLED,
    DEEP_BODY,
    DEEP_CHECKED,
    ELASTIC,
    LAYOUT_CASES,
    LONG_BODY,
    NAMES,
    NO_JSON,
    NO_KEY,
    NO_ROUTE,
    NO_TYPE,
    NOTHING_WAITS,
    OTHERS,
    PAGES,
    REPLACED,
    REQUEST_CASES,
    RIGHTS_CASES,
    ROUTES,
    TOO_DEEP,
    TOO_LONG,
    WRONG_KEY,
    WRONG_METHOD,
    degree_case,
)
from tests.with_vllm.server.apps import app as admin_app


def expect(answer: httpx.Response, case: Case) -> None:
    """The answer has the case's code and text, and is an error in JSON."""
    assert answer.status_code == case.code, answer.text
    body = answer.json()
    text = body["error"]["message"] if "error" in body else body["detail"]
    assert case.says.replace("`", "") in text.replace("`", "")


def completion(server: Server, **fields: Any) -> httpx.Response:
    """One small completion, with changes."""
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, **fields}
    return server.http.post("/v1/completions", json=body)


@pytest.mark.server
@pytest.mark.parametrize("case", REQUEST_CASES, ids=lambda case: case.what)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_request(server: Server, case: Case, stream: bool) -> None:
    """A wrong request is answered before it starts, streamed or not."""
    answer = completion(server, stream=stream, **case.send)
    if stream and case.in_stream:
        first = answer.text.splitlines()[0].removeprefix("data: ")
        answer = httpx.Response(json.loads(first)["error"]["code"], text=first)
    expect(answer, case)


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
OTHER_ROUTES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda degree: {**CHAT, "vllm_xargs": {"tp_degree": degree}}),
    "responses": (
        "/v1/responses",
        lambda degree: {"input": "x", "vllm_xargs": {"tp_degree": degree}},
    ),
    "messages": ("/v1/messages", lambda degree: {**CHAT, "vllm_xargs": {"tp_degree": degree}}),
    "invocations": (
        "/invocations",
        lambda degree: {"prompt": [1, 2], "vllm_xargs": {"tp_degree": degree}},
    ),
    "tokens": (
        "/inference/v1/generate",
        lambda degree: {
            "token_ids": [1, 2],
            "sampling_params": {"extra_args": {"tp_degree": degree}},
        },
    ),
}


@pytest.mark.server
@pytest.mark.parametrize("name", OTHER_ROUTES)
@pytest.mark.parametrize("value", [3, "x", 2.0], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_degree_on_another_route(server: Server, name: str, value: Any, stream: bool) -> None:
    """Each says the same, before a stream begins."""
    path, body = OTHER_ROUTES[name]
    answer = server.http.post(path, json={"model": server.model, "stream": stream, **body(value)})
    expect(answer, degree_case(value, ""))
    if name != "messages":  # Anthropic's errors have no such field
        assert answer.json()["error"]["param"] == "vllm_xargs.tp_degree"


@pytest.mark.parametrize("case", RIGHTS_CASES, ids=lambda case: case.what)
def test_field_that_clients_may_not_set_is_refused(case: Case) -> None:
    """`tests/deep/server/requests/test_rights.py` asks a live server by every route."""
    rights = ClientRights(FlyingConfig())
    rights.has_key = True
    with pytest.raises(VLLMValidationError) as refused:
        rights.check(case.send.get("priority", 0), case.send.get("extra", {}))
    assert str(refused.value).startswith(case.says)


@pytest.mark.server
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.what)
def test_wrong_layout(server: Server, case: Case) -> None:
    """A wrong order changes nothing."""
    before = server.status()["layout"]
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/flying/layout", content=json.dumps(case.send), headers=headers)
    expect(answer, case)
    error = answer.json()["error"]
    assert error["message"].startswith(f"{error['field']}=")
    assert error["message"].endswith(error["allowed"])
    assert server.status()["layout"] == before


@pytest.mark.server
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", ["Bearer wrong", f"Basic {KEY}", KEY, "Bearer secret2", None])
def test_wrong_key(server: Server, method: str, path: str, header: str | None) -> None:
    """Every admin route is guarded."""
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(
        method, server.url + path, headers=headers, json={"groups": ALONE}, timeout=30
    )
    expect(answer, NO_KEY if header is None else WRONG_KEY)


async def test_without_a_key_only_this_machine_is_answered() -> None:
    """A proxy on it may speak for others, and a browser on it for other sites."""
    for peer, headers, case in (
        ("10.0.0.7", {}, OTHERS),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, OTHERS),
        ("127.0.0.1", {"Origin": "https://example.com"}, PAGES),
        ("127.0.0.1", {"Host": "example.com"}, NAMES),
    ):
        transport = httpx.ASGITransport(admin_app(keys=()), client=(peer, 5000))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost:8000"
        ) as client:
            expect(await client.get("/flying/switches", headers=headers), case)


@pytest.mark.server
@pytest.mark.parametrize("path", ["/v1/completions", *(path for path, _ in OTHER_ROUTES.values())])
@pytest.mark.parametrize("chunked", [False, True])
def test_wrong_body(server: Server, path: str, chunked: bool) -> None:
    """On every route that takes requests, whether its length is known or not; and without the key
    it is not read.
    """

    def post(content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        sent = (
            (content[at : at + 2**20] for at in range(0, len(content), 2**20))
            if chunked
            else content
        )
        return httpx.post(
            server.url + path, content=sent, headers={"Content-Type": "application/json", **headers}
        )

    for content, case in (
        (b" " * (2**24 + 1), LONG_BODY),
        (b"[" * 50_000 + b"]" * 50_000, DEEP_CHECKED if path == "/invocations" else DEEP_BODY),
    ):
        expect(post(content, server.http.headers), case)
        assert post(content, {}).status_code == 401
    assert completion(server).status_code == 200


DEEP_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "unknown": lambda deep: {"x": deep},
    "params": lambda deep: {"kv_transfer_params": {"x": deep}},
    "grammar": lambda deep: {"structured_outputs": {"json": {"x": deep}}},
    "tool": lambda deep: {
        "tools": [
            {
                "type": "function",
                "name": "f",
                "input_schema": {"x": deep},
                "function": {"name": "f", "parameters": {"x": deep}},
            }
        ]
    },
    "metadata": lambda deep: {"metadata": {"x": deep}},
    "sampling": lambda deep: {"sampling_params": {"max_tokens": 2, "extra_args": {"x": deep}}},
}


@pytest.mark.server
@pytest.mark.parametrize("field", DEEP_FIELDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_body_that_is_deep_is_answered_or_refused(server: Server, field: str, stream: bool) -> None:
    """At every depth that JSON's parser takes, and a little more."""
    routes = {path: body(1) for path, body in OTHER_ROUTES.values()}
    routes |= {"/v1/completions": {"prompt": [1, 2]}, "/tokenize": {"prompt": "x"}}
    for path, body in routes.items():
        for depth in (300, 900, 930):
            sent = {"model": server.model, "stream": stream, "max_tokens": 2} | body
            text = json.dumps(sent | DEEP_FIELDS[field]("DEEP"))
            content = text.replace('"DEEP"', "[" * depth + "]" * depth)
            answer = server.http.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (200, 400), (path, depth, answer.text)
    assert completion(server).status_code == 200


@pytest.mark.server
def test_wrong_route_and_body(server: Server) -> None:
    """What FastAPI answers by itself."""
    headers = {"Content-Type": "application/json"}
    expect(server.http.post("/flying/layout", content=b"{", headers=headers), NO_JSON)
    expect(server.http.post("/flying/layout", content=b" " * (1 << 24), headers=headers), TOO_LONG)
    expect(
        server.http.post("/flying/layout", content=b"[" * 960 + b"]" * 960, headers=headers),
        TOO_DEEP,
    )
    expect(server.http.get("/flying/layout"), WRONG_METHOD)
    expect(server.http.get("/flying/nothing"), NO_ROUTE)
    expect(server.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}), ELASTIC)
    expect(server.http.delete("/flying/layout"), NOTHING_WAITS)
    for path in ("/flying/layout", "/flying/check"):
        for kind in (
            {},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
        ):
            expect(
                server.http.post(path, content=json.dumps({"groups": ALONE}), headers=kind), NO_TYPE
            )


@pytest.mark.server
def test_a_sequential_order_is_cancelled_replaced_or_left(server: Server) -> None:
    """It waits for long requests. What does not wait any more holds nothing back."""
    answers: dict[str, httpx.Response] = {}

    def later(name: str, send: Callable[[], httpx.Response]) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: send()}))
        thread.start()
        return thread

    def order(groups: list[list[int]], read_s: float = 60.0) -> httpx.Response:
        body, timeout = {"groups": groups, "mode": "sequential"}, httpx.Timeout(60.0, read=read_s)
        return httpx.post(
            f"{server.url}/flying/layout", json=body, headers=server.http.headers, timeout=timeout
        )

    def waits() -> bool:
        last = server.switches()[-1]
        return last["cutover_ms"] is None and last["problem"] is None

    server.layout(ALONE)
    long = [
        later(f"{i}", lambda: completion(server, max_tokens=1000, ignore_eos=True))
        for i in range(2)
    ]
    wait_until(lambda: server.requests("running") == len(long))
    cancelled = later("cancelled", lambda: order([[0, 1], [2, 3]]))
    wait_until(waits)
    assert server.http.delete("/flying/layout").json() == {"cancelled": [[0, 1], [2, 3]]}
    cancelled.join(30)
    expect(answers["cancelled"], CANCELLED)
    replaced = later("replaced", lambda: order([[0, 1], [2, 3]]))
    wait_until(waits)
    with pytest.raises(httpx.ReadTimeout):
        order([[0, 1, 2, 3]], 0.5)
    replaced.join(30)
    expect(answers["replaced"], REPLACED)
    wait_until(lambda: not waits())
    assert completion(server).status_code == 200, "nothing is held back"
    assert server.status()["layout"] == ALONE
    for i, thread in enumerate(long):
        thread.join(120)
        assert answers[f"{i}"].json()["usage"]["completion_tokens"] == 1000


@pytest.mark.server
def test_a_request_that_no_present_group_holds_waits_for_a_layout(server: Server) -> None:
    """It is held, which the status shows; a layout that suits starts it, and a client that leaves
    ends it.
    """
    server.layout(ALONE)
    assert server.requests("waiting") == 0
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(completion(server, prompt=[1] * 1500)))
    waiting.start()
    wait_until(lambda: server.requests("waiting") == 1)
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": server.model, "prompt": [1] * 1600, "max_tokens": 4}
        server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=1))
    wait_until(lambda: server.requests("waiting") == 1)
    server.layout([[0, 1], [2, 3]])
    waiting.join(60)
    assert answers[0].status_code == 200, answers[0].text
    server.layout(ALONE)


@pytest.mark.server
def test_server_is_sound_after_all_wrong_requests(server: Server) -> None:
    """Runs after all wrong requests: the server answers, its blocks add up, and nobody has logged a
    traceback.
    """
    assert completion(server, vllm_xargs={"tp_degree": 4}).status_code == 200
    server.check()
    assert "Traceback" not in server.log()
