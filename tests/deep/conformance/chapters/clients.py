"""Clients of every kind get stock vLLM's answers, field by field, while the layout changes."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

from flying_serving.config import MODES
from harness.live import FLAGS
from tests.deep.conformance.calls.bodies import CALLS, CHAT, COMPLETIONS, QUESTION, Call
from tests.deep.conformance.calls.comparable import ask, differences
from tests.deep.conformance.calls.speaker import (
    NAME,
    TEMPLATE,
    WORDS,
    prompt,
    says,
    write_speaker,
)
from tests.deep.conformance.live import Live
from tests.stock.served import Served

SHAPE = "qwen3"
GRAMMARS = '{"backend": "xgrammar", "disable_any_whitespace": true}'
TAGS = '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
PARSERS = (
    f"--served-model-name={NAME}",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
    f"--reasoning-config={TAGS}",
    f"--structured-outputs-config={GRAMMARS}",
    "--trust-request-chat-template",
)
STOCK_FLAGS = (
    *PARSERS,
    *(flag for flag in FLAGS if not flag.startswith(("--policy", "--max-num-batched"))),
    "--max-num-batched-tokens=2048",
    "--enforce-eager",
)
"""Stock vLLM has to compute a prompt with a seed in one step (see tests/stock/requests.py)."""
CLIENTS = 8
BETWEEN_S = (0.05, 0.3)
"""The shortest and the longest time from one switch to the next."""

OF_STOCK = Served(
    "calls",
    SHAPE,
    STOCK_FLAGS,
    [[(call.name, call.path, call.content) for call in CALLS.values()], TEMPLATE, WORDS],
    lambda stock: {name: ask(stock.http, call) for name, call in CALLS.items()},
    write=lambda model, scratch: write_speaker(model, scratch / NAME),
)


def calls_of_every_kind(live: Live) -> None:
    """Several clients make them at once, while the layout changes at random."""
    draw, before = random.Random(45), len(live.switches())
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = {name: pool.submit(ask, live.http, call) for name, call in CALLS.items()}
        while not all(answer.done() for answer in answers.values()):
            live.layout(draw.choice(live.layouts), draw.choice(MODES))
            time.sleep(draw.uniform(*BETWEEN_S))
    assert {switch["mode"] for switch in live.switches()[before:]} == set(MODES)
    stock = OF_STOCK.answers()
    found = {name: list(differences(answers[name].result(), stock[name])) for name in CALLS}
    assert {name: places for name, places in found.items() if places} == {}
    live.until_idle()
    live.check()


def a_thought_that_is_cut_off(live: Live) -> None:
    """A request in the same batch says what it says alone: it takes over no thinking budget."""
    live.layout(live.layouts[0])
    greedy = {"temperature": 0.0, "ignore_eos": True}
    plain = {"prompt": prompt(9, 20), "max_tokens": 200, **greedy}
    other = Call("beside-a-thought", COMPLETIONS, plain)
    thought = {**says("<think>", ends=False), "thinking_token_budget": 90, "max_tokens": 80}
    cut_off = Call("cut-off", CHAT, {"messages": QUESTION, **thought, **greedy})
    alone = ask(live.http, other)
    with ThreadPoolExecutor(1) as pool:
        thinking = pool.submit(ask, live.http, cut_off)
        time.sleep(BETWEEN_S[0])  # it has the first row of the batch
        beside = ask(live.http, other)
    assert thinking.result()["body"]["usage"]["completion_tokens"] == 80
    assert beside == alone
