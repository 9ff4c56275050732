"""Which fields that steer a node clients may set: without an API key all, with one none, or as the
operator says.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from flying_serving.config import FlyingConfig
from flying_serving.server.patches import tell_rights
from flying_serving.server.requests.rights import EVERYTHING, ClientRights
from harness.live import KEY, Server
from tests.with_vllm.server.doubles import Server as Double
from tests.with_vllm.server.engine_clients import EngineClient

PRIORITY = {"priority": -1}
DEGREE = {"tp_degree": 2}
SPLIT = {"split_at": 1}
EXPECTED = {"expected_tokens": 3}
FLAG = "(--clients-may-set)"


def rights(*, has_key: bool = False, **flying: Any) -> ClientRights:
    """The rights of clients of a server with these settings."""
    made = ClientRights(FlyingConfig(**flying))
    made.has_key = has_key
    return made


def shown(value: object) -> str:
    """Return how a value is shown in a test's name: the same in every process."""
    return str(sorted(value)) if isinstance(value, set | frozenset) else str(value)


@pytest.mark.parametrize(
    ("has_key", "flying", "allowed"),
    [
        (False, {}, EVERYTHING),
        (True, {}, set()),
        (True, {"most_urgent_priority": -3}, {"priority"}),
        (True, {"clients_may_set": ("tp_degree", "split_at")}, {"tp_degree", "split_at"}),
        (True, {"clients_may_set": ("tp_degree",), "most_urgent_priority": -3}, {"tp_degree"}),
        (True, {"clients_may_set": ("expected_tokens",)}, {"expected_tokens"}),
        (
            True,
            {"clients_may_set": ("priority", "tp_degree", "split_at", "expected_tokens")},
            EVERYTHING,
        ),
        (False, {"clients_may_set": ("none",)}, set()),
        (False, {"clients_may_set": ("priority",)}, {"priority"}),
    ],
    ids=shown,
)
def test_settable_fields_follow_the_key_unless_the_flag_names_them(
    has_key: bool, flying: dict[str, Any], allowed: set[str]
) -> None:
    assert rights(has_key=has_key, **flying).allowed == allowed


@pytest.mark.parametrize(
    ("priority", "extra", "says"),
    [
        (-1, {}, f"priority=-1: clients may not set it on this server {FLAG}"),
        (7, {}, f"priority=7: clients may not set it on this server {FLAG}"),
        (
            0,
            {"tp_degree": 2},
            f"vllm_xargs.tp_degree=2: clients may not set it on this server {FLAG}",
        ),
        (
            0,
            {"tp_degree": None},
            f"vllm_xargs.tp_degree=None: clients may not set it on this server {FLAG}",
        ),
        (
            0,
            {"split_at": 9},
            f"vllm_xargs.split_at=9: clients may not set it on this server {FLAG}",
        ),
        (
            0,
            {"expected_tokens": 9},
            f"vllm_xargs.expected_tokens=9: clients may not set it on this server {FLAG}",
        ),
    ],
)
def test_forbidden_field_is_refused_by_name(
    priority: int, extra: dict[str, Any], says: str
) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        rights(has_key=True).check(priority, extra)
    assert str(refused.value).startswith(says)
    assert refused.value.parameter == says.partition("=")[0]


@pytest.mark.parametrize("extra", [{}, {"queue_deadline_s": 1}, {"another": 1}], ids=str)
def test_field_without_effect_may_always_be_set(extra: dict[str, Any]) -> None:
    rights(has_key=True).check(0, extra)


@pytest.mark.parametrize(
    ("flying", "urgent"),
    [
        ({}, True),
        ({"most_urgent_priority": -1}, True),
        ({"most_urgent_priority": 0}, False),
        ({"clients_may_set": ("tp_degree",)}, False),
    ],
    ids=str,
)
def test_whether_a_request_may_be_urgent(flying: dict[str, Any], urgent: bool) -> None:
    assert rights(**flying).may_be_urgent is urgent


def test_the_most_urgent_priority_bounds_what_clients_may_set() -> None:
    made = rights(has_key=True, most_urgent_priority=-3)
    made.check(-3, {})
    with pytest.raises(
        VLLMValidationError, match=r"^priority=-4: must be -3 or more on this server"
    ):
        made.check(-4, {})


@pytest.mark.parametrize("asked", [PRIORITY, DEGREE, SPLIT, EXPECTED], ids=str)
async def test_shell_takes_only_settable_fields_from_clients(asked: dict[str, int]) -> None:
    """Whatever route a request comes by, and before it is booked."""
    shell = Double().shell
    extra = {key: value for key, value in asked.items() if key != "priority"}
    fields = {
        "prompt_token_ids": [1, 2],
        "prompt_embeds": None,
        "priority": asked.get("priority", 0),
        "sampling_params": SamplingParams(max_tokens=4, extra_args=extra),
    }
    shell.checks.checked_spec(fields)
    shell.checks.rights.has_key = True
    with pytest.raises(VLLMValidationError, match=r"clients may not set it on this server"):
        shell.checks.checked_spec(fields)


