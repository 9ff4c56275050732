"""Each kind of wrong use has one answer, which names the field, its value and what is allowed.

docs/errors.md has all of them.
"""

from typing import Any

import httpx
import pytest

from harness.forked import run
from harness.live import KEY, Server, tiny
from tests.smoke.four_requests import streams_answer_as_stock

pytestmark = pytest.mark.server

COMMAND_S = 120.0
COMPLETIONS, LAYOUT = "/v1/completions", "/flying/layout"
MOST_OUTPUTS = 2 * 16 + 8
"""Of one request to two engines: --max-num-seqs of each, and --max-waiting-requests."""
WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "degree": (
        COMPLETIONS,
        {"vllm_xargs": {"tp_degree": 3}},
        400,
        "vllm_xargs.tp_degree=3: must be one of [1, 2, 4]",
    ),
    "length": (
        COMPLETIONS,
        {"max_tokens": 5000},
        400,
        "max_tokens=5000 cannot be greater than max_model_len=2048",
    ),
    "model": (COMPLETIONS, {"model": "nope"}, 404, "The model `nope` does not exist"),
    "group": (
        LAYOUT,
        {"groups": [[0], [1, 2], [3]]},
        400,
        "groups[1]=[1, 2]: groups are aligned and contiguous, like [0, 1]",
    ),
    "engine": (
        LAYOUT,
        {"groups": [[0, 1]]},
        400,
        "groups=[[0, 1]]: engine 2 is in no group; name every engine",
    ),
    "mode": (
        LAYOUT,
        {"groups": [[0, 1], [2, 3]], "mode": "gentle"},
        400,
        "mode='gentle': must be one of ['weave', 'hard', 'sequential', 'soft', 'migrate']",
    ),
}
"""Route, fields of the body, status, and what the answer says."""


def said(answer: httpx.Response, code: int) -> str:
    """The message of an answer that has this status."""
    assert answer.status_code == code, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize("what", WRONG)
def test_wrong_field_is_refused(four: Server, what: str) -> None:
    path, fields, code, says = WRONG[what]
    asked = {"model": four.model, "prompt": [1, 2, 3]} if path == COMPLETIONS else {}
    before = four.status()["layout"]
    assert says in said(four.http.post(path, json=asked | fields), code)
    assert four.status()["layout"] == before


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}], ids=["none", "wrong"])
def test_wrong_key_is_refused(two: Server, header: dict[str, str]) -> None:
    for method, path in (("POST", COMPLETIONS), ("POST", LAYOUT), ("GET", "/flying/status")):
        answer = httpx.request(method, two.url + path, headers=header, json={})
        assert answer.status_code == 401, path


def test_too_long_a_body_is_refused(two: Server) -> None:
    answer = two.http.post(
        COMPLETIONS, content=b" " * (2**24 + 1), headers={"Content-Type": "application/json"}
    )
    assert "body: must be at most 16777216 bytes long" in said(answer, 413)


async def test_more_requests_than_may_wait_are_refused(two: Server) -> None:
    """A request for so many outputs, beside others; alone it would be served."""
    async with streams_answer_as_stock(two):
        answer = two.post([1, 2, 3], 1, n=MOST_OUTPUTS)
    assert f"n={MOST_OUTPUTS} adds {MOST_OUTPUTS} (--max-waiting-requests)" in said(answer, 429)
    assert int(answer.headers["Retry-After"]) > 0
    assert two.post([1, 2, 3], 1, n=MOST_OUTPUTS).status_code == 200


def test_cancelling_no_change_is_refused(two: Server) -> None:
    assert "no change of layout waits" in said(two.http.delete(LAYOUT), 409)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["status"], 2, "the API key is missing or wrong"),
        (["layout", "0", "0,1", "--api-key", KEY], 2, "engine 0 is in more than one group"),
        (["status", "--url", "http://127.0.0.1:1"], 1, "no server answers"),
        (["layout", "0,1", "--api-key", KEY], 0, ""),
    ],
    ids=["key", "layout", "server", "right"],
)
def test_admin_command_ends_with_its_code(
    two: Server, arguments: list[str], code: int, says: str
) -> None:
    """A wrong one says why in one line; the last is right."""
    url = [] if "--url" in arguments else ["--url", two.url]
    done = run([*arguments, *url], COMMAND_S)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and len(done.stderr.splitlines()) == bool(code)


def test_wrong_flag_ends_a_start() -> None:
    done = run(["serve", str(tiny("llama")), "--data-parallel-size=3"], COMMAND_S)
    assert done.returncode == 2
    assert "flying-serving: --data-parallel-size=3: must be 1, 2, 4 or 8" in done.stderr
    assert "Traceback" not in done.stderr
