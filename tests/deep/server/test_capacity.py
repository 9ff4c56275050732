"""Prompts that only a group can hold, and lanes that compete for the same blocks.

Each of four engines has 32 blocks of 32 tokens beside vLLM's null block, so 1,024 tokens; a group
of four has 4,096.
"""

import base64
import io
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from harness.live import Server, wait_until
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conftest import SMALL_BLOCKS as BLOCKS
from tests.stock.requests import tokens

pytestmark = pytest.mark.server

ALONE = [[0], [1], [2], [3]]
PAIRS = [[0, 1], [2, 3]]
TOGETHER = [[0, 1, 2, 3]]
WAIT_S = 120


@pytest.fixture(scope="module")
def server(small_engines: Server) -> Server:
    return small_engines


@dataclass(frozen=True)
class Answer:
    """A completion: tokens, their logprobs, how many prompt tokens came out of a prefix cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def ask(
    server: Server,
    prompt: Sequence[int],
    max_tokens: int,
    degree: int | None = None,
    /,
    **fields: Any,
) -> Answer:
    answer = server.post(prompt, max_tokens, degree, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == max_tokens
    return Answer(
        choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0
    )


def same(ours: Answer, reference: Answer) -> None:
    assert ours.tokens == reference.tokens
    assert worst_difference(ours.logprobs, reference.logprobs) <= WORST_LOGPROB


def exact_logprobs(server: Server, prompt: Sequence[int], output: list[int]) -> list[float]:
    """What transformers, which has neither blocks nor lanes, gives the output's tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[
            0
        ]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])
    return [float(logprob) for logprob in chosen[:, 0]]


LONG = tokens(1, 3750)


@pytest.fixture(scope="module")
def long_answer(server: Server) -> Answer:
    """3,750 tokens, served by the group of four."""
    server.layout(TOGETHER)
    return ask(server, LONG, 16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_group_serves_a_prompt_that_no_engine_can_hold(server: Server, long_answer: Answer) -> None:
    assert server.status()["capacity_tokens"] == {"1": 1024, "2": 2048, "4": 4096}
    assert long_answer.cached == 0
    assert (
        worst_difference(long_answer.logprobs, exact_logprobs(server, LONG, long_answer.tokens))
        <= WORST_LOGPROB
    )
    server.check()


def test_a_prompt_waits_for_a_layout_that_holds_it_and_finds_its_prefix(
    server: Server, long_answer: Answer
) -> None:
    server.layout(ALONE)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, server, LONG, 16)
        wait_until(lambda: server.requests("waiting") == 1, server.status)
        ask(server, tokens(2, 100), 16)  # others are served meanwhile
        server.layout(PAIRS)
        ask(server, tokens(3, 100), 16)
        assert not held.done()
        assert server.status()["requests"]["waiting"] == 1
        server.layout(TOGETHER)
        answer = held.result(WAIT_S)
    same(answer, long_answer)
    # the requests in between took some of its blocks: 4 at a time, least recently used first
    assert answer.cached > 3000, "the group's prefix cache outlives its release"
    server.check()


def test_prefix_cache_of_an_engine_outlives_a_group(server: Server) -> None:
    prompt = tokens(4, 500)
    server.layout(ALONE)
    first = ask(server, prompt, 16, degree=1)
    server.layout(TOGETHER)
    ask(server, tokens(5, 150), 16)
    server.layout(ALONE)
    again = ask(server, prompt, 16, degree=1)
    same(again, first)
    assert again.cached == 480  # 15 whole blocks


@pytest.mark.parametrize(("degree", "holds"), [(1, 1024), (2, 2048)])
def test_degree_that_is_too_narrow_is_refused_with_one_that_would_do(
    server: Server, degree: int, holds: int
) -> None:
    answer = server.post(LONG, 16, degree)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"tp_degree={degree}" in message
    assert f"holds {holds} tokens" in message
    assert "degree 4 would do" in message


def test_prompt_that_no_group_holds_is_refused(server: Server) -> None:
    answer = server.post(tokens(6, 4250), 16)
    assert answer.status_code == 400
    assert "4096" in answer.json()["error"]["message"]
    assert server.status()["requests"] == {"running": 0, "waiting": 0}


def test_held_request_whose_client_leaves_is_forgotten(server: Server) -> None:
    server.layout(ALONE)
    body = {"model": server.model, "prompt": LONG, "max_tokens": 16, "stream": True}
    with ThreadPoolExecutor(1) as pool:

        def leave() -> None:
            with pytest.raises(Exception, match="timed out"):
                server.http.post(
                    "/v1/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=3)
                )

        left = pool.submit(leave)
        wait_until(lambda: server.requests("waiting") == 1, server.status)
        left.result(WAIT_S)
    wait_until(lambda: server.requests("waiting") == 0, server.status)
    server.check()


def usage(server: Server) -> list[float]:
    """The share of its blocks that each engine says requests hold."""
    found = server.metric("vllm:kv_cache_usage_perc", "engine")
    return [found[str(engine),] for engine in range(4)]


