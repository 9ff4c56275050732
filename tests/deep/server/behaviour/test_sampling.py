"""Sampling in lane 1 and in a group, as clients of vLLM rely on it."""

import asyncio
import re

import httpx
import pytest

from harness.live import Server
from harness.streams import WORST_LOGPROB, stream, streamed_body, worst_difference
from tests.deep.server.behaviour.comparisons import LANES, TOGETHER, post, prompt, same, sampling

pytestmark = pytest.mark.server


# ---- sampling


@pytest.mark.parametrize("degree", LANES)
def test_stop_tokens_and_strings(server: Server, degree: int) -> None:
    tokens = prompt(20, 30)
    whole = server.complete(tokens, **sampling(21, 40, degree))
    stop = whole["token_ids"][12]
    first = whole["token_ids"].index(stop)
    by_token = server.complete(tokens, **sampling(21, 40, degree, stop_token_ids=[stop]))
    assert by_token["token_ids"] == whole["token_ids"][: first + 1]
    assert by_token["finish_reason"] == "stop"
    assert by_token["stop_reason"] == stop
    word = re.findall(r"[a-z]{3,}", whole["text"])[2]
    by_string = server.complete(tokens, **sampling(21, 40, degree, stop=[word]))
    assert by_string["text"] == whole["text"][: whole["text"].index(word)]
    assert by_string["finish_reason"] == "stop"
    assert by_string["stop_reason"] == word


@pytest.mark.parametrize("degree", LANES)
def test_three_choices_are_three_seeds(server: Server, degree: int) -> None:
    tokens = prompt(30, 50)
    fields = sampling(31, 20, degree, n=3, return_token_ids=True)
    choices = post(server, "/v1/completions", prompt=tokens, **fields)["choices"]
    alone = [
        server.complete(tokens, **sampling(31 + i, 20, 3 - degree))["token_ids"] for i in range(3)
    ]
    assert [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_seed_decides_the_tokens_in_every_lane(server: Server) -> None:
    runs = [
        server.complete(prompt(40, 20), **sampling(41, 30, degree))["token_ids"]
        for degree in (1, 2, None, 2, 1)
    ]
    assert all(run == runs[0] for run in runs)
    assert server.complete(prompt(40, 20), **sampling(42, 30, 2))["token_ids"] != runs[0]


async def test_unseeded_streams_are_consistent_on_all_members(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Members that sampled differently would write different tokens into their parts of the KV
    cache.
    """
    server.layout(TOGETHER)
    jobs = [(prompt(50 + i, 10 + 20 * i), degree) for degree in LANES for i in range(8)]
    bodies = [
        streamed_body(server.model, tokens, **sampling(None, 60, degree)) for tokens, degree in jobs
    ]
    answers = await asyncio.gather(*(stream(http, body) for body in bodies))
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    forced = [
        streamed_body(
            server.model,
            tokens,
            **sampling(None, 60, 3 - degree, extra={"force_token_ids": answer.tokens}),
        )
        for (tokens, degree), answer in zip(jobs, answers, strict=True)
    ]
    for ours, theirs in zip(
        answers, await asyncio.gather(*(stream(http, body) for body in forced)), strict=True
    ):
        same(ours, theirs)


def test_logprobs_of_alternatives_and_of_the_prompt(server: Server) -> None:
    fields = {
        "prompt": prompt(60, 70),
        "logprobs": 3,
        "prompt_logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    choices = [
        post(server, "/v1/completions", **fields, **sampling(61, 12, degree))["choices"][0]
        for degree in LANES
    ]
    for choice in choices:
        assert all(3 <= len(top) <= 4 for top in choice["logprobs"]["top_logprobs"])
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == 70
        assert all(2 <= len(top) <= 3 for top in choice["prompt_logprobs"][1:])
    one, two = choices
    for ours, theirs in zip(
        one["logprobs"]["top_logprobs"], two["logprobs"]["top_logprobs"], strict=True
    ):
        close(ours, theirs)
    for ours, theirs in zip(one["prompt_logprobs"][1:], two["prompt_logprobs"][1:], strict=True):
        close(
            *({token: entry["logprob"] for token, entry in top.items()} for top in (ours, theirs))
        )


def close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys()
    assert (
        worst_difference([ours[token] for token in ours], [theirs[token] for token in ours])
        <= WORST_LOGPROB
    )


@pytest.mark.parametrize("degree", LANES)
def test_one_token(server: Server, degree: int) -> None:
    answer = server.complete([5], **sampling(1, 1, degree))
    assert len(answer["token_ids"]) == 1
    assert answer["finish_reason"] == "length"


def test_empty_prompt_is_refused_as_by_stock_vllm(server: Server) -> None:
    """The answer was copied from vLLM 0.32.0's own server."""
    answer = server.http.post(
        "/v1/completions", json={"model": server.model, "prompt": "", **sampling(1, 4, 2)}
    )
    message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    error = {"message": message, "type": "BadRequestError", "param": "prompt", "code": 400}
    assert answer.status_code == 400
    assert answer.json() == {"error": error}
