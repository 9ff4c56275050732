"""A member that samples another token than its leader ends the group's requests with an error.

Nothing is given out that was computed from the other token. The group goes on with new requests.
"""

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from harness.apart import devices_apart, members_apart
from harness.live import Server
from harness.preambles import calling

pytestmark = pytest.mark.server

PROMPT = list(range(3, 43))
LENGTH = 24
WHY_DEVICES = (
    "device 1 of engine 0 has sampled other tokens than its device 0, in group [0, 1], by step "
)
WHY = re.compile(
    r"engine 1 has sampled other tokens than engine 0, which leads group \[0, 1\], by step (\d+)"
)


@pytest.fixture(scope="module", params=[(), ("--async-scheduling",)], ids=["", "async"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Two engines in one group, whose random numbers differ until they begin anew."""
    with Server("llama", 2, *request.param, preamble=calling(members_apart)) as live:
        live.layout([[0, 1]])
        yield live


def body(server: Server, **more: object) -> dict[str, object]:
    return {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def ask(server: Server, **more: object) -> httpx.Response:
    return server.http.post("/v1/completions", json=body(server, **more))


def test_members_that_draw_apart_end_the_groups_requests_and_no_later_ones(
    server: Server,
) -> None:
    alone = ask(server, temperature=0.0).raise_for_status().json()["choices"][0]["token_ids"]
    long = {**body(server, temperature=0.0, max_tokens=1500), "stream": True}
    with server.http.stream("POST", "/v1/completions", json=long) as beside:
        events = (line for line in beside.iter_lines() if line)
        assert next(events).startswith("data: ")
        drawn = ask(server, temperature=1.0)
        *_, error, end = events
    assert drawn.status_code == 500
    assert WHY.search(drawn.json()["error"]["message"]), drawn.text
    assert WHY.search(json.loads(error.removeprefix("data: "))["error"]["message"]), error
    assert end == "data: [DONE]"
    assert WHY.search(server.log())
    # the cache has no prefix of a step in which members had different tokens
    again = ask(server, temperature=0.0).raise_for_status().json()["choices"][0]["token_ids"]
    assert again == alone
    later = ask(server, temperature=1.0).raise_for_status().json()["choices"][0]
    assert len(later["token_ids"]) == LENGTH
    server.check()


def test_devices_of_an_engine_that_draw_apart_end_the_groups_requests() -> None:
    """In both engines in the same way, so that the engines' first devices agree."""
    with Server("llama", 2, "--tensor-parallel-size=2", preamble=calling(devices_apart)) as server:
        server.layout([[0, 1]])
        greedy = {"temperature": 0.0}
        alone = ask(server, **greedy).raise_for_status().json()["choices"][0]["token_ids"]

        drawn = ask(server, temperature=1.0)
        assert drawn.status_code == 500
        assert WHY_DEVICES in drawn.json()["error"]["message"], drawn.text
        assert WHY_DEVICES in server.log()

        again = ask(server, **greedy).raise_for_status().json()["choices"][0]["token_ids"]
        assert again == alone
        later = ask(server, temperature=1.0).raise_for_status().json()["choices"][0]
        assert len(later["token_ids"]) == LENGTH
        server.check()
