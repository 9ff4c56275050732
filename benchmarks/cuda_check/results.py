"""Lines that compare answers with stock vLLM's on the same device."""

from collections.abc import Sequence
from typing import Any

from benchmarks.cuda_check.asking import (
    LAYOUTS,
    PROMPTS,
    TOKENS,
    TOLERANCE,
    ask,
    ask_at_once,
    difference,
    drawn,
    logprobs,
    require,
    token_parallel_steps,
)
from benchmarks.cuda_check.rounding import evaluate
from benchmarks.cuda_check.site import Site
from harness.live import Server

KINDS: dict[str, dict[str, Any]] = {
    "seeds": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "a grammar": {"temperature": 0.0, "structured_outputs": {"regex": "[0-9]{12}"}},
}
NOT_INTERPRETED = {"a grammar"}
"""Triton's interpreter cannot run the kernels of V2 for it."""
V2_TOKENS = 8
SEEDED = [
    {"prompt": drawn(100 + n, 40 + 37 * n), "seed": n, "temperature": 1.0, "max_tokens": 48}
    for n in range(6)
]


def token_and_logprob(site: Site) -> str:
    """Ask for what ended with an error once (docs/design/cuda.md, *The token without its logprob*):
    seeds and `logprobs: 0` in groups of two, in float32, one after the other and at once.
    """
    stock, ours = site["stock float32"], site["ours float32"]
    ours.layout(LAYOUTS[2])
    requests = [request | {"vllm_xargs": {"tp_degree": 2}} for request in SEEDED]
    expected = [ask(stock, **request) for request in SEEDED]
    answers = [ask(ours, **request) for request in requests] + ask_at_once(ours, requests)
    pairs = list(zip(answers, expected * 2, strict=True))
    equal = sum(answer["token_ids"] == other["token_ids"] for answer, other in pairs)
    worst = max(difference(*pair) for pair in pairs)
    figure = f"{equal} of {len(pairs)} answers equal, logprobs within {worst:.1e}"
    require(equal == len(pairs) and worst <= TOLERANCE, figure)
    return figure


def same_as_stock(site: Site, degree: int, name: str = "ours float32") -> str:
    """Compare tokens and logprobs of every kind of request with stock's, in float32. `name`: of our
    server.
    """
    stock, ours = site["stock float32"], site[name]
    ours.layout(LAYOUTS[degree])
    wrong, worst, count = [], 0.0, len(KINDS) * len(PROMPTS)
    for name, kind in KINDS.items():
        for prompt in PROMPTS:
            expected = ask(stock, prompt, **kind)
            answer = ask(ours, prompt, **kind, vllm_xargs={"tp_degree": degree})
            worst = max(worst, difference(answer, expected))
            wrong += [name] if answer["token_ids"] != expected["token_ids"] else []
    figure = f"{count - len(wrong)} of {count} answers equal, logprobs within {worst:.1e}"
    if wrong:
        figure += f"; others: {', '.join(sorted(set(wrong)))}"
    require(not wrong and worst <= TOLERANCE, figure)
    return figure


def both_ways_as_stock(site: Site) -> str:
    """Compare answers as `same_as_stock`, in groups that divide tokens in every second step, if it
    is long enough.
    """
    name = "ours both ways"
    figures = [f"degree {degree}: {same_as_stock(site, degree, name)}" for degree in (2, 4)]
    steps = token_parallel_steps(site[name])
    figures.append(f"{steps[2]} and {steps[4]} steps divided tokens")
    require(all(steps.values()), "; ".join(figures))
    return "; ".join(figures)


def unseeded_scored(site: Site, kind: str, layouts: Sequence[list[list[int]]]) -> str:
    """Score unseeded answers of groups again, by stock as prompts: members that draw apart give
    tokens of other logprobs, or errors.
    """
    stock, ours = site[f"stock {kind}"], site[f"ours {kind}"]
    worst, count = 0.0, 0
    for layout in layouts:
        ours.layout(layout)
        requests = [{"prompt": p, "temperature": 1.0, "ignore_eos": True} for p in PROMPTS]
        for prompt, answer in zip(PROMPTS, ask_at_once(ours, requests), strict=True):
            tokens = answer["token_ids"]
            scored = ask(
                stock, [*prompt, *tokens], max_tokens=1, temperature=0.0, prompt_logprobs=0
            )
            rows = zip(tokens, scored["prompt_logprobs"][len(prompt) :], strict=True)
            alone = [row[str(token)]["logprob"] for token, row in rows]
            pairs = zip(logprobs(answer), alone, strict=True)
            worst = max(worst, *(abs(one - other) for one, other in pairs))
            count += len(tokens)
    figure = f"{count} tokens, logprobs within {worst:.1e} when scored again alone"
    require(worst <= TOLERANCE, figure)
    return figure


def rounded_as_stock(site: Site, degree: int) -> str:
    """Compare logprobs of forced tokens in bfloat16 with stock's; see rounding.py.

    At degree 1 a GPU runs stock's kernels, each with its sums in the same order: all are equal.
    """
    site["ours bfloat16"].layout(LAYOUTS[degree])
    exact, stock = (_forced(site[f"stock {dtype}"]) for dtype in ("float32", "bfloat16"))
    ours = _forced(site["ours bfloat16"], tp_degree=degree)
    near, figure = evaluate(ours, stock, exact)
    require(near, figure)
    require(degree > 1 or not site.has_gpu or ours == stock, figure)
    return figure


def _forced(server: Server, **xargs: int) -> list[float]:
    """Return logprobs of tokens that a server is forced to emit."""
    found: list[float] = []
    for number, prompt in enumerate(PROMPTS):
        tokens = drawn(50 + number, TOKENS)
        told = xargs | {"force_token_ids": tokens}
        answer = ask(server, prompt, temperature=1.0, ignore_eos=True, vllm_xargs=told)
        require(answer["token_ids"] == tokens, "a server was not forced")
        found += logprobs(answer)
    return found


def same_as_stock_v2(site: Site, degree: int) -> str:
    """Compare both with model runner V2, in float32; short answers without a GPU."""
    stock, ours = site["stock V2"], site["ours V2"]
    ours.layout([[0], [1]] if degree == 1 else [[0, 1]])
    most = TOKENS if site.has_gpu else V2_TOKENS
    kinds = [k for name, k in KINDS.items() if site.has_gpu or name not in NOT_INTERPRETED]
    prompts = PROMPTS if site.has_gpu else PROMPTS[:1]
    equal, worst = 0, 0.0
    for kind in kinds:
        for prompt in prompts:
            expected = ask(stock, prompt, **kind, max_tokens=most)
            answer = ask(ours, prompt, **kind, max_tokens=most, vllm_xargs={"tp_degree": degree})
            equal += answer["token_ids"] == expected["token_ids"]
            worst = max(worst, difference(answer, expected))
    count = len(kinds) * len(prompts)
    figure = f"{equal} of {count} answers equal, logprobs within {worst:.1e}"
    require(equal == count and worst <= TOLERANCE, figure)
    return figure
