"""vLLM's V2 model runner, under Triton's interpreter.

The interpreter takes tens of milliseconds for a step, so answers are short and switches are few.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.conformance.chapters.lanes import migrate_until
from tests.deep.conformance.live import Answer, Asked, Job, Live
from tests.stock.requests import VOCAB, StockRequest, tokens

PROMPT = tokens(12, 60)
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 32, "ignore_eos": True}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
# Triton's interpreter cannot run vLLM's kernels for grammars, nor for top-k and top-p.
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "greedy": PENALTIES | {"temperature": 0.0},
    "min-p and bias": {"min_p": 0.001, "logit_bias": {"3": 4.0}, "temperature": 0.8},
    "min_tokens and stop": {"min_tokens": 20, "stop_token_ids": [*range(0, VOCAB, 8)]},
}


def state_of_a_sampler_follows_from_tokens(live: Live) -> None:
    """Penalties and limits go on behind a migration as in a request that stays."""

    def ask(name: str, xargs: dict[str, int]) -> dict[str, Any]:
        return live.complete(PROMPT, vllm_xargs=xargs, **SEEDED | SAMPLERS[name])

    live.layout(live.apart)
    stayed = [ask(name, {"tp_degree": 1}) for name in SAMPLERS]
    before = live.migrations()
    with ThreadPoolExecutor(len(SAMPLERS)) as pool:
        answers = [pool.submit(ask, name, {}) for name in SAMPLERS]
        migrate_until(live, lambda: all(answer.done() for answer in answers))
    assert live.migrations() > before
    for name, alone, answer in zip(SAMPLERS, stayed, answers, strict=True):
        choice = answer.result()
        assert choice["token_ids"] == alone["token_ids"], name
        assert choice["finish_reason"] == alone["finish_reason"], name
        values = [each["logprobs"]["token_logprobs"] for each in (choice, alone)]
        assert worst_difference(*values) <= WORST_LOGPROB, name
    live.check()


def members_draw_the_same_tokens(live: Live) -> None:
    """Each member computes with the tokens that it has drawn: of other tokens than the leader's
    the next logprobs would be others.
    """
    request = StockRequest("drawn", tokens(11, 40), 8, seed=None)

    def drawn(degree: int) -> Answer:
        return live.run(Asked(Job(request), degree))

    for degree in live.degrees[1:]:
        first, second = drawn(degree), drawn(degree)
        assert first.tokens != second.tokens
        for answer in (first, second):
            forced = replace(request, forced=tuple(answer.tokens))
            scored = live.run(Asked(Job(forced), 1))
            assert worst_difference(answer.logprobs, scored.logprobs) <= WORST_LOGPROB
    live.check()