def test_usage_is_what_requests_hold_on_every_member(server: Server) -> None:
    """Blocks that are lent but cached, or not lent at all, are not in use."""
    server.layout(TOGETHER)
    most = [0.0] * 4
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, tokens(7, 2000), 100, 4)
        while not running.done():
            most = [max(pair) for pair in zip(most, usage(server), strict=True)]
            time.sleep(0.05)
        running.result()
    lent = [sum(engine["lent_blocks"].values()) for engine in server.status()["engines"]]
    held = [-(-count // 128) / (BLOCKS - 1) for count in (2000, 2100)]
    assert all(held[0] <= share <= held[1] for share in most), (most, held)
    wait_until(lambda: not any(usage(server)), lambda: usage(server))
    assert min(lent) > 15


def test_lanes_give_up_idle_blocks_to_each_other(server: Server) -> None:
    """Whatever lane ran last keeps nearly all blocks, as its prefix cache; the next one gets them
    nevertheless.
    """
    server.layout(ALONE)
    lengths = {1: 950, 2: 1950, 4: 3950}
    reference: dict[int, Answer] = {}
    for degree in (1, 2, 4, 1, 4, 2, 1):
        answer = ask(server, tokens(100 * degree, lengths[degree]), 24, degree)
        same(answer, reference.setdefault(degree, answer))
        server.check()


def test_lanes_share_blocks_under_pressure(server: Server) -> None:
    """Twice the memory is asked for at once, in all lanes, while the layout changes."""
    kinds = ((1, 375, 6), (2, 750, 3), (4, 1500, 2))
    jobs = [
        (tokens(1000 * degree + i, length), 48, degree)
        for degree, length, n in kinds
        for i in range(n)
    ]
    server.layout(ALONE)
    reference = [ask(server, *job) for job in jobs]
    random.Random(0).shuffle(order := list(range(len(jobs))))
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers: dict[int, Future[Answer]] = {i: pool.submit(ask, server, *jobs[i]) for i in order}
        for groups, mode in (
            (PAIRS, "weave"),
            (TOGETHER, "hard"),
            ([[0, 1], [2], [3]], "weave"),
            (ALONE, "hard"),
        ):
            wait_until(lambda: server.requests("running"), server.status)
            server.layout(groups, mode)
            server.check()
        for i in order:
            same(answers[i].result(WAIT_S), reference[i])
    server.check()
    engines = server.status()["engines"]
    for engine in engines:
        assert engine["free_blocks"] + sum(engine["lent_blocks"].values()) == BLOCKS - 1


def test_lane_short_of_blocks_yields_its_engines_to_the_lane_with_blocks(server: Server) -> None:
    """A hard switch gives an older lane a step a second; 150 of those would take longer than a
    client waits.
    """
    server.layout(TOGETHER)
    with ThreadPoolExecutor(5) as pool:
        has = pool.submit(ask, server, tokens(40, 3250), 150, 4)
        wait_until(lambda: server.status()["engines"][0]["lanes"]["4"]["running"])
        server.layout(ALONE, "hard")
        waits = [pool.submit(ask, server, tokens(41 + number, 950), 16, 1) for number in range(4)]
        for answer in (has, *waits):
            answer.result(WAIT_S)
    server.check()


def embeddings(server: Server, prompt: Sequence[int]) -> torch.Tensor:
    table = load_file(f"{server.model}/model.safetensors")["model.embed_tokens.weight"]
    return table[list(prompt)]


def written(embeds: torch.Tensor) -> str:
    """Embeddings as vLLM's API takes them."""
    file = io.BytesIO()
    torch.save(embeds, file)
    return base64.b64encode(file.getvalue()).decode()


def as_embeddings(server: Server, prompt: Sequence[int]) -> str:
    return written(embeddings(server, prompt))


@pytest.mark.parametrize("degree", [1, 2])
def test_embeddings_of_a_prompt_give_what_its_tokens_give(server: Server, degree: int) -> None:
    prompt = tokens(20, 150)
    given = {"prompt": None, "prompt_embeds": as_embeddings(server, prompt)}
    same(ask(server, prompt, 16, degree, **given), ask(server, prompt, 16, degree))
    server.check()


def test_embeddings_that_are_no_numbers_are_refused(server: Server) -> None:
    embeds = written(torch.full_like(embeddings(server, tokens(20, 3)), torch.nan))
    for stream in (False, True):
        answer = server.post([], 8, 1, stream=stream, prompt=None, prompt_embeds=embeds)
        assert answer.status_code == 400
        assert "prompt_embeds: must be finite numbers" in answer.text


def test_embeddings_count_as_tokens(server: Server) -> None:
    """More than an engine holds goes to a group at once, and what no group holds is refused, in a
    stream too.
    """
    server.layout(PAIRS)
    prompt = tokens(21, 1250)
    given = {"prompt": None, "prompt_embeds": as_embeddings(server, prompt)}
    alone = server.post(prompt, 8, 1, **given)
    assert alone.status_code == 400
    assert "prompt plus max_tokens are 1258" in alone.text
    same(ask(server, prompt, 8, **given), ask(server, prompt, 8))
    streamed = server.post(prompt, 8, 1, stream=True, **given)
    assert streamed.status_code == 400
    server.check()
