"""Requests with drafts by n-grams: the answers and the counts of stock vLLM."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flying_serving.config import MODES
from harness import drafts_cpu
from harness.live import FLAGS, Server
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conformance.live import Answer, Asked, Job, Live
from tests.stock.drafted import CONFIG, COUNTERS, FLAG, PROMPTS, REQUESTS, recorded_counts
from tests.stock.served import Served

JOBS = tuple(Job(request) for request in REQUESTS)
MOST_DRAFTS: int = CONFIG["num_speculative_tokens"]
STOCK_FLAGS = (
    *(f for f in FLAGS if not f.startswith(("--policy", "--logits", "--max-num-batched"))),
    "--max-num-batched-tokens=2048",  # above all prompts together: see tests/stock/requests.py
    FLAG,
)
A_TO_H = list(range(97, 105))
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {"allowed_token_ids": A_TO_H},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "top_k, top_p": {"top_k": 9, "top_p": 0.8},
    "temperature": {"temperature": 0.4},
    "repetition_penalty": {"repetition_penalty": 1.9, "allowed_token_ids": A_TO_H},
    "presence_penalty": {"presence_penalty": 1.9, "allowed_token_ids": A_TO_H},
    "frequency_penalty": {"frequency_penalty": 1.5, "allowed_token_ids": A_TO_H},
    "bad_words": {"bad_words": ["b", "ac", "hh"], "allowed_token_ids": A_TO_H},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(256)), "ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "n": {"n": 2},
}
WITH_PARAMETERS = {
    f"{prompt}: {name}": {
        "prompt": list(PROMPTS[prompt]),
        "temperature": 1.0,
        "seed": 54,
        "max_tokens": 32,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **fields,
    }
    for prompt in ("short", "loop")
    for name, fields in PARAMETERS.items()
}
SHORT = [name for name in WITH_PARAMETERS if name.startswith("short")]
"""Alone they make steps in which there are no drafts."""
MIGRATED = ("flying:kv_pulled_requests", "flying:kv_prefilled_again_requests")
REGEX = "([ab]{3}[ab01]{2}-)+"


def answers_to(server: Server, body: dict[str, Any], **xargs: int) -> list[Answer]:
    """Return the answer of each choice."""
    asked = {"model": server.model, **body, **({"vllm_xargs": xargs} if xargs else {})}
    choices = server.http.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
    return [Answer(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in choices]


OF_STOCK = Served(
    "speculation",
    "llama",
    STOCK_FLAGS,
    WITH_PARAMETERS,
    lambda stock: {name: answers_to(stock, body) for name, body in WITH_PARAMETERS.items()},
    drafts_cpu.ENVIRONMENT,
)


@dataclass(frozen=True)
class Counted:
    """`made`: of COUNTERS. `migrated`: requests that went on in another group."""

    made: list[int]
    migrated: int

    def since(self, before: Counted) -> Counted:
        made = [after - count for after, count in zip(self.made, before.made, strict=True)]
        return Counted(made, self.migrated - before.migrated)

    def check(self, expected: list[int]) -> None:
        """A step is made again if its tokens had not arrived when its request went on."""
        again = [made - count for made, count in zip(self.made, expected, strict=True)]
        steps, drafts, accepted = again
        assert 0 <= steps <= self.migrated, (self, expected)
        assert 0 <= accepted <= drafts <= MOST_DRAFTS * steps, (self, expected)


def counts(live: Live) -> Counted:
    def of(name: str) -> int:
        return int(sum(live.metric(f"{name}_total").values()))

    return Counted([of(name) for name in COUNTERS], sum(of(name) for name in MIGRATED))


def drafts_are_accepted_and_rejected(live: Live) -> None:
    """The recorded ones: what follows would show little otherwise."""
    for degree in live.degrees:
        steps, drafts, accepted = recorded_counts(degree)
        assert steps > 100
        assert 0.1 * drafts < accepted < 0.9 * drafts


def answers_and_counts(live: Live) -> None:
    """All requests of a degree at once make the steps of stock vLLM, with the same drafts."""
    for degree in live.degrees[::-1]:
        before = counts(live)
        live.answer_all(Asked(job, degree) for job in live.jobs(degree))
        assert counts(live).since(before).made == recorded_counts(degree)
    live.check()


def parameters_of_sampling(live: Live) -> None:
    """Short prompts one after the other, then all together: steps with drafts and without."""
    stock, losses = OF_STOCK.answers(), live.metric("flying:engine_losses_total")

    def ask(name: str, degree: int) -> None:
        found = answers_to(live, WITH_PARAMETERS[name], tp_degree=degree)
        for (tokens, logprobs), expected in zip(found, stock[name], strict=True):
            assert tokens == expected[0], name
            assert worst_difference(logprobs, expected[1]) <= WORST_LOGPROB, name

    for degree in live.degrees:
        for name in SHORT:
            ask(name, degree)
        with ThreadPoolExecutor(len(WITH_PARAMETERS)) as pool:
            list(pool.map(ask, WITH_PARAMETERS, itertools.repeat(degree)))
    assert live.metric("flying:engine_losses_total") == losses
    live.check()


def switches_change_no_count(live: Live) -> None:
    """Whole steps are made wherever a request goes, and each has the drafts that it had. A step
    that is made twice is counted twice.
    """
    before, times = counts(live), 0
    orders = [(groups, mode) for mode in MODES for groups in live.layouts]
    while orders:
        times += 1
        with live.asking([Asked(job) for job in live.jobs()]) as all_answered:
            while orders and not all_answered():
                live.layout(*orders.pop(0))
    counts(live).since(before).check([times * count for count in recorded_counts(1)])
    assert {switch["mode"] for switch in live.switches()} == set(MODES)
    live.check()


def drafts_keep_to_a_grammar(live: Live) -> None:
    """A grammar shortens drafts. The answers are those of requests that stay where they are."""

    def ask(seed: int | None) -> str:
        drawn = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        fields = {"structured_outputs": {"regex": REGEX}, "max_tokens": 40, "ignore_eos": True}
        text: str = live.complete(range(40, 70), **fields, **drawn)["text"]
        return text

    seeds = (None, 5, 6)
    live.layout(live.apart)
    with ThreadPoolExecutor(len(seeds)) as pool:
        before = counts(live)
        undisturbed = list(pool.map(ask, seeds))
        between = counts(live)
        answers = [pool.submit(ask, seed) for seed in seeds]
        for groups in live.layouts * 3:
            live.layout(groups, "migrate")
        assert [answer.result() for answer in answers] == undisturbed
    first = between.since(before)
    assert first.migrated == 0
    counts(live).since(between).check(first.made)
    assert first.made[2] > 0
    assert all(re.match(REGEX, text) for text in undisturbed)
    live.check()
