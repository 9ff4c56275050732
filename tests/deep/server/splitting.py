"""A server that splits requests: its shapes, layouts and splits, and how it comes to rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from harness.live import Server, wait_until
from harness.streams import WORST_LOGPROB, Stream, streamed_body, worst_difference
from tests.stock.recorded import stock_answers
from tests.stock.requests import REQUESTS, StockRequest

SHAPES = ("llama", "qwen3", "mixtral")
LAYOUTS = {1: [[0], [1], [2], [3]], 2: [[0, 1], [2, 3]]}
"""By degree."""
BY_NAME = {request.name: request for request in REQUESTS}
QUIET = {
    "long": 352,  # of 700 prompt tokens, on the edge of a block
    "forced-long": 701,  # of 1100 prompt tokens
    "chunks": 256,  # the second group has the prompt's last token, in a block of its own
    "prefix": 640,  # the prompt's end: the first group gives the first token
    "forced-short": 17,  # the prompt's end, inside a block
    "blocks": 101,  # the first group gives a second token
    "short": 29,  # in the output
    "block": 79,  # the second group gives the last token
}
"""Where requests are split that run one after the other."""
BUSY = {
    "chunks": 0,  # the second group has all of it
    "block": 81,  # the first group has all of it
    "forced-short": 1,
    "blocks": 64,
    "prefix": 97,
    "long": 700,
    "forced-long": 1110,
    "short": 51,
}
"""Where they are split when all run at once: the first groups compute some of them while they give
out others.
"""
PULLED = "flying:kv_pulled_tokens_total"
STORM_LAYOUTS = (*LAYOUTS.values(), [[0, 1], [2], [3]], [[0], [1], [2, 3]], [[0, 1, 2, 3]])
STORM_SWITCHES = 200
STORM_REQUESTS = [
    replace(request, max_tokens=6) for request in REQUESTS if len(request.prompt) < 1000
]
"""What stock answers begins alike."""
STORM_PAUSE_S = 0.05
LEAVE_SHARE = 0.1


class Splitting(Server):
    """A server of four engines, and what stock vLLM answers with the same model."""

    def __init__(self, shape: str) -> None:
        super().__init__(shape, 4)
        self.recorded = stock_answers(shape)

    def body(self, request: StockRequest, split: int | None, **fields: Any) -> dict[str, Any]:
        """A streamed request that is split there."""
        sampling = request.sampling()
        extra = (sampling.pop("extra_args") or {}) | ({} if split is None else {"split_at": split})
        return streamed_body(self.model, request.prompt, vllm_xargs=extra, **sampling, **fields)

    def compare(self, request: StockRequest, degree: int, answer: Stream) -> None:
        """An answer is stock's, or its begin if it was not read to the end."""
        stock, count = self.recorded[str(degree)]["answers"][request.name], len(answer.tokens)
        assert answer.tokens == stock["tokens"][:count], request.name
        assert worst_difference(answer.logprobs, stock["logprobs"][:count]) <= WORST_LOGPROB, (
            request.name
        )
        assert not answer.done or (count, answer.finish_reason) == (request.max_tokens, "length"), (
            request.name
        )

    def counts(self) -> Counter[str]:
        """What was split and pulled since the start."""
        found: Counter[str] = Counter()
        for engine in self.status()["engines"]:
            found.update(engine["migrations"])
        found["pulled"] = int(sum(self.metric(PULLED).values()))
        found["undone"] = int(sum(self.metric("flying:splits_undone_total").values()))
        found.update(
            {
                where: int(count)
                for (where,), count in self.metric("flying:splits_total", "where").items()
            }
        )
        return found

    def nothing_is_left(self) -> None:
        """Nothing runs or waits, and soon no lane holds a block for a request, whether it left or
        was to come.
        """
        self.until_idle()
        wait_until(lambda: self.http.post("/reset_prefix_cache").json()["success"])
        assert self.metric("flying:split_requests") == {(): 0}
        self.check()
