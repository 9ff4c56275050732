"""A request that kills the engines it comes to is failed, with an error that says so; no other
request is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.faulty_engines import DEADLY, GREEDY, deadly_prompts
from harness.live import Server, wait_until
from harness.preambles import calling

pytestmark = pytest.mark.server

TRIED = r"its engine was lost [23] times while it computed the prompt of this request"
"""It is alone the last time: before that, at most once more with others that may be why."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Yield a server whose engines such a request kills."""
    with Server("llama", 4, preamble=calling(deadly_prompts)) as running:
        yield running


def ask(server: Server, first: int, **fields: Any) -> Any:
    """Return the answer to a request."""
    body = {
        "model": server.model,
        "prompt": [first, *range(5, 25)],
        "max_tokens": 200,
        "seed": 1,
        "ignore_eos": True,
    }
    return server.http.post(
        "/v1/completions", json=body | {"temperature": 1.0, "return_token_ids": True} | fields
    )


def is_whole(server: Server) -> bool:
    """Return whether all engines are there."""
    return len(server.http.get("/flying/status").json()["engines"]) == 4


# in a group the request kills all members
@pytest.mark.parametrize("layout", [[[0], [1], [2], [3]], [[0, 1], [2, 3]]])
def test_harmful_request_fails_and_others_are_served(
    server: Server, layout: list[list[int]]
) -> None:
    """It is tried a few times; what ran beside it gives the tokens that it gives alone."""
    wait_until(lambda: is_whole(server))
    assert server.http.post("/flying/layout", json={"groups": layout}).status_code == 200
    alone = ask(server, 3).json()["choices"][0]["token_ids"]
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(ask, server, 3) for _ in range(8)]
        deadly = pool.submit(ask, server, DEADLY)
        later = [pool.submit(ask, server, 3) for _ in range(3)]
        answer = deadly.result(60)
        assert answer.status_code == 500
        assert re.search(TRIED, answer.json()["error"]["message"])
        for each in (*others, *later):
            found = each.result(60)
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["token_ids"] == alone
    wait_until(lambda: is_whole(server))
    wait_until(lambda: sorted(server.http.get("/flying/status").json()["layout"]) == layout)


def test_stream_of_a_harmful_request_ends_with_the_error(server: Server) -> None:
    wait_until(lambda: is_whole(server))
    answer = ask(server, DEADLY, stream=True)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    errors = [json.loads(event) for event in events if event != "[DONE]"]
    assert "its engine was lost 2 times while" in errors[-1]["error"]["message"]
    assert server.http.get("/health").status_code == 200


def test_one_whose_engines_are_killed_is_failed_one_loss_later(server: Server) -> None:
    """The kernel, or an operator, may kill an engine that computes anything: the first time says
    nothing.
    """
    wait_until(lambda: is_whole(server))
    assert (
        server.http.post("/flying/layout", json={"groups": [[0], [1], [2], [3]]}).status_code == 200
    )
    answer = ask(server, GREEDY)
    assert answer.status_code == 500
    assert (
        "its engine was lost 3 times while it computed the prompt"
        in answer.json()["error"]["message"]
    )
    assert len(ask(server, 3).json()["choices"][0]["token_ids"]) == 200
