"""The fixed requests that stock vLLM and the lanes both answer with n-gram speculation.

Most may sample a few tokens only, so that drafts are often accepted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stock.requests import tokens

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
ENGINE: dict[str, Any] = {
    "speculative_config": CONFIG,
    "logits_processors": None,  # vLLM has none with speculation
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 2048,  # above all prompts together: see requests.py
    "disable_log_stats": False,
}
"""Settings of a recording's engine."""
RECORDING = Path(__file__).with_name("llama-ngram.json")
FLAG = f"--speculative-config={json.dumps(CONFIG)}"
COUNTERS = tuple(
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")
)
"""vLLM's, whose sums over all answers are recorded."""
OUTPUTS = 60
PROMPTS = {
    "loop": tokens(31, 20) * 4,
    "short": tokens(32, 5),
    "long": (tokens(33, 130) + tokens(34, 7)) * 3,
}


@dataclass(frozen=True)
class DraftedRequest:
    """One request: greedy without a seed. It may sample some tokens only, or all if none are
    named.
    """

    name: str
    prompt: tuple[int, ...]
    seed: int | None
    allowed: tuple[int, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's SamplingParams, with the logprob of each token."""
        return {
            "temperature": 0.0 if self.seed is None else 1.0,
            "seed": self.seed,
            "max_tokens": OUTPUTS,
            "ignore_eos": True,
            "logprobs": 0,
            "allowed_token_ids": list(self.allowed) or None,
        }


REQUESTS = [
    request
    for name, prompt in PROMPTS.items()
    for request in (
        DraftedRequest(f"{name}-greedy", prompt, None, prompt[:3]),
        DraftedRequest(f"{name}-two", prompt, 51, prompt[:2]),
        DraftedRequest(f"{name}-four", prompt, 52, prompt[:4]),
        DraftedRequest(f"{name}-all", prompt, 53),
    )
]


def requests_hash() -> str:
    """Return a hash of all requests, so that a recording of others is noticed."""
    return hashlib.sha256(repr((CONFIG, REQUESTS)).encode()).hexdigest()[:16]


def answer(llm: Any) -> tuple[dict[str, dict[str, list[Any]]], list[int]]:
    """Return what a vLLM engine answers, by name of the request, and its counts: see COUNTERS."""
    from vllm import SamplingParams

    prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in REQUESTS]
    params = [SamplingParams(**request.sampling()) for request in REQUESTS]
    answers = {}
    for request, done in zip(REQUESTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(done.outputs[0].token_ids)
        entries = zip(done.outputs[0].logprobs, tokens, strict=True)
        logprobs = [round(entry[token].logprob, 6) for entry, token in entries]
        answers[request.name] = {"tokens": tokens, "logprobs": logprobs}
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    return answers, [int(values[name]) for name in COUNTERS]


def recorded_counts(degree: int) -> list[int]:
    """Return what was recorded of COUNTERS, over all requests."""
    saved = json.loads(RECORDING.read_text(encoding="utf-8"))
    counts: list[int] = saved["degrees"][str(degree)]["counts"]
    return counts