@pytest.mark.parametrize(("keys", "told"), [(["a"], True), ([""], False), ([], False)], ids=str)
async def test_the_shell_is_told_whether_there_is_a_key(keys: list[str], told: bool) -> None:
    server = Double()
    seen: list[Any] = []
    state = SimpleNamespace(flying_keys=keys)
    tell_rights(lambda *given: seen.append(given), EngineClient(server), state, None)
    assert server.shell.checks.rights.has_key is told
    assert len(seen) == 1


# ---- a server with a key, whose operator has said nothing


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with Server("llama", 2, "--policy=auto", "--enable-scale-out", key=KEY) as live:
        yield live


MESSAGES = [{"role": "user", "content": "x"}]
WAYS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [1, 2]}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "batch": ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": MESSAGES}),
    "invocations": ("/invocations", {"prompt": [1, 2]}),
    "invocations by chat": ("/invocations", {"messages": MESSAGES}),
    "tokens": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}),
    "scores": ("/generative_scoring", {"query": "x", "items": ["y"], "label_token_ids": [5, 6]}),
}
LENGTH = {
    "/v1/responses": "max_output_tokens",
    "/generative_scoring": None,
    "/inference/v1/generate": None,
}
NO_PRIORITY = ("messages",)
NO_XARGS = ("scores", "tokens")


def body(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    """The path of a way in, and a small body for it."""
    path, fields = WAYS[name]
    length = LENGTH.get(path, "max_tokens")
    return path, {"model": server.model, **fields} | ({} if length is None else {length: 2})


def expect_refused(answer: httpx.Response, field: str) -> None:
    """The answer names field and flag."""
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert said.startswith(f"{field}="), said
    assert FLAG in said


@pytest.mark.server
@pytest.mark.parametrize("name", WAYS)
def test_every_route_is_open_to_requests_without_wishes(keyed: Server, name: str) -> None:
    path, fields = body(keyed, name)
    answer = keyed.http.post(path, json=fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.server
@pytest.mark.parametrize("name", WAYS)
def test_every_way_in_needs_the_key(keyed: Server, name: str) -> None:
    path, fields = body(keyed, name)
    assert httpx.post(keyed.url + path, json=fields, timeout=30).status_code == 401


@pytest.mark.server
@pytest.mark.parametrize("name", [name for name in WAYS if name not in NO_PRIORITY])
def test_no_way_in_takes_a_priority(keyed: Server, name: str) -> None:
    path, fields = body(keyed, name)
    expect_refused(keyed.http.post(path, json=fields | PRIORITY), "priority")


@pytest.mark.server
@pytest.mark.parametrize("name", ["completions", "chat", "responses", "messages", "invocations"])
def test_no_way_in_takes_a_priority_from_a_header(keyed: Server, name: str) -> None:
    path, fields = body(keyed, name)
    answer = keyed.http.post(path, json=fields, headers={"X-Vllm-Priority": "-1"})
    expect_refused(answer, "priority")


@pytest.mark.server
@pytest.mark.parametrize("name", [name for name in WAYS if name not in NO_XARGS])
@pytest.mark.parametrize("asked", [DEGREE, SPLIT, EXPECTED], ids=str)
def test_no_way_in_takes_a_degree_a_split_or_a_length(
    keyed: Server, name: str, asked: dict[str, int]
) -> None:
    path, fields = body(keyed, name)
    answer = keyed.http.post(path, json=fields | {"vllm_xargs": asked})
    expect_refused(answer, f"vllm_xargs.{next(iter(asked))}")


@pytest.mark.server
@pytest.mark.parametrize("asked", [DEGREE, SPLIT, EXPECTED], ids=str)
def test_sampling_parameters_of_tokens_take_no_degree_split_or_length(
    keyed: Server, asked: dict[str, int]
) -> None:
    path, fields = body(keyed, "tokens")
    answer = keyed.http.post(
        path, json=fields | {"sampling_params": {"max_tokens": 2, "extra_args": asked}}
    )
    expect_refused(answer, f"vllm_xargs.{next(iter(asked))}")


@pytest.mark.server
@pytest.mark.parametrize("asked", [PRIORITY, {"vllm_xargs": DEGREE}], ids=str)
def test_a_stream_is_refused_before_it_begins(keyed: Server, asked: dict[str, Any]) -> None:
    path, fields = body(keyed, "chat")
    answer = keyed.http.post(path, json=fields | asked | {"stream": True})
    assert answer.status_code == 400, answer.text
