"""A live server on emulated devices: tokens come as fast as the profile's, in every layout."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flying_lab.emulation.command import profile, server_flags
from flying_lab.emulation.runner import FIRST_WORD
from flying_lab.sim.requests import Chunk, SimStep
from flying_serving.parallelism import Parallelism
from flying_serving.predict.parallelism import TokenCost
from flying_serving.predict.steps import StepCost
from harness.live import ROOT, Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PROFILE = profile({"hardware": "h200x2", "model": "nemotron-8b", "devices_per_engine": 1})
TOKENS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    path, *flags = server_flags(PROFILE, ROOT / ".models", stock=False)
    more = ["--policy=manual", "--max-model-len=2048", "--max-num-seqs=64"]
    with Server(Path(path), 2, base=flags + more) as started:
        started.model = PROFILE.model
        yield started


def tokens_of(server: Server, prompt_tokens: int = 64, tokens: int = TOKENS) -> list[int]:
    """Return the tokens of one request."""
    body = {
        "model": server.model,
        "prompt": [300] * prompt_tokens,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def test_a_request_gets_its_number_of_tokens_all_of_them_words(server: Server) -> None:
    tokens = tokens_of(server)
    assert len(tokens) == TOKENS
    assert min(tokens) >= FIRST_WORD


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_come_no_faster_than_on_the_devices(server: Server, size: int) -> None:
    server.layout([[0, 1]] if size == 2 else [[0], [1]])
    began_s = time.monotonic()
    tokens_of(server)
    took_s = time.monotonic() - began_s
    step_s = PROFILE.lane(size).step_s(SimStep([], 1, 64))
    assert took_s >= (TOKENS - 1) * step_s


def test_token_parallel_steps_are_measured_as_long_as_on_the_devices(server: Server) -> None:
    """With the host's time in them, as all that the start measures."""
    (found,) = server.status()["token_parallel_step_cost"].values()
    step = SimStep([Chunk(2000, 0)], parallelism=Parallelism.TOKEN)
    cost = TokenCost(StepCost(**found["cost"]), 2, found["least_tokens"])
    assert cost.step_s(*step.counts) == pytest.approx(PROFILE.lane(2).step_s(step), rel=0.25)


def test_running_requests_migrate_and_keep_their_tokens(server: Server) -> None:
    server.layout([[0], [1]])
    found: list[int] = []
    streams = [
        threading.Thread(target=lambda: found.append(len(tokens_of(server, tokens=400))))
        for _ in range(4)
    ]
    for stream in streams:
        stream.start()
    server.layout([[0, 1]], "migrate")
    for stream in streams:
        stream.join(120)
    assert found == [400] * 4
